#include "tests/contract/pack/pack_data.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <sstream>
#include <utility>

#include "gtest/gtest.h"

namespace tessera::kernels {
namespace {

double Element(ElementType type, const std::byte* row, std::size_t index) {
  if (type == ElementType::kFp32) {
    float value;
    std::memcpy(&value, row + index * 4, 4);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, row + index * 2, 2);
  return type == ElementType::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
}

// Applies layers of plane rotations by random angles to random pairs of rows.
std::vector<double> RandomOrthogonal(std::uint32_t n, TestRandom& random) {
  std::vector<double> matrix(std::size_t{n} * n, 0.0);
  for (std::uint32_t i = 0; i < n; ++i) matrix[i * n + i] = random.OneIn(2) ? 1 : -1;
  std::vector<std::uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  for (int layer = 0; layer < 12; ++layer) {
    for (std::uint32_t i = n; i > 1; --i) std::swap(order[i - 1], order[random.Below(i)]);
    for (std::uint32_t i = 0; i < n; i += 2) {
      const double angle = static_cast<double>(random.Below(1u << 30)) * 0x1p-30 * 6.2831853;
      const double cosine = std::cos(angle);
      const double sine = std::sin(angle);
      double* a = &matrix[order[i] * n];
      double* b = &matrix[order[i + 1] * n];
      for (std::uint32_t c = 0; c < n; ++c) {
        const double old = a[c];
        a[c] = cosine * old - sine * b[c];
        b[c] = sine * old + cosine * b[c];
      }
    }
  }
  return matrix;
}

float Sign(TestRandom& random) { return random.OneIn(2) ? 1.0f : -1.0f; }

// Channel `c` of a row. `row_number` is a random number drawn once per row.
float Number(Content content, float row_number, TestRandom& random) {
  constexpr float kFew[] = {0.25f, 1.0f, 1.5f, 3.0f};
  switch (content) {
    case Content::kNormal:
      return NormalNumber(random);
    case Content::kSparse:
      return random.OneIn(6) ? NormalNumber(random) : 0.0f * Sign(random);
    case Content::kTies:
      return kFew[random.Below(4)] * Sign(random);
    case Content::kEqual:
      return row_number;
    case Content::kHuge:
      return NormalNumber(random) * 0x1p60f;
    case Content::kTiny:
      return kSmallestScaledPeak * row_number * (static_cast<float>(random.Below(257)) * 0x1p-8f) *
             Sign(random);
    case Content::kSpread:
      return std::ldexp(NormalNumber(random), static_cast<int>(random.Between(0, 200)) - 140);
    case Content::kZeros:
      return 0.0f * Sign(random);
  }
  return 0;
}

float RowNumber(Content content, TestRandom& random) {
  if (content != Content::kTiny) return NormalNumber(random);
  constexpr float kPeaks[] = {1.0f, 1.0f + 0x1p-7f, 1.152f, 1.16f, 0.99f, 0.5f, 2.0f, 1000.0f};
  return kPeaks[random.Below(std::size(kPeaks))];
}

void FillRows(const TileShape& shape, ElementType type, std::uint32_t rows, std::size_t stride,
              Content content, std::byte* data, TestRandom& random) {
  for (std::uint32_t r = 0; r < rows; ++r) {
    const float row_number = RowNumber(content, random);
    for (std::uint32_t c = 0; c < shape.head_dim; ++c) {
      StoreElement(type, data + r * stride, c, Number(content, row_number, random));
    }
  }
}

// A tile and the summaries directly after it.
struct ArrayPlace {
  const char* name;
  std::uint32_t begin;
  std::uint32_t rows;
  std::uint32_t row_bytes;
};

std::vector<ArrayPlace> ArraysOf(const TileShape& shape) {
  const TileLayout l = LayoutOf(shape);
  const std::uint32_t blocks = shape.blocks();
  return {{"key bits", l.key_bits, kTileEntries, l.key_row.bits},
          {"key scales", l.key_scales, kTileEntries, l.key_row.scale},
          {"key data", l.key_data, kTileEntries, l.key_row.data},
          {"value bits", l.value_bits, kTileEntries, l.value_row.bits},
          {"value scales", l.value_scales, kTileEntries, l.value_row.scale},
          {"value data", l.value_data, kTileEntries, l.value_row.data},
          {"block bits", l.bytes + l.block_bits, blocks, l.block_row.bits},
          {"block scales", l.bytes + l.block_scales, blocks, l.block_row.scale},
          {"block data", l.bytes + l.block_data, blocks, l.block_row.data},
          {"weights", l.weights, shape.weights ? kTileEntries : 0, 4},
          {"positions", l.positions, shape.positions ? kTileEntries : 0, 4}};
}

// A random row shape with this group size that keeps all channels or some.
RowShape RandomRow(TestRandom& random, const ShapeWish& wish, std::uint32_t head_dim,
                   std::uint32_t group) {
  std::uint64_t groups = head_dim / group;
  if (wish.cut && random.OneIn(2)) {  // three quarters of head_dim, or any number
    groups = random.OneIn(2) ? std::max(head_dim * 3 / 4 / group, 1u) : random.Between(1, groups);
  }
  const std::uint64_t kept[] = {1, groups, std::max<std::uint64_t>(groups / 4, 1),
                                random.Between(1, groups)};
  return {.channels = static_cast<std::uint16_t>(groups * group),
          .kept = static_cast<std::uint16_t>(random.Pick(kept) * group)};
}

}  // namespace

TileShape RandomShape(TestRandom& random, const ShapeWish& wish) {
  TileShape shape;
  shape.head_dim = static_cast<std::uint16_t>(random.Pick(kHeadDims));
  shape.key = shape.value = {shape.head_dim, shape.head_dim};
  if (wish.dense && random.OneIn(5)) {
    shape.format = static_cast<TileFormat>(random.Between(1, 3));
  } else {
    shape.format = static_cast<TileFormat>(random.Between(4, 7));
    shape.group = static_cast<std::uint8_t>(1u << random.Below(3));
    shape.key = RandomRow(random, wish, shape.head_dim, shape.group);
    shape.value =
        random.OneIn(2) ? shape.key : RandomRow(random, wish, shape.head_dim, shape.group);
  }
  if (wish.summary && !random.OneIn(3)) {
    shape.summary = random.OneIn(2) ? Summary::kMean : Summary::kMinMax;
    shape.block = static_cast<std::uint8_t>(4u << random.Below(3));
  }
  if (wish.words) {
    shape.weights = random.OneIn(2);
    shape.positions = random.OneIn(2);
  }
  return shape;
}

std::string Describe(const TileShape& shape) {
  constexpr const char* kFormats[] = {"?",           "dense bf16",  "dense fp16",
                                      "dense fp32",  "packed bf16", "packed fp16",
                                      "packed int8", "packed fp8",  "planes"};
  std::ostringstream text;
  text << kFormats[static_cast<std::size_t>(shape.format)] << " D " << shape.head_dim << " keys "
       << shape.key.kept << " of " << shape.key.channels << " values " << shape.value.kept << " of "
       << shape.value.channels << " g " << +shape.group << " summary "
       << static_cast<int>(shape.summary) << " b " << +shape.block << " planes "
       << +shape.key_planes.first << '|' << +shape.key_planes.second << ", "
       << +shape.value_planes.first << '|' << +shape.value_planes.second
       << (shape.weights ? " weights" : "") << (shape.positions ? " positions" : "");
  return text.str();
}

Rotations::Rotations(const TileShape& shape, ElementType type, TestRandom& random)
    : type_(type),
      key_(RotationBytes(shape, shape.key, type)),
      value_(RotationBytes(shape, shape.value, type)) {
  const auto fill = [&](const Buffer& buffer, const RowShape& side) {
    const std::vector<double> matrix = RandomOrthogonal(shape.head_dim, random);
    for (std::size_t i = 0; i < std::size_t{side.channels} * shape.head_dim; ++i) {
      StoreElement(type, buffer.data(), i, static_cast<float>(matrix[i]));
    }
  };
  fill(key_, shape.key);
  fill(value_, shape.value);
}

Rotations::Rotations(const TileShape& shape, ElementType type,
                     const std::vector<std::uint32_t>& channels)
    : type_(type), turns_values_(false), key_(RotationBytes(shape, shape.key, type)), value_(64) {
  for (std::size_t i = 0; i < channels.size() * shape.head_dim; ++i) {
    const bool chosen = i % shape.head_dim == channels[i / shape.head_dim];
    StoreElement(type, key_.data(), i, chosen ? 1.0f : 0.0f);
  }
}

RotationView SomeOf(RotationView rotation, const TileShape& shape, TestRandom& random) {
  if (shape.key.channels == shape.head_dim && random.OneIn(3)) rotation.key = nullptr;
  if (shape.value.channels == shape.head_dim && random.OneIn(3)) rotation.value = nullptr;
  return rotation;
}

std::vector<double> RotateExactly(const std::byte* rotation, ElementType type,
                                  std::uint32_t channels, const std::vector<double>& row) {
  if (rotation == nullptr) return row;
  std::vector<double> rotated(channels, 0.0);
  for (std::uint32_t c = 0; c < channels; ++c) {
    for (std::size_t d = 0; d < row.size(); ++d) {
      rotated[c] += Element(type, rotation, c * row.size() + d) * row[d];
    }
  }
  return rotated;
}

TileInput::TileInput(const TileShape& shape, ElementType type, std::uint32_t rows, Content content,
                     TestRandom& random)
    : head_dim_(shape.head_dim),
      type_(type),
      rows_(rows),
      stride_((shape.head_dim + random.Below(3) * 8) * ElementBytes(type)) {
  const std::size_t bytes = (rows - 1) * stride_ + shape.head_dim * ElementBytes(type);
  key_ = std::make_unique<Buffer>(bytes);
  value_ = std::make_unique<Buffer>(bytes);
  FillRows(shape, type, rows, stride_, content, key_->data(), random);
  FillRows(shape, type, rows, stride_, content, value_->data(), random);
  if (random.OneIn(2)) {
    for (std::uint32_t r = 0; r < rows; ++r) {
      weights.push_back(static_cast<float>(random.Between(1, 1000)));
    }
  }
  if (random.OneIn(2)) {
    std::uint32_t at = 0;
    for (std::uint32_t r = 0; r < rows; ++r) {
      positions.push_back(at += static_cast<std::uint32_t>(random.Below(1000)));
    }
  }
}

TileInput::TileInput(const TileShape& shape, std::uint32_t rows, const std::vector<float>& keys,
                     const std::vector<float>& values)
    : head_dim_(shape.head_dim),
      type_(ElementType::kFp32),
      rows_(rows),
      stride_(shape.head_dim * sizeof(float)),
      key_(std::make_unique<Buffer>(rows * stride_)),
      value_(std::make_unique<Buffer>(rows * stride_)) {
  std::memcpy(key_->data(), keys.data(), rows * stride_);
  std::memcpy(value_->data(), values.data(), rows * stride_);
}

std::vector<double> TileInput::Row(bool value, std::uint32_t row) const {
  std::vector<double> elements(head_dim_);
  const std::byte* data = (value ? value_ : key_)->data() + row * stride_;
  for (std::uint32_t c = 0; c < head_dim_; ++c) elements[c] = Element(type_, data, c);
  return elements;
}

void TileInput::Set(bool value, std::uint32_t row, std::uint32_t channel, float element) {
  std::byte* data = (value ? value_ : key_)->data() + row * stride_;
  if (type_ == ElementType::kFp16) {  // without the clamp of StoreElement
    const std::uint16_t bits = FloatToFp16(element);
    std::memcpy(data + channel * 2, &bits, 2);
    return;
  }
  StoreElement(type_, data, channel, element);
}

EncodeJob TileInput::Job(const TileShape& shape) const {
  return {.key = key_->data(),
          .value = value_->data(),
          .stride = stride_,
          .type = type_,
          .rows = rows_,
          .weights = weights.empty() ? nullptr : weights.data(),
          .positions = positions.empty() ? nullptr : positions.data(),
          .shape = shape,
          .layout = LayoutOf(shape),
          .prepared = nullptr,
          .tile = nullptr,
          .summaries = nullptr};
}

std::optional<std::vector<std::byte>> EncodeTile(const Operations& operations,
                                                 const TileShape& shape, const TileInput& input,
                                                 const RotationView& rotation) {
  EncodeJob job = input.Job(shape);
  std::unique_ptr<Buffer> prepared;
  if (shape.packed() || shape.summary == Summary::kSigns) {
    prepared = std::make_unique<Buffer>(operations.prepared_bytes(shape, input.type()));
    operations.prepare_encode(shape, input.type(), rotation, prepared->data());
    job.prepared = prepared->data();
  }
  const Buffer tile(job.layout.bytes);
  const Buffer summaries(job.layout.summary_bytes);
  job.tile = tile.data();
  job.summaries = summaries.data();
  if (!operations.encode(job)) return std::nullopt;
  std::vector<std::byte> both(tile.data(), tile.data() + tile.size());
  both.insert(both.end(), summaries.data(), summaries.data() + summaries.size());
  return both;
}

DecodedRows DecodeTile(const Operations& operations, const TileShape& shape,
                       const std::vector<std::byte>& bytes, std::uint32_t rows) {
  const Buffer tile(bytes.size());
  std::memcpy(tile.data(), bytes.data(), bytes.size());
  const std::uint32_t padded = PaddedChannels(shape);
  const Buffer keys(std::size_t{rows} * padded * sizeof(float));
  const Buffer values(std::size_t{rows} * padded * sizeof(float));
  auto* key_floats = reinterpret_cast<float*>(keys.data());
  auto* value_floats = reinterpret_cast<float*>(values.data());
  operations.decode({.tile = tile.data(),
                     .shape = shape,
                     .layout = LayoutOf(shape),
                     .rows = rows,
                     .padded_channels = padded,
                     .keys = key_floats,
                     .values = value_floats});
  return {.channels = padded,
          .keys = {key_floats, key_floats + std::size_t{rows} * padded},
          .values = {value_floats, value_floats + std::size_t{rows} * padded}};
}

namespace {

// `from`: the base of the array's offset.
ReadTileRow ReadRowOf(const TileShape& shape, const std::byte* from, Array array,
                      std::uint32_t row) {
  const TileLayout l = LayoutOf(shape);
  const bool min_max = array == Array::kBlocks && shape.summary == Summary::kMinMax;
  const std::uint32_t bits_at = array == Array::kKeys     ? l.key_bits
                                : array == Array::kValues ? l.value_bits
                                                          : l.block_bits;
  const std::uint32_t scale_at = array == Array::kKeys     ? l.key_scales
                                 : array == Array::kValues ? l.value_scales
                                                           : l.block_scales;
  const std::uint32_t data_at = array == Array::kKeys     ? l.key_data
                                : array == Array::kValues ? l.value_data
                                                          : l.block_data;
  const RowBytes& bytes = array == Array::kKeys     ? l.key_row
                          : array == Array::kValues ? l.value_row
                                                    : l.block_row;
  const std::byte* data = from + data_at + row * bytes.data;
  ReadTileRow read;
  if (min_max || !shape.packed()) {
    const std::uint32_t count = min_max ? 2u * shape.key.channels : shape.head_dim;
    const ElementType type = min_max ? MinMaxType(shape) : ElementsOf(shape.format);
    read.kept.assign(count, true);
    for (std::uint32_t c = 0; c < count; ++c) read.elements.push_back(Element(type, data, c));
    return read;
  }
  const ValueType type = ValuesOf(shape.format);
  const std::byte* bits = from + bits_at + row * bytes.bits;
  if (IsScaled(type)) {
    read.scale = Element(ElementType::kBf16, from + scale_at + row * bytes.scale, 0);
  }
  const RowShape& side = RowsOf(shape, array);
  const std::uint32_t groups = side.channels / shape.group;
  const bool all = side.kept == side.channels;  // no bitmap then
  EXPECT_EQ(bytes.bits, all ? 0 : (groups + 7) / 8);
  std::uint32_t stored = 0;
  for (std::uint32_t g = 0; g < (all ? groups : 8 * bytes.bits); ++g) {
    const bool set = all || (std::to_integer<unsigned>(bits[g / 8]) & (1u << (g % 8))) != 0;
    if (g >= groups) {
      read.padding_is_zero = read.padding_is_zero && !set;
      continue;
    }
    for (std::uint32_t i = 0; i < shape.group; ++i) {
      read.kept.push_back(set);
      if (!set || stored == side.kept) {
        read.elements.push_back(0);
      } else if (type == ValueType::kBf16 || type == ValueType::kFp16) {
        read.elements.push_back(Element(
            type == ValueType::kBf16 ? ElementType::kBf16 : ElementType::kFp16, data, stored++));
      } else {
        read.elements.push_back(read.scale *
                                FromScaled(type, std::to_integer<std::uint8_t>(data[stored++])));
      }
    }
  }
  return read;
}

}  // namespace

ReadTileRow ReadByDefinition(const TileShape& shape, const std::byte* tile, Array array,
                             std::uint32_t row) {
  if (array == Array::kBlocks) return ReadBlock(shape, SummariesAfter(tile, LayoutOf(shape)), row);
  return ReadRowOf(shape, tile, array, row);
}

ReadTileRow ReadBlock(const TileShape& shape, const std::byte* summaries, std::uint32_t block) {
  return ReadRowOf(shape, summaries, Array::kBlocks, block);
}

std::string FirstDifference(const TileShape& shape, const std::vector<std::byte>& a,
                            const std::vector<std::byte>& b) {
  if (a.size() != b.size()) return "different sizes";
  const auto at =
      static_cast<std::uint32_t>(std::mismatch(a.begin(), a.end(), b.begin()).first - a.begin());
  if (at == a.size()) return "";
  std::ostringstream text;
  text << "byte " << at << ": 0x" << std::hex << std::to_integer<int>(a[at]) << " and 0x"
       << std::to_integer<int>(b[at]) << std::dec;
  for (const ArrayPlace& array : ArraysOf(shape)) {
    if (array.row_bytes == 0 || at < array.begin ||
        at >= array.begin + array.rows * array.row_bytes)
      continue;
    text << ", " << array.name << " row " << (at - array.begin) / array.row_bytes << " byte "
         << (at - array.begin) % array.row_bytes;
  }
  return text.str();
}

void PoisonDeadRows(const TileShape& shape, std::uint32_t rows, std::byte* tile,
                    std::byte* summaries) {
  const std::uint32_t tile_bytes = LayoutOf(shape).bytes;
  const std::uint32_t blocks = shape.block == 0 ? 0 : (rows + shape.block - 1) / shape.block;
  const QuadLayout quad = LayoutOf(shape).quad;
  for (std::uint32_t r = rows; shape.planes() && r < kTileEntries; ++r) {
    std::byte* const at = tile + r / kQuadRows * quad.bytes;
    if (r % kQuadRows == 0) std::memset(at, 0xff, quad.bytes);
    for (std::uint32_t scale = quad.key_scales; scale < quad.bytes; scale += 8) {
      const std::uint32_t planes = shape.key_planes.planes() + shape.value_planes.planes();
      if (scale < quad.key_scales + 8 * planes) std::memset(at + scale + r % 4 * 2, 0xff, 2);
    }
  }
  for (const ArrayPlace& array : ArraysOf(shape)) {
    const std::uint32_t live = std::string(array.name).rfind("block", 0) == 0 ? blocks : rows;
    if (array.row_bytes == 0 || live >= array.rows) continue;
    std::byte* const begin =
        array.begin < tile_bytes ? tile + array.begin : summaries + (array.begin - tile_bytes);
    std::memset(begin + live * array.row_bytes, 0xff, (array.rows - live) * array.row_bytes);
  }
}

}  // namespace tessera::kernels
