#include "tests/fakes/emulated_kernels.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "kernels/cuda/attend_fma.cuh"
#include "kernels/cuda/attend_mma.cuh"
#include "kernels/cuda/merge.cuh"
#include "kernels/cuda/rows.cuh"
#include "tests/fakes/gpu_emulator.h"

namespace tessera::tests {
namespace {

using namespace kernels::cuda;  // NOLINT: a test file
using kernels::ElementType;

// Fresh memory at an address that is a multiple of 256, of exactly this size, so that
// AddressSanitizer sees what lies beyond; filled with NaN.
class DeviceMemory {
 public:
  explicit DeviceMemory(std::uint64_t bytes)
      : bytes_(bytes), data_(static_cast<std::byte*>(operator new(bytes, kAlignment))) {
    std::memset(data_, 0xff, bytes);
  }
  explicit DeviceMemory(std::span<const std::byte> content) : DeviceMemory(content.size()) {
    if (!content.empty()) std::memcpy(data_, content.data(), content.size());
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory() { operator delete(data_, kAlignment); }

  std::byte* data() const { return data_; }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(data_); }
  std::span<const std::byte> bytes() const { return {data_, bytes_}; }

 private:
  static constexpr std::align_val_t kAlignment{256};
  std::uint64_t bytes_;
  std::byte* data_;
};

template <class Shape, class Body>
void RunAttend(const AttendParams& params, const EmulatedGrid& grid, Body body) {
  EmulateGpu({.blocks_x = grid.blocks_x,
              .blocks_y = (params.max_columns + Shape::kColumns - 1) / Shape::kColumns,
              .threads = Shape::kThreads,
              .shared_bytes = Shape::kSharedBytes,
              .seed = grid.seed},
             [&] { body(params); });
}

template <ElementType kType, std::uint32_t kHeadDim>
void RunMma(const AttendParams& params, const EmulatedGrid& grid) {
  const std::uint32_t tiles =
      grid.column_tiles != 0 ? grid.column_tiles : (params.max_columns <= kTileColumns ? 1 : 2);
  if (tiles == 1) {
    RunAttend<MmaShape<kHeadDim, 1>>(params, grid, AttendMma<kType, kHeadDim, 1>);
  } else {
    RunAttend<MmaShape<kHeadDim, 2>>(params, grid, AttendMma<kType, kHeadDim, 2>);
  }
}

template <std::uint32_t kHeadDim>
void RunHeadDim(ElementType type, const AttendParams& params, const EmulatedGrid& grid) {
  switch (type) {
    case ElementType::kBf16:
      return RunMma<ElementType::kBf16, kHeadDim>(params, grid);
    case ElementType::kFp16:
      return RunMma<ElementType::kFp16, kHeadDim>(params, grid);
    case ElementType::kFp32:
      return RunAttend<FmaShape<kHeadDim>>(params, grid, AttendFma<kHeadDim>);
  }
}

}  // namespace

void EmulateAttend(const AttendCall& call, const EmulatedGrid& grid) {
  if (const std::string_view problem = AttendCallProblem(call); !problem.empty()) {
    std::fprintf(stderr, "the launcher would refuse: %.*s\n", static_cast<int>(problem.size()),
                 problem.data());
    std::abort();
  }
  const AttendParams params = MakeAttendParams(call);
  const ElementType type = call.geometry.type;
  if (params.head_dim == 64) RunHeadDim<64>(type, params, grid);
  if (params.head_dim == 128) RunHeadDim<128>(type, params, grid);
  if (params.head_dim == 256) RunHeadDim<256>(type, params, grid);
  EmulateGpu({.blocks_x = params.query_heads,
              .blocks_y = call.limits.queries,
              .blocks_z = call.limits.batch,
              .threads = params.head_dim,
              .seed = grid.seed},
             [&] { Merge(params); });
}

void EmulateAppend(const AppendParams& params, std::uint64_t seed) {
  EmulateGpu({.blocks_x = params.max_appended * params.kv_heads,
              .blocks_y = params.max_batch,
              .threads = 64,
              .seed = seed},
             [&] { AppendRow(params); });
}

void EmulateWriteRows(const WriteRowsParams& params, std::uint64_t seed) {
  EmulateGpu({.blocks_x = params.rows, .blocks_y = params.kv_heads, .threads = 64, .seed = seed},
             [&] { WriteRow(params); });
}

void EmulateFindUnusable(const FindUnusableParams& params, std::uint64_t seed) {
  EmulateGpu({.blocks_x = params.rows, .blocks_y = params.kv_heads, .threads = 64, .seed = seed},
             [&] { FindUnusableInRow(params); });
}

std::uint64_t EmulateHostBatch(const HostBatch& batch, const EmulatedGrid& grid) {
  if (batch.items.empty()) return kNoFault;
  HostBatchImage image(batch, std::uint64_t{1} << 18);
  const DeviceMemory pool(image.pool());
  const DeviceMemory tails(image.tails());
  const DeviceMemory queries(image.queries());
  if (image.WriteStep(pool.address(), tails.address()) != StepStatus::kOk) std::abort();
  const DeviceMemory step(image.step());
  const DeviceMemory output(image.output_bytes());
  const DeviceMemory lse(image.lse_bytes());
  const DeviceMemory scratch(AttendScratchBytes(batch.geometry, image.limits()));
  std::uint64_t fault = kNoFault;
  EmulateAttend({.geometry = batch.geometry,
                 .causal = batch.causal,
                 .output_type = batch.output_type,
                 .layer = 0,
                 .limits = image.limits(),
                 .step = step.data(),
                 .query = queries.data(),
                 .output = output.data(),
                 .lse = reinterpret_cast<float*>(lse.data()),
                 .scratch = scratch.data(),
                 .scratch_bytes = scratch.bytes().size(),
                 .fault = &fault},
                grid);
  image.Scatter(output.bytes(),
                {reinterpret_cast<const float*>(lse.data()), image.lse_bytes() / sizeof(float)});
  if (!image.HasBadItem()) return fault;
  const std::uint64_t packing =
      FaultWord::Pack(FaultKind::kBadTile, 0, image.bad_item() * batch.geometry.kv_heads);
  return std::min(fault, packing);
}

std::uint32_t EmulateFindLane(const std::uint32_t* works, std::uint32_t lanes, std::uint32_t work) {
  std::uint32_t found = 0;
  EmulateGpu({.threads = 32, .seed = work}, [&] { found = FindLane(works, lanes, work); });
  return found;
}

}  // namespace tessera::tests
