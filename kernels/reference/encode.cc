#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/reference/packed.h"
#include "kernels/reference/planes.h"
#include "kernels/reference/scalar.h"
#include "kernels/reference/tile_row.h"

namespace tessera::kernels {
namespace {

// The rows of one tile after rotation: fp32, not yet rounded to the stored type.
struct RotatedRows {
  float rows[kTileEntries][kMaxChannels];
};

struct Rotation {
  const std::byte* matrix;  // null: identity
  ElementType type;
  const std::byte* mean;  // bf16; null: zeros
};

// The reference's `prepared` buffer: the rotations unchanged.
struct Prepared {
  RotationView rotation;
};

void Rotate(const EncodeJob& job, const std::byte* rows, const RowShape& side,
            const Rotation& rotation, RotatedRows& rotated) {
  const std::byte* pointers[kTileEntries];
  RotatedRows centred;
  for (std::uint32_t r = 0; r < job.rows; ++r) pointers[r] = rows + r * job.stride;
  for (std::uint32_t r = 0; rotation.mean != nullptr && r < job.rows; ++r) {
    for (std::uint32_t d = 0; d < job.shape.head_dim; ++d) {
      centred.rows[r][d] = static_cast<float>(ElementAt(pointers[r], d, job.type)) -
                           static_cast<float>(ElementAt(rotation.mean, d, ElementType::kBf16));
    }
    pointers[r] = reinterpret_cast<const std::byte*>(centred.rows[r]);
  }
  RotateReference({.rotation = rotation.matrix,
                   .rotation_type = rotation.type,
                   .channels = side.channels,
                   .head_dim = job.shape.head_dim,
                   .rows = pointers,
                   .row_type = rotation.mean != nullptr ? ElementType::kFp32 : job.type,
                   .row_count = job.rows,
                   .output = rotated.rows[0],
                   .padded_channels = kMaxChannels});
}

bool AllStorable(const TileShape& shape, const RowShape& side, const RotatedRows& rotated,
                 std::uint32_t rows) {
  for (std::uint32_t r = 0; r < rows; ++r) {
    for (std::uint32_t c = 0; c < side.channels; ++c) {
      const auto bits = std::bit_cast<std::uint32_t>(rotated.rows[r][c]);
      if ((bits & 0x7fffffffu) >= UnstorableBits(shape)) return false;
    }
  }
  return true;
}

// 2^-e, where the row's largest magnitude is in [2^e, 2^(e + 1)). Keeps sums of squares in range.
float Normaliser(const float* row, std::uint32_t channels) {
  float peak = 0;
  for (std::uint32_t c = 0; c < channels; ++c) peak = std::max(peak, std::fabs(row[c]));
  const std::uint32_t exponent = std::max(std::bit_cast<std::uint32_t>(peak) >> 23, 1u);
  return std::bit_cast<float>((254 - std::min(exponent, 253u)) << 23);
}

// The strength of a group of channels.
float GroupKey(const float* row, std::uint32_t group, float normaliser) {
  if (group == 1) return std::fabs(row[0]);
  float sum = 0;
  for (std::uint32_t i = 0; i < group; ++i) {
    const float scaled = row[i] * normaliser;
    sum = std::fma(scaled, scaled, sum);
  }
  return sum;
}

// The destination of a packed row.
struct RowTarget {
  std::byte* bits;  // null: every group is kept
  std::byte* scale;
  std::byte* data;
};

void StoreValues(ValueType type, std::uint32_t count, const float* values,
                 const RowTarget& target) {
  float peak = 0;
  for (std::uint32_t i = 0; i < count; ++i) peak = std::max(peak, std::fabs(values[i]));
  const std::uint16_t scale = IsScaled(type) ? ScaleOf(type, peak) : std::uint16_t{0};
  if (IsScaled(type)) std::memcpy(target.scale, &scale, sizeof(scale));
  for (std::uint32_t i = 0; i < count; ++i) {
    if (IsScaled(type)) {
      target.data[i] = std::byte{ToScaled(type, values[i], Bf16ToFloat(scale))};
      continue;
    }
    const std::uint16_t stored =
        type == ValueType::kBf16 ? FloatToBf16(values[i]) : FloatToFp16(values[i]);
    std::memcpy(target.data + i * sizeof(stored), &stored, sizeof(stored));
  }
}

// Row `row` of the arrays at these offsets.
RowTarget TargetOf(std::byte* tile, std::uint32_t bits, std::uint32_t scales, std::uint32_t data,
                   const RowBytes& bytes, std::uint32_t row) {
  return {.bits = bytes.bits != 0 ? tile + bits + row * bytes.bits : nullptr,
          .scale = tile + scales + row * bytes.scale,
          .data = tile + data + row * bytes.data};
}

// Selects the strongest groups and stores them. The bitmap must be zeroed beforehand.
void PackRow(const TileShape& shape, const RowShape& side, const float* row,
             const RowTarget& target) {
  const std::uint32_t groups = side.channels / shape.group;
  const std::uint32_t wanted = side.kept / shape.group;
  const float normaliser = Normaliser(row, side.channels);
  float keys[kMaxChannels];
  std::uint32_t order[kMaxChannels];
  for (std::uint32_t g = 0; g < groups; ++g) {
    keys[g] = GroupKey(row + g * shape.group, shape.group, normaliser);
  }
  std::iota(order, order + groups, 0u);
  std::stable_sort(order, order + groups,
                   [&](std::uint32_t a, std::uint32_t b) { return keys[a] > keys[b]; });
  std::sort(order, order + wanted);
  float values[kMaxChannels];
  for (std::uint32_t i = 0; i < wanted; ++i) {
    const std::uint32_t g = order[i];
    if (target.bits != nullptr) {
      target.bits[g / 8] |= std::byte{static_cast<std::uint8_t>(1u << (g % 8))};
    }
    std::copy_n(row + g * shape.group, shape.group, values + i * shape.group);
  }
  StoreValues(ValuesOf(shape.format), side.kept, values, target);
}

void StoreElementAt(ElementType type, std::byte* row, std::uint32_t index, float value) {
  if (type == ElementType::kFp32) {
    std::memcpy(row + index * sizeof(value), &value, sizeof(value));
    return;
  }
  const std::uint16_t bits = type == ElementType::kBf16 ? FloatToBf16(value) : FloatToFp16(value);
  std::memcpy(row + index * sizeof(bits), &bits, sizeof(bits));
}

// The largest bf16 not above `value`.
float FloorToBf16(float value) {
  std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const bool exact = (bits & 0xffffu) == 0;
  bits &= 0xffff0000u;
  if (!exact && (bits >> 31) != 0) bits += 0x10000u;
  return std::bit_cast<float>(bits);
}

void StoreMinMax(const TileShape& shape, const TileLayout& layout, std::uint32_t block,
                 std::uint32_t entries, const std::byte* tile, std::byte* summaries) {
  const ElementType type = MinMaxType(shape);
  std::byte* row = summaries + layout.block_data + block * layout.block_row.data;
  double elements[kTileEntries][kMaxChannels];
  for (std::uint32_t e = 0; e < entries; ++e) {
    ReadRow(KeyRow(shape, layout, tile, block * shape.block + e), elements[e]);
  }
  for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
    double least = elements[0][c];
    double greatest = elements[0][c];
    for (std::uint32_t e = 1; e < entries; ++e) {
      least = std::min(least, elements[e][c]);
      greatest = std::max(greatest, elements[e][c]);
    }
    auto low = static_cast<float>(least) + 0.0f;  // never -0
    auto high = static_cast<float>(greatest) + 0.0f;
    if (shape.packed()) {
      low = FloorToBf16(low);
      high = -FloorToBf16(-high) + 0.0f;
    }
    StoreElementAt(type, row, c, low);
    StoreElementAt(type, row, shape.key.channels + c, high);
  }
}

// `keys` are the unrounded rows to average, in the tile's space.
void StoreMean(const TileShape& shape, const TileLayout& layout, std::uint32_t block,
               std::uint32_t entries, const RotatedRows& keys, std::byte* summaries) {
  float mean[kMaxChannels];
  for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
    double sum = 0;
    for (std::uint32_t e = 0; e < entries; ++e) sum += keys.rows[block * shape.block + e][c];
    mean[c] = static_cast<float>(sum / entries);
  }
  std::byte* data = summaries + layout.block_data + block * layout.block_row.data;
  if (shape.packed()) {
    PackRow(shape, shape.key, mean,
            TargetOf(summaries, layout.block_bits, layout.block_scales, layout.block_data,
                     layout.block_row, block));
    return;
  }
  for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
    StoreElementAt(ElementsOf(shape.format), data, c, mean[c]);
  }
}

