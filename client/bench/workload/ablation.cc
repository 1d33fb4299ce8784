#include "client/bench/workload/ablation.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <optional>
#include <utility>

#include "daemon/base/check.h"
#include "kernels/strategy/candidates.h"

namespace tessera::cli::bench {

namespace {

using Segment = Examination::Segment;
using kernels::Strategy;

constexpr double kQuarter = 0.25;
constexpr std::size_t kThresholdsTried = 8;

std::vector<Strategy> StrategiesFor(const Examination& examination,
                                    const kernels::StrategyOptions& options) {
  std::vector<Strategy> strategies;
  for (const Segment& segment : examination.segments()) {
    strategies.push_back(StrategyFor(segment.rows, options));
  }
  return strategies;
}

std::size_t IndexOf(const Examination& examination, const Segment& segment) {
  return static_cast<std::size_t>(&segment - examination.segments().data());
}

absl::StatusOr<Score> ExaminePacked(const Examination& examination,
                                    const std::vector<Strategy>& strategies) {
  return examination.Examine([&](const Segment& segment) {
    const Strategy& strategy = strategies[IndexOf(examination, segment)];
    return ThroughTiles(segment.rows, strategy.shape, strategy.view());
  });
}

double BytesOf(const Segment& segment, const Strategy& strategy) {
  return kernels::BytesPerEntry(strategy.shape, strategy.rotation_type, segment.rows.keys.count) *
         static_cast<double>(segment.rows.keys.count);
}

double BytesOf(const Examination& examination, const std::vector<Strategy>& strategies) {
  double bytes = 0;
  for (const Segment& segment : examination.segments()) {
    bytes += BytesOf(segment, strategies[IndexOf(examination, segment)]);
  }
  return bytes;
}

kernels::Loss WorstLoss(const Examination& examination, const std::vector<Strategy>& strategies) {
  kernels::Loss worst;
  for (const Segment& segment : examination.segments()) {
    const Strategy& strategy = strategies[IndexOf(examination, segment)];
    const kernels::Loss loss =
        kernels::LossUnder(segment.rows, strategy.shape, strategy.view(), BenchOperations());
    worst.key = std::max(worst.key, loss.key);
    worst.value = std::max(worst.value, loss.value);
  }
  return worst;
}

// Masks with at most the bytes of these strategies.
absl::Status MeasureMasks(const Examination& examination, const std::vector<Strategy>& strategies,
                          FormScores& scores) {
  const auto masked = [&](bool rotated) {
    return examination.Examine([&, rotated](const Segment& segment) -> absl::StatusOr<KeptRows> {
      const Strategy& strategy = strategies[IndexOf(examination, segment)];
      const std::uint32_t channels =
          ChannelsWithin(BytesOf(segment, strategy), segment.rows, rotated);
      return ThroughMask(segment.rows, channels,
                         rotated ? strategy.view() : kernels::RotationView{});
    });
  };
  const absl::StatusOr<Score> raw = masked(false);
  if (!raw.ok()) return raw.status();
  const absl::StatusOr<Score> svd = masked(true);
  if (!svd.ok()) return svd.status();
  scores.raw_mask = *raw;
  scores.svd_mask = *svd;
  return absl::OkStatus();
}

}  // namespace

Difference ErrorDifference(const Score& a, const Score& b) {
  TESSERA_CHECK(a.errors.size() == b.errors.size(), "both scores have the same queries");
  const auto count = static_cast<double>(a.errors.size());
  Difference difference;
  double squares = 0;
  for (std::size_t i = 0; i < a.errors.size(); ++i) {
    const double one = a.errors[i] - b.errors[i];
    difference.mean += one / count;
    squares += one * one;
  }
  const double variance = squares / count - difference.mean * difference.mean;
  difference.standard_error = std::sqrt(std::max(variance, 0.0) / std::max(count - 1, 1.0));
  return difference;
}

Examination::Examination(const GeneratedKv& kv, std::uint32_t segment_tokens,
                         const Queries& queries)
    : kv_(kv) {
  const GeneratedShape& shape = kv.shape();
  questions_.resize(shape.kv_heads);
  for (std::uint32_t h = 0; h < shape.kv_heads; ++h) {
    lanes_.push_back(Widen(kv.Rows(h)));
    for (std::uint32_t first = 0; first < shape.tokens; first += segment_tokens) {
      segments_.push_back(
          {.kv_head = h,
           .index = first / segment_tokens,
           .rows = kv.Rows(h, first, std::min(segment_tokens, shape.tokens - first))});
    }
    for (std::uint32_t i = 0; i < queries.count * shape.group; ++i) {
      Question question = {.query = kv.Query(h, i % shape.group, queries.first + i / shape.group),
                           .truth = {}};
      question.truth = Attend(question.query.row, lanes_[h]);
      questions_[h].push_back(std::move(question));
    }
  }
}

absl::StatusOr<Score> Examination::Examine(const Keep& keep) const {
  Score score;
  double asked = 0;
  for (std::uint32_t h = 0; h < kv_.shape().kv_heads; ++h) {
    FloatLane lane;
    for (const Segment& segment : segments_) {
      if (segment.kv_head != h) continue;
      const absl::StatusOr<KeptRows> kept = keep(segment);
      if (!kept.ok()) return kept.status();
      lane.Append(kept->lane);
      score.bytes += kept->bytes / static_cast<double>(kv_.shape().tokens);
    }
    for (const Question& question : questions_[h]) {
      const Fidelity fidelity = Compare(Attend(question.query.row, lane), question.truth);
      score.errors.push_back(fidelity.error);
      score.fidelity.error += fidelity.error;
      score.fidelity.kept_mass += fidelity.kept_mass;
      ++asked;
    }
  }
  score.fidelity.error /= asked;
  score.fidelity.kept_mass /= asked;
  score.bytes /= kv_.shape().kv_heads;
  return score;
}

absl::StatusOr<FormScores> MeasureForms(const Examination& examination, double share) {
  FormScores scores;
  for (std::uint32_t i = 0; i < 3; ++i) {
    kernels::StrategyOptions options = FixedOptions(share, 1u << i);
    const std::vector<Strategy> strategies = StrategiesFor(examination, options);
    const absl::StatusOr<Score> score = ExaminePacked(examination, strategies);
    if (!score.ok()) return score.status();
    scores.rotated[i] = *score;
    if (i == 0) {
      const absl::Status status = MeasureMasks(examination, strategies, scores);
      if (!status.ok()) return status;
      const absl::StatusOr<Score> raw = examination.Examine([&](const Segment& segment) {
        return ThroughTiles(segment.rows, strategies[0].shape, {});
      });
      if (!raw.ok()) return raw.status();
      scores.raw = *raw;
      continue;
    }
    options.reorder = false;
    const absl::StatusOr<Score> unordered =
        ExaminePacked(examination, StrategiesFor(examination, options));
    if (!unordered.ok()) return unordered.status();
    scores.unordered[i - 1] = *unordered;
  }
  return scores;
}

absl::StatusOr<RotationScores> MeasureRotations(const Examination& examination) {
  const std::vector<Segment>& segments = examination.segments();
  const kernels::StrategyOptions options = FixedOptions(kQuarter, 1);
  std::vector<EveryOtherTile> seen;
  std::vector<EveryOtherTile> seen_of_head;
  for (const Segment& segment : segments) {
    seen.emplace_back(segment.rows, false);
    if (segment.index == 0) {
      seen_of_head.push_back(seen.back());
    } else {
      seen_of_head.back().Append(seen.back());
    }
  }
  std::vector<Strategy> own;
  for (const EveryOtherTile& tiles : seen) own.push_back(StrategyFor(tiles.rows(), options));
  std::vector<Strategy> global;
  for (const EveryOtherTile& tiles : seen_of_head) {
    global.push_back(StrategyFor(tiles.rows(), options));
  }

  RotationScores scores;
  const auto count = static_cast<double>(segments.size());
  const auto add_loss = [&](const EveryOtherTile& unseen, const Strategy& strategy,
                            kernels::Loss& sum) {
    const kernels::Loss loss =
        kernels::LossUnder(unseen.rows(), strategy.shape, strategy.view(), BenchOperations());
    sum.key += loss.key / count;
    sum.value += loss.value / count;
  };
  for (const Segment& segment : segments) {
    const EveryOtherTile unseen(segment.rows, true);
    add_loss(unseen, global[segment.kv_head], scores.global_loss);
    add_loss(unseen, own[IndexOf(examination, segment)], scores.own_loss);
  }
  const absl::StatusOr<Score> own_score = ExaminePacked(examination, own);
  if (!own_score.ok()) return own_score.status();
  const absl::StatusOr<Score> global_score = examination.Examine([&](const Segment& segment) {
    const Strategy& strategy = global[segment.kv_head];
    return ThroughTiles(segment.rows, strategy.shape, strategy.view());
  });
  if (!global_score.ok()) return global_score.status();
  scores.own = *own_score;
  scores.global = *global_score;
  // The shared rotation is stored once per head.
  const Strategy& any = global.front();
  const double spare = static_cast<double>(segments.size()) - static_cast<double>(global.size());
  scores.global.bytes -= spare * static_cast<double>(RotationBytes(any.shape, any.rotation_type)) /
                         static_cast<double>(global.size()) / examination.kv().shape().tokens;
  return scores;
}

namespace {

// Loss and bytes of each segment in every format that a threshold can choose.
class Candidates {
 public:
  Candidates(const Examination& examination, const kernels::StrategyOptions& options)
      : of_segment_(examination.segments().size()) {
    for (const double share : options.kept) {
      for (const std::uint32_t group : options.groups) {
        const std::vector<Strategy> all = StrategiesFor(examination, FixedOptions(share, group));
        for (std::size_t i = 0; i < all.size(); ++i) {
          const auto entries = static_cast<double>(examination.segments()[i].rows.keys.count);
          of_segment_[i].push_back({.shape = all[i].shape,
                                    .bytes = BytesOf(examination.segments()[i], all[i]) / entries,
                                    .loss = all[i].loss});
        }
      }
    }
  }

