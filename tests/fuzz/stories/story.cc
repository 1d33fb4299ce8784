#include "tests/fuzz/stories/story.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "client/api/worker_access.h"
#include "daemon/base/strings.h"

namespace tessera::fuzz {

using cli::BytesOf;
using cli::SyntheticSequence;
using cli::WritableBytesOf;

namespace {

constexpr std::array<std::string_view, kActs> kNames = {
    "create",  "append",   "step",      "speculate", "abandon",    "attend",   "select",
    "fork",    "truncate", "compress",  "pack",      "park",       "offload",  "restore",
    "publish", "reuse",    "unpublish", "handover",  "set_policy", "describe", "free"};
// The weight of each Act, in order.
constexpr std::array<std::uint32_t, kActs> kWeights = {6, 12, 30, 6, 3, 12, 4, 6, 6, 6, 3,
                                                       3, 4,  2,  6, 6, 2,  3, 2, 4, 5};
constexpr std::size_t kLinesKept = 60;

constexpr double kExact = 0.02;   // for fp32 sums over bf16 rows
constexpr double kRounded = 0.1;  // for rows that were rotated and rounded again

bool IsRefusal(const absl::Status& status) { return absl::IsResourceExhausted(status); }

}  // namespace

std::string_view NameOf(Act act) { return kNames[static_cast<std::size_t>(act)]; }

std::span<const Kind> Kinds() {
  static const Kind kKinds[] = {
      {"dense", kExact},
      {"dense", kExact},
      {"mosaickv:keep=1,group=1,loss_k=1,loss_v=1,select=0,min_segment=32,sinks=0,recent=0+bf16",
       kRounded},
      {"mosaickv:keep=1,group=1,loss_k=1,loss_v=1,select=0,min_segment=32,recent=40+bf16",
       kRounded},
      {"mosaickv:keep=0.25,group=1,loss_k=1,loss_v=1,pressed=0.125,min_segment=32,sinks=0,recent=0,"
       "floor=0",
       std::nullopt},
      {"mosaickv:keep=0.5,group=2,loss_k=1,loss_v=1,pressed=0.1,min_segment=32,sinks=0,recent=0+"
       "quest:page=8,"
       "tokens=64,dense_layers=0+int8",
       std::nullopt},
      {"quest:page=4,tokens=64,dense_layers=0", std::nullopt},
      {"think:ratio=0.5", std::nullopt},
      // Valid for every length above the window, whose tokens the share always covers.
      {"chunkkv:budget=0.7,chunk=4,window=2", std::nullopt, /*any_head=*/false},
      {"snapkv:budget=0.7,window=2+mosaickv:keep=0.5,group=2,loss_k=1,loss_v=1,min_segment=32,"
       "pressed=0.25+fp8",
       std::nullopt, /*any_head=*/false},
      {"streaming:sink=4,recent=100", std::nullopt, /*any_head=*/false},
      {"lacache:budget=96,span=1,overlap=0,sink=4", std::nullopt, /*any_head=*/false},
      {"h2o:heavy=40,recent=40", std::nullopt, /*any_head=*/false},
      {"tova:budget=80+mosaickv:keep=0.5,group=1,loss_k=1,loss_v=1,min_segment=32,recent=0,pressed="
       "0.125",
       std::nullopt, /*any_head=*/false},
  };
  return kKinds;
}

absl::StatusOr<Story> Story::Begin(const Options& options) {
  absl::StatusOr<client::Model> model = options.worker->RegisterModel(kStoryShape.Geometry());
  if (!model.ok()) return model.status();
  return Story(options, *std::move(model));
}

std::string Story::Told() const {
  std::string text;
  for (const std::string& line : told_) tessera::Append(text, line, "\n");
  return text;
}

void Story::Say(const std::string& line) {
  told_.push_back(Concat(operations_, " ", line));
  if (told_.size() > kLinesKept) told_.pop_front();
  if (options_.on_line) options_.on_line(told_.back());
}

absl::Status Story::Allow(const absl::Status& status) {
  if (!IsRefusal(status)) return status;
  ++options_.tally->refused;
  Say(Concat("  refused: ", AsStringView(status.message())));
  return absl::OkStatus();
}

absl::Status Story::Next() {
  ++operations_;
  std::uint32_t sum = 0;
  for (const std::uint32_t weight : kWeights) sum += weight;
  std::uint64_t drawn = options_.random->Below(sum);
  std::size_t act = 0;
  while (drawn >= kWeights[act]) drawn -= kWeights[act++];
  const bool by_itself = static_cast<Act>(act) == Act::kReuse;
  if (known_.empty() && !by_itself) act = static_cast<std::size_t>(Act::kCreate);
  const absl::Status status = Allow(Perform(static_cast<Act>(act)));
  if (status.ok()) ++options_.tally->done[act];
  return status;
}

absl::Status Story::Perform(Act act) {
  if (act == Act::kCreate) return Create();
  if (act == Act::kStep) return Step();
  if (act == Act::kReuse) return Reuse();
  if (act == Act::kUnpublish) return Unpublish();
  Known& known = Any();
  switch (act) {
    case Act::kAppend:
      return Append(known);
    case Act::kSpeculate:
      return Speculate(known);
    case Act::kAbandon:
      return Abandon(known);
    case Act::kAttend:
      return Attend(known);
    case Act::kSelect:
      return Select(known);
    case Act::kFork:
      return Fork(known);
    case Act::kTruncate:
      return Truncate(known);
    case Act::kCompress:
      return Compress(known);
    case Act::kPack:
      return Pack(known);
    case Act::kPark:
      Say(Concat("park ", known.number));
      return known.sequence.Park();
    case Act::kOffload:
      return Offload(known);
    case Act::kRestore:
      return Restore(known);
    case Act::kPublish:
      return Publish(known);
    case Act::kHandover:
      return Handover(known);
    case Act::kSetPolicy:
      return SetPolicy(known);
    case Act::kDescribe:
      return Describe(known);
    default:
      break;
  }
  Say(Concat("free ", known.number));
  const absl::Status status = known.sequence.Free();
  if (status.ok()) known_.erase(known_.begin() + (&known - known_.data()));
  return status;
}

absl::Status Story::Create() {
  if (known_.size() >= options_.most_sequences) return Step();
  const Kind& kind = Kinds()[options_.random->Below(Kinds().size())];
  const std::uint64_t number = ++created_;
  Say(Concat("create ", number, " ", kind.policy));
  absl::StatusOr<client::Sequence> sequence = options_.worker->CreateSequence(model_, kind.policy);
  if (!sequence.ok()) return sequence.status();
  known_.push_back({number, *std::move(sequence),
                    SyntheticSequence(kStoryShape, options_.random->Bits()), kind});
  return absl::OkStatus();
}

// ---- Appending rows

absl::Status Story::Append(Known& known) {
  const std::uint64_t room =
      options_.most_tokens - std::min(known.truth.tokens(), options_.most_tokens);
  if (room == 0) return Describe(known);
  const std::uint64_t count = options_.random->Between(1, std::min<std::uint64_t>(room, 300));
  const std::uint64_t first = known.truth.tokens();
  Say(Concat("append ", known.number, " ", count, " from ", first));
  known.truth.Grow(count);
  const auto key = known.truth.KeysOfAllLayers(first, count);
  const auto value = known.truth.ValuesOfAllLayers(first, count);
  const absl::StatusOr<std::uint64_t> held =
      known.sequence.Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = count});
  if (!held.ok()) {
    known.truth.Truncate(first);
    return held.status();
  }
  if (*held != known.truth.tokens()) {
    return absl::DataLossError(Concat("sequence ", known.number, " holds ", *held,
                                      " tokens; appended were ", known.truth.tokens()));
  }
  return Observe(known, first, count);
}

