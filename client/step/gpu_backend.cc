#include "client/step/gpu_backend.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "client/session/kernel_types.h"
#include "daemon/base/strings.h"
#include "kernels/cuda/common/step_view.h"
#include "kernels/dispatch/per_head.h"

namespace tessera::client {

namespace cuda = kernels::cuda;

namespace {

constexpr std::uint64_t kPartAlignment = 256;  // alignment of the parts of device memory
// Device memory begins with one fault word per kind of image: with a lane per kv head, and with a
// lane per query head.
constexpr int kFaults = 2;
constexpr std::uint64_t kTensorAlignment = 16;

std::uint64_t AddressOf(const void* pointer) { return reinterpret_cast<std::uint64_t>(pointer); }

std::string Name(const kernels::SelectionRule& rule) {
  std::string name =
      rule.entries != 0 ? Concat(rule.entries, " entries") : Concat("a share of ", rule.rate);
  if (rule.floor != 0) Append(name, " and at least ", rule.floor, " entries");
  const bool logit = rule.judge == kernels::SelectionRule::Judge::kLogit;
  name += logit ? " by logit" : " by share";
  if (rule.each_head) name += " for each query head";
  if (rule.first_block) name += " with the first block";
  return name;
}

bool EachHeadOf(const std::optional<kernels::SelectionRule>& rule) {
  return rule.has_value() && rule->each_head;
}

// Lists the rule of each item. An image has one lane per kv head or one per query head, so
// each_head must be the same in all sequences that have a rule.
absl::Status ListRules(const StepBatch& batch, std::uint32_t layer, const StepTensors& tensors,
                       std::vector<std::optional<kernels::SelectionRule>>& rules) {
  rules.clear();
  const std::optional<kernels::SelectionRule> named = RuleOf(tensors);
  std::optional<std::size_t> chooses;  // the first with a rule
  for (std::size_t i = 0; i < batch.items().size(); ++i) {
    const kernels::SelectionRule* const one = RuleOf(batch.items()[i], layer, named);
    rules.push_back(one == nullptr ? std::nullopt : std::optional(*one));
    if (one == nullptr) continue;
    if (one->each_query && batch.items()[i].new_tokens > 1) {
      return absl::UnimplementedError(Concat(
          batch.items()[i].sequence->id.ToString(), " selects for each of its ",
          batch.items()[i].new_tokens,
          " queries; on a GPU they share one choice: leave out each_query, or use a step for "
          "each token"));
    }
    if (!chooses.has_value()) chooses = i;
    const kernels::SelectionRule& first = *rules[*chooses];
    if (first.each_head == one->each_head) continue;
    return absl::UnimplementedError(
        Concat(batch.items()[i].sequence->id.ToString(), " selects ", Name(*one), ", ",
               batch.items()[*chooses].sequence->id.ToString(), " ", Name(first),
               "; on a GPU each_head must be the same in all sequences of a step: name one "
               "selection in the call, or use a step for each sequence"));
  }
  return absl::OkStatus();
}

}  // namespace

GpuBackend::GpuBackend(Gpu& gpu, const Extents& extents)
    : gpu_(gpu),
      extents_(extents),
      memory_(gpu.runtime()),
      partial_(gpu.runtime()),
      key_(gpu.runtime()),
      value_(gpu.runtime()),
      query_(gpu.runtime()),
      output_(gpu.runtime()),
      lse_(gpu.runtime()),
      queries_(gpu.runtime()) {}

absl::Status GpuBackend::TakeQueue(void* stream) {
  if (queue_ != nullptr && stream == stream_) return absl::OkStatus();
  queue_ = nullptr;
  stream_ = stream;
  return GpuStatus(stream != nullptr ? gpu_.runtime().Borrow(stream, &queue_)
                                     : gpu_.runtime().NewQueue(&queue_));
}

// Also lays out device memory.
void GpuBackend::Measure(const StepBatch& batch) {
  const BoundModel& model = batch.model();
  limits_ = {.batch = static_cast<std::uint32_t>(batch.items().size()),
             .queries = 1,
             .appended = 1,
             .works = 0};
  for (const StepItem& item : batch.items()) {
    limits_.queries = limits_.appended = std::max(limits_.queries, item.new_tokens);
  }
  // Scores take memory per new token. A step with more of them than before may read everything, so
  // the rules are dropped.
  if (limits_.queries > rule_queries_) rules_.clear();
  // If the batch differs, Attend requests its rules.
  rules_.resize(batch.items().size(), rules_.empty() ? std::nullopt : rules_.back());
  sinks_at_.assign(model.layers(), 0);
  std::uint64_t next = kPartAlignment;  // after the fault words
  for (std::uint32_t layer = 0; layer < model.layers(); ++layer) {
    if (model.geometry(layer).sinks == nullptr) continue;
    sinks_at_[layer] = next;
    next += (model.geometry(layer).query_heads * sizeof(float) + kPartAlignment - 1) /
            kPartAlignment * kPartAlignment;
  }
  image_at_ = next;
  MeasureImage(batch);
}

// Resets the limits first: they only widen, and limits of an image with more lanes would be
// multiplied by the columns of one with fewer.
void GpuBackend::MeasureImage(const StepBatch& batch) {
  limits_ = {
      .batch = limits_.batch, .queries = limits_.queries, .appended = limits_.appended, .works = 0};
  shape_ = ShapeOf(batch, EachHead());
  image_bytes_ = cuda::StepBytes(shape_);
  host_.resize((image_at_ + image_bytes_) / sizeof(Line) + 1);
}

bool GpuBackend::EachHead() const { return std::ranges::any_of(rules_, EachHeadOf); }

kernels::LayerGeometry GpuBackend::GeometryOf(const StepBatch& batch, std::uint32_t layer) const {
  const kernels::LayerGeometry& geometry = batch.model().geometry(layer);
  return EachHead() ? kernels::WithoutGroups(geometry) : geometry;
}

std::uint64_t* GpuBackend::FaultOf(bool each_head) const {
  return memory_.at<std::uint64_t>(each_head ? sizeof(std::uint64_t) : 0);
}

// `each_head`: one lane per query head.
cuda::StepShape GpuBackend::ShapeOf(const StepBatch& batch, bool each_head) const {
  const BoundModel& model = batch.model();
  cuda::StepShape shape = {.batch = static_cast<std::uint32_t>(batch.items().size()),
                           .layers = model.layers(),
                           .lanes = 0,
                           .extents = static_cast<std::uint32_t>(bases_.size())};
  for (std::uint32_t layer = 0; layer < model.layers(); ++layer) {
    const std::uint32_t times = each_head ? model.geometry(layer).group() : 1;
    for (std::uint32_t head = 0; head < model.layout().kv_heads(layer); ++head) {
      for (const StepItem& item : batch.items()) {
        const kernels::LaneView& lane =
            item.sequence->resolved.lanes[model.layout().lane(layer, head)];
        const std::uint32_t choices = cuda::CountChoices(lane);
        shape.lanes += times;
        shape.segments += times * lane.segment_count;
        shape.strategies += times * cuda::CountStrategies(lane);
        shape.choices += times * choices;
        shape.selections += choices != 0 ? times : 0;
      }
    }
  }
  return shape;
}

absl::Status GpuBackend::Begin(const StepBatch& batch, const StepOptions& options) {
  if (absl::Status status = TakeQueue(options.cuda_stream); !status.ok()) return status;
  extents_.ListPoolExtents(bases_);
  Measure(batch);
  std::byte* const host = host_.data()->bytes;
  for (int i = 0; i < kFaults; ++i) {
    std::memcpy(host + i * sizeof cuda::kNoFault, &cuda::kNoFault, sizeof cuda::kNoFault);
  }
  for (std::uint32_t layer = 0; layer < batch.model().layers(); ++layer) {
    const kernels::LayerGeometry& geometry = batch.model().geometry(layer);
    if (geometry.sinks == nullptr) continue;
    std::memcpy(host + sinks_at_[layer], geometry.sinks, geometry.query_heads * sizeof(float));
  }
  if (absl::Status status = PrepareQueries(batch); !status.ok()) return status;
  if (absl::Status status = WriteImage(batch); !status.ok()) return status;
  absl::Status status = Upload(batch);
  stale_ = !status.ok();
  return status;
}

absl::Status GpuBackend::PrepareQueries(const StepBatch& batch) {
  queries_of_.clear();
  queries_end_ = 0;
  batch.ListObserved(observed_);
  if (observed_.empty()) return absl::OkStatus();
  const BoundModel& model = batch.model();
  std::uint64_t rows = 0;
  for (const StepBatch::RowRun& run : observed_) rows += run.count;
  std::uint64_t end = 0;
  for (std::uint32_t layer = 0; layer < model.layers(); ++layer) {
    queries_of_.push_back({.at = end});
    const std::uint64_t bytes = rows * model.geometry(layer).query_heads * model.row_bytes(layer);
    end += (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
  }
  settled_queries_.resize(std::max<std::size_t>(settled_queries_.size(), end / sizeof(Line)));
  return end > queries_.bytes() ? GpuStatus(queries_.Grow(2 * end)) : absl::OkStatus();
}

cuda::Error GpuBackend::KeepQueries(std::uint32_t layer, const std::byte* query,
                                    std::uint64_t token_bytes) {
  cuda::Error error;
  if (queries_of_.empty()) return error;
  LayerQueries& kept = queries_of_[layer];
  kept.bytes = 0;
  for (const StepBatch::RowRun& run : observed_) {
    const std::uint64_t bytes = run.count * token_bytes;
    if (error.ok()) {
      error =
          queue_->Copy(queries_.at(kept.at + kept.bytes), query + run.first * token_bytes, bytes);
    }
    kept.bytes += bytes;
  }
  queries_end_ = std::max(queries_end_, kept.at + kept.bytes);
  return error;
}

std::span<const std::byte> GpuBackend::SettledQueries(std::uint32_t layer) const {
  if (queries_of_.empty() || queries_of_[layer].bytes == 0) return {};
  return {settled_queries_.data()->bytes + queries_of_[layer].at, queries_of_[layer].bytes};
}

absl::Status GpuBackend::WriteImage(const StepBatch& batch) {
  const BoundModel& model = batch.model();
  cuda::StepWriter writer({host_.data()->bytes + image_at_, image_bytes_}, shape_);
  writer.SetExtents(bases_, extents_.pool_extent_bytes());
  for (std::uint32_t i = 0; i < shape_.batch; ++i) {
    const StepItem& item = batch.items()[i];
    const auto first_row = static_cast<std::uint32_t>(item.first_row);
    writer.SetSequence(i,
                       {.committed = item.base,
                        .first_query_position = item.first_query_position,
                        .appended = item.new_tokens,
                        .queries = item.new_tokens,
                        .first_append_row = first_row,
                        .first_query_row = first_row,
                        .rule = cuda::StepRuleOf(rules_[i].has_value() ? &*rules_[i] : nullptr)});
  }
  for (std::uint32_t layer = 0; layer < model.layers(); ++layer) {
    const std::uint32_t heads = model.layout().kv_heads(layer);
    const std::uint32_t lanes = GeometryOf(batch, layer).kv_heads;  // per sequence
    const std::uint32_t times = lanes / heads;
    writer.BeginLayer(lanes, model.type());
    for (const StepItem& item : batch.items()) {
      for (std::uint32_t head = 0; head < lanes; ++head) {
        writer.AddLane(item.sequence->resolved.lanes[model.layout().lane(layer, head / times)]);
      }
    }
  }
  writer.Widen(limits_);
  if (const cuda::StepStatus status = writer.Finish(); status != cuda::StepStatus::kOk) {
    return absl::InternalError(
        Concat("the lanes of the step do not fit its image: code ", static_cast<int>(status)));
  }
  return absl::OkStatus();
}

std::uint64_t GpuBackend::PartialBytes(const StepBatch& batch) const {
  std::uint64_t partial = 0;
  for (std::uint32_t layer = 0; layer < batch.model().layers(); ++layer) {
    partial = std::max(partial, cuda::AttendScratchBytes(GeometryOf(batch, layer), limits_));
  }
  return partial;
}

absl::Status GpuBackend::UseAsked(const StepBatch& batch) {
  if (!stale_ && asked_ == rules_) return absl::OkStatus();
  const bool each_head = EachHead();
  std::swap(rules_, asked_);
  rule_queries_ = limits_.queries;
  if (EachHead() != each_head) MeasureImage(batch);
  absl::Status status = WriteImage(batch);
  if (status.ok()) status = GpuStatus(Replace(batch));
  stale_ = !status.ok();
  if (stale_) {
    // The next step must not request again what could not be allocated.
    std::ranges::fill(rules_, std::nullopt);
    MeasureImage(batch);
  }
  return status;
}

cuda::Error GpuBackend::Replace(const StepBatch& batch) {
  cuda::Error error;
  const std::uint64_t partial = PartialBytes(batch);
  const std::uint64_t bytes = image_at_ + image_bytes_;
  const bool grows = bytes > memory_.bytes();
  std::byte* const host = host_.data()->bytes;
  // Keep the faults of earlier layers: they have not been reported yet.
  if (grows) error = queue_->Copy(host, memory_.at(), kFaults * sizeof(std::uint64_t));
  if (error.ok() && (grows || partial > partial_.bytes())) {
    error = queue_->Wait();  // running kernels may use the old memory
  }
  if (error.ok() && partial > partial_.bytes()) error = partial_.Grow(2 * partial);
  if (error.ok() && grows) error = memory_.Grow(2 * bytes);
  if (!error.ok()) return error;
  return grows ? queue_->Copy(memory_.at(), host, bytes)
               : queue_->Copy(memory_.at(image_at_), host + image_at_, image_bytes_);
}

absl::Status GpuBackend::Upload(const StepBatch& batch) {
  const std::uint64_t bytes = image_at_ + image_bytes_;
  const std::uint64_t partial = PartialBytes(batch);
  // Twice the need: lanes grow, and steady decoding must not allocate.
  cuda::Error error;
  if (bytes > memory_.bytes()) error = memory_.Grow(2 * bytes);
  if (error.ok() && partial > partial_.bytes()) error = partial_.Grow(2 * partial);
  if (!error.ok()) return GpuStatus(error);
  under_way_ = true;
  return GpuStatus(queue_->Copy(memory_.at(), host_.data(), bytes));
}

absl::StatusOr<std::byte*> GpuBackend::Place(std::string_view what, const void* tensor,
                                             std::uint64_t bytes, cuda::Scratch& copy,
                                             bool* copied) {
  *copied = !gpu_.runtime().IsDeviceMemory(tensor);
  if (!*copied) {
    if (AddressOf(tensor) % kTensorAlignment != 0) {
      return absl::InvalidArgumentError(Concat(what,
                                               " is device memory at an address that is not a ",
                                               "multiple of ", kTensorAlignment));
    }
    return static_cast<std::byte*>(const_cast<void*>(tensor));
  }
  if (bytes > copy.bytes()) {
    cuda::Error error = queue_->Wait();  // running kernels may use the old copy
    if (error.ok()) error = copy.Grow(bytes);
    if (!error.ok()) return GpuStatus(error);
  }
  return copy.at();
}

absl::StatusOr<const std::byte*> GpuBackend::PlaceInput(std::string_view what,
                                                        std::span<const std::byte> tensor,
                                                        cuda::Scratch& copy) {
  bool copied = false;
  absl::StatusOr<std::byte*> place = Place(what, tensor.data(), tensor.size(), copy, &copied);
  if (!place.ok() || !copied) return place;
  absl::Status status = GpuStatus(queue_->Copy(*place, tensor.data(), tensor.size()));
  if (!status.ok()) return status;
  return *place;
}

absl::Status GpuBackend::Append(const StepBatch& batch, std::uint32_t layer,
                                std::span<const std::byte> key, std::span<const std::byte> value) {
  const absl::StatusOr<const std::byte*> key_at = PlaceInput("key", key, key_);
  if (!key_at.ok()) return key_at.status();
  const absl::StatusOr<const std::byte*> value_at = PlaceInput("value", value, value_);
  if (!value_at.ok()) return value_at.status();
  const BoundModel& model = batch.model();
  return GpuStatus(queue_->Append({.step = memory_.at(image_at_),
                                   .key = *key_at,
                                   .value = *value_at,
                                   .fault = FaultOf(EachHead()),
                                   .row_stride = model.token_bytes(layer),
                                   .layer = layer,
                                   .row_bytes = static_cast<std::uint32_t>(model.row_bytes(layer)),
                                   .kv_heads = model.geometry(layer).kv_heads,
                                   .max_batch = limits_.batch,
                                   .max_appended = limits_.appended}));
}

absl::Status GpuBackend::Attend(const StepBatch& batch, std::uint32_t layer,
                                const StepTensors& tensors) {
  absl::Status status = ListRules(batch, layer, tensors, asked_);
  if (status.ok()) status = UseAsked(batch);
  if (!status.ok()) return status;
  const absl::StatusOr<const std::byte*> query = PlaceInput("query", tensors.query, query_);
  if (!query.ok()) return query.status();
  bool output_copied = false;
  const absl::StatusOr<std::byte*> output =
      Place("output", tensors.output.data(), tensors.output.size(), output_, &output_copied);
  if (!output.ok()) return output.status();
  bool lse_copied = false;
  absl::StatusOr<std::byte*> lse = nullptr;
  if (!tensors.lse.empty()) {
    lse = Place("lse", tensors.lse.data(), tensors.lse.size_bytes(), lse_, &lse_copied);
    if (!lse.ok()) return lse.status();
  }
  kernels::LayerGeometry geometry = GeometryOf(batch, layer);
  if (sinks_at_[layer] != 0) geometry.sinks = memory_.at<const float>(sinks_at_[layer]);
  cuda::Error error = queue_->Attend({.geometry = geometry,
                                      .causal = tensors.causal,
                                      .appended = batch.appended(layer),
                                      .output_type = ToKernels(tensors.output_type),
                                      .layer = layer,
                                      .limits = limits_,
                                      .step = memory_.at(image_at_),
                                      .query = *query,
                                      .output = *output,
                                      .lse = reinterpret_cast<float*>(*lse),
                                      .scratch = partial_.at(),
                                      .scratch_bytes = partial_.bytes(),
                                      .fault = FaultOf(EachHead())});
  if (error.ok()) error = KeepQueries(layer, *query, tensors.query.size() / batch.rows());
  if (error.ok() && output_copied) {
    error = queue_->Copy(tensors.output.data(), *output, tensors.output.size());
  }
  if (error.ok() && lse_copied) {
    error = queue_->Copy(tensors.lse.data(), *lse, tensors.lse.size_bytes());
  }
  return GpuStatus(error);
}

absl::Status GpuBackend::Settle(const StepBatch& batch) {
  if (!under_way_) return absl::OkStatus();
  under_way_ = false;
  std::uint64_t faults[kFaults];
  cuda::Error error = queue_->Copy(faults, memory_.at(), sizeof faults);
  if (error.ok() && queries_end_ != 0) {
    error = queue_->Copy(settled_queries_.data(), queries_.at(), queries_end_);
  }
  if (error.ok()) error = queue_->Wait();
  if (!error.ok()) return GpuStatus(error);
  for (const bool each_head : {false, true}) {
    const std::uint64_t fault = faults[each_head ? 1 : 0];
    if (fault == cuda::kNoFault) continue;
    const std::uint32_t layer = cuda::FaultWord::Layer(fault);
    const kernels::LayerGeometry& geometry = batch.model().geometry(layer);
    const std::uint32_t lanes = each_head ? geometry.query_heads : geometry.kv_heads;
    const std::size_t index = cuda::FaultWord::Lane(fault) / lanes;
    const StepItem& at = batch.items()[std::min(index, batch.items().size() - 1)];
    return absl::DataLossError(Concat(at.sequence->id.ToString(), ", layer ", layer));
  }
  return absl::OkStatus();
}

}  // namespace tessera::client