  struct Outcome {
    double lost = 0;   // K plus V, mean over segments
    double bytes = 0;  // per entry, mean over segments
  };
  Outcome Under(const kernels::Loss& threshold) const {
    Outcome outcome;
    for (const std::vector<kernels::Candidate>& candidates : of_segment_) {
      const kernels::Candidate& chosen =
          candidates[kernels::ChooseCandidate(candidates, threshold)];
      outcome.lost += chosen.loss.key + chosen.loss.value;
      outcome.bytes += chosen.bytes;
    }
    const auto segments = static_cast<double>(of_segment_.size());
    return {.lost = outcome.lost / segments, .bytes = outcome.bytes / segments};
  }

  // The `most` thresholds with the smallest loss among those that take at most `bytes` per entry.
  // Never empty: the threshold of the cheapest formats is included.
  std::vector<kernels::Loss> BestWithin(double bytes, std::size_t most) const {
    std::vector<double> keys;
    std::vector<double> values;
    for (const std::vector<kernels::Candidate>& candidates : of_segment_) {
      for (const kernels::Candidate& candidate : candidates) {
        keys.push_back(candidate.loss.key);
        values.push_back(candidate.loss.value);
      }
    }
    const kernels::Loss cheapest = {.key = 1, .value = 1};
    std::map<double, kernels::Loss> by_lost = {{Under(cheapest).lost, cheapest}};
    for (const double key : keys) {
      for (const double value : values) {
        const Outcome outcome = Under({.key = key, .value = value});
        if (outcome.bytes > bytes) continue;
        by_lost.emplace(outcome.lost, kernels::Loss{.key = key, .value = value});
        if (by_lost.size() > most) by_lost.erase(std::prev(by_lost.end()));
      }
    }
    std::vector<kernels::Loss> best;
    for (const auto& [lost, threshold] : by_lost) best.push_back(threshold);
    return best;
  }