void StoreSummaries(const TileShape& shape, const TileLayout& layout, std::uint32_t rows,
                    const RotatedRows& keys, const std::byte* tile, std::byte* summaries) {
  if (shape.summary == Summary::kNone) return;
  std::memset(summaries, 0, layout.summary_bytes);
  for (std::uint32_t b = 0; b < shape.blocks() && b * shape.block < rows; ++b) {
    const std::uint32_t entries = std::min<std::uint32_t>(shape.block, rows - b * shape.block);
    if (shape.summary == Summary::kSigns) {
      for (std::uint32_t e = 0; e < entries; ++e) {
        WriteSigns(shape, layout, keys.rows[b * shape.block + e], summaries, b * shape.block + e);
      }
    } else if (shape.summary == Summary::kMean) {
      StoreMean(shape, layout, b, entries, keys, summaries);
    } else {
      StoreMinMax(shape, layout, b, entries, tile, summaries);
    }
  }
}

void StoreWords(const EncodeJob& job) {
  for (std::uint32_t r = 0; r < job.rows; ++r) {
    const float weight = job.weights == nullptr ? 1.0f : job.weights[r];
    const std::uint32_t position = job.positions == nullptr ? r : job.positions[r];
    if (job.shape.weights) {
      std::memcpy(job.tile + job.layout.weights + r * sizeof(weight), &weight, sizeof(weight));
    }
    if (job.shape.positions) {
      std::memcpy(job.tile + job.layout.positions + r * sizeof(position), &position,
                  sizeof(position));
    }
  }
}

