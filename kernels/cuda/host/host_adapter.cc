#include "kernels/cuda/host/host_adapter.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace tessera::kernels::cuda {
namespace {

constexpr std::uint64_t kExtentBytes = std::uint64_t{2} << 20;

// Runs a sequence of calls and keeps the first error; later calls are skipped.
class Calls {
 public:
  template <class Call>
  void Try(Call call) {
    if (error_.ok()) error_ = call();
  }
  bool ok() const { return error_.ok(); }
  HostAttendResult Failed() const {
    return {.status = HostAttendStatus::kCudaError, .error = error_.text()};
  }

 private:
  Error error_;
};

// Device memory of one batch, filled with 0xff, so that anything a kernel does not write reads as
// NaN.
class Buffer {
 public:
  Buffer(Runtime& runtime, Queue& queue, std::uint64_t bytes, Calls& calls)
      : Buffer(runtime, queue, std::vector<std::byte>(bytes, std::byte{0xff}), calls) {}
  Buffer(Runtime& runtime, Queue& queue, std::span<const std::byte> content, Calls& calls)
      : queue_(queue), memory_(runtime) {
    calls.Try([&] { return memory_.Grow(std::max<std::uint64_t>(content.size(), 1)); });
    calls.Try([&] { return queue_.Copy(memory_.at(), content.data(), content.size()); });
  }

  template <class T = std::byte>
  T* at() const {
    return memory_.at<T>();
  }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(memory_.at()); }
  void Download(void* to, std::uint64_t bytes, Calls& calls) const {
    calls.Try([&] { return queue_.Copy(to, memory_.at(), bytes); });
  }

 private:
  Queue& queue_;
  Scratch memory_;
};

std::span<const std::byte> SinkBytes(const LayerGeometry& geometry) {
  if (geometry.sinks == nullptr) return {};
  return std::as_bytes(std::span(geometry.sinks, geometry.query_heads));
}

HostAttendResult Judge(const HostBatchImage& image, std::uint64_t fault, std::uint32_t kv_heads) {
  if (image.HasBadItem()) {
    fault = std::min(fault, FaultWord::Pack(FaultKind::kBadTile, 0, image.bad_item() * kv_heads));
  }
  if (fault == kNoFault) return {};
  return {.status = HostAttendStatus::kBadLane,
          .item = image.ItemOfLane(FaultWord::Lane(fault)),
          .fault = fault};
}

// A batch on the device, with everything that a call needs except space for results.
class UploadedBatch {
 public:
  UploadedBatch(Runtime& runtime, const HostBatch& batch)
      : runtime_(runtime), batch_(batch), image_(batch, kExtentBytes) {
    calls_.Try([&] { return runtime.NewQueue(&queue_); });
    if (!calls_.ok()) return;
    pool_.emplace(runtime, *queue_, image_.pool(), calls_);
    tails_.emplace(runtime, *queue_, image_.tails(), calls_);
    queries_.emplace(runtime, *queue_, image_.queries(), calls_);
    sinks_.emplace(runtime, *queue_, SinkBytes(batch.geometry), calls_);
    if (!calls_.ok()) return;
    written_ = image_.WriteStep(pool_->address(), tails_->address()) == StepStatus::kOk;
    if (!written_) return;
    scratch_bytes_ = AttendScratchBytes(batch.geometry, image_.limits());
    step_.emplace(runtime, *queue_, image_.step(), calls_);
    scratch_.emplace(runtime, *queue_, scratch_bytes_, calls_);
    fault_.emplace(runtime, *queue_, sizeof(std::uint64_t), calls_);  // kNoFault
  }

  bool ready() const { return written_ && calls_.ok(); }
  HostAttendResult Failed() const {
    if (!calls_.ok()) return calls_.Failed();
    return {.status = HostAttendStatus::kCudaError, .error = "StepWriter rejected the step image"};
  }
  Calls& calls() { return calls_; }
  Queue& queue() { return *queue_; }
  const HostBatchImage& image() const { return image_; }

