#include "kernels/reference/attend_part.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/format/tile_shape.h"
#include "kernels/reference/packed.h"
#include "kernels/reference/planes.h"
#include "kernels/reference/scalar.h"
#include "kernels/reference/tile_row.h"

namespace tessera::kernels {
namespace {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct RowState {
  double max = -kInfinity;
  double sum = 0;
  double output[kMaxChannels] = {};
};

// Reads a query row as doubles: the model's element type over dense tiles, fp32 over packed ones,
// rounded to codes over planes.
void ReadQuery(const AttendPart& part, const QueryRow& row, double* query) {
  if (part.shape.planes()) {
    const std::uint32_t planes = part.shape.key_planes.planes();
    RoundQueryToCodes(reinterpret_cast<const float*>(row.query), planes,
                      part.shape.head_dim / planes, query);
    return;
  }
  const ElementType type = part.shape.packed() ? ElementType::kFp32 : ElementsOf(part.shape.format);
  for (std::uint32_t c = 0; c < part.shape.key.channels; ++c) {
    query[c] = ElementAt(row.query, c, type);
  }
}

// The logit in log2 units, so that weights are powers of two. Saturates like the fp32 kernels.
double Logit(const AttendPart& part, const double* query, double mean_product, const double* key,
             double weight) {
  double logit = mean_product;
  for (std::uint32_t c = 0; c < part.shape.key.channels; ++c) logit += query[c] * key[c];
  logit *= part.scale;
  if (part.logit_softcap != 0) {
    logit = part.logit_softcap * std::tanh(logit / part.logit_softcap);
  }
  constexpr double kLimit = std::numeric_limits<float>::max();
  return std::clamp(logit * kLog2E, -kLimit, kLimit) + std::log2(weight);
}

void AddEntry(const AttendPart& part, double logit, const double* value, RowState& state) {
  if (logit == -kInfinity) return;  // an entry of weight 0
  if (!(logit <= state.max)) {      // a new maximum, or NaN, which is kept from then on
    const double factor = std::exp2(state.max - logit);
    state.max = logit;
    state.sum *= factor;
    for (std::uint32_t c = 0; c < part.shape.value.channels; ++c) state.output[c] *= factor;
  }
  const double weight = std::exp2(logit - state.max);
  state.sum += weight;
  for (std::uint32_t c = 0; c < part.shape.value.channels; ++c) {
    state.output[c] += weight * value[c];
  }
}

void AttendRow(const AttendPart& part, const QueryRow& row, RowState& state) {
  double query[kMaxChannels];
  double key[kMaxChannels];
  double value[kMaxChannels];
  ReadQuery(part, row, query);
  for (std::uint32_t i = 0; i < part.run_count; ++i) {
    const RowRun& run = part.runs[i];
    for (std::uint32_t j = 0; j < run.row_count; ++j) {
      const std::uint32_t r = run.row_begin + j;
      const std::uint64_t position =
          part.shape.positions ? PositionOf(part.shape, part.layout, run.tile, run.position, r)
                               : run.position + j;
      if (position < row.visible_begin || position >= row.visible_end) continue;
      ReadKey(part.shape, part.layout, run.tile, r, key);
      ReadValue(part.shape, part.layout, run.tile, r, value);
      const double weight = WeightOf(part.shape, part.layout, run.tile, r);
      AddEntry(part, Logit(part, query, row.mean_product, key, weight), value, state);
    }
  }
}

const char* AttendPartReference(const AttendPart& part, const PartialRows& partial) {
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    RowState state;
    AttendRow(part, part.rows[r], state);
    partial.max[r] = static_cast<float>(state.max);
    partial.sum[r] = static_cast<float>(state.sum);
    for (std::uint32_t c = 0; c < part.padded_channels; ++c) {
      partial.output[r * part.padded_channels + c] = static_cast<float>(state.output[c]);
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
                                    .rotate = RotateReference,
                                    .unrotate = UnrotateReference,
                                    .score_part = ScorePartReference,
                                    .select = SelectReference,
                                    .prepared_bytes = PreparedBytesReference,
                                    .prepare_encode = PrepareEncodeReference,
                                    .encode = EncodeReference,
                                    .decode = DecodeReference,
                                    .gather = GatherReference,
                                    .moments = MomentsReference,
                                    .observe = ObserveReference,
                                    .first_unusable = FirstUnusableReference};

}  // namespace

const Operations& ReferenceOperations() { return kOperations; }

}  // namespace tessera::kernels