void PackRows(const EncodeJob& job, const RotatedRows& keys, const RotatedRows& values) {
  const TileLayout& layout = job.layout;
  for (std::uint32_t r = 0; r < job.rows; ++r) {
    PackRow(
        job.shape, job.shape.key, keys.rows[r],
        TargetOf(job.tile, layout.key_bits, layout.key_scales, layout.key_data, layout.key_row, r));
    PackRow(job.shape, job.shape.value, values.rows[r],
            TargetOf(job.tile, layout.value_bits, layout.value_scales, layout.value_data,
                     layout.value_row, r));
  }
}

bool WritePlanes(const EncodeJob& job, const RotatedRows& keys, const RotatedRows& values) {
  const SidePlanes key = KeyPlanes(job.shape, job.layout);
  const SidePlanes value = ValuePlanes(job.shape, job.layout);
  for (std::uint32_t r = 0; r < job.rows; ++r) {
    if (!WritePlanesRow(key, keys.rows[r], job.key_error_limit, job.tile, r) ||
        !WritePlanesRow(value, values.rows[r], job.value_error_limit, job.tile, r)) {
      return false;
    }
  }
  return true;
}

void CopyDenseRows(const EncodeJob& job) {
  for (std::uint32_t r = 0; r < job.rows; ++r) {
    const std::uint32_t bytes = job.layout.key_row.data;  // value rows have the same size
    std::memcpy(job.tile + job.layout.key_data + r * bytes, job.key + r * job.stride, bytes);
    std::memcpy(job.tile + job.layout.value_data + r * bytes, job.value + r * job.stride, bytes);
  }
}

// Copies the stored row `source` to row `r` of the new tile.
void CopyStoredRow(const GatherJob& job, const GatherRow& source, std::uint32_t r) {
  const TileLayout& from = job.from_layout;
  const TileLayout& to = job.to_layout;
  if (job.to.planes()) {
    CopyPlanesRow(KeyPlanes(job.from, from), source.tile, source.row, KeyPlanes(job.to, to),
                  job.tile, r);
    CopyPlanesRow(ValuePlanes(job.from, from), source.tile, source.row, ValuePlanes(job.to, to),
                  job.tile, r);
    return;
  }
  const auto copy = [&](std::uint32_t target, std::uint32_t origin, std::uint32_t row_bytes) {
    std::memcpy(job.tile + target + r * row_bytes, source.tile + origin + source.row * row_bytes,
                row_bytes);
  };
  copy(to.key_bits, from.key_bits, to.key_row.bits);
  copy(to.key_scales, from.key_scales, to.key_row.scale);
  copy(to.key_data, from.key_data, to.key_row.data);
  copy(to.value_bits, from.value_bits, to.value_row.bits);
  copy(to.value_scales, from.value_scales, to.value_row.scale);
  copy(to.value_data, from.value_data, to.value_row.data);
}

}  // namespace

