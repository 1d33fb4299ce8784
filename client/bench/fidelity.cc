// tessera bench fidelity: attention error of the packed format and its alternatives, on generated
// rows. Measures no times.
//
// A row's value is the relative error of the attention output, mean over heads and queries. Its
// kept mass is the share of the true attention that remains on the same tokens.

#include <utility>

#include "client/bench/bench.h"
#include "client/bench/workload/ablation.h"
#include "client/bench/workload/block_choice.h"
#include "daemon/base/strings.h"

namespace tessera::cli::bench {

namespace {

constexpr const char* kError = "rel. error";

// Whether a statement is a goal (the paper's ablation claims it) or a further question.
constexpr bool kGoal = true;
constexpr bool kAsked = false;

struct Extent {
  GeneratedShape shape;
  std::uint32_t segment_tokens = 4096;
  std::uint32_t queries = 8;  // per query head
  std::uint64_t seed = 1;
};

Extent ExtentOf(const Options& options) {
  Extent extent = {.shape = {}, .seed = options.seed};
  extent.shape.tokens = options.quick ? 8192 : 16384;
  extent.shape.kv_heads = options.quick ? 2 : 4;
  return extent;
}

// The ratio is this row's error divided by the baseline's.
Row ErrorRow(std::string name, const Score& score, const std::string& baseline = "",
             const Score* against = nullptr) {
  Row row = {.name = std::move(name),
             .value = score.fidelity.error,
             .unit = kError,
             .baseline = baseline,
             .sense = Goal::kAtMost,
             .kept_mass = score.fidelity.kept_mass};
  if (score.bytes > 0) row.held_bytes = score.bytes;
  if (against != nullptr) row.ratio = score.fidelity.error / against->fidelity.error;
  return row;
}

std::string Versus(double a, double b) { return Concat(Figure(a), " against ", Figure(b)); }

// A statement over several cases; it holds if it holds for all of them.
class Claim {
 public:
  Claim(std::string statement, bool goal) : statement_(std::move(statement)), goal_(goal) {}

  // For errors.
  void AddLess(const std::string& where, double better, double worse) {
    Add(where, better, worse, better < worse);
  }
  // For masses.
  void AddMore(const std::string& where, double better, double worse) {
    Add(where, better, worse, better > worse);
  }
  Finding finding() const { return {statement_, holds_, figures_, goal_}; }

 private:
  void Add(const std::string& where, double better, double worse, bool is_so) {
    holds_ = holds_ && is_so;
    Append(figures_, figures_.empty() ? "" : ", ", where, " ", Versus(better, worse));
  }