  // Does not set the result addresses.
  AttendCall Call() const {
    LayerGeometry geometry = batch_.geometry;
    if (geometry.sinks != nullptr) geometry.sinks = sinks_->at<const float>();
    return {.geometry = geometry,
            .causal = batch_.causal,
            .output_type = batch_.output_type,
            .layer = 0,
            .limits = image_.limits(),
            .step = step_->at(),
            .query = queries_->at(),
            .scratch = scratch_->at(),
            .scratch_bytes = scratch_bytes_,
            .fault = fault_->at<std::uint64_t>()};
  }
  // Waits for the device and returns the result.
  HostAttendResult Finish() {
    std::uint64_t fault = kNoFault;
    fault_->Download(&fault, sizeof fault, calls_);
    calls_.Try([&] { return queue_->Wait(); });
    if (!calls_.ok()) return calls_.Failed();
    HostAttendResult result = Judge(image_, fault, batch_.geometry.kv_heads);
    result.implementation = runtime_.implementation();
    return result;
  }

 private:
  Runtime& runtime_;
  const HostBatch& batch_;
  Calls calls_;
  std::unique_ptr<Queue> queue_;
  HostBatchImage image_;
  bool written_ = false;
  std::uint64_t scratch_bytes_ = 0;
  std::optional<Buffer> pool_, tails_, queries_, sinks_, step_, scratch_, fault_;
};

}  // namespace

HostAttendResult AttendOnDevice(Runtime& runtime, const HostBatch& batch) {
  if (batch.items.empty()) return {.implementation = runtime.implementation()};
  UploadedBatch device(runtime, batch);
  if (!device.ready()) return device.Failed();
  Calls& calls = device.calls();
  const HostBatchImage& image = device.image();
  const Buffer output(runtime, device.queue(), image.output_bytes(), calls);
  const Buffer lse(runtime, device.queue(), image.lse_bytes(), calls);
  AttendCall call = device.Call();
  call.output = output.at();
  call.lse = lse.at<float>();
  calls.Try([&] { return device.queue().Attend(call); });
  std::vector<std::byte> outputs(image.output_bytes());
  std::vector<float> sums(image.lse_bytes() / sizeof(float));
  output.Download(outputs.data(), outputs.size(), calls);
  lse.Download(sums.data(), image.lse_bytes(), calls);
  const HostAttendResult result = device.Finish();
  if (result.status != HostAttendStatus::kCudaError) image.Scatter(outputs, sums);
  return result;
}

HostAttendResult SelectOnDevice(Runtime& runtime, const HostBatch& batch, HostSelectionSink& sink) {
  if (batch.items.empty()) return {.implementation = runtime.implementation()};
  UploadedBatch device(runtime, batch);
  if (!device.ready()) return device.Failed();
  Calls& calls = device.calls();
  const HostBatchImage& image = device.image();
  const AttendCall call = device.Call();
  calls.Try([&] { return device.queue().Select(call); });
  const AttendParams params = MakeAttendParams(call);
  std::vector<std::uint32_t> taken(image.limits().blocks);
  std::vector<SelectedRange> ranges(image.limits().choices + image.limits().selections);
  calls.Try([&] {
    return device.queue().Copy(taken.data(), params.taken, taken.size() * sizeof taken[0]);
  });
  calls.Try([&] {
    return device.queue().Copy(ranges.data(), params.ranges, ranges.size() * sizeof ranges[0]);
  });
  const HostAttendResult result = device.Finish();
  if (result.status != HostAttendStatus::kOk) return result;
  const SelectionReader selection = image.Selection(taken, ranges);
  for (std::uint32_t i = 0; i < batch.items.size(); ++i) {
    selection.ForEachRun(image.LaneOfItem(i),
                         [&](const SelectedEntries& run) { sink.Take(i, run); });
  }
  return result;
}

}  // namespace tessera::kernels::cuda
