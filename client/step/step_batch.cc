#include "client/step/step_batch.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "client/sequence/compression.h"
#include "client/sequence/sequence_access.h"
#include "client/session/kernel_types.h"
#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

absl::Status CheckBytes(std::string_view what, std::size_t given, std::uint64_t rows,
                        std::uint64_t heads, const kernels::LayerGeometry& geometry,
                        kernels::ElementType type) {
  const std::uint64_t wanted = rows * heads * geometry.head_dim * kernels::ElementBytes(type);
  if (given == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(Concat(what, " has ", given, " bytes; expected are [", rows,
                                           " tokens][", heads, " heads][", geometry.head_dim,
                                           "] of ", kernels::ElementName(type), ": ", wanted));
}

}  // namespace

absl::Status CheckOutputType(ElementType type, const BoundModel& model) {
  if (type == ElementType::kFp32 || ToKernels(type) == model.type()) return absl::OkStatus();
  return absl::InvalidArgumentError(Concat("output_type is ", kernels::ElementName(ToKernels(type)),
                                           "; supported are fp32 and the model's type, ",
                                           kernels::ElementName(model.type())));
}

absl::Status StepBatch::Take(std::span<Sequence* const> sequences, const StepOptions& options) {
  if (sequences.empty()) return absl::InvalidArgumentError("a step needs at least one sequence");
  const std::span<const std::uint32_t> each = options.new_tokens_each;
  if (!each.empty() && each.size() != sequences.size()) {
    return absl::InvalidArgumentError(Concat("new_tokens_each has ", each.size(), " counts for ",
                                             sequences.size(), " sequences"));
  }
  absl::Status status = absl::OkStatus();
  is_reading_ = false;
  model_ = SequenceAccess::State(*sequences.front())->model.get();
  rows_ = 0;
  items_.reserve(sequences.size());
  for (std::size_t i = 0; i < sequences.size() && status.ok(); ++i) {
    const std::uint32_t count = each.empty() ? options.new_tokens : each[i];
    absl::StatusOr<SequenceUse> use = SequenceUse::Take(SequenceAccess::State(*sequences[i]));
    if (!use.ok()) {
      status = use.status();
    } else if ((*use)->model.get() != model_) {
      status = absl::InvalidArgumentError(
          Concat("all sequences of a step must have one model; ", (*use)->id.ToString(), " has ",
                 (*use)->model->id().ToString(), ", the first has ", model_->id().ToString()));
    } else if (count == 0) {
      status = absl::InvalidArgumentError(
          Concat("0 new tokens for ", (*use)->id.ToString(), "; a step needs at least 1"));
    } else {
      const std::uint64_t base = (*use)->tokens;
      items_.push_back({*std::move(use), base, count, rows_, base});
      rows_ += count;
    }
  }
  if (!status.ok()) {
    Release();
    return status;
  }
  appended_.assign(model_->layers(), false);
  refused_.assign(model_->layers(), false);
  return absl::OkStatus();
}