absl::Status Story::Observe(Known& known, std::uint64_t first, std::uint64_t count) {
  for (std::uint32_t layer = 0; layer < kStoryShape.layers; ++layer) {
    std::vector<std::uint16_t> queries;
    for (std::uint64_t t = first; t < first + count; ++t) {
      const auto row = known.truth.Query(layer, t);
      queries.insert(queries.end(), row.begin(), row.end());
    }
    const absl::Status status =
        known.sequence.Observe({.layer = layer,
                                .first_token = first,
                                .query = BytesOf(queries),
                                .key = std::as_bytes(known.truth.Key(layer, first, count))});
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Story::RetryAfterObserving(std::span<Known* const> all,
                                        const std::function<absl::Status()>& what) {
  absl::Status status = what();
  if (!absl::IsFailedPrecondition(status)) return status;
  Say(Concat("  observes all again: ", AsStringView(status.message())));
  for (Known* known : all) {
    if (known->kind.tolerance.has_value() || known->truth.tokens() == 0) continue;
    absl::Status shown = Observe(*known, 0, known->truth.tokens());
    if (!shown.ok()) return shown;
  }
  return what();
}

// ---- Steps

absl::Status Story::Step() {
  std::vector<Known*> batch;
  for (Known& known : known_) {
    if (known.truth.tokens() < options_.most_tokens && options_.random->OneIn(2)) {
      batch.push_back(&known);
    }
  }
  if (batch.empty()) return known_.empty() ? absl::OkStatus() : Describe(Any());
  std::string line = "step";
  for (const Known* known : batch) tessera::Append(line, " ", known->number);
  const std::uint64_t steps = options_.random->Between(1, 12);
  Say(Concat(line, ", ", steps, " times"));
  for (std::uint64_t i = 0; i < steps; ++i) {
    const absl::Status status = RetryAfterObserving(batch, [&] { return RunStep(batch, 1, 1); });
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Story::Speculate(Known& known) {
  const auto count = static_cast<std::uint32_t>(options_.random->Between(1, 5));
  const auto accepted = static_cast<std::uint32_t>(options_.random->Between(0, count));
  if (known.truth.tokens() + count > options_.most_tokens) return Describe(known);
  Say(Concat("speculate ", known.number, " ", count, ", ", accepted, " accepted"));
  Known* const batch[] = {&known};
  return RetryAfterObserving(batch, [&] { return RunStep(batch, count, accepted); });
}

absl::Status Story::Abandon(Known& known) {
  Say(Concat("abandon ", known.number));
  client::Sequence* const batch[] = {&known.sequence};
  Known* const all[] = {&known};
  absl::StatusOr<client::Step> step = absl::UnknownError("not begun");
  const absl::Status begun = RetryAfterObserving(all, [&] {
    step = options_.worker->BeginStep(batch);
    return step.status();
  });
  if (!begun.ok()) return begun;
  known.truth.Grow(1);
  const std::uint64_t token = known.truth.tokens() - 1;
  // The first of two layers.
  const absl::Status status = step->Append(0, std::as_bytes(known.truth.Key(0, token, 1)),
                                           std::as_bytes(known.truth.Value(0, token, 1)));
  known.truth.Truncate(token);
  return absl::IsAborted(status) ? absl::OkStatus() : status;
}

absl::Status Story::RunStep(std::span<Known* const> batch, std::uint32_t count,
                            std::uint32_t accepted) {
  for (Known* known : batch) known->truth.Grow(count);
  const auto take_back = [&](std::uint32_t left) {
    for (Known* known : batch) known->truth.Truncate(known->truth.tokens() - count + left);
  };
  std::vector<std::vector<float>> outputs;
  absl::Status status;
  while (absl::IsAborted(status = TryStep(batch, count, accepted, outputs))) {
    ++options_.tally->retried;
  }
  if (!status.ok()) {
    take_back(0);
    return status;
  }
  const std::size_t row = kStoryShape.query_row();
  for (std::size_t i = 0; status.ok() && i < batch.size(); ++i) {
    const std::uint64_t first = batch[i]->truth.tokens() - count;
    for (std::uint32_t layer = 0; layer < kStoryShape.layers; ++layer) {
      for (std::uint32_t token = 0; status.ok() && token < count; ++token) {
        status = Judge(*batch[i], layer, first + token,
                       std::span(outputs[layer]).subspan((i * count + token) * row, row));
      }
    }
  }
  take_back(accepted);
  return status;
}

absl::Status Story::TryStep(std::span<Known* const> batch, std::uint32_t count,
                            std::uint32_t accepted, std::vector<std::vector<float>>& outputs) {
  std::vector<client::Sequence*> sequences;
  for (Known* known : batch) sequences.push_back(&known->sequence);
  absl::StatusOr<client::Step> step = options_.worker->BeginStep(sequences, {.new_tokens = count});
  if (!step.ok()) return step.status();
  outputs.assign(kStoryShape.layers,
                 std::vector<float>(batch.size() * count * kStoryShape.query_row()));
  std::vector<std::vector<std::uint16_t>> rows;  // per layer: key, value, query
  for (std::uint32_t layer = 0; layer < kStoryShape.layers; ++layer) {
    std::vector<std::uint16_t> key, value, query;
    const auto add = [](std::vector<std::uint16_t>& to, const auto& from) {
      to.insert(to.end(), from.begin(), from.end());
    };
    for (const Known* known : batch) {
      const std::uint64_t first = known->truth.tokens() - count;
      add(key, known->truth.Key(layer, first, count));
      add(value, known->truth.Value(layer, first, count));
      for (std::uint32_t i = 0; i < count; ++i) add(query, known->truth.Query(layer, first + i));
    }
    const absl::Status status =
        step->AppendAndAttend(layer, {.key = BytesOf(key),
                                      .value = BytesOf(value),
                                      .query = BytesOf(query),
                                      .output = WritableBytesOf(outputs[layer])});
    if (!status.ok()) return status;
  }
  const std::vector<std::uint32_t> counts(batch.size(), accepted);
  return step->End(counts);
}

// ---- Reading

absl::Status Story::Judge(const Known& known, std::uint32_t layer, std::uint64_t position,
                          std::span<const float> output) {
  ++options_.tally->outputs_judged;
  if (!known.kind.tolerance.has_value()) {
    if (std::ranges::all_of(output, [](float x) { return std::isfinite(x); })) {
      return absl::OkStatus();
    }
    return absl::DataLossError(Concat("sequence ", known.number, ", layer ", layer, ", position ",
                                      position, ": the output is not finite"));
  }
  const double error = known.truth.Error(layer, position, output);
  if (error <= *known.kind.tolerance) return absl::OkStatus();
  return absl::DataLossError(Concat("sequence ", known.number, " (", known.kind.policy, "), layer ",
                                    layer, ", position ", position, " of ", known.truth.tokens(),
                                    ": the output is off by ", error, "; allowed is ",
                                    *known.kind.tolerance));
}

absl::Status Story::Attend(Known& known) {
  if (known.truth.tokens() == 0) return Describe(known);
  Say(Concat("attend ", known.number, " at ", known.truth.tokens() - 1));
  return AttendBy(*options_.worker, known.sequence, known);
}

absl::Status Story::Describe(Known& known) {
  Say(Concat("describe ", known.number));
  const absl::StatusOr<v1::DescribeResponse> held =
      client::DescribeMessage(known.sequence, client::Detail::kLanes);
  if (!held.ok()) return held.status();
  if (held->tokens() == known.truth.tokens() && held->state() != v1::SEQUENCE_STATE_FAILED) {
    return absl::OkStatus();
  }
  return absl::DataLossError(Concat("sequence ", known.number, " holds ", held->tokens(),
                                    " tokens, state ", static_cast<int>(held->state()),
                                    "; it should hold ", known.truth.tokens()));
}

// ---- Changes

absl::Status Story::Fork(Known& known) {
  if (known_.size() >= options_.most_sequences) return Attend(known);
  const std::uint64_t number = ++created_;
  Say(Concat("fork ", known.number, " to ", number));
  absl::StatusOr<client::Sequence> child = known.sequence.Fork();
  if (!child.ok()) return child.status();
  if (child->tokens() != known.truth.tokens()) {
    return absl::DataLossError(
        Concat("a fork holds ", child->tokens(), " tokens; its parent ", known.truth.tokens()));
  }
  known_.push_back({number, *std::move(child), known.truth.Fork(options_.random->Bits()),
                    known.kind, known.by_hand, known.repolicied});
  return absl::OkStatus();
}

absl::Status Story::Truncate(Known& known) {
  const std::uint64_t tokens = options_.random->Between(0, known.truth.tokens());
  Say(Concat("truncate ", known.number, " to ", tokens));
  const absl::Status status = known.sequence.Truncate(tokens);
  // A cut cannot split merged or moved entries.
  if (!known.kind.tolerance.has_value() && absl::IsFailedPrecondition(status))
    return absl::OkStatus();
  if (!status.ok()) return status;
  known.truth.Truncate(tokens);
  if (tokens == 0) known.by_hand = false;  // no packed rows are left
  return absl::OkStatus();
}

absl::Status Story::Compress(Known& known) {
  Say(Concat("compress ", known.number, " by ", known.kind.policy));
  Known* const all[] = {&known};
  return RetryAfterObserving(all, [&] { return known.sequence.Compress().status(); });
}

absl::Status Story::Pack(Known& known) {
  if (std::string_view(known.kind.policy) != "dense") return Compress(known);
  Say(Concat("pack ", known.number));
  const absl::StatusOr<client::CompressResult> packed = known.sequence.Compress(client::Packing{
      .kept_channels = kStoryShape.head_dim, .summary = client::Summary::kMean, .block = 4});
  known.by_hand |= packed.ok() && packed->entries_packed > 0;
  return absl::IsAborted(packed.status()) ? absl::OkStatus() : packed.status();
}

}  // namespace tessera::fuzz