  std::string statement_;
  bool goal_;
  bool holds_ = true;
  std::string figures_;
};

absl::Status AddForms(const Examination& examination, Report& report) {
  Claim svd_of_masks("SVD better than none, same channels in all rows", kGoal);
  Claim svd_of_rows("SVD better than none, each row its own channels", kGoal);
  Claim per_vector("per-vector better than uniform at equal bytes", kGoal);
  Claim pairs("groups of 1 better than of 2", kAsked);
  Claim fours("groups of 2 better than of 4", kAsked);
  Claim order("reordered groups better than the original order", kAsked);
  for (const auto& [share, name] : {std::pair{0.125, "125"}, {0.25, "250"}, {0.375, "375"}}) {
    Progress(Concat("formats that keep ", share * 100, " % of the channels"));
    const absl::StatusOr<FormScores> forms = MeasureForms(examination, share);
    if (!forms.ok()) return forms.status();
    const Score* const best = &forms->rotated[0];
    const std::string baseline = Concat("svd_rows_g1_", name);
    report.Add(ErrorRow(Concat("raw_mask_", name), forms->raw_mask, baseline, best));
    report.Add(ErrorRow(Concat("svd_mask_", name), forms->svd_mask, baseline, best));
    report.Add(ErrorRow(Concat("raw_rows_", name), forms->raw, baseline, best));
    report.Add(ErrorRow(baseline, *best));
    for (int i = 1; i < 3; ++i) {
      const std::string group = Concat("svd_rows_g", 1 << i);
      report.Add(ErrorRow(Concat(group, "_", name), forms->rotated[i], baseline, best));
      report.Add(
          ErrorRow(Concat(group, "_unordered_", name), forms->unordered[i - 1], baseline, best));
    }
    const std::string where = Concat(share * 100, " %");
    const auto error = [](const Score& score) { return score.fidelity.error; };
    svd_of_masks.AddLess(where, error(forms->svd_mask), error(forms->raw_mask));
    svd_of_rows.AddLess(where, error(*best), error(forms->raw));
    per_vector.AddLess(where, error(*best), error(forms->svd_mask));
    pairs.AddLess(where, error(*best), error(forms->rotated[1]));
    fours.AddLess(where, error(forms->rotated[1]), error(forms->rotated[2]));
    order.AddLess(Concat(where, ", 2:"), error(forms->rotated[1]), error(forms->unordered[0]));
    order.AddLess(Concat(where, ", 4:"), error(forms->rotated[2]), error(forms->unordered[1]));
  }
  for (const Claim* claim : {&svd_of_masks, &svd_of_rows, &per_vector, &pairs, &fours, &order}) {
    report.findings.push_back(claim->finding());
  }
  return absl::OkStatus();
}

absl::Status AddRotations(const Examination& examination, const std::string& data, bool goal,
                          Report& report) {
  Progress(Concat("one rotation compared with one per segment, ", data, " rows"));
  const absl::StatusOr<RotationScores> scores = MeasureRotations(examination);
  if (!scores.ok()) return scores.status();
  const auto add = [&](const std::string& name, const kernels::Loss& loss, const Score& score,
                       bool is_baseline) {
    const std::string full = Concat(data, "_", name);
    const std::string baseline = is_baseline ? "" : Concat(data, "_global");
    const auto ratio = [&](double value, double against) {
      return is_baseline ? std::optional<double>() : value / against;
    };
    report.Add({.name = Concat(full, "_key_loss"),
                .value = loss.key,
                .unit = "loss",
                .baseline = baseline,
                .ratio = ratio(loss.key, scores->global_loss.key),
                .sense = Goal::kAtMost});
    report.Add({.name = Concat(full, "_value_loss"),
                .value = loss.value,
                .unit = "loss",
                .baseline = baseline,
                .ratio = ratio(loss.value, scores->global_loss.value),
                .sense = Goal::kAtMost});
    report.Add(ErrorRow(full, score, baseline, is_baseline ? nullptr : &scores->global));
  };
  add("global", scores->global_loss, scores->global, true);
  add("per_segment", scores->own_loss, scores->own, false);
  report.findings.push_back(
      {.statement =
           Concat("a rotation per segment loses less than one for all, held-out ", data, " rows"),
       .holds = scores->own_loss.key < scores->global_loss.key &&
                scores->own_loss.value < scores->global_loss.value,
       .figures = Concat("K ", Versus(scores->own_loss.key, scores->global_loss.key), ", V ",
                         Versus(scores->own_loss.value, scores->global_loss.value), ", error ",
                         Versus(scores->own.fidelity.error, scores->global.fidelity.error)),
       .goal = goal});
  return absl::OkStatus();
}

absl::Status AddChoice(const Examination& examination, const Examination& calibration,
                       const std::string& data, bool goal, Report& report) {
  Progress(Concat("a fixed strategy compared with thresholds, ", data, " segments"));
  const absl::StatusOr<ChoiceScores> scores = MeasureChoice(examination, calibration);
  if (!scores.ok()) return scores.status();
  const std::string fixed = Concat(data, "_fixed_250_g1");
  report.Add(ErrorRow(Concat(data, "_fixed_first"), scores->first, fixed, &scores->fixed));
  report.Add(ErrorRow(fixed, scores->fixed));
  report.Add(ErrorRow(Concat(data, "_dynamic"), scores->dynamic, fixed, &scores->fixed));
  // Differences within two standard errors do not count.
  const Difference beyond = ErrorDifference(scores->dynamic, scores->fixed);
  report.findings.push_back(
      {.statement =
           Concat("dynamic no worse than a fixed rate at no more bytes, ", data, " segments"),
       .holds = beyond.mean <= 2 * beyond.standard_error,
       .figures = Concat(Versus(scores->dynamic.fidelity.error, scores->fixed.fidelity.error),
                         ", mean difference over queries ", Figure(beyond.mean), " +- ",
                         Figure(beyond.standard_error), "; ",
                         Versus(scores->dynamic.bytes, scores->fixed.bytes), " B, thresholds ",
                         Figure(scores->threshold.key), " and ", Figure(scores->threshold.value)),
       .goal = goal});
  report.findings.push_back(
      {.statement =
           Concat("dynamic better than the first segment's strategy for all, equal bytes, ", data,
                  " segments"),
       .holds = scores->dynamic.fidelity.error < scores->first.fidelity.error,
       .figures = Concat(Versus(scores->dynamic.fidelity.error, scores->first.fidelity.error), ", ",
                         Versus(scores->dynamic.bytes, scores->first.bytes), " B"),
       .goal = goal});
  const kernels::Loss& worst = scores->dynamic_worst;
  const kernels::Loss& fixed_worst = scores->fixed_worst;
  report.findings.push_back(
      {.statement = Concat("the worst segment loses no more under dynamic, ", data, " segments"),
       .holds = worst.key <= fixed_worst.key && worst.value <= fixed_worst.value,
       .figures = Concat("K ", Versus(worst.key, fixed_worst.key), ", V ",
                         Versus(worst.value, fixed_worst.value)),
       .goal = kAsked});
  return absl::OkStatus();
}

absl::Status AddBlocks(const Examination& examination, Report& report) {
  Claim mean("mean keys keep more mass than min/max, blocks of the same length", kAsked);
  Claim bytes("mean keys of 8 keep more mass than min/max of 16, summaries of the same bytes",
              kAsked);
  for (const auto& [rate, name] : {std::pair{0.0625, "0625"}, {0.125, "1250"}}) {
    double min_max_of_16 = 0;
    for (const std::uint32_t block : {16u, 8u}) {
      Progress(Concat("selection of blocks of ", block, ", ", rate * 100, " %"));
      const absl::StatusOr<BlockScores> scores =
          MeasureBlocks(examination, {.block = block, .rate = rate});
      if (!scores.ok()) return scores.status();
      const std::string suffix = Concat("_b", block, "_", name);
      const std::string ideal = Concat("ideal", suffix);
      // Here the ratio compares masses: the mass found relative to the ideal choice.
      const auto add = [&](const std::string& row_name, const Fidelity& fidelity) {
        Row row = ErrorRow(row_name, {.fidelity = fidelity}, row_name == ideal ? "" : ideal);
        if (row_name != ideal) row.ratio = fidelity.kept_mass / scores->ideal.kept_mass;
        row.sense = Goal::kAtLeast;
        report.Add(std::move(row));
      };
      add(ideal, scores->ideal);
      add(Concat("min_max", suffix), scores->min_max);
      add(Concat("mean", suffix), scores->mean);
      add(Concat("packed_mean", suffix), scores->packed_mean);
      mean.AddMore(Concat(rate * 100, " % in blocks of ", block, ":"), scores->mean.kept_mass,
                   scores->min_max.kept_mass);
      if (block == 16) {
        min_max_of_16 = scores->min_max.kept_mass;
      } else {
        bytes.AddMore(Concat(rate * 100, " %"), scores->mean.kept_mass, min_max_of_16);
      }
    }
  }
  report.findings.push_back(mean.finding());
  report.findings.push_back(bytes.finding());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Report> RunFidelity(const Options& options) {
  Report report{.name = "fidelity"};
  Extent extent = ExtentOf(options);
  Progress("generating rows");
  const auto examine = [&](const GeneratedShape& shape, const auto& act) -> absl::Status {
    const GeneratedKv kv(shape, extent.seed);
    const std::uint32_t count = extent.queries;
    return act(Examination(kv, extent.segment_tokens, {.count = count}),
               Examination(kv, extent.segment_tokens, {.first = count, .count = count}));
  };
  using Rows = const Examination&;
  absl::Status status = examine(extent.shape, [&](Rows still, Rows) -> absl::Status {
    if (absl::Status forms = AddForms(still, report); !forms.ok()) return forms;
    if (absl::Status rotations = AddRotations(still, "still", kAsked, report); !rotations.ok()) {
      return rotations;
    }
    return AddBlocks(still, report);
  });
  if (!status.ok()) return status;
  GeneratedShape shape = extent.shape;
  shape.regions = shape.tokens / extent.segment_tokens;
  status = examine(shape, [&](Rows drifting, Rows others) -> absl::Status {
    if (absl::Status rotations = AddRotations(drifting, "drifting", kGoal, report);
        !rotations.ok()) {
      return rotations;
    }
    return AddChoice(drifting, others, "similar", kGoal, report);
  });
  if (!status.ok()) return status;
  shape.exponent_spread = 2;
  status = examine(shape, [&](Rows differing, Rows others) -> absl::Status {
    return AddChoice(differing, others, "differing", kAsked, report);
  });
  if (!status.ok()) return status;
  report.notes.push_back(
      Concat("generated rows, seed ", extent.seed, ": bf16, head_dim ", extent.shape.head_dim, ", ",
             extent.shape.tokens, " tokens, ", extent.shape.kv_heads, " kv heads with ",
             extent.shape.group, " query heads each, ", extent.queries,
             " queries per head, segments of ", extent.segment_tokens, " tokens"));
  report.notes.emplace_back(
      "rel. error: |output - truth| / |truth|. kept mass: sum over tokens of min(weight, true "
      "weight). stored: bytes per token and kv head, with bitmaps and rotations. ratio: of errors; "
      "in rows with blocks, of masses. Masks take the bytes of svd_rows_g1");
  report.notes.emplace_back(
      "Losses are measured on every other tile, rotations computed from the tiles between them. "
      "Blocks: raw rows, one choice per group of heads. Spectrum exponents of similar segments "
      "differ by up to 1.4 times either way, of differing ones by up to 4. Dynamic: of the "
      "thresholds that take no more bytes than the fixed rate (a rotation per segment, 25 % in "
      "groups of 1), the eight with the smallest mean loss are tried on other queries, and the one "
      "with the smallest error is used. +-: standard error. The first segment's strategy keeps as "
      "many channels as fit these bytes");
  return report;
}

}  // namespace tessera::cli::bench
