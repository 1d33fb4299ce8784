#include "kernels/reference/attend_part.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/format/dense_tile.h"
#include "kernels/reference/scalar.h"

namespace tessera::kernels {
namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::uint32_t kMaxHeadDim = 256;

struct RowState {
  double max = -kInfinity;
  double sum = 0;
  double output[kMaxHeadDim] = {};
};

// In units of log2, so that weights are powers of two. Saturates like the fp32 kernels do.
double Logit(const AttendPart& part, const std::byte* query, const std::byte* key) {
  double logit = part.scale * Dot(query, key, part.head_dim, part.type);
  if (part.logit_softcap != 0) {
    logit = part.logit_softcap * std::tanh(logit / part.logit_softcap);
  }
  constexpr double kLimit = std::numeric_limits<float>::max();
  return std::clamp(logit * kLog2E, -kLimit, kLimit);
}

void AddEntry(const AttendPart& part, double logit, const std::byte* value, RowState& state) {
  if (!(logit <= state.max)) {  // a new maximum, or NaN, which then stays
    const double factor = std::exp2(state.max - logit);
    state.max = logit;
    state.sum *= factor;
    for (std::uint32_t c = 0; c < part.head_dim; ++c) state.output[c] *= factor;
  }
  const double weight = std::exp2(logit - state.max);
  state.sum += weight;
  for (std::uint32_t c = 0; c < part.head_dim; ++c) {
    state.output[c] += weight * ElementAt(value, c, part.type);
  }
}

void AttendRow(const AttendPart& part, const QueryRow& row, RowState& state) {
  const DenseTile tile{part.head_dim, part.type};
  for (std::uint32_t i = 0; i < part.run_count; ++i) {
    const RowRun& run = part.runs[i];
    for (std::uint32_t j = 0; j < run.row_count; ++j) {
      const std::uint64_t position = run.position + j;
      if (position < row.visible_begin || position >= row.visible_end) continue;
      const std::uint32_t r = run.row_begin + j;
      const double logit = Logit(part, row.query, run.tile + tile.key_offset(r));
      AddEntry(part, logit, run.tile + tile.value_offset(r), state);
    }
  }
}

const char* AttendPartReference(const AttendPart& part, const PartialRows& partial) {
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    RowState state;
    AttendRow(part, part.rows[r], state);
    partial.max[r] = static_cast<float>(state.max);
    partial.sum[r] = static_cast<float>(state.sum);
    for (std::uint32_t c = 0; c < part.head_dim; ++c) {
      partial.output[r * part.head_dim + c] = static_cast<float>(state.output[c]);
    }
  }
  return "reference";
}

std::int64_t FirstUnusableReference(const void* elements, std::size_t count, ElementType type) {
  for (std::size_t i = 0; i < count; ++i) {
    const double magnitude = std::fabs(ElementAt(static_cast<const std::byte*>(elements), i, type));
    if (!(magnitude < 0x1p63)) return static_cast<std::int64_t>(i);
  }
  return -1;
}

constexpr Operations kOperations = {.attend_part = AttendPartReference,
                                    .first_unusable = FirstUnusableReference};

}  // namespace

const Operations& ReferenceOperations() { return kOperations; }

}  // namespace tessera::kernels
