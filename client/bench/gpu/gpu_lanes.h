// A benchmark's lanes on a GPU, laid out as in a daemon's pool, and attention over them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/bench/workload/working_set.h"
#include "kernels/cuda/host/runtime.h"
#include "kernels/cuda/host/step_writer.h"
#include "kernels/dispatch/attend.h"

namespace tessera::cli::bench {

// A set of lanes in device memory, as one extent of a pool. Every segment of every lane has its own
// rotation, as in a daemon.
class GpuLanes {
 public:
  // `lanes`, `runtime` and `queue` must outlive the object.
  static absl::StatusOr<std::unique_ptr<GpuLanes>> Upload(kernels::cuda::Runtime& runtime,
                                                          kernels::cuda::Queue& queue,
                                                          const LaneSet& lanes);

  const LaneSet& host() const { return lanes_; }
  const std::byte* data() const { return pool_.at(); }
  std::uint64_t bytes() const { return bytes_; }
  const std::vector<kernels::cuda::SegmentSpec>& segments(std::uint32_t lane) const {
    return segments_[lane];
  }

 private:
  GpuLanes(kernels::cuda::Runtime& runtime, const LaneSet& lanes) : lanes_(lanes), pool_(runtime) {}
  absl::Status Place(kernels::cuda::Queue& queue);
  absl::Status Put(kernels::cuda::Queue& queue, const void* data, std::uint64_t bytes,
                   std::uint64_t* offset);

  const LaneSet& lanes_;
  kernels::cuda::Scratch pool_;
  std::uint64_t bytes_ = 0;                                        // used of pool_
  std::vector<std::vector<kernels::cuda::SegmentSpec>> segments_;  // by lane
};

struct GpuBatchShape {
  std::uint32_t first = 0;  // first sequence of the set
  std::uint32_t count = 1;
  std::uint32_t kv_heads = 8;  // per sequence: consecutive lanes of the set
  std::uint32_t group = 1;
  std::uint32_t queries = 1;  // per sequence, for its newest tokens
  double rate = 1;            // below 1: blocks are selected
};

// One layer's attention over some sequences of a set, ready to launch.
class GpuAttention {
 public:
  static absl::StatusOr<std::unique_ptr<GpuAttention>> Prepare(kernels::cuda::Runtime& runtime,
                                                               kernels::cuda::Queue& queue,
                                                               const GpuLanes& lanes,
                                                               const GpuBatchShape& shape);

  kernels::cuda::Error Attend() { return queue_.Attend(call_); }
  // Only the selection of blocks.
  kernels::cuda::Error Select() { return queue_.Select(call_); }
  // Checks the last output: the largest difference to the CPU kernels' output for the first
  // sequence, relative to its root mean square. With selected blocks CPU and GPU may choose
  // differently; then it checks that all outputs are finite and returns 0.
  absl::StatusOr<double> Error();

 private:
  GpuAttention(kernels::cuda::Runtime& runtime, kernels::cuda::Queue& queue, const GpuLanes& lanes,
               const GpuBatchShape& shape);
  absl::Status Write();
  absl::StatusOr<std::vector<float>> FromCpu();

  kernels::cuda::Queue& queue_;
  const GpuLanes& lanes_;
  const GpuBatchShape shape_;
  kernels::LayerGeometry geometry_;
  std::vector<std::uint16_t> query_;
  std::uint64_t output_bytes_ = 0;
  kernels::cuda::Scratch memory_;  // step, queries, fault
  kernels::cuda::Scratch output_;
  kernels::cuda::Scratch partial_;
  kernels::cuda::AttendCall call_;
};

}  // namespace tessera::cli::bench