std::size_t PreparedBytesReference(const TileShape&, ElementType) { return sizeof(Prepared); }

void PrepareEncodeReference(const TileShape&, ElementType, const RotationView& rotation,
                            std::byte* prepared) {
  const Prepared what = {.rotation = rotation};
  std::memcpy(prepared, &what, sizeof(what));
}

bool EncodeReference(const EncodeJob& job) {
  std::memset(job.tile, 0, job.layout.bytes);
  RotatedRows keys;
  RotatedRows values;
  Prepared prepared;
  const bool signs = job.shape.summary == Summary::kSigns;
  if (job.shape.packed() || signs) std::memcpy(&prepared, job.prepared, sizeof(prepared));
  const RotationView& rotation = prepared.rotation;
  Rotate(job, job.key, job.shape.key, {rotation.key, rotation.type, rotation.key_mean}, keys);
  Rotate(job, job.value, job.shape.value,
         {job.shape.packed() ? rotation.value : nullptr, rotation.type, rotation.value_mean},
         values);
  if (!AllStorable(job.shape, job.shape.key, keys, job.rows) ||
      !AllStorable(job.shape, job.shape.value, values, job.rows)) {
    return false;
  }
  if (job.shape.planes()) {
    if (!WritePlanes(job, keys, values)) return false;
  } else if (job.shape.packed()) {
    PackRows(job, keys, values);
  } else {
    CopyDenseRows(job);
  }
  StoreWords(job);
  StoreSummaries(job.shape, job.layout, job.rows, keys, job.tile, job.summaries);
  return true;
}

const char* DecodeReference(const DecodeJob& job) {
  double row[kMaxChannels];
  const auto copy = [&](std::uint32_t channels, float* to) {
    std::fill_n(to, job.padded_channels, 0.0f);
    std::copy_n(row, channels, to);
  };
  for (std::uint32_t r = 0; r < job.rows; ++r) {
    const std::size_t at = std::size_t{r} * job.padded_channels;
    ReadKey(job.shape, job.layout, job.tile, r, row);
    copy(job.shape.key.channels, job.keys + at);
    ReadValue(job.shape, job.layout, job.tile, r, row);
    copy(job.shape.value.channels, job.values + at);
  }
  return "reference";
}

const char* GatherReference(const GatherJob& job) {
  std::memset(job.tile, 0, job.to_layout.bytes);
  const bool signs = job.to.summary == Summary::kSigns;
  if (signs) std::memset(job.summaries, 0, job.to_layout.summary_bytes);
  RotatedRows keys = {};
  for (std::uint32_t r = 0; r < job.row_count; ++r) {
    const GatherRow& source = job.rows[r];
    const TileLayout& from = job.from_layout;
    const TileLayout& to = job.to_layout;
    CopyStoredRow(job, source, r);
    const auto weight = static_cast<float>(WeightOf(job.from, from, source.tile, source.row));
    if (job.to.weights) {
      std::memcpy(job.tile + to.weights + r * sizeof(weight), &weight, sizeof(weight));
    }
    if (job.to.positions) {
      std::memcpy(job.tile + to.positions + r * sizeof(source.position), &source.position,
                  sizeof(source.position));
    }
    if (signs) {
      CopySigns(job.to, from, source.summaries, source.row, to, job.summaries, r);
      continue;
    }
    double row[kMaxChannels];
    ReadKey(job.from, from, source.tile, source.row, row);
    std::copy_n(row, job.to.key.channels, keys.rows[r]);
  }
  if (!signs) {
    StoreSummaries(job.to, job.to_layout, job.row_count, keys, job.tile, job.summaries);
  }
  return "reference";
}

}  // namespace tessera::kernels
