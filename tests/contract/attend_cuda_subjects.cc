// The CUDA kernels as subjects of the conformance suite: on a GPU where there is one, and their
// source on the emulated machine everywhere.
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/error_bound.h"
#include "kernels/cuda/host_adapter.h"
#include "tests/contract/attend_conformance.h"
#include "tests/fakes/emulated_kernels.h"

namespace tessera::kernels {
namespace {

// AttendBatch as the device's adapter takes it.
class HostItems {
 public:
  explicit HostItems(const AttendBatch& batch) : batch_(batch) {
    for (const AttendItem& item : batch.items) {
      items_.push_back({.lane = item.lane,
                        .kv_head = item.kv_head,
                        .queries = item.queries,
                        .first_query_position = item.first_query_position,
                        .query = item.query,
                        .output = item.output,
                        .lse = item.lse});
    }
  }
  cuda::HostBatch batch() const {
    return {.geometry = batch_.geometry,
            .causal = batch_.causal,
            .output_type = batch_.output_type,
            .items = items_};
  }

 private:
  const AttendBatch& batch_;
  std::vector<cuda::HostItem> items_;
};

ErrorBound CudaBoundOf(const TileShape& shape) {
  return shape.packed() ? cuda::PackedErrorBound(ValuesOf(shape.format))
                        : cuda::CudaErrorBound(ElementsOf(shape.format));
}

class CudaSubject final : public AttendSubject {
 public:
  CudaSubject() : runtime_(cuda::SystemGpus().Open(0, &reason_)) {}

  std::string_view name() const override { return "cuda"; }
  bool supported() const override { return runtime_ != nullptr; }
  std::string reason() const override { return reason_; }
  ErrorBound bound(ElementType type) const override { return cuda::CudaErrorBound(type); }
  ErrorBound bound_of(const TileShape& shape) const override { return CudaBoundOf(shape); }
  std::string lacks_packed() const override { return ""; }
  bool rows_are_independent() const override { return true; }

  AttendResult Run(const AttendBatch& batch, Executor&) override {
    const HostItems items(batch);
    const cuda::HostAttendResult result = AttendOnDevice(*runtime_, items.batch());
    EXPECT_NE(result.status, cuda::HostAttendStatus::kCudaError) << result.error;
    return {.status = result.status == cuda::HostAttendStatus::kOk ? AttendStatus::kOk
                                                                   : AttendStatus::kBadTile,
            .implementation = result.implementation,
            .item = result.item};
  }

 private:
  std::string reason_;
  std::unique_ptr<cuda::Runtime> runtime_;
};

class EmulatedSubject final : public AttendSubject {
 public:
  std::string_view name() const override { return "cuda_emulated"; }
  bool supported() const override { return true; }
  std::string reason() const override { return ""; }
  ErrorBound bound(ElementType type) const override { return cuda::CudaErrorBound(type); }
  ErrorBound bound_of(const TileShape& shape) const override { return CudaBoundOf(shape); }
  std::string lacks_packed() const override { return ""; }
  bool rows_are_independent() const override { return true; }

  // Every run has another grid and another order of threads.
  AttendResult Run(const AttendBatch& batch, Executor&) override {
    const HostItems items(batch);
    ++runs_;
    const std::uint64_t fault =
        tests::EmulateHostBatch(items.batch(), {.blocks_x = runs_ % 5 + 1, .seed = runs_});
    if (fault == cuda::kNoFault) return {.implementation = name()};
    return {.status = AttendStatus::kBadTile,
            .implementation = name(),
            .item = cuda::FaultWord::Lane(fault) / batch.geometry.kv_heads};
  }

 private:
  std::uint32_t runs_ = 0;
};

std::vector<std::shared_ptr<AttendSubject>> Subjects() {
  return {std::make_shared<CudaSubject>(), std::make_shared<EmulatedSubject>()};
}

INSTANTIATE_TEST_SUITE_P(Cuda, AttendConformance, testing::ValuesIn(Subjects()), SubjectName);
INSTANTIATE_TEST_SUITE_P(Cuda, AttendPackedConformance, testing::ValuesIn(Subjects()), SubjectName);

}  // namespace
}  // namespace tessera::kernels
