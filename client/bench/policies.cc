// tessera bench policies: attention error of each policy at equal budgets, on generated rows with
// sinks, heavy hitters and needles, through the benchmark's own daemon.
//
// A row's value is the relative error of the attention output that the daemon computes, mean over
// layers, heads and queries that the policy has not observed. Its kept mass is the share of the
// true attention on tokens that have their own entry.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "client/api/worker_access.h"
#include "client/bench/bench.h"
#include "client/bench/endless.h"
#include "client/bench/measure/attention_judge.h"
#include "client/bench/workload/generated_kv.h"
#include "client/bench/workload/synthetic.h"
#include "client/tools/local_daemon.h"
#include "daemon/base/strings.h"
#include "kernels/format/element.h"
#include "tessera/worker.h"

namespace tessera::cli::bench {

namespace {

constexpr std::uint32_t kLayers = 8;
constexpr std::uint32_t kLeastTokens = 1024;
constexpr std::uint32_t kSeenQueries = 64;  // observed, per head; repeated along the prompt
constexpr std::uint64_t kFirstUnseen = 1000;
constexpr std::uint32_t kDelimiter = 1;

// Rows of every layer for one text. Queries are generated for the last position and rotated to the
// others.
class Prompt {
 public:
  Prompt(const GeneratedShape& shape, std::uint64_t seed) : shape_(shape) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      Progress(Concat("generating layer ", layer));
      layers_.push_back(std::make_unique<GeneratedKv>(shape, seed, layer));
      std::vector<std::vector<std::uint16_t>> heads;
      for (std::uint32_t head = 0; head < query_heads(); ++head) {
        std::vector<std::uint16_t> rows;
        for (std::uint32_t i = 0; i < kSeenQueries; ++i) {
          const auto query = layers_.back()->Query(head / shape.group, head % shape.group, i).row;
          rows.insert(rows.end(), query.begin(), query.end());
        }
        heads.push_back(std::move(rows));
      }
      seen_.push_back(std::move(heads));
    }
  }

  const GeneratedShape& shape() const { return shape_; }
  std::uint32_t query_heads() const { return shape_.kv_heads * shape_.group; }
  const GeneratedKv& layer(std::uint32_t index) const { return *layers_[index]; }

  // [tokens][kv_heads][head_dim] of K or V.
  std::vector<std::uint16_t> Rows(std::uint32_t layer, bool values) const {
    std::vector<std::uint16_t> rows(std::size_t{shape_.tokens} * shape_.kv_heads * shape_.head_dim);
    for (std::uint32_t head = 0; head < shape_.kv_heads; ++head) {
      const kernels::LaneRows lane = layers_[layer]->Rows(head);
      const kernels::RowSpan& from = values ? lane.values : lane.keys;
      for (std::uint32_t token = 0; token < shape_.tokens; ++token) {
        std::memcpy(&rows[(std::size_t{token} * shape_.kv_heads + head) * shape_.head_dim],
                    from.row(token), from.row_bytes());
      }
    }
    return rows;
  }

  // [tokens][query_heads][head_dim], each rotated to its position.
  std::vector<std::uint16_t> Queries(std::uint32_t layer) const {
    const std::uint32_t dim = shape_.head_dim;
    std::vector<std::uint16_t> rows(std::size_t{shape_.tokens} * query_heads() * dim);
    for (std::uint32_t token = 0; token < shape_.tokens; ++token) {
      for (std::uint32_t head = 0; head < query_heads(); ++head) {
        const std::uint16_t* const from =
            &seen_[layer][head][std::size_t{token % kSeenQueries} * dim];
        Turn(from, static_cast<double>(token) - (shape_.tokens - 1),
             &rows[(std::size_t{token} * query_heads() + head) * dim]);
      }
    }
    return rows;
  }

  // Token ids with a delimiter at the end of each sentence.
  std::vector<std::uint32_t> TokenIds() const {
    std::vector<std::uint32_t> ids(shape_.tokens, 0);
    for (std::uint32_t t = shape_.chunk_tokens - 1; t < shape_.tokens; t += shape_.chunk_tokens) {
      ids[t] = kDelimiter;
    }
    return ids;
  }

 private:
  // Pairs are channels i and i + head_dim / 2.
  void Turn(const std::uint16_t* from, double by, std::uint16_t* to) const {
    const std::uint32_t half = shape_.head_dim / 2;
    for (std::uint32_t i = 0; i < half; ++i) {
      const double angle =
          by * std::pow(shape_.rope_base, -static_cast<double>(i) / static_cast<double>(half));
      const double x = kernels::Bf16ToFloat(from[i]);
      const double y = kernels::Bf16ToFloat(from[i + half]);
      to[i] = kernels::FloatToBf16(static_cast<float>(x * std::cos(angle) - y * std::sin(angle)));
      to[i + half] =
          kernels::FloatToBf16(static_cast<float>(x * std::sin(angle) + y * std::cos(angle)));
    }
  }

