#include "kernels/cuda/common/params.h"

#include "kernels/cuda/common/selection_index.h"
#include "kernels/format/dense_tile.h"

namespace tessera::kernels::cuda {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

bool Aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % 16 == 0; }

// Byte offsets in a call's scratch memory.
struct ScratchLayout {
  ScratchLayout(const LayerGeometry& geometry, const StepLimits& limits) {
    const std::uint64_t columns = std::uint64_t{limits.queries} * geometry.group();
    const auto place = [this](std::uint64_t rows, std::uint64_t row_bytes) {
      constexpr std::uint64_t kCacheLine = 128;
      const std::uint64_t begin = bytes;
      bytes += (rows * row_bytes + kCacheLine - 1) / kCacheLine * kCacheLine;
      return begin;
    };
    const std::uint64_t parts = std::uint64_t{limits.works} + limits.slots;
    states = place(parts * columns, 2 * sizeof(float));
    outputs = place(parts * columns, geometry.head_dim * sizeof(float));
    rotated_scales = place(limits.strategies * columns, sizeof(float));
    rotated = place(limits.strategies * columns, geometry.head_dim * sizeof(std::uint16_t));
    scores = place(columns * limits.blocks, sizeof(float));
    score_sums = place(limits.pieces * columns, 2 * sizeof(float));
    row_sums = place(limits.selections * columns, sizeof(float));
    values = place(limits.blocks, sizeof(std::uint32_t));
    taken = place(limits.blocks, sizeof(std::uint32_t));
    ranges = place(std::uint64_t{limits.choices} + limits.selections, sizeof(SelectedRange));
    visible = place(limits.blocks, sizeof(std::uint8_t));
  }
  std::uint64_t states, outputs, rotated_scales, rotated;
  std::uint64_t scores, score_sums, row_sums, values, taken, ranges, visible;
  std::uint64_t bytes = 0;
};

}  // namespace

std::uint64_t AttendScratchBytes(const LayerGeometry& geometry, const StepLimits& limits) {
  return ScratchLayout(geometry, limits).bytes;
}

std::string_view SelectCallProblem(const AttendCall& call) {
  const LayerGeometry& g = call.geometry;
  if (!IsHeadDim(g.head_dim)) return "head_dim is not 64, 128 or 256";
  if (!IsElementType(static_cast<std::uint8_t>(g.type))) return "unknown element type";
  if (!IsElementType(static_cast<std::uint8_t>(call.output_type))) return "unknown output type";
  if (g.kv_heads == 0 || g.query_heads == 0 || g.query_heads % g.kv_heads != 0) {
    return "query_heads is not a multiple of kv_heads";
  }
  if (call.limits.queries == 0) return "no queries";
  if (call.limits.batch > 65535 || call.limits.queries > 65535) {
    return "more than 65535 sequences or queries";  // a grid's y and z limit
  }
  if (call.limits.blocks > kMostLayerBlocks) return "too many blocks to select from";
  if ((call.limits.kinds & KindBit(PartKind::kDense)) == 0 ||
      call.limits.kinds >> kPartKinds != 0 || call.limits.selected_kinds >> kPartKinds != 0) {
    return "kinds of parts without a kernel";
  }
  if (call.step == nullptr || call.query == nullptr || call.fault == nullptr) {
    return "a null address";
  }
  if (!Aligned(call.step) || !Aligned(call.query) || !Aligned(call.scratch)) {
    return "an address that is not 16-byte aligned";
  }
  if (call.query_stride % 8 != 0) return "query_stride is not a multiple of 8 elements";
  if (call.scratch_bytes < AttendScratchBytes(g, call.limits))
    return "scratch is smaller than AttendScratchBytes";
  return {};
}

std::string_view AttendCallProblem(const AttendCall& call) {
  if (const std::string_view problem = SelectCallProblem(call); !problem.empty()) return problem;
  if (call.output == nullptr) return "a null address";
  if (!Aligned(call.output)) return "an address that is not 16-byte aligned";
  return {};
}

AttendParams MakeAttendParams(const AttendCall& call) {
  const LayerGeometry& g = call.geometry;
  const std::uint64_t packed = std::uint64_t{g.query_heads} * g.head_dim;
  const ScratchLayout scratch(g, call.limits);
  auto* const memory = static_cast<std::byte*>(call.scratch);
  const bool capped = g.logit_softcap > 0;
  return {
      .step = call.step,
      .query = static_cast<const std::byte*>(call.query),
      .output = static_cast<std::byte*>(call.output),
      .lse = call.lse,
      .sinks = g.sinks,
      .states = reinterpret_cast<float*>(memory + scratch.states),
      .outputs = reinterpret_cast<float*>(memory + scratch.outputs),
      .rotated_scales = reinterpret_cast<float*>(memory + scratch.rotated_scales),
      .rotated = reinterpret_cast<std::uint16_t*>(memory + scratch.rotated),
      .scores = reinterpret_cast<float*>(memory + scratch.scores),
      .score_sums = reinterpret_cast<float*>(memory + scratch.score_sums),
      .row_sums = reinterpret_cast<float*>(memory + scratch.row_sums),
      .values = reinterpret_cast<std::uint32_t*>(memory + scratch.values),
      .taken = reinterpret_cast<std::uint32_t*>(memory + scratch.taken),
      .ranges = reinterpret_cast<SelectedRange*>(memory + scratch.ranges),
      .visible = reinterpret_cast<std::uint8_t*>(memory + scratch.visible),
      .fault = call.fault,
      .query_stride = call.query_stride != 0 ? call.query_stride : packed,
      .output_stride = call.output_stride != 0 ? call.output_stride : packed,
      .layer = call.layer,
      .query_heads = g.query_heads,
      .group = g.group(),
      .head_dim = g.head_dim,
      .max_batch = call.limits.batch,
      .max_columns = call.limits.queries * g.group(),
      .max_works = call.limits.works,
      .max_strategies = call.limits.strategies,
      .max_selections = call.limits.selections,
      .max_choices = call.limits.choices,
      .max_blocks = call.limits.blocks,
      .max_pieces = call.limits.pieces,
      .max_slots = call.limits.slots,
      .kinds = call.limits.kinds,
      .selected_kinds = call.limits.selected_kinds,
      .summaries = call.limits.summaries,
      .window = g.sliding_window,
      .causal = call.causal ? 1u : 0u,
      .appended = call.appended ? 1u : 0u,
      .logit_scale = capped ? g.scale / g.logit_softcap : g.scale * kLog2E,
      .logit_cap = capped ? g.logit_softcap * kLog2E : 0,
      .score_scale = g.scale * kLog2E,
      .query_type = g.type,
      .output_type = call.output_type,
  };
}

std::string_view RowsProblem(const void* key, const void* value, std::uint64_t row_stride,
                             std::uint32_t row_bytes) {
  if (key == nullptr || value == nullptr) return "a null address";
  if (!Aligned(key) || !Aligned(value)) return "rows that are not 16-byte aligned";
  if (row_stride % 16 != 0) return "a row stride that is not a multiple of 16 bytes";
  if (row_bytes == 0 || row_bytes % 16 != 0) return "rows that are not a multiple of 16 bytes";
  return {};
}

}  // namespace tessera::kernels::cuda
