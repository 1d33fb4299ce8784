// Attention over one part of planes. Written over the including file's `Simd` and `ByteSimd`.
// Internal linkage throughout: see ../README.md.
//
//   queries   rounded to int8 once per part, and spread as the words of keys need them
//   for each group of query rows, for each batch of eight quads, from one tile or several runs:
//     logits   integer products per plane, times the scales of row and query
//     weights  2^(x - max), times the value's scale, rounded to 8 bits of the batch's largest
//     outputs  integer products of weights and codes, added in fp32 in the order of the words
//
// Between the weights and the outputs of a batch come the logits of the next one: they keep the
// core busy while it waits for the weights.
//
// The sums of codes are shifted to the centre of their range and put into channel order at the end.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attend/attend_part-inl.h"
#include "kernels/cpu/attend/planes_dots-inl.h"
#include "kernels/format/part.h"

namespace tessera::kernels {
namespace {

constexpr int kQueryBytes = 8 * kMaxHeadDim;              // of one row, spread
constexpr int kSumFloats = 2 * kMaxHeadDim;               // products of one row's weights and codes
constexpr int kSumOfWeights = kMaxPlanes * Simd::kLanes;  // per plane and lane
constexpr int kAccumulated = kSumFloats + kSumOfWeights;
constexpr std::uint32_t kMostQuads = kMaxPartRuns * kTileQuads;
// Weights times scales below this count as zero, so that their inverse is finite.
constexpr float kSmallestWeight = 1e-30f;
constexpr float kMostWeight = 255;

// How many batches ahead quads are requested.
constexpr std::uint32_t kBatchesAhead = 2;

// A quad that the part reads.
struct ListedQuad {
  std::uint16_t run;
  std::uint8_t first_row;  // in its tile
  std::uint8_t live;       // one bit per row
};

struct QueryFactors {
  float half_scale[kMaxPlanes];  // of the plane's codes, halved
  float centre[kMaxPlanes];      // (2^width - 1) x sum of codes
};

// What the logits of a batch leave for its weights.
struct BatchLogits {
  alignas(64) float weights[kMostHeads][kTileRows];  // logits first, then weights
  alignas(64) std::uint16_t scales[2 * kMaxPlanes][kTileRows];
};

struct PlanesScratch {
  alignas(64) std::int8_t queries[kMaxPartRows][kQueryBytes];
  alignas(64) float sums[kMaxPartRows][Simd::kLanes];
  alignas(64) float accumulated[kMaxPartRows][kAccumulated];
  BatchLogits logits[2];  // of this batch and the next
  alignas(64) std::int32_t dots[kMostHeads][kTileRows];
  alignas(64) std::uint8_t rounded[kMaxPlanes][kMostHeads][kTileRows];
  float unit[kMaxPlanes][kMostHeads];
  alignas(64) float bias[kTileRows];
  QueryFactors factors[kMaxPartRows];
  const std::byte* quads[kMostQuads + kQuads];
  ListedQuad listed[kMostQuads + kQuads];
  std::uint32_t live[kMaxPartRuns + 1];  // per batch, one bit per row
};

struct PlanesContext {
  const AttendPart* part;
  const PartialRows* partial;
  PlanesScratch* scratch;
  Logits logits;
  QuadSide keys;
  QuadSide values;
  std::size_t weights;      // offset of the sums of weights
  std::size_t summed;       // floats per row that are rescaled
  std::uint32_t quads;      // listed
  bool everything_visible;  // every row sees every live entry
};

// ---- queries ----

struct RoundedQuery {
  alignas(64) std::int8_t codes[kMaxHeadDim];
};

// Rounds one plane to int8 codes. Returns its scale; NaN if an element is not finite.
TESSERA_SIMD float RoundPlane(const float* query, int channels, std::int8_t* codes) {
  constexpr float kToInteger = 0x1.8p23f;  // adding it rounds to the nearest integer, ties to even
  auto peak = Simd::Zero();
  auto poison = Simd::Zero();  // 0 x infinity and 0 x NaN are NaN
  for (int c = 0; c < channels; c += Simd::kLanes) {
    const auto element = Simd::Load(query + c);
    peak = Simd::Max(Simd::Absolute(element), peak);
    poison = Simd::Add(poison, Simd::Multiply(element, Simd::Zero()));
  }
  alignas(64) float lanes[Simd::kLanes];
  Simd::Store(lanes, poison);
  float bad = 0;
  for (float lane : lanes) bad += lane;
  const float top = Simd::MaxLane(peak);
  const float scale = top != 0 ? top / 127 : 1;
  if (!(bad == 0)) {
    __builtin_memset(codes, 0, static_cast<std::size_t>(channels));
    return __builtin_nanf("");
  }
  alignas(64) float rounded[kMaxHeadDim];
  const auto to_integer = Simd::Splat(kToInteger);
  for (int c = 0; c < channels; c += Simd::kLanes) {
    const auto quotient = Simd::Divide(Simd::Load(query + c), Simd::Splat(scale));
    Simd::Store(rounded + c, Simd::Subtract(Simd::Add(quotient, to_integer), to_integer));
  }
  for (int c = 0; c < channels; ++c) codes[c] = static_cast<std::int8_t>(rounded[c]);
  return scale;
}

// Spreads codes as the words of an array need them: for each vector and field, the four codes of
// each group's word, repeated for its four rows.
TESSERA_SIMD void SpreadCodes(const QuadArray& array, const std::int8_t* codes, int channels,
                              std::int8_t* to) {
  const int parts = array.bits == 8 ? 1 : array.parts;
  to += array.first * ByteSimd::kBytes;
  for (int v = 0; v < array.vectors; ++v) {
    for (int s = 0; s < parts; ++s) {
      for (int g = 0; g < ByteSimd::kGroups; ++g, to += 16) {
        const int channel = ChannelOf(array, true, v * ByteSimd::kGroups + g, s);
        std::uint32_t word = 0;
        if (channel < channels) __builtin_memcpy(&word, codes + channel, sizeof(word));
        for (int r = 0; r < 4; ++r) __builtin_memcpy(to + 4 * r, &word, sizeof(word));
      }
    }
  }
}

TESSERA_SIMD void LoadPlanesQuery(const PlanesContext& context, std::uint32_t row) {
  PlanesScratch& scratch = *context.scratch;
  const auto* query = reinterpret_cast<const float*>(context.part->rows[row].query);
  RoundedQuery rounded;
  for (int p = 0; p < context.keys.planes; ++p) {
    const QuadPlane& plane = context.keys.plane[p];
    const float scale = RoundPlane(query + p * plane.channels, plane.channels, rounded.codes);
    int sum = 0;
    for (int c = 0; c < plane.channels; ++c) sum += rounded.codes[c];
    scratch.factors[row].half_scale[p] = scale * 0.5f;
    scratch.factors[row].centre[p] = static_cast<float>(sum * ((1 << plane.width) - 1));
    for (int a = 0; a < plane.arrays; ++a) {
      SpreadCodes(plane.array[a], rounded.codes, plane.channels, scratch.queries[row]);
    }
  }
}

// ---- quads ----

TESSERA_SIMD void ListQuads(PlanesContext& context) {
  const AttendPart& part = *context.part;
  PlanesScratch& scratch = *context.scratch;
  const std::size_t quad_bytes = part.layout.quad.bytes;
  std::uint64_t first = ~std::uint64_t{0};
  std::uint64_t last = 0;
  std::uint32_t count = 0;
  for (std::uint32_t batch = 0; batch <= kMaxPartRuns; ++batch) scratch.live[batch] = 0;
  for (std::uint32_t i = 0; i < part.run_count; ++i) {
    const RowRun& run = part.runs[i];
    const std::uint32_t end = run.row_begin + run.row_count;
    first = Least(first, run.position);
    last = run.position + run.row_count > last ? run.position + run.row_count : last;
    const std::uint32_t rows = RowBits(static_cast<int>(run.row_begin), static_cast<int>(end));
    const std::byte* quad = run.tile + run.row_begin / kQuadRows * quad_bytes;
    for (std::uint32_t row = run.row_begin / kQuadRows * kQuadRows; row < end;
         row += kQuadRows, ++count, quad += quad_bytes) {
      const std::uint32_t live = rows >> row & 15u;
      scratch.quads[count] = quad;
      scratch.listed[count] = {static_cast<std::uint16_t>(i), static_cast<std::uint8_t>(row),
                               static_cast<std::uint8_t>(live)};
      scratch.live[count / kQuads] |= live << count % kQuads * kQuadRows;
    }
  }
  context.quads = count;
  context.everything_visible = !part.shape.positions;
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    context.everything_visible &=
        part.rows[r].visible_begin <= first && last <= part.rows[r].visible_end;
  }
  // The last batch is filled with dead quads.
  for (int k = 0; count != 0 && k < kQuads; ++k) {
    scratch.quads[count + static_cast<std::uint32_t>(k)] = scratch.quads[count - 1];
    scratch.listed[count + static_cast<std::uint32_t>(k)] = {0, 0, 0};
  }
}

// Those visible to a query row.
TESSERA_PER_PASS std::uint32_t VisibleBitsOfQuads(const AttendPart& part, const ListedQuad* listed,
                                                  const QueryRow& row) {
  std::uint32_t bits = 0;
  std::uint32_t of_run = 0;
  int run = -1;
  for (int k = 0; k < kQuads; ++k) {
    if (listed[k].live == 0) continue;
    if (listed[k].run != run) of_run = VisibleBits(part, part.runs[listed[k].run], row);
    run = listed[k].run;
    bits |= (of_run >> listed[k].first_row & listed[k].live) << (4 * k);
  }
  return bits;
}

// Copies the scales of one side's planes: [plane][32 rows].
TESSERA_SIMD void ReadQuadScales(const QuadSide& side, const std::byte* const* quads,
                                 std::uint16_t (*scales)[kTileRows]) {
  for (int p = 0; p < side.planes; ++p) {
    for (int k = 0; k < kQuads; ++k) {
      __builtin_memcpy(scales[p] + 4 * k, quads[k] + side.scales + 8 * p, 8);
    }
  }
}

TESSERA_PER_PASS void ReadQuadBias(const PlanesContext& context, const ListedQuad* listed) {
  PlanesScratch& scratch = *context.scratch;
  alignas(64) float bias[kTileRows + Simd::kLanes];
  for (int i = 0; i < kTileRows; i += Simd::kLanes) Simd::Store(scratch.bias + i, Simd::Zero());
  for (int k = 0; k < kQuads; ++k) {
    if (listed[k].live == 0) continue;
    const std::uint32_t first = listed[k].first_row;
    ReadBias(*context.part, context.part->runs[listed[k].run].tile, first, kQuadRows, bias);
    __builtin_memcpy(scratch.bias + 4 * k, bias, kQuadRows * sizeof(float));
  }
}

// Requests the quads of a later batch.
TESSERA_SIMD void PrefetchQuads(const PlanesContext& context, std::uint32_t batch) {
  const std::size_t bytes = context.part->layout.quad.bytes;
  for (std::uint32_t k = batch; k < batch + kQuads && k < context.quads; ++k) {
    if (context.part->lookahead.into_l1) {
      PrefetchLines<kIntoL1>(context.scratch->quads[k], bytes);
    } else {
      PrefetchLines<kIntoL2>(context.scratch->quads[k], bytes);
    }
  }
}

// ---- one batch ----

// The dot products of a batch with kHeads query rows from `row` on.
template <int kHeads>
TESSERA_SIMD void DotQuads(const PlanesContext& context, std::uint32_t batch, std::uint32_t row,
                           BatchLogits& logits) {
  PlanesScratch& scratch = *context.scratch;
  const std::byte* const* quads = scratch.quads + batch;
  ReadQuadScales(context.keys, quads, logits.scales);
  ReadQuadScales(context.values, quads, logits.scales + context.keys.planes);
  for (int p = 0; p < context.keys.planes; ++p) {
    const QuadPlane& plane = context.keys.plane[p];
    const std::int8_t* queries = scratch.queries[row];
    switch (plane.width) {
      case 2:
        DotPlane<2, kHeads>(plane, quads, queries, kQueryBytes, scratch.dots);
        break;
      case 4:
        DotPlane<4, kHeads>(plane, quads, queries, kQueryBytes, scratch.dots);
        break;
      case 6:
        DotPlane<6, kHeads>(plane, quads, queries, kQueryBytes, scratch.dots);
        break;
      default:
        DotPlane<8, kHeads>(plane, quads, queries, kQueryBytes, scratch.dots);
    }
    for (int i = 0; i < kTileRows; i += Simd::kLanes) {
      const auto scale = ByteSimd::LoadBf16(logits.scales[p] + i);
      TESSERA_UNROLL for (int h = 0; h < kHeads; ++h) {
        const QueryFactors& factors = scratch.factors[row + static_cast<std::uint32_t>(h)];
        const float mean = context.part->rows[row + static_cast<std::uint32_t>(h)].mean_product;
        const auto before = p == 0 ? Simd::Splat(mean) : Simd::Load(logits.weights[h] + i);
        // Twice the product with the centred codes: an exact integer below 2^24.
        const auto centred =
            Simd::MultiplyAdd(ByteSimd::ToFloats(ByteSimd::Load(scratch.dots[h] + i)),
                              Simd::Splat(2.0f), Simd::Splat(-factors.centre[p]));
        const auto factor = Simd::Multiply(scale, Simd::Splat(factors.half_scale[p]));
        Simd::Store(logits.weights[h] + i, Simd::MultiplyAdd(centred, factor, before));
      }
    }
  }
}

// Rounds weights times the scales of a value plane to bytes, and adds them up. Returns what one
// unit stands for.
TESSERA_SIMD float RoundWeights(const float* weights, const std::uint16_t* scales,
                                std::uint32_t visible, std::uint8_t* rounded, float* sums) {
  constexpr int kVectors = kTileRows / Simd::kLanes;
  typename Simd::Floats product[kVectors];
  auto peak = Simd::Zero();
  TESSERA_UNROLL for (int i = 0; i < kVectors; ++i) {
    const int first = i * Simd::kLanes;
    product[i] = Simd::Multiply(Simd::Load(weights + first), ByteSimd::LoadBf16(scales + first));
    product[i] = Simd::WhereBits(visible >> first, product[i], Simd::Zero());
    peak = Simd::Max(product[i], peak);
  }
  const float top = Simd::MaxLane(peak);
  const bool any = top > kSmallestWeight;
  const float unit = any ? top * (1 / kMostWeight) : 0.0f;
  const auto inverse = Simd::Splat(any ? kMostWeight / top : 0.0f);
  auto sum = Simd::Load(sums);
  TESSERA_UNROLL for (int i = 0; i < kVectors; ++i) {
    const auto byte = ByteSimd::Round(Simd::Multiply(product[i], inverse));
    ByteSimd::StoreRounded(rounded + i * Simd::kLanes, byte);
    sum = Simd::MultiplyAdd(Simd::Splat(unit), byte, sum);
  }
  Simd::Store(sums, sum);
  return unit;
}

// Turns the dot products into weights. False if no row sees the batch.
template <int kHeads>
TESSERA_SIMD bool WeighQuads(const PlanesContext& context, std::uint32_t batch, std::uint32_t row,
                             BatchLogits& logits) {
  const AttendPart& part = *context.part;
  PlanesScratch& scratch = *context.scratch;
  const ListedQuad* listed = scratch.listed + batch;
  std::uint32_t visible[kHeads];
  std::uint32_t any = 0;
  for (std::uint32_t h = 0; h < kHeads; ++h) {
    visible[h] = context.everything_visible ? scratch.live[batch / kQuads]
                                            : VisibleBitsOfQuads(part, listed, part.rows[row + h]);
    any |= visible[h];
  }
  if (any == 0) return false;
  if (part.shape.weights) ReadQuadBias(context, listed);
  const RowFactors factors = {nullptr, nullptr, part.shape.weights ? scratch.bias : nullptr};
  for (std::uint32_t h = 0; h < kHeads; ++h) {
    float* accumulated = scratch.accumulated[row + h];
    WeighRow(context.logits, factors, visible[h], static_cast<int>(context.summed),
             logits.weights[h], context.partial->max + row + h, scratch.sums[row + h], accumulated);
    for (int p = 0; p < context.values.planes; ++p) {
      scratch.unit[p][h] =
          RoundWeights(logits.weights[h], logits.scales[context.keys.planes + p], visible[h],
                       scratch.rounded[p][h], accumulated + context.weights + p * Simd::kLanes);
    }
  }
  return true;
}

// All batches for kHeads query rows.
template <int kHeads>
static void AttendQuads(const PlanesContext& context, std::uint32_t row) {
  PlanesScratch& scratch = *context.scratch;
  if (context.quads != 0) DotQuads<kHeads>(context, 0, row, scratch.logits[0]);
  for (std::uint32_t batch = 0; batch < context.quads; batch += kQuads) {
    if (row == 0) PrefetchQuads(context, batch + kBatchesAhead * kQuads);
    const bool seen = WeighQuads<kHeads>(context, batch, row, scratch.logits[batch / kQuads % 2]);
    const std::uint32_t next = batch + kQuads;
    if (next < context.quads) {
      DotQuads<kHeads>(context, next, row, scratch.logits[next / kQuads % 2]);
    }
    for (int p = 0; seen && p < context.values.planes; ++p) {
      AddPlane<kHeads>(context.values.plane[p], scratch.quads + batch, scratch.rounded[p],
                       scratch.unit[p], scratch.accumulated[row], kAccumulated);
    }
  }
}

// ---- the part ----

// Writes a row's output in channel order.
TESSERA_PER_PASS void FinishPlanesOutput(const PlanesContext& context, const float* accumulated,
                                         float* output) {
  for (int p = 0; p < context.values.planes; ++p, output += context.values.plane[0].channels) {
    const QuadPlane& plane = context.values.plane[p];
    const float* weights = accumulated + context.weights + p * Simd::kLanes;
    float sum = 0;
    for (int lane = 0; lane < Simd::kLanes; ++lane) sum += weights[lane];
    const float shift = plane.centre * sum;
    for (int c = 0; c < plane.channels; ++c) output[c] = -shift;
    for (int a = 0; a < plane.arrays; ++a) {
      const QuadArray& array = plane.array[a];
      const float* products = accumulated + array.first * ByteSimd::kWords;
      for (int v = 0; v < array.vectors; ++v) {
        for (int s = 0; s < array.parts; ++s) {
          const float factor = array.bits == 8 && s == 1 ? 16.0f : array.factor;
          for (int i = 0; i < ByteSimd::kWords; ++i, ++products) {
            const int channel = ChannelOf(array, false, v * ByteSimd::kWords + i, s);
            if (channel < plane.channels) output[channel] += factor * *products;
          }
        }
      }
    }
  }
}

template <class Run>
TESSERA_SIMD void ForEachHeadGroup(std::uint32_t rows, Run run) {
  std::uint32_t row = 0;
  for (; row + 4 <= rows; row += 4) run.template operator()<4>(row);
  if (row + 2 <= rows) {
    run.template operator()<2>(row);
    row += 2;
  }
  if (row < rows) run.template operator()<1>(row);
}

static void AttendPlanes(const AttendPart& part, const PartialRows& partial) {
  PlanesScratch scratch;
  PlanesContext context = {.part = &part,
                           .partial = &partial,
                           .scratch = &scratch,
                           .logits = LogitsOf(part.scale, part.logit_softcap),
                           .keys = SideOf(part.shape, part.layout, true),
                           .values = SideOf(part.shape, part.layout, false),
                           .weights = 0,
                           .summed = 0,
                           .quads = 0,
                           .everything_visible = false};
  context.weights = static_cast<std::size_t>(context.values.vectors) * ByteSimd::kWords;
  context.summed = context.weights + kSumOfWeights;
  ListQuads(context);
  for (std::uint32_t batch = 0; batch < kBatchesAhead; ++batch) {
    PrefetchQuads(context, batch * kQuads);
  }
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    partial.max[r] = -kInfinity;
    Simd::Store(scratch.sums[r], Simd::Zero());
    for (std::size_t i = 0; i < context.summed; i += Simd::kLanes) {
      Simd::Store(scratch.accumulated[r] + i, Simd::Zero());
    }
    LoadPlanesQuery(context, r);
  }
  ForEachHeadGroup(part.row_count,
                   [&]<int kHeads>(std::uint32_t row) { AttendQuads<kHeads>(context, row); });
  for (std::uint32_t r = 0; r < part.row_count; ++r) {
    float sum = 0;
    for (float lane : scratch.sums[r]) sum += lane;
    partial.sum[r] = sum;
    FinishPlanesOutput(context, scratch.accumulated[r], partial.output + r * part.padded_channels);
  }
}

}  // namespace
}  // namespace tessera::kernels