  GeneratedShape shape_;
  std::vector<std::unique_ptr<GeneratedKv>> layers_;
  std::vector<std::vector<std::vector<std::uint16_t>>> seen_;  // [layer][query head]
};

// Exact attention of the unobserved queries.
struct Truth {
  struct Asked {
    std::vector<std::uint16_t> query;  // [query_heads][head_dim]
    std::vector<Attention> exact;      // by query head
  };
  std::vector<std::vector<Asked>> layers;
};

Truth TruthOf(const Prompt& prompt, std::uint32_t queries) {
  Truth truth;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    Progress(Concat("exact attention of layer ", layer));
    std::vector<FloatLane> lanes;
    for (std::uint32_t head = 0; head < prompt.shape().kv_heads; ++head) {
      lanes.push_back(Widen(prompt.layer(layer).Rows(head)));
    }
    std::vector<Truth::Asked> asked(queries);
    for (std::uint32_t i = 0; i < queries; ++i) {
      for (std::uint32_t head = 0; head < prompt.query_heads(); ++head) {
        const std::uint32_t kv_head = head / prompt.shape().group;
        const auto row =
            prompt.layer(layer).Query(kv_head, head % prompt.shape().group, kFirstUnseen + i).row;
        asked[i].query.insert(asked[i].query.end(), row.begin(), row.end());
        asked[i].exact.push_back(Attend(row, lanes[kv_head]));
      }
    }
    truth.layers.push_back(std::move(asked));
  }
  return truth;
}

struct Bench {
  std::unique_ptr<LocalDaemon> daemon;
  std::unique_ptr<client::Worker> worker;
  client::Model model;
  client::Sequence full;  // the prompt, dense
};

absl::StatusOr<Bench> Open(const Prompt& prompt) {
  Bench bench;
  absl::StatusOr<std::unique_ptr<LocalDaemon>> daemon =
      LocalDaemon::Start({"--compactor-threads=1"});
  if (!daemon.ok()) return daemon.status();
  bench.daemon = *std::move(daemon);
  absl::StatusOr<std::unique_ptr<client::Worker>> worker =
      client::Worker::Attach({.address = bench.daemon->address(), .worker_name = "bench"});
  if (!worker.ok()) return worker.status();
  bench.worker = *std::move(worker);
  const client::LayerGeometry layer = {.query_heads = prompt.query_heads(),
                                       .kv_heads = prompt.shape().kv_heads,
                                       .head_dim = prompt.shape().head_dim};
  client::ModelGeometry geometry;
  geometry.name = "generated";
  geometry.layers = std::vector(kLayers, layer);
  geometry.delimiter_token_ids = {kDelimiter};
  absl::StatusOr<client::Model> model = bench.worker->RegisterModel(geometry);
  if (!model.ok()) return model.status();
  bench.model = *std::move(model);
  absl::StatusOr<client::Sequence> full = bench.worker->CreateSequence(bench.model);
  if (!full.ok()) return full.status();
  bench.full = *std::move(full);
  for (std::uint32_t index = 0; index < kLayers; ++index) {
    const auto key = prompt.Rows(index, false);
    const auto value = prompt.Rows(index, true);
    const auto tokens = bench.full.Append({.key = BytesOf(key),
                                           .value = BytesOf(value),
                                           .tokens = prompt.shape().tokens,
                                           .first_layer = index,
                                           .layers = 1});
    if (!tokens.ok()) return tokens.status();
  }
  return bench;
}

using Seconds = std::chrono::duration<double>;

// Hands the policy's observations to the sequence. Returns the time spent in the worker.
absl::StatusOr<Seconds> Show(const Prompt& prompt, client::Sequence& sequence) {
  Seconds spent{0};
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    const std::vector<std::uint16_t> queries = prompt.Queries(layer);
    const std::vector<std::uint16_t> keys = prompt.Rows(layer, false);
    const auto begun = std::chrono::steady_clock::now();
    absl::Status status = sequence.Observe({.layer = layer,
                                            .query = BytesOf(queries),
                                            .key = BytesOf(keys),
                                            .prompt_tokens = prompt.shape().tokens});
    if (!status.ok()) return status;
    spent += std::chrono::steady_clock::now() - begun;
  }
  if (absl::Status status = sequence.ObserveTokens(0, prompt.TokenIds()); !status.ok()) {
    return status;
  }
  return spent;
}

