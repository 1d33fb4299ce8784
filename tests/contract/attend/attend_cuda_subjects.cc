// The CUDA kernels as subjects of the conformance suite: on a real GPU if there is one, and always
// on the emulated GPU.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/cuda/common/error_bound.h"
#include "kernels/cuda/host/host_adapter.h"
#include "tests/contract/attend/attend_conformance.h"
#include "tests/fakes/gpu/emulated_kernels.h"
#include "tests/fakes/gpu/emulated_runtime.h"

namespace tessera::kernels {
namespace {

// Converts an AttendBatch into the input of the device adapter.
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
                        .lse = item.lse,
                        .rule = cuda::StepRuleOf(item.selection)});
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

// Forwards a SelectionSink to the device adapter.
class HostSink final : public cuda::HostSelectionSink {
 public:
  explicit HostSink(SelectionSink& sink) : sink_(sink) {}
  void Take(std::uint32_t item, const cuda::SelectedEntries& run) override {
    sink_.Take(item,
               {.segment = run.segment, .first_entry = run.first_entry, .entries = run.entries});
  }

 private:
  SelectionSink& sink_;
};

AttendResult ResultOf(const cuda::HostAttendResult& result) {
  EXPECT_NE(result.status, cuda::HostAttendStatus::kCudaError) << result.error;
  return {.status = result.status == cuda::HostAttendStatus::kOk ? AttendStatus::kOk
                                                                 : AttendStatus::kBadTile,
          .implementation = result.implementation,
          .item = result.item};
}

// The first item whose queries select for themselves and were not split. Callers split items before
// they make an image.
std::optional<AttendResult> RefuseUnsplit(const AttendBatch& batch, std::string_view name) {
  for (std::uint32_t i = 0; i < batch.items.size(); ++i) {
    const AttendItem& item = batch.items[i];
    if (item.selection == nullptr || !item.selection->each_query || item.queries == 1) continue;
    return AttendResult{.status = AttendStatus::kBadTile, .implementation = name, .item = i};
  }
  return std::nullopt;
}

AttendResult ChooseOn(cuda::Runtime& runtime, const AttendBatch& batch, SelectionSink& sink) {
  const HostItems items(batch);
  HostSink host_sink(sink);
  return ResultOf(SelectOnDevice(runtime, items.batch(), host_sink));
}

// Rotated queries are rounded to bf16.
constexpr double kValueTolerance = 0.05;

ErrorBound CudaBoundOf(const TileShape& shape) {
  if (shape.planes()) return cuda::kPlanesErrorBound;
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
  bool rows_are_independent() const override { return true; }
  bool survives_fork() const override { return false; }

  AttendResult Run(const AttendBatch& batch, Executor&) override {
    if (const auto refused = RefuseUnsplit(batch, name())) return *refused;
    const HostItems items(batch);
    return ResultOf(AttendOnDevice(*runtime_, items.batch()));
  }
  AttendResult Choose(const AttendBatch& batch, Executor&, SelectionSink& sink) override {
    return ChooseOn(*runtime_, batch, sink);
  }
  double value_tolerance() const override { return kValueTolerance; }

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
  bool rows_are_independent() const override { return true; }
  int rounds(int usual) const override { return (usual + 2) / 3; }  // slow: one thread for a grid

  // Every run uses another grid and another order of threads.
  AttendResult Run(const AttendBatch& batch, Executor&) override {
    if (const auto refused = RefuseUnsplit(batch, name())) return *refused;
    const HostItems items(batch);
    ++runs_;
    const std::uint64_t fault =
        tests::EmulateHostBatch(items.batch(), {.blocks_x = runs_ % 5 + 1, .seed = runs_});
    if (fault == cuda::kNoFault) return {.implementation = name()};
    return {.status = AttendStatus::kBadTile,
            .implementation = name(),
            .item = cuda::FaultWord::Lane(fault) / batch.geometry.kv_heads};
  }
  AttendResult Choose(const AttendBatch& batch, Executor&, SelectionSink& sink) override {
    ++runs_;
    const std::unique_ptr<cuda::Runtime> runtime =
        tests::NewEmulatedRuntime({.grid = {.blocks_x = runs_ % 5 + 1, .seed = runs_}});
    return ChooseOn(*runtime, batch, sink);
  }
  double value_tolerance() const override { return kValueTolerance; }

 private:
  std::uint32_t runs_ = 0;
};

std::vector<std::shared_ptr<AttendSubject>> Subjects() {
  return {std::make_shared<CudaSubject>(), std::make_shared<EmulatedSubject>()};
}

INSTANTIATE_TEST_SUITE_P(Cuda, AttendConformance, testing::ValuesIn(Subjects()), SubjectName);
INSTANTIATE_TEST_SUITE_P(Cuda, AttendPackedConformance, testing::ValuesIn(Subjects()), SubjectName);
INSTANTIATE_TEST_SUITE_P(Cuda, AttendPlanes, testing::ValuesIn(Subjects()), SubjectName);
INSTANTIATE_TEST_SUITE_P(Cuda, AttendSelection, testing::ValuesIn(Subjects()), SubjectName);

}  // namespace
}  // namespace tessera::kernels
