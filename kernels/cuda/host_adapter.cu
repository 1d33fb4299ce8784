#include <cuda_runtime.h>

#include <cstddef>
#include <span>
#include <vector>

#include "kernels/cuda/host_adapter.h"
#include "kernels/cuda/launch.h"

namespace tessera::kernels::cuda {
namespace {

constexpr std::uint64_t kExtentBytes = std::uint64_t{2} << 20;

// The first error of a sequence of calls; those after it are not made.
class Errors {
 public:
  bool Try(cudaError_t error, const char* what) {
    if (error == cudaSuccess || !text_.empty()) return text_.empty();
    text_ =
        std::string(what) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")";
    return false;
  }
  bool ok() const { return text_.empty(); }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

// Device memory, filled with NaN so that what a kernel leaves unwritten shows.
class Buffer {
 public:
  Buffer(std::uint64_t bytes, Errors& errors) : bytes_(bytes == 0 ? 1 : bytes) {
    if (errors.ok() && errors.Try(cudaMalloc(&data_, bytes_), "allocating device memory")) {
      errors.Try(cudaMemset(data_, 0xff, bytes_), "filling device memory");
    }
  }
  Buffer(std::span<const std::byte> content, Errors& errors) : Buffer(content.size(), errors) {
    if (errors.ok() && !content.empty()) {
      errors.Try(cudaMemcpy(data_, content.data(), content.size(), cudaMemcpyHostToDevice),
                 "copying to the device");
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }

  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(data_); }
  void Download(void* target, std::uint64_t bytes, Errors& errors) const {
    if (errors.ok() && bytes != 0) {
      errors.Try(cudaMemcpy(target, data_, bytes, cudaMemcpyDeviceToHost),
                 "copying from the device");
    }
  }

 private:
  std::uint64_t bytes_;
  void* data_ = nullptr;
};

std::span<const std::byte> SinkBytes(const LayerGeometry& geometry) {
  if (geometry.sinks == nullptr) return {};
  return std::as_bytes(std::span(geometry.sinks, geometry.query_heads));
}

class GpuAdapter final : public HostAdapter {
 public:
  GpuAdapter(int device, const DeviceLimits& limits) : device_(device), limits_(limits) {}

  HostAttendResult Attend(const HostBatch& batch) override {
    if (batch.items.empty()) return {.implementation = "cuda"};
    Errors errors;
    errors.Try(cudaSetDevice(device_), "choosing the device");
    HostBatchImage image(batch, kExtentBytes);
    const Buffer pool(image.pool(), errors);
    const Buffer tails(image.tails(), errors);
    const Buffer queries(image.queries(), errors);
    const Buffer sinks(SinkBytes(batch.geometry), errors);
    if (!errors.ok()) return Failed(errors);
    if (image.WriteStep(pool.address(), tails.address()) != StepStatus::kOk) {
      return {.status = HostAttendStatus::kCudaError, .error = "the step image was refused"};
    }
    const Buffer step(image.step(), errors);
    const std::uint64_t scratch_bytes = AttendScratchBytes(batch.geometry, image.limits());
    const Buffer scratch(scratch_bytes, errors);
    const Buffer output(image.output_bytes(), errors);
    const Buffer lse(image.lse_bytes(), errors);
    const Buffer fault_word(sizeof(std::uint64_t), errors);  // kNoFault is what buffers start with
    if (!errors.ok()) return Failed(errors);

    LayerGeometry geometry = batch.geometry;
    if (geometry.sinks != nullptr) geometry.sinks = sinks.as<const float>();
    errors.Try(LaunchAttend(limits_,
                            {.geometry = geometry,
                             .causal = batch.causal,
                             .output_type = batch.output_type,
                             .layer = 0,
                             .limits = image.limits(),
                             .step = step.as<const std::byte>(),
                             .query = queries.as<const void>(),
                             .output = output.as<void>(),
                             .lse = lse.as<float>(),
                             .scratch = scratch.as<void>(),
                             .scratch_bytes = scratch_bytes,
                             .fault = fault_word.as<std::uint64_t>()},
                            /*stream=*/nullptr),
               "launching attention");
    errors.Try(cudaDeviceSynchronize(), "running attention");
    return Collect(image, output, lse, fault_word, errors);
  }

 private:
  static HostAttendResult Failed(const Errors& errors) {
    return {.status = HostAttendStatus::kCudaError, .error = errors.text()};
  }

  static HostAttendResult Collect(const HostBatchImage& image, const Buffer& output,
                                  const Buffer& lse, const Buffer& fault_word, Errors& errors) {
    std::vector<std::byte> outputs(image.output_bytes());
    std::vector<float> sums(image.lse_bytes() / sizeof(float));
    std::uint64_t fault = kNoFault;
    output.Download(outputs.data(), outputs.size(), errors);
    lse.Download(sums.data(), image.lse_bytes(), errors);
    fault_word.Download(&fault, sizeof fault, errors);
    if (!errors.ok()) return Failed(errors);
    image.Scatter(outputs, sums);
    HostAttendResult result = {.implementation = "cuda"};
    if (fault != kNoFault) {
      result.status = HostAttendStatus::kBadLane;
      result.item = image.ItemOfLane(FaultWord::Lane(fault));
    } else if (image.HasBadItem()) {
      result.status = HostAttendStatus::kBadLane;
      result.item = image.bad_item();
    }
    return result;
  }

  const int device_;
  const DeviceLimits limits_;
};

}  // namespace

std::unique_ptr<HostAdapter> HostAdapter::Open(int device, std::string* reason) {
  Errors errors;
  DeviceLimits limits;
  if (!errors.Try(PrepareDevice(device, &limits), "no CUDA device")) {
    (void)cudaGetLastError();
    *reason = errors.text();
    return nullptr;
  }
  return std::make_unique<GpuAdapter>(device, limits);
}

}  // namespace tessera::kernels::cuda
