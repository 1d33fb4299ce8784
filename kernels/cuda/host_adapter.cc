#include "kernels/cuda/host_adapter.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace tessera::kernels::cuda {
namespace {

constexpr std::uint64_t kExtentBytes = std::uint64_t{2} << 20;

// The first error of a sequence of calls; those after it are not made.
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

// Device memory of one batch, filled with 0xff: NaN where a kernel leaves something unwritten.
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

}  // namespace

HostAttendResult AttendOnDevice(Runtime& runtime, const HostBatch& batch) {
  if (batch.items.empty()) return {.implementation = runtime.implementation()};
  Calls calls;
  std::unique_ptr<Queue> queue;
  calls.Try([&] { return runtime.NewQueue(&queue); });
  if (!calls.ok()) return calls.Failed();
  HostBatchImage image(batch, kExtentBytes);
  const Buffer pool(runtime, *queue, image.pool(), calls);
  const Buffer tails(runtime, *queue, image.tails(), calls);
  const Buffer queries(runtime, *queue, image.queries(), calls);
  const Buffer sinks(runtime, *queue, SinkBytes(batch.geometry), calls);
  if (!calls.ok()) return calls.Failed();
  if (image.WriteStep(pool.address(), tails.address()) != StepStatus::kOk) {
    return {.status = HostAttendStatus::kCudaError, .error = "the step image was refused"};
  }
  const std::uint64_t scratch_bytes = AttendScratchBytes(batch.geometry, image.limits());
  const Buffer step(runtime, *queue, image.step(), calls);
  const Buffer scratch(runtime, *queue, scratch_bytes, calls);
  const Buffer output(runtime, *queue, image.output_bytes(), calls);
  const Buffer lse(runtime, *queue, image.lse_bytes(), calls);
  const Buffer fault_word(runtime, *queue, sizeof(std::uint64_t), calls);  // kNoFault
  LayerGeometry geometry = batch.geometry;
  if (geometry.sinks != nullptr) geometry.sinks = sinks.at<const float>();
  calls.Try([&] {
    return queue->Attend({.geometry = geometry,
                          .causal = batch.causal,
                          .output_type = batch.output_type,
                          .layer = 0,
                          .limits = image.limits(),
                          .step = step.at(),
                          .query = queries.at(),
                          .output = output.at(),
                          .lse = lse.at<float>(),
                          .scratch = scratch.at(),
                          .scratch_bytes = scratch_bytes,
                          .fault = fault_word.at<std::uint64_t>()});
  });
  std::vector<std::byte> outputs(image.output_bytes());
  std::vector<float> sums(image.lse_bytes() / sizeof(float));
  std::uint64_t fault = kNoFault;
  output.Download(outputs.data(), outputs.size(), calls);
  lse.Download(sums.data(), image.lse_bytes(), calls);
  fault_word.Download(&fault, sizeof fault, calls);
  calls.Try([&] { return queue->Wait(); });
  if (!calls.ok()) return calls.Failed();
  image.Scatter(outputs, sums);
  HostAttendResult result = Judge(image, fault, batch.geometry.kv_heads);
  result.implementation = runtime.implementation();
  return result;
}

}  // namespace tessera::kernels::cuda