absl::Status StepBatch::TakeForReading(std::span<Sequence* const> sequences) {
  if (absl::Status status = Take(sequences, {}); !status.ok()) return status;
  is_reading_ = true;
  for (StepItem& item : items_) {
    item.wants_tail = false;
    item.new_tokens = 0;  // SetQueries has not been called
    if (item.sequence->layer_tokens.empty()) continue;
    const absl::Status status = absl::FailedPreconditionError(
        Concat("the layers of ", item.sequence->id.ToString(),
               " hold different numbers of tokens; append the missing layers before reading"));
    Release();
    return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> StepBatch::SetQueries(const ReadTensors& tensors) {
  constexpr std::uint64_t kLastPosition = std::uint64_t{1} << 62;  // the daemon's limit, too
  const auto check_counts = [&](std::string_view what, std::size_t counts) {
    if (counts == 0 || counts == items_.size()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        Concat(what, " has ", counts, " values for ", items_.size(), " sequences"));
  };
  absl::Status status = check_counts("queries_each", tensors.queries_each.size());
  if (status.ok()) {
    status = check_counts("first_query_positions", tensors.first_query_positions.size());
  }
  const auto queries_of = [&](std::size_t i) {
    return tensors.queries_each.empty() ? tensors.queries : tensors.queries_each[i];
  };
  for (std::size_t i = 0; i < items_.size() && status.ok(); ++i) {
    const std::string name = items_[i].sequence->id.ToString();
    if (queries_of(i) == 0) {
      status = absl::InvalidArgumentError(Concat("0 queries for ", name, "; pass at least 1"));
    } else if (tensors.first_query_positions.empty() && queries_of(i) > items_[i].base) {
      status =
          absl::InvalidArgumentError(Concat(queries_of(i), " queries, but ", name, " has ",
                                            items_[i].base, " tokens; set first_query_positions"));
    } else if (!tensors.first_query_positions.empty() &&
               tensors.first_query_positions[i] > kLastPosition) {
      status = absl::InvalidArgumentError(Concat("the first query position of ", name, " is ",
                                                 tensors.first_query_positions[i],
                                                 "; the limit is ", kLastPosition));
    }
  }
  if (!status.ok()) return status;
  bool changed = false;
  rows_ = 0;
  for (std::size_t i = 0; i < items_.size(); ++i) {
    StepItem& item = items_[i];
    const std::uint64_t position = tensors.first_query_positions.empty()
                                       ? item.base - queries_of(i)
                                       : tensors.first_query_positions[i];
    changed |= item.new_tokens != queries_of(i) || item.first_query_position != position;
    item.new_tokens = queries_of(i);
    item.first_query_position = position;
    item.first_row = rows_;
    rows_ += item.new_tokens;
  }
  return changed;
}

void StepBatch::Release() {
  items_.clear();
  model_ = nullptr;
}

bool StepBatch::AppendedAny() const {
  return std::find(appended_.begin(), appended_.end(), true) != appended_.end();
}

absl::Status StepBatch::CheckLayer(std::uint32_t layer) const {
  if (layer < model_->layers()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat("layer is ", layer, "; the model has ", model_->layers(), " layers"));
}

absl::Status StepBatch::CheckAppend(std::uint32_t layer, std::span<const std::byte> key,
                                    std::span<const std::byte> value) const {
  if (absl::Status status = CheckLayer(layer); !status.ok()) return status;
  if (appended_[layer]) {
    return absl::FailedPreconditionError(
        Concat("layer ", layer, " has already been appended in this step"));
  }
  const kernels::LayerGeometry& geometry = model_->geometry(layer);
  absl::Status status =
      CheckBytes("key", key.size(), rows_, geometry.kv_heads, geometry, model_->type());
  if (status.ok()) {
    status = CheckBytes("value", value.size(), rows_, geometry.kv_heads, geometry, model_->type());
  }
  return status;
}

StepTensors AsStepTensors(const ReadTensors& tensors) {
  return {.key = {},
          .value = {},
          .query = tensors.query,
          .output = tensors.output,
          .lse = tensors.lse,
          .output_type = tensors.output_type,
          .causal = tensors.causal,
          .selection = tensors.selection};
}

std::optional<kernels::SelectionRule> RuleOf(const StepTensors& tensors) {
  if (!tensors.selection.has_value()) return std::nullopt;
  return ToKernels(*tensors.selection);
}

const kernels::SelectionRule* RuleOf(const StepItem& item, std::uint32_t layer,
                                     const std::optional<kernels::SelectionRule>& named) {
  if (named.has_value()) return &*named;
  const std::optional<PolicySelection>& policy = item.sequence->selection;
  if (!policy.has_value() || layer < policy->dense_layers) return nullptr;
  // More tokens than a selection allows are a prompt, which reads everything.
  return item.new_tokens <= kMaxSelectingTokens ? &policy->rule : nullptr;
}

absl::Status StepBatch::CheckAttend(std::uint32_t layer, const StepTensors& tensors) const {
  if (absl::Status status = CheckLayer(layer); !status.ok()) return status;
  absl::Status status = CheckOutputType(tensors.output_type, *model_);
  if (!status.ok()) return status;
  if (tensors.selection.has_value()) {
    if (status = CheckRule(*tensors.selection); !status.ok()) return status;
    for (const StepItem& item : items_) {
      if (item.new_tokens <= kMaxSelectingTokens) continue;
      return absl::InvalidArgumentError(Concat(
          item.new_tokens, is_reading_ ? " queries of " : " new tokens of ",
          item.sequence->id.ToString(), " with a selection; the limit is ", kMaxSelectingTokens));
    }
  }
  const kernels::LayerGeometry& geometry = model_->geometry(layer);
  status = CheckBytes("query", tensors.query.size(), rows_, geometry.query_heads, geometry,
                      model_->type());
  if (status.ok()) {
    status = CheckBytes("output", tensors.output.size(), rows_, geometry.query_heads, geometry,
                        ToKernels(tensors.output_type));
  }
  if (status.ok() && !tensors.lse.empty() && tensors.lse.size() != rows_ * geometry.query_heads) {
    status = absl::InvalidArgumentError(
        Concat("lse has ", tensors.lse.size(), " floats; expected are [", rows_, " tokens][",
               geometry.query_heads, " heads]: ", rows_ * geometry.query_heads));
  }
  return status;
}

std::vector<AttendRow> StepBatch::Rows(std::uint32_t layer, const StepTensors& tensors) const {
  const kernels::LayerGeometry& geometry = model_->geometry(layer);
  const std::size_t query_token = geometry.query_heads * model_->row_bytes(layer);
  const std::size_t output_token =
      std::size_t{geometry.query_heads} * geometry.head_dim * ElementBytes(tensors.output_type);
  std::vector<AttendRow> rows;
  for (const StepItem& item : items_) {
    rows.push_back(
        {.sequence = item.sequence->id,
         .queries = item.new_tokens,
         .query =
             tensors.query.subspan(item.first_row * query_token, item.new_tokens * query_token),
         .output =
             tensors.output.subspan(item.first_row * output_token, item.new_tokens * output_token),
         .lse = tensors.lse.empty()
                    ? std::span<float>()
                    : tensors.lse.subspan(item.first_row * geometry.query_heads,
                                          std::size_t{item.new_tokens} * geometry.query_heads),
         .first_query_position = item.first_query_position});
  }
  return rows;
}

bool StepBatch::Observes(const StepItem& item) const {
  return !is_reading_ && item.sequence->observer != nullptr &&
         item.sequence->observer->WantsDecoded();
}

absl::Status StepBatch::Observe(std::uint32_t layer, std::span<const std::byte> query,
                                QueryRows rows) {
  const std::size_t token =
      std::size_t{model_->geometry(layer).query_heads} * model_->row_bytes(layer);
  const auto for_each_observed = [&](auto act) {
    std::uint64_t packed = 0;
    absl::Status status;
    for (StepItem& item : items_) {
      if (!Observes(item) || !status.ok()) continue;
      const std::uint64_t first = rows == QueryRows::kAll ? item.first_row : packed;
      status = act(item, query.subspan(first * token, item.new_tokens * token));
      packed += item.new_tokens;
    }
    return status;
  };
  absl::Status status = for_each_observed([&](const StepItem& item, auto queries) {
    return item.sequence->observer->CheckDecoded(layer, item.base, queries);
  });
  refused_[layer] = !status.ok();
  if (refused_[layer]) return status;
  return for_each_observed([&](StepItem& item, auto queries) {
    item.sequence->observer->ObserveDecoded(layer, item.base, queries);
    return absl::OkStatus();
  });
}

void StepBatch::ListObserved(std::vector<RowRun>& runs) const {
  runs.clear();
  for (const StepItem& item : items_) {
    if (!Observes(item)) continue;
    if (runs.empty() || runs.back().first + runs.back().count != item.first_row) {
      runs.push_back({.first = item.first_row, .count = 0});
    }
    runs.back().count += item.new_tokens;
  }
}

absl::Status StepBatch::CheckEnd(std::span<const std::uint32_t> accepted) const {
  if (std::find(appended_.begin(), appended_.end(), false) != appended_.end()) {
    return absl::FailedPreconditionError(Concat(
        "the step cannot be committed before every layer is appended; missing: ", MissingLayers()));
  }
  const auto refused = std::find(refused_.begin(), refused_.end(), true);
  if (refused != refused_.end()) {
    return absl::FailedPreconditionError(
        Concat("the step cannot be committed: the queries of layer ", refused - refused_.begin(),
               " were refused; attend it again with valid ones"));
  }
  if (accepted.empty()) return absl::OkStatus();
  if (accepted.size() != items_.size()) {
    return absl::InvalidArgumentError(
        Concat(accepted.size(), " accepted counts for ", items_.size(), " sequences"));
  }
  for (std::size_t i = 0; i < accepted.size(); ++i) {
    if (accepted[i] > items_[i].new_tokens) {
      return absl::InvalidArgumentError(Concat(accepted[i], " accepted tokens of ",
                                               items_[i].sequence->id.ToString(), "; the step has ",
                                               items_[i].new_tokens));
    }
  }
  return absl::OkStatus();
}

// For example "0, 3-7, 31".
std::string StepBatch::MissingLayers() const {
  std::string text;
  for (std::size_t i = 0; i < appended_.size(); ++i) {
    if (appended_[i]) continue;
    const std::size_t first = i;
    while (i + 1 < appended_.size() && !appended_[i + 1]) ++i;
    Append(text, text.empty() ? "" : ", ", first);
    if (i > first) Append(text, "-", i);
  }
  return text;
}

}  // namespace tessera::client
