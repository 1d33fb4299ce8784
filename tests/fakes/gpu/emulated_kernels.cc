#include "tests/fakes/gpu/emulated_kernels.h"

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "kernels/cuda/attend/attend_fma.cuh"
#include "kernels/cuda/attend/attend_mma.cuh"
#include "kernels/cuda/attend/attend_packed.cuh"
#include "kernels/cuda/attend/attend_planes_selected.cuh"
#include "kernels/cuda/attend/merge.cuh"
#include "kernels/cuda/common/rotate.cuh"
#include "kernels/cuda/encode/rows.cuh"
#include "kernels/cuda/select/score.cuh"
#include "kernels/cuda/select/select.cuh"
#include "kernels/cuda/select/sign_scores.cuh"
#include "tests/fakes/gpu/gpu_emulator.h"

namespace tessera::tests {
namespace {

using namespace kernels::cuda;  // NOLINT: a test file
using kernels::ElementType;

template <class Shape, class Body>
void RunAttend(const AttendParams& params, const EmulatedGrid& grid, Body body) {
  EmulateGpu({.blocks_x = grid.blocks_x,
              .blocks_y = (params.max_columns + Shape::kColumns - 1) / Shape::kColumns,
              .threads = Shape::kThreads,
              .shared_bytes = Shape::kSharedBytes,
              .seed = grid.seed},
             [&] { body(params); });
}

bool IsNarrow(const AttendParams& params, const EmulatedGrid& grid) {
  return grid.column_tiles != 0 ? grid.column_tiles == 1 : params.max_columns <= kTileColumns;
}

template <ElementType kType, std::uint32_t kHeadDim, bool kWords>
void RunMma(const AttendParams& params, const EmulatedGrid& grid) {
  if (IsNarrow(params, grid)) {
    RunAttend<MmaShape<kHeadDim, 1, kWords>>(params, grid, AttendMma<kType, kHeadDim, 1, kWords>);
  } else {
    RunAttend<MmaShape<kHeadDim, 2, kWords>>(params, grid, AttendMma<kType, kHeadDim, 2, kWords>);
  }
}

template <std::uint32_t kHeadDim, bool kWords>
void RunDense(ElementType type, const AttendParams& params, const EmulatedGrid& grid) {
  switch (type) {
    case ElementType::kBf16:
      return RunMma<ElementType::kBf16, kHeadDim, kWords>(params, grid);
    case ElementType::kFp16:
      return RunMma<ElementType::kFp16, kHeadDim, kWords>(params, grid);
    case ElementType::kFp32:
      return RunAttend<FmaShape<kHeadDim>>(params, grid, AttendFma<kHeadDim, kWords>);
  }
}

template <kernels::ValueType kValues, std::uint32_t kHeadDim>
void RunPacked(const AttendParams& params, const EmulatedGrid& grid) {
  if ((params.kinds & KindBit(KindOf({.format = kernels::PackedFormat(kValues)}))) == 0) return;
  constexpr std::uint32_t kMost = PackedTuningFor(kHeadDim).column_tiles;
  if (IsNarrow(params, grid) || kMost == 1) {
    RunAttend<PackedShape<kValues, kHeadDim, 1>>(params, grid, AttendPacked<kValues, kHeadDim, 1>);
  } else {
    RunAttend<PackedShape<kValues, kHeadDim, kMost>>(params, grid,
                                                     AttendPacked<kValues, kHeadDim, kMost>);
  }
}

template <std::uint32_t kHeadDim, PartKind kKind>
void RunPlanes(const AttendParams& params, const EmulatedGrid& grid) {
  if ((params.kinds & KindBit(kKind)) == 0) return;
  constexpr std::uint32_t kMost = PlanesTuningFor(kHeadDim).column_tiles;
  if (IsNarrow(params, grid) || kMost == 1) {
    RunAttend<QuadShape<kHeadDim, 1>>(params, grid, AttendPlanes<kHeadDim, 1, kKind>);
  } else {
    RunAttend<QuadShape<kHeadDim, kMost>>(params, grid, AttendPlanes<kHeadDim, kMost, kKind>);
  }
}

template <ElementType kType, std::uint32_t kHeadDim>
void RunSelectedMma(const AttendParams& params, const EmulatedGrid& grid) {
  if (IsNarrow(params, grid)) {
    RunAttend<SelectedShape<MmaShape<kHeadDim, 1, true>>>(params, grid,
                                                          AttendMmaSelected<kType, kHeadDim, 1>);
  } else {
    RunAttend<SelectedShape<MmaShape<kHeadDim, 2, true>>>(params, grid,
                                                          AttendMmaSelected<kType, kHeadDim, 2>);
  }
}

template <std::uint32_t kHeadDim>
void RunSelectedDense(ElementType type, const AttendParams& params, const EmulatedGrid& grid) {
  if ((params.selected_kinds & KindBit(PartKind::kDenseWords)) == 0) return;
  switch (type) {
    case ElementType::kBf16:
      return RunSelectedMma<ElementType::kBf16, kHeadDim>(params, grid);
    case ElementType::kFp16:
      return RunSelectedMma<ElementType::kFp16, kHeadDim>(params, grid);
    case ElementType::kFp32:
      return RunAttend<SelectedShape<FmaShape<kHeadDim>>>(params, grid,
                                                          AttendFmaSelected<kHeadDim>);
  }
}

template <kernels::ValueType kValues, std::uint32_t kHeadDim>
void RunSelectedPacked(const AttendParams& params, const EmulatedGrid& grid) {
  const PartKind kind = KindOf({.format = kernels::PackedFormat(kValues)});
  if ((params.selected_kinds & KindBit(kind)) == 0) return;
  constexpr std::uint32_t kMost = PackedTuningFor(kHeadDim).column_tiles;
  if (IsNarrow(params, grid) || kMost == 1) {
    RunAttend<SelectedShape<PackedShape<kValues, kHeadDim, 1>>>(
        params, grid, AttendPackedSelected<kValues, kHeadDim, 1>);
  } else {
    RunAttend<SelectedShape<PackedShape<kValues, kHeadDim, kMost>>>(
        params, grid, AttendPackedSelected<kValues, kHeadDim, kMost>);
  }
}

template <std::uint32_t kHeadDim, PartKind kKind>
void RunSelectedPlanes(const AttendParams& params, const EmulatedGrid& grid) {
  if ((params.selected_kinds & KindBit(kKind)) == 0) return;
  constexpr std::uint32_t kMost = PlanesTuningFor(kHeadDim).column_tiles;
  if (IsNarrow(params, grid) || kMost == 1) {
    RunAttend<SelectedShape<QuadShape<kHeadDim, 1>>>(params, grid,
                                                     AttendPlanesSelected<kHeadDim, 1, kKind>);
  } else {
    RunAttend<SelectedShape<QuadShape<kHeadDim, kMost>>>(
        params, grid, AttendPlanesSelected<kHeadDim, kMost, kKind>);
  }
}

template <std::uint32_t kHeadDim>
void RunSelected(ElementType type, const AttendParams& params, const EmulatedGrid& grid) {
  RunSelectedDense<kHeadDim>(type, params, grid);
  RunSelectedPacked<kernels::ValueType::kBf16, kHeadDim>(params, grid);
  RunSelectedPacked<kernels::ValueType::kFp16, kHeadDim>(params, grid);
  RunSelectedPacked<kernels::ValueType::kInt8, kHeadDim>(params, grid);
  RunSelectedPacked<kernels::ValueType::kFp8, kHeadDim>(params, grid);
  RunSelectedPlanes<kHeadDim, PartKind::kPlanes>(params, grid);
  RunSelectedPlanes<kHeadDim, PartKind::kNearPlanes>(params, grid);
}

template <std::uint32_t kHeadDim>
void RunHeadDim(ElementType type, const AttendParams& params, const EmulatedGrid& grid) {
  RunDense<kHeadDim, false>(type, params, grid);
  if ((params.kinds & KindBit(PartKind::kDenseWords)) != 0) {
    RunDense<kHeadDim, true>(type, params, grid);
  }
  RunPacked<kernels::ValueType::kBf16, kHeadDim>(params, grid);
  RunPacked<kernels::ValueType::kFp16, kHeadDim>(params, grid);
  RunPacked<kernels::ValueType::kInt8, kHeadDim>(params, grid);
  RunPacked<kernels::ValueType::kFp8, kHeadDim>(params, grid);
  RunPlanes<kHeadDim, PartKind::kPlanes>(params, grid);
  RunPlanes<kHeadDim, PartKind::kNearPlanes>(params, grid);
  RunSelected<kHeadDim>(type, params, grid);
}

template <class Body>
void RunScore(const AttendParams& params, const EmulatedGrid& grid, std::uint32_t shared_bytes,
              Body body) {
  EmulateGpu({.blocks_x = grid.blocks_x,
              .blocks_y = (params.max_columns + kTileColumns - 1) / kTileColumns,
              .threads = kScoreThreads,
              .shared_bytes = shared_bytes,
              .seed = grid.seed},
             body);
}

void RunChoice(const AttendParams& params, const EmulatedGrid& grid) {
  if (params.max_selections == 0) return;
  const std::uint32_t signs = SummaryBit(kernels::Summary::kSigns);
  if ((params.summaries & ~signs) != 0) {
    RunScore(params, grid, ScoreSharedBytes(params.head_dim), [&] {
      if (params.head_dim == 64) ScoreBlocks<64>(params);
      if (params.head_dim == 128) ScoreBlocks<128>(params);
      if (params.head_dim == 256) ScoreBlocks<256>(params);
    });
  }
  if ((params.summaries & signs) != 0) {
    RunScore(params, grid, kSignSharedBytes, [&] {
      if (params.head_dim == 64) ScoreSigns<64>(params);
      if (params.head_dim == 128) ScoreSigns<128>(params);
      if (params.head_dim == 256) ScoreSigns<256>(params);
    });
  }
  EmulateGpu({.blocks_x = params.max_selections,
              .threads = kSelectThreads,
              .shared_bytes = kSelectSharedBytes,
              .seed = grid.seed},
             [&] { SelectBlocks(params); });
}

void RunRotate(const AttendParams& params, const EmulatedGrid& grid) {
  if (params.max_strategies == 0) return;
  EmulateGpu({.blocks_x = params.max_strategies,
              .blocks_y = (params.max_columns + kTileColumns - 1) / kTileColumns,
              .threads = kRotateThreads,
              .shared_bytes = RotateSharedBytes(params.head_dim),
              .seed = grid.seed},
             [&] { RotateQueries(params); });
}

// Same check as in the launcher.
void RefuseProblem(std::string_view problem) {
  if (problem.empty()) return;
  std::fprintf(stderr, "the launcher would refuse: %.*s\n", static_cast<int>(problem.size()),
               problem.data());
  std::abort();
}

}  // namespace

void EmulateSelect(const AttendCall& call, const EmulatedGrid& grid) {
  RefuseProblem(SelectCallProblem(call));
  const AttendParams params = MakeAttendParams(call);
  RunRotate(params, grid);
  RunChoice(params, grid);
}

void EmulateAttend(const AttendCall& call, const EmulatedGrid& grid) {
  RefuseProblem(AttendCallProblem(call));
  const AttendParams params = MakeAttendParams(call);
  const ElementType type = call.geometry.type;
  RunRotate(params, grid);
  RunChoice(params, grid);
  if (params.head_dim == 64) RunHeadDim<64>(type, params, grid);
  if (params.head_dim == 128) RunHeadDim<128>(type, params, grid);
  if (params.head_dim == 256) RunHeadDim<256>(type, params, grid);
  EmulateGpu({.blocks_x = params.query_heads,
              .blocks_y = call.limits.queries,
              .blocks_z = call.limits.batch,
              .threads = MergeThreads(params.head_dim),
              .shared_bytes = MergeSharedBytes(params.head_dim),
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

void EmulateStoreRows(const StoreRowsParams& params, std::uint64_t seed) {
  EmulateGpu({.blocks_x = params.count, .threads = 32, .seed = seed}, [&] { StoreRun(params); });
}

void EmulateStoreWords(const StoreWordsParams& params, std::uint64_t seed) {
  EmulateGpu({.blocks_x = (params.count + 31) / 32, .threads = 32, .seed = seed},
             [&] { StoreWord(params); });
}

std::uint32_t EmulateFindLane(const std::uint32_t* works, std::uint32_t lanes, std::uint32_t work) {
  std::uint32_t found = 0;
  EmulateGpu({.threads = 32, .seed = work}, [&] { found = FindLane(works, lanes, work); });
  return found;
}

}  // namespace tessera::tests