 private:
  std::vector<std::vector<kernels::Candidate>> of_segment_;
};

// The strategy of each head's first segment for all its segments, with as many channels as fit
// `bytes` per entry; the rotation is stored once.
absl::StatusOr<Score> ExamineFirst(const Examination& examination, double bytes) {
  const std::uint64_t tokens = examination.kv().shape().tokens;
  std::vector<Strategy> of_head;
  for (const Segment& segment : examination.segments()) {
    if (segment.index != 0) continue;
    const std::uint32_t dim = examination.kv().shape().head_dim;
    std::optional<Strategy> most;
    for (std::uint32_t kept = dim / 8; kept <= dim; ++kept) {
      Strategy strategy =
          StrategyFor(segment.rows, FixedOptions(static_cast<double>(kept) / dim, 1));
      if (kernels::BytesPerEntry(strategy.shape, strategy.rotation_type, tokens) > bytes) break;
      most = std::move(strategy);
    }
    if (!most) return absl::InternalError("no format fits the byte limit");
    of_head.push_back(*std::move(most));
  }
  absl::StatusOr<Score> score = examination.Examine([&](const Segment& segment) {
    const Strategy& strategy = of_head[segment.kv_head];
    return ThroughTiles(segment.rows, strategy.shape, strategy.view());
  });
  if (!score.ok()) return score;
  score->bytes = 0;
  for (const Strategy& strategy : of_head) {
    score->bytes += kernels::BytesPerEntry(strategy.shape, strategy.rotation_type, tokens) /
                    static_cast<double>(of_head.size());
  }
  return score;
}

}  // namespace

absl::StatusOr<ChoiceScores> MeasureChoice(const Examination& examination,
                                           const Examination& calibration) {
  const std::vector<Strategy> fixed = StrategiesFor(examination, FixedOptions(kQuarter, 1));
  kernels::StrategyOptions options = FixedOptions(kQuarter, 1);
  options.kept = kernels::StrategyOptions{}.kept;
  options.groups = kernels::StrategyOptions{}.groups;
  double entries = 0;
  for (const Segment& segment : examination.segments()) {
    entries += static_cast<double>(segment.rows.keys.count);
  }
  const std::vector<kernels::Loss> thresholds =
      Candidates(examination, options)
          .BestWithin(BytesOf(examination, fixed) / entries, kThresholdsTried);
  std::vector<Strategy> dynamic;
  double least = 0;
  for (const kernels::Loss& threshold : thresholds) {
    kernels::StrategyOptions under = options;
    under.threshold = threshold;
    std::vector<Strategy> strategies = StrategiesFor(calibration, under);
    const absl::StatusOr<Score> score = ExaminePacked(calibration, strategies);
    if (!score.ok()) return score.status();
    if (!dynamic.empty() && score->fidelity.error >= least) continue;
    least = score->fidelity.error;
    options.threshold = threshold;
    dynamic = std::move(strategies);
  }
  const absl::StatusOr<Score> fixed_score = ExaminePacked(examination, fixed);
  if (!fixed_score.ok()) return fixed_score.status();
  const absl::StatusOr<Score> dynamic_score = ExaminePacked(examination, dynamic);
  if (!dynamic_score.ok()) return dynamic_score.status();
  const absl::StatusOr<Score> first_score = ExamineFirst(examination, dynamic_score->bytes);
  if (!first_score.ok()) return first_score.status();
  return ChoiceScores{.first = *first_score,
                      .fixed = *fixed_score,
                      .dynamic = *dynamic_score,
                      .threshold = options.threshold,
                      .fixed_worst = WorstLoss(examination, fixed),
                      .dynamic_worst = WorstLoss(examination, dynamic)};
}

}  // namespace tessera::cli::bench