// Shares of needles whose tokens are all kept.
struct Needles {
  double in_a_lane = 0;  // in one lane, mean over lanes
  double anywhere = 0;   // each token in at least one lane
};

// nullopt if entries are merged: their tokens are unknown.
std::optional<Needles> NeedlesIn(const Prompt& prompt, const v1::DescribeResponse& held) {
  const std::uint32_t length = prompt.shape().needle_tokens;
  double whole = 0;
  std::set<std::uint64_t> somewhere;
  for (const v1::LaneDescription& lane : held.lane()) {
    if (std::ranges::any_of(lane.weight(), [](float w) { return w > 1; })) return std::nullopt;
    const std::set<std::uint64_t> kept(lane.position().begin(), lane.position().end());
    for (const std::uint32_t needle : prompt.layer(lane.layer()).needles()) {
      std::uint32_t stayed = 0;
      for (std::uint64_t token = needle; token < needle + length; ++token) {
        if (!kept.contains(token)) continue;
        ++stayed;
        somewhere.insert(token);
      }
      whole += stayed == length;
    }
  }
  const std::vector<std::uint32_t>& needles = prompt.layer(0).needles();  // alike in all layers
  const auto covered = std::count_if(needles.begin(), needles.end(), [&](std::uint32_t needle) {
    for (std::uint64_t token = needle; token < needle + length; ++token) {
      if (!somewhere.contains(token)) return false;
    }
    return true;
  });
  const auto count = static_cast<double>(needles.size());
  return Needles{.in_a_lane = whole / (count * held.lane_size()),
                 .anywhere = static_cast<double>(covered) / count};
}

absl::Status Judge(const Prompt& prompt, const Truth& truth, Bench& bench,
                   client::Sequence& sequence, const v1::DescribeResponse& held, Row& row) {
  const std::uint32_t dim = prompt.shape().head_dim;
  double error = 0;
  double mass = 0;
  double count = 0;
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    for (const Truth::Asked& asked : truth.layers[layer]) {
      std::vector<float> output(asked.query.size());
      const client::AttendQuery queries[] = {{.sequence = &sequence,
                                              .query = BytesOf(asked.query),
                                              .output = WritableBytesOf(output)}};
      absl::Status status = bench.worker->AttendRpc(layer, queries, {});
      if (!status.ok()) return status;
      for (std::uint32_t head = 0; head < prompt.query_heads(); ++head) {
        const Attention& exact = asked.exact[head];
        double distance = 0;
        double length = 0;
        for (std::uint32_t d = 0; d < dim; ++d) {
          const double off = output[std::size_t{head} * dim + d] - exact.output[d];
          distance += off * off;
          length += exact.output[d] * exact.output[d];
        }
        error += std::sqrt(distance / length);
        const std::uint32_t kv_head = head / prompt.shape().group;
        const auto& lane = held.lane(static_cast<int>(layer * prompt.shape().kv_heads + kv_head));
        for (const std::uint64_t position : lane.position()) mass += exact.weights[position];
        count += 1;
      }
    }
  }
  row.value = error / count;
  row.kept_mass = mass / count;
  return absl::OkStatus();
}

struct Measured {
  Row row;
  double choice_seconds = 0;
  v1::DescribeResponse held;
};

absl::StatusOr<Measured> Measure(const Prompt& prompt, const Truth& truth, Bench& bench,
                                 const std::string& name, const std::string& policy) {
  Progress(policy);
  absl::StatusOr<client::Sequence> sequence = bench.full.Fork(policy);
  if (!sequence.ok()) {
    return absl::Status(sequence.status().code(),
                        Concat(policy, ": ", AsStringView(sequence.status().message())));
  }
  const absl::StatusOr<Seconds> shown = Show(prompt, *sequence);
  if (!shown.ok()) return shown.status();
  const absl::StatusOr<v1::StatsResponse> before = client::StatsMessage(*bench.worker);
  if (!before.ok()) return before.status();
  const auto begun = std::chrono::steady_clock::now();
  const auto compressed = sequence->Compress();
  const Seconds seconds = std::chrono::steady_clock::now() - begun;
  if (!compressed.ok()) {
    return absl::Status(compressed.status().code(),
                        Concat(policy, ": ", AsStringView(compressed.status().message())));
  }
  const absl::StatusOr<v1::StatsResponse> after = client::StatsMessage(*bench.worker);
  if (!after.ok()) return after.status();
  absl::StatusOr<v1::DescribeResponse> held =
      client::DescribeMessage(*sequence, client::Detail::kEntries);
  if (!held.ok()) return held.status();
  const std::optional<Needles> needles = NeedlesIn(prompt, *held);
  const auto per_1k = [&](Seconds spent) {
    return spent.count() * 1e3 * 1024 / prompt.shape().tokens;
  };
  Measured measured = {.row = {.name = name,
                               .unit = "rel. error",
                               .tokens = held->tokens_kept(),
                               .elements = held->elements_kept(),
                               .bytes = held->bytes_kept(),
                               .show_ms_per_1k = per_1k(*shown),
                               .ms_per_1k = per_1k(seconds)},
                       .choice_seconds = after->compaction().token_choice_seconds() -
                                         before->compaction().token_choice_seconds(),
                       .held = *std::move(held)};
  if (needles.has_value()) {
    measured.row.needles = needles->in_a_lane;
    measured.row.anywhere = needles->anywhere;
  }
  absl::Status status = Judge(prompt, truth, bench, *sequence, measured.held, measured.row);
  if (!status.ok()) return status;
  return measured;
}

