#include "kernels/strategy/reduce/channels.h"

#include <algorithm>
#include <bitset>
#include <cmath>
#include <cstring>

#include "kernels/format/element.h"
#include "kernels/format/value_type.h"
#include "kernels/strategy/candidates.h"

namespace tessera::kernels {
namespace {

constexpr std::uint32_t kMostGroups = 256;
using Groups = std::bitset<kMostGroups>;

// Offsets of the parts of one stored row.
struct RowPlace {
  std::size_t bits;
  std::size_t scale;
  std::size_t data;
};

// The rows of one array of a tile or of its summaries, before and after.
struct Side {
  ValueType values;
  std::uint32_t group;
  RowShape from;
  RowShape to;
  const std::byte* was;  // base of the source offsets
  std::byte* is;
};

RowPlace PlaceOf(std::uint32_t bits, std::uint32_t scales, std::uint32_t data, const RowBytes& row,
                 std::size_t at) {
  return {bits + at * row.bits, scales + at * row.scale, data + at * row.data};
}

// The stored value without the row's scale.
float ReadValue(ValueType type, const std::byte* from) {
  if (IsScaled(type)) return FromScaled(type, static_cast<std::uint8_t>(*from));
  std::uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return type == ValueType::kFp16 ? Fp16ToFloat(bits) : Bf16ToFloat(bits);
}

Groups ReadBits(const Side& side, const std::byte* bits) {
  const std::uint32_t groups = side.from.channels / side.group;
  Groups present;
  for (std::uint32_t g = 0; g < groups; ++g) {
    present[g] =
        !side.from.has_bitmap() || (static_cast<std::uint8_t>(bits[g / 8]) >> (g % 8) & 1u) != 0;
  }
  return present;
}

// Sums of squares of stored values; these always fit a double.
struct Strengths {
  double groups[kMostGroups];  // by index among the row's stored groups
  double sum = 0;
};

Strengths StrengthsOf(const Side& side, const std::byte* data) {
  const std::size_t bytes = ValueBytes(side.values);
  Strengths strengths;
  for (std::uint32_t place = 0; place < side.from.kept / side.group; ++place) {
    double sum = 0;
    for (std::uint32_t i = 0; i < side.group; ++i) {
      const double value = ReadValue(side.values, data + (place * side.group + i) * bytes);
      sum += value * value;
    }
    strengths.groups[place] = sum;
    strengths.sum += sum;
  }
  return strengths;
}

// The `wanted` strongest of a row's stored groups, by index; ties go to the first.
Groups Strongest(const Strengths& strengths, std::uint32_t count, std::uint32_t wanted) {
  std::uint16_t order[kMostGroups];
  for (std::uint32_t place = 0; place < count; ++place) {
    order[place] = static_cast<std::uint16_t>(place);
  }
  std::nth_element(order, order + (wanted - 1), order + count, [&](auto a, auto b) {
    if (strengths.groups[a] != strengths.groups[b]) {
      return strengths.groups[a] > strengths.groups[b];
    }
    return a < b;
  });
  Groups stay;
  for (std::uint32_t i = 0; i < wanted; ++i) stay.set(order[i]);
  return stay;
}

// Returns the share of the row's energy that is kept. Adds dropped groups to `lost`.
double ReduceRow(const Side& side, const RowPlace& from, const RowPlace& to, Groups* lost) {
  const std::size_t group_bytes = side.group * ValueBytes(side.values);
  const std::uint32_t count = side.from.kept / side.group;
  const std::uint32_t wanted = side.to.kept / side.group;
  const std::byte* const data = side.was + from.data;
  const Strengths strengths = StrengthsOf(side, data);
  const Groups stay = Strongest(strengths, count, wanted);
  const Groups present = ReadBits(side, side.was + from.bits);
  std::memcpy(side.is + to.scale, side.was + from.scale, ScaleBytes(side.values));
  std::byte* write = side.is + to.data;
  double kept = 0;
  std::uint32_t place = 0;
  for (std::uint32_t g = 0; g < side.from.channels / side.group && place < count; ++g) {
    if (!present[g]) continue;
    if (stay[place]) {
      std::memcpy(write, data + place * group_bytes, group_bytes);
      write += group_bytes;
      kept += strengths.groups[place];
      if (side.to.has_bitmap()) side.is[to.bits + g / 8] |= std::byte{1} << (g % 8);
    } else if (lost != nullptr) {
      lost->set(g);
    }
    ++place;
  }
  return strengths.sum == 0 ? 1 : kept / strengths.sum;
}

// `lost` are the groups lost by keys of the block. Bounds are bf16: all minima, then all maxima.
void WidenBounds(const TileShape& shape, const Groups& lost, std::byte* bounds) {
  static_assert(MinMaxType({.format = TileFormat::kPackedInt8}) == ElementType::kBf16);
  constexpr std::uint16_t kNegative = 0x8000;
  const std::uint32_t channels = shape.key.channels;
  for (std::uint32_t c = 0; c < channels; ++c) {
    if (!lost[c / shape.group]) continue;
    for (const bool greatest : {false, true}) {
      std::byte* const at = bounds + (greatest ? channels + c : c) * sizeof(std::uint16_t);
      std::uint16_t bound;
      std::memcpy(&bound, at, sizeof(bound));
      if (greatest == ((bound & kNegative) != 0)) std::memset(at, 0, sizeof(bound));
    }
  }
}

void ReduceSummaries(const ReduceJob& job, const TileLayout& from, const TileLayout& to,
                     const Groups* lost) {
  const std::uint32_t blocks = (job.rows + job.from.block - 1) / job.from.block;
  const Side side = {
      ValuesOf(job.from.format), job.from.group, job.from.key, job.to.key, job.summaries,
      job.thinned_summaries};
  std::memset(job.thinned_summaries, 0, to.summary_bytes);
  for (std::uint32_t b = 0; b < blocks; ++b) {
    const RowPlace was =
        PlaceOf(from.block_bits, from.block_scales, from.block_data, from.block_row, b);
    const RowPlace is = PlaceOf(to.block_bits, to.block_scales, to.block_data, to.block_row, b);
    if (job.from.summary == Summary::kMinMax) {
      std::memcpy(side.is + is.data, side.was + was.data, from.block_row.data);
      WidenBounds(job.to, lost[b], side.is + is.data);
    } else {
      ReduceRow(side, was, is, nullptr);
    }
  }
}

}  // namespace

std::optional<TileShape> ReducedShape(const TileShape& shape, double share) {
  if (!shape.packed() || shape.planes()) return std::nullopt;
  TileShape thinner = shape;
  for (RowShape* row : {&thinner.key, &thinner.value}) {
    const std::uint32_t kept = KeptChannels(share, shape.group, shape.head_dim, row->channels);
    row->kept = std::min(row->kept, static_cast<std::uint16_t>(kept));
  }
  if (TileAndSummaryBytes(LayoutOf(thinner)) >= TileAndSummaryBytes(LayoutOf(shape)))
    return std::nullopt;
  return thinner;
}

Stays ReduceTile(const ReduceJob& job) {
  const TileLayout from = LayoutOf(job.from);
  const TileLayout to = LayoutOf(job.to);
  std::memset(job.thinned, 0, to.bytes);
  const ValueType values = ValuesOf(job.from.format);
  const Side keys = {values, job.from.group, job.from.key, job.to.key, job.tile, job.thinned};
  const Side vectors = {values,       job.from.group, job.from.value,
                        job.to.value, job.tile,       job.thinned};
  Groups lost[kMaxTileBlocks];
  Stays sums = {0, 0};
  for (std::uint32_t row = 0; row < job.rows; ++row) {
    sums.key +=
        ReduceRow(keys, PlaceOf(from.key_bits, from.key_scales, from.key_data, from.key_row, row),
                  PlaceOf(to.key_bits, to.key_scales, to.key_data, to.key_row, row),
                  job.from.block == 0 ? nullptr : &lost[row / job.from.block]);
    sums.value += ReduceRow(
        vectors, PlaceOf(from.value_bits, from.value_scales, from.value_data, from.value_row, row),
        PlaceOf(to.value_bits, to.value_scales, to.value_data, to.value_row, row), nullptr);
  }
  if (job.from.summary != Summary::kNone) ReduceSummaries(job, from, to, lost);
  constexpr std::size_t kWord = 4;  // a weight, or a position
  if (job.from.weights) {
    std::memcpy(job.thinned + to.weights, job.tile + from.weights, kTileEntries * kWord);
  }
  if (job.from.positions) {
    std::memcpy(job.thinned + to.positions, job.tile + from.positions, kTileEntries * kWord);
  }
  if (job.rows == 0) return {};
  return {sums.key / job.rows, sums.value / job.rows};
}

}  // namespace tessera::kernels