// Mean Jaccard index of the tokens that adjacent layers keep, first kv head.
double MeanJaccard(const v1::DescribeResponse& held, std::uint32_t kv_heads) {
  double sum = 0;
  for (std::uint32_t layer = 0; layer + 1 < kLayers; ++layer) {
    const auto& one = held.lane(static_cast<int>(layer * kv_heads)).position();
    const auto& other = held.lane(static_cast<int>((layer + 1) * kv_heads)).position();
    std::vector<std::uint64_t> both;
    std::set_intersection(one.begin(), one.end(), other.begin(), other.end(),
                          std::back_inserter(both));
    const double common = static_cast<double>(both.size());
    sum += common / (one.size() + other.size() - common);
  }
  return sum / (kLayers - 1);
}

// Adds a row for policies whose layers could share one choice of tokens.
void AddJaccard(const std::string& name, const Measured& measured, std::uint32_t kv_heads,
                Report& report) {
  if (name != "chunkkv_20" && name != "snapkv_20") return;
  report.Add({.name = Concat(name, "_jaccard"),
              .value = MeanJaccard(measured.held, kv_heads),
              .unit = "of the union"});
}

// Each policy's text for the same budget.
std::vector<std::pair<std::string, std::string>> PoliciesAt(double share, std::uint32_t tokens) {
  const auto of_tokens = static_cast<std::uint64_t>(share * tokens);
  const std::string budget = Concat("budget=", share);
  return {
      {"chunkkv", Concat("chunkkv:", budget)},
      {"chunkkv_kvpress", Concat("chunkkv:mode=kvpress,", budget)},
      {"semantickv", Concat("semantickv:sink=16,keep_total=", share)},
      {"semanticache", Concat("semanticache:", budget)},
      {"semanticache_no_ends", Concat("semanticache:delimiters=0,", budget)},
      {"lacache", Concat("lacache:span=4,overlap=2,pass=uniform,budget=", of_tokens)},
      {"streaming", Concat("streaming:budget=", of_tokens)},
      {"h2o", Concat("h2o:heavy=", of_tokens / 2, ",recent=", of_tokens - of_tokens / 2)},
      {"snapkv", Concat("snapkv:", budget)},
      {"pyramidkv", Concat("pyramidkv:", budget)},
      {"tova", Concat("tova:budget=", of_tokens)},
  };
}

absl::Status MeasureReuse(const Prompt& prompt, const Truth& truth, Bench& bench, Report& report) {
  constexpr std::uint32_t kReuses[] = {1, 2, 4};
  // The fastest of several alternating rounds: other load only adds time.
  constexpr int kRounds = 5;
  std::map<std::uint32_t, double> fastest;
  for (int round = 0; round < kRounds; ++round) {
    for (const std::uint32_t reuse : kReuses) {
      Progress(Concat("choices shared by ", reuse, " layers, round ", round + 1, " of ", kRounds));
      absl::StatusOr<Measured> measured =
          Measure(prompt, truth, bench, "", Concat("chunkkv:budget=0.2,reuse=", reuse));
      if (!measured.ok()) return measured.status();
      const auto it = fastest.try_emplace(reuse, measured->choice_seconds).first;
      it->second = std::min(it->second, measured->choice_seconds);
    }
  }
  constexpr double kWithin = 0.2;
  bool is_nth = true;
  std::string figures;
  for (const auto& [reuse, seconds] : fastest) {
    Row row = {.name = Concat("chunkkv_reuse_", reuse),
               .value = seconds * 1e3,
               .unit = "ms choosing",
               .baseline = reuse == 1 ? "" : "chunkkv_reuse_1"};
    if (reuse > 1) {
      row.ratio = fastest.at(1) / seconds;
      row.goal = reuse / (1 + kWithin);
      const double share = seconds / fastest.at(1);
      is_nth = is_nth && std::fabs(share * reuse - 1) <= kWithin;
      Append(figures, figures.empty() ? "" : ", ", reuse, " layers: ", Figure(share));
    }
    report.Add(std::move(row));
  }
  report.findings.push_back(
      {.statement =
           Concat("one choice for n layers takes 1/n of the time, within ", kWithin * 100, " %"),
       .holds = is_nth,
       .figures = std::move(figures)});
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Report> RunPolicies(const Options& options) {
  Report report = {.name = "policies"};
  GeneratedShape shape;
  shape.tokens = options.tokens.value_or(options.quick ? 2048 : 8192);
  if (shape.tokens < kLeastTokens) {
    return absl::InvalidArgumentError(Concat("--tokens is ", shape.tokens, "; policies needs ",
                                             kLeastTokens, " or more to place all needles"));
  }
  const Prompt prompt(shape, options.seed);
  const Truth truth = TruthOf(prompt, options.quick ? 2 : 4);
  absl::StatusOr<Bench> bench = Open(prompt);
  if (!bench.ok()) return bench.status();
  const auto add = [&](const std::string& name, const std::string& policy) {
    absl::StatusOr<Measured> measured = Measure(prompt, truth, *bench, name, policy);
    if (!measured.ok()) return measured.status();
    report.Add(std::move(measured->row));
    AddJaccard(name, *measured, shape.kv_heads, report);
    return absl::OkStatus();
  };
  if (absl::Status status = add("dense", "dense"); !status.ok()) return status;
  for (const double share : {0.1, 0.2, 0.35, 0.5}) {
    for (const auto& [name, policy] : PoliciesAt(share, shape.tokens)) {
      absl::Status status = add(Concat(name, "_", share * 100), policy);
      // A policy that cannot meet a budget is reported as refused.
      if (absl::IsInvalidArgument(status)) {
        report.Add({.name = Concat(name, "_", share * 100),
                    .value = std::numeric_limits<double>::quiet_NaN(),
                    .unit = "refused"});
        report.notes.push_back(std::string(AsStringView(status.message())));
        status = absl::OkStatus();
      }
      if (!status.ok()) return status;
    }
  }
  for (const auto& [name, policy] : {
           std::pair{"mosaickv", "mosaickv"},
           {"mosaickv_reads_all", "mosaickv:select=0"},
           {"mosaickv_reads_tenth", "mosaickv:floor=0"},
           {"chunkkv+mosaickv", "chunkkv:budget=0.35+mosaickv"},
           {"semantickv+mosaickv", "semantickv:sink=16,keep_total=0.35+mosaickv"},
           {"semanticache+mosaickv+int8", "semanticache:tau=0.7+mosaickv+int8"},
           {"chunkkv+semanticache", "chunkkv:budget=0.5+semanticache:budget=0.35"},
           {"chunkkv+semanticache+mosaickv+int8",
            "chunkkv:budget=0.5+semanticache:budget=0.35+mosaickv+int8"},
       }) {
    if (absl::Status status = add(name, policy); !status.ok()) return status;
  }
  absl::Status status = MeasureReuse(prompt, truth, *bench, report);
  if (status.ok()) status = MeasureEndless(options.quick ? 50'000 : 1'000'000, report);
  if (!status.ok()) return status;
  report.notes.push_back(
      Concat(kLayers, " layers of ", shape.kv_heads, " kv heads, ", shape.tokens,
             " tokens of generated rows; errors are measured with queries the policy did not "
             "observe"));
  report.notes.push_back(
      "kept mass: of tokens that have their own entry, whether a query reads it or not. A merged "
      "entry counts as its first token; judge it by the error");
  report.notes.push_back(
      "jaccard: of the tokens that adjacent layers keep, first head, mean; each layer has its own "
      "rows for the same text");
  report.notes.push_back(
      "needles: share of needles kept whole in a lane, mean over lanes. anywhere: each token kept "
      "in at least one lane. -: tokens were merged");
  report.notes.push_back(
      "observe ms/1K: time the worker spends gathering queries and sums for 1,024 tokens. compress "
      "ms/1K: time it waits for Compress");
  return report;
}

}  // namespace tessera::cli::bench
