// encode: which channels it keeps, how it stores them, and the rest of the tile.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/contract/pack/pack_conformance.h"

namespace tessera::kernels {
namespace {

constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};

std::string Trace(const TileShape& shape, const TileInput& input, Content content) {
  return Describe(shape) + " rows " + std::to_string(input.rows()) + " of " +
         ElementName(input.type()) + " content " + std::to_string(static_cast<int>(content));
}

// The exact encoding of a row, and the allowed error.
struct ExactRow {
  std::vector<double> elements;
  double error;
};

// A rotated row, whose channels may each be off by `rotation_error` times the row's length.
ExactRow Rotated(const TileShape& shape, const TileInput& input, const RotationView& rotation,
                 double rotation_error, bool value, std::uint32_t row) {
  const std::vector<double> elements = input.Row(value, row);
  double squares = 0;
  for (double e : elements) squares += e * e;
  return {.elements = RotateExactly(value ? rotation.value : rotation.key, rotation.type,
                                    (value ? shape.value : shape.key).channels, elements),
          .error = std::sqrt(squares) * rotation_error + 0x1p-118};
}

ExactRow MeanKey(const TileShape& shape, const TileInput& input, const RotationView& rotation,
                 double rotation_error, std::uint32_t block) {
  ExactRow mean = {.elements = std::vector<double>(shape.key.channels, 0.0), .error = 0};
  const std::uint32_t begin = block * shape.block;
  const std::uint32_t end = std::min<std::uint32_t>(begin + shape.block, input.rows());
  for (std::uint32_t r = begin; r < end; ++r) {
    const ExactRow row = Rotated(shape, input, rotation, rotation_error, false, r);
    for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
      mean.elements[c] += row.elements[c] / (end - begin);
    }
    mean.error = std::max(mean.error, row.error);
  }
  return mean;
}

std::vector<double> GroupLengths(const TileShape& shape, const std::vector<double>& row) {
  std::vector<double> lengths;
  for (std::size_t c = 0; c < row.size(); c += shape.group) {
    double squares = 0;
    for (std::uint32_t i = 0; i < shape.group; ++i) squares += row[c + i] * row[c + i];
    lengths.push_back(std::sqrt(squares));
  }
  return lengths;
}

// Every kept group must be as strong as the weakest of the strongest groups, found by sorting all.
void JudgeChoice(const TileShape& shape, std::uint32_t wanted, const ReadTileRow& stored,
                 const ExactRow& exact) {
  ASSERT_TRUE(stored.padding_is_zero);
  const std::vector<double> lengths = GroupLengths(shape, exact.elements);
  std::vector<double> sorted = lengths;
  std::sort(sorted.rbegin(), sorted.rend());
  const double weakest = sorted[wanted - 1];
  const double allowed = 2 * std::sqrt(shape.group) * exact.error + weakest * 0x1p-20;
  std::uint32_t kept = 0;
  for (std::uint32_t g = 0; g < lengths.size(); ++g) {
    if (!stored.kept[g * shape.group]) continue;
    ++kept;
    ASSERT_GE(lengths[g], weakest - allowed) << "group " << g << " is kept, too weak";
  }
  ASSERT_EQ(kept, wanted);
}

void JudgeValues(const TileShape& shape, const ReadTileRow& stored, const ExactRow& exact) {
  const ValueType type = ValuesOf(shape.format);
  double peak = 0;
  for (std::size_t c = 0; c < exact.elements.size(); ++c) {
    if (stored.kept[c]) peak = std::max(peak, std::fabs(exact.elements[c]));
  }
  if (IsScaled(type) && peak > 2 * kSmallestScaledPeak) {
    ASSERT_LE(std::fabs(stored.scale * LargestStored(type) - peak), peak * 0x1p-8 + exact.error);
  }
  for (std::size_t c = 0; c < exact.elements.size(); ++c) {
    if (!stored.kept[c]) continue;
    const double e = exact.elements[c];
    double rounding = 0;
    switch (type) {
      case ValueType::kBf16:
        rounding = std::fabs(e) * 0x1p-8 + 0x1p-133;
        break;
      case ValueType::kFp16:
        rounding = std::fabs(e) * 0x1p-11 + 0x1p-25;
        break;
      case ValueType::kInt8:
        rounding = stored.scale * 0.5001;
        break;
      case ValueType::kFp8:
        rounding = std::max(std::fabs(e) * 0.0626, stored.scale * 0x1p-10);
        break;
    }
    if (stored.scale == 0 && IsScaled(type)) rounding = 2 * kSmallestScaledPeak;
    ASSERT_LE(std::fabs(stored.elements[c] - e), rounding * 1.001 + 1.01 * exact.error)
        << "channel " << c << ": " << stored.elements[c] << ", exact " << e;
  }
}

void JudgeRow(const TileShape& shape, const std::byte* tile, Array array, std::uint32_t row,
              const ExactRow& exact) {
  SCOPED_TRACE("row " + std::to_string(row) + " of array " +
               std::to_string(static_cast<int>(array)));
  const ReadTileRow stored = ReadByDefinition(shape, tile, array, row);
  JudgeChoice(shape, RowsOf(shape, array).kept / shape.group, stored, exact);
  JudgeValues(shape, stored, exact);
}

// The smallest bf16 not below a value, and the greatest not above it.
void JudgeMinMax(const TileShape& shape, const std::byte* tile, std::uint32_t rows) {
  for (std::uint32_t b = 0; b * shape.block < rows; ++b) {
    const std::vector<double> bounds = ReadByDefinition(shape, tile, Array::kBlocks, b).elements;
    for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
      double least = std::numeric_limits<double>::infinity();
      double greatest = -least;
      for (std::uint32_t r = b * shape.block;
           r < std::min<std::uint32_t>(rows, (b + 1) * shape.block); ++r) {
        const double e = ReadByDefinition(shape, tile, Array::kKeys, r).elements[c];
        least = std::min(least, e);
        greatest = std::max(greatest, e);
      }
      const auto is_bf16 = [](double e) {
        return (std::bit_cast<std::uint32_t>(static_cast<float>(e)) & 0xffffu) == 0;
      };
      ASSERT_LE(bounds[c], least) << "channel " << c;
      ASSERT_GE(bounds[shape.key.channels + c], greatest) << "channel " << c;
      if (!shape.packed() || is_bf16(least)) {
        ASSERT_EQ(bounds[c], least);
      }
      if (!shape.packed() || is_bf16(greatest)) {
        ASSERT_EQ(bounds[shape.key.channels + c], greatest);
      }
      ASSERT_GE(bounds[c], least - std::fabs(least) * 0x1p-7 - 0x1p-133);
      ASSERT_LE(bounds[shape.key.channels + c], greatest + std::fabs(greatest) * 0x1p-7 + 0x1p-133);
    }
  }
}

// Rows and blocks without entries, and the padding between arrays, must be zero.
void JudgeDeadBytes(const TileShape& shape, std::vector<std::byte> tile, std::uint32_t rows) {
  const TileLayout l = LayoutOf(shape);
  const std::uint32_t blocks = shape.block == 0 ? 0 : (rows + shape.block - 1) / shape.block;
  const struct {
    std::uint32_t begin, rows, row_bytes;
  } live[] = {{l.key_bits, rows, l.key_row.bits},
              {l.key_scales, rows, l.key_row.scale},
              {l.key_data, rows, l.key_row.data},
              {l.value_bits, rows, l.value_row.bits},
              {l.value_scales, rows, l.value_row.scale},
              {l.value_data, rows, l.value_row.data},
              {l.bytes + l.block_bits, blocks, l.block_row.bits},
              {l.bytes + l.block_scales, blocks, l.block_row.scale},
              {l.bytes + l.block_data, blocks, l.block_row.data},
              {l.weights, shape.weights ? rows : 0, 4},
              {l.positions, shape.positions ? rows : 0, 4}};
  for (const auto& array : live) {
    std::fill_n(tile.begin() + array.begin, array.rows * array.row_bytes, std::byte{0});
  }
  for (std::size_t i = 0; i < tile.size(); ++i) {
    ASSERT_EQ(tile[i], std::byte{0}) << "byte " << i << " belongs to no entry";
  }
}

// Without a rotation the choice of channels uses no rounded arithmetic, so the bytes must equal
// those of the reference for any input.
TEST_P(PackConformance, EncodeWithoutRotationGivesTheBytesOfTheReference) {
  TESSERA_NEEDS(encode);
  for (int round = 0; round < Rounds(1500); ++round) {
    const TileShape shape = RandomShape(random_, {.dense = true});
    const ElementType type = shape.packed() ? kTypes[random_.Below(3)] : ElementsOf(shape.format);
    const auto rows = static_cast<std::uint32_t>(random_.OneIn(2) ? 32 : random_.Between(1, 32));
    const Content content = kContents[random_.Below(std::size(kContents))];
    const TileInput input(shape, type, rows, content, random_);
    SCOPED_TRACE(Trace(shape, input, content));
    const auto expected = EncodeTile(reference(), shape, input, {});
    const auto tile = EncodeTile(ops(), shape, input, {});
    ASSERT_EQ(tile.has_value(), expected.has_value());
    if (!expected.has_value()) {  // too large for the value type
      ASSERT_EQ(shape.format, TileFormat::kPackedFp16);
      continue;
    }
    ASSERT_EQ(FirstDifference(shape, *expected, *tile), "");
    JudgeDeadBytes(shape, *tile, rows);
    if (HasFatalFailure()) return;
  }
}

// A tie selects the lower channel, from the bits alone.
TEST_P(PackConformance, EncodeTakesTheLowerOfEqualGroups) {
  TESSERA_NEEDS(encode);
  for (int round = 0; round < Rounds(60); ++round) {
    TileShape shape = RandomShape(random_, {.summary = false, .words = false});
    const Content content = random_.OneIn(2) ? Content::kEqual : Content::kZeros;
    const TileInput input(shape, kTypes[random_.Below(3)], 5, content, random_);
    SCOPED_TRACE(Trace(shape, input, content));
    const auto tile = EncodeTile(ops(), shape, input, {});
    ASSERT_TRUE(tile.has_value());
    for (std::uint32_t r = 0; r < 5; ++r) {
      const ReadTileRow row = ReadByDefinition(shape, tile->data(), Array::kKeys, r);
      for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
        ASSERT_EQ(row.kept[c], c < shape.key.kept);
      }
    }
  }
}

// Checks kept and stored channels without the reference.
TEST_P(PackConformance, EncodeKeepsTheStrongestOfRotatedRows) {
  TESSERA_NEEDS(encode);
  constexpr Content kJudged[] = {Content::kNormal, Content::kSparse, Content::kEqual,
                                 Content::kHuge,   Content::kTies,   Content::kZeros,
                                 Content::kTiny};
  const double rotation_error = subject().rotation_error;
  for (int round = 0; round < Rounds(120); ++round) {
    const TileShape shape = RandomShape(random_, {.cut = true});
    const Content content = kJudged[random_.Below(std::size(kJudged))];
    if (content == Content::kHuge && ValuesOf(shape.format) == ValueType::kFp16) continue;
    const Rotations rotations(shape, random_.OneIn(2) ? ElementType::kBf16 : ElementType::kFp32,
                              random_);
    const auto rows = static_cast<std::uint32_t>(random_.OneIn(2) ? 32 : random_.Between(1, 32));
    const TileInput input(shape, kTypes[random_.Below(3)], rows, content, random_);
    SCOPED_TRACE(Trace(shape, input, content));
    const RotationView rotation = SomeOf(rotations.view(), shape, random_);
    const auto tile = EncodeTile(ops(), shape, input, rotation);
    ASSERT_TRUE(tile.has_value());
    for (std::uint32_t r = 0; r < rows; ++r) {
      JudgeRow(shape, tile->data(), Array::kKeys, r,
               Rotated(shape, input, rotation, rotation_error, false, r));
      JudgeRow(shape, tile->data(), Array::kValues, r,
               Rotated(shape, input, rotation, rotation_error, true, r));
      if (HasFatalFailure()) return;
    }
    if (shape.summary == Summary::kMean) {
      for (std::uint32_t b = 0; b * shape.block < rows; ++b) {
        JudgeRow(shape, tile->data(), Array::kBlocks, b,
                 MeanKey(shape, input, rotation, rotation_error, b));
      }
    } else if (shape.summary == Summary::kMinMax) {
      JudgeMinMax(shape, tile->data(), rows);
    }
    JudgeDeadBytes(shape, *tile, rows);
    if (HasFatalFailure()) return;
  }
}

TEST_P(PackConformance, EncodeJudgesMinMaxOfWhatIsStored) {
  TESSERA_NEEDS(encode);
  for (int round = 0; round < Rounds(60); ++round) {
    TileShape shape = RandomShape(random_, {.dense = true});
    shape.summary = Summary::kMinMax;
    shape.block = static_cast<std::uint8_t>(4u << random_.Below(3));
    const ElementType type = shape.packed() ? kTypes[random_.Below(3)] : ElementsOf(shape.format);
    const auto rows = static_cast<std::uint32_t>(random_.Between(1, 32));
    const TileInput input(shape, type, rows, Content::kNormal, random_);
    SCOPED_TRACE(Describe(shape));
    const auto tile = EncodeTile(ops(), shape, input, {});
    ASSERT_TRUE(tile.has_value());
    JudgeMinMax(shape, tile->data(), rows);
    if (HasFatalFailure()) return;
  }
}

TEST_P(PackConformance, EncodeStoresWeightsAndPositions) {
  TESSERA_NEEDS(encode);
  for (int round = 0; round < Rounds(40); ++round) {
    TileShape shape = RandomShape(random_, {.dense = true});
    shape.weights = shape.positions = true;
    const ElementType type = shape.packed() ? ElementType::kBf16 : ElementsOf(shape.format);
    const auto rows = static_cast<std::uint32_t>(random_.Between(1, 32));
    const TileInput input(shape, type, rows, Content::kNormal, random_);
    const auto tile = EncodeTile(ops(), shape, input, {});
    ASSERT_TRUE(tile.has_value());
    const TileLayout layout = LayoutOf(shape);
    for (std::uint32_t r = 0; r < rows; ++r) {
      float weight;
      std::uint32_t position;
      std::memcpy(&weight, tile->data() + layout.weights + 4 * r, 4);
      std::memcpy(&position, tile->data() + layout.positions + 4 * r, 4);
      ASSERT_EQ(weight, input.weights.empty() ? 1.0f : input.weights[r]);
      ASSERT_EQ(position, input.positions.empty() ? r : input.positions[r]);
    }
  }
}

TEST_P(PackConformance, EncodeRefusesWhatIsNotFinite) {
  TESSERA_NEEDS(encode);
  constexpr float kBad[] = {std::numeric_limits<float>::quiet_NaN(),
                            std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()};
  for (int round = 0; round < Rounds(80); ++round) {
    const bool rotated = random_.OneIn(2);
    const TileShape shape = RandomShape(random_, {.dense = !rotated});
    const Rotations rotations(shape, ElementType::kBf16, random_);
    const ElementType type = shape.packed() ? kTypes[random_.Below(3)] : ElementsOf(shape.format);
    const auto rows = static_cast<std::uint32_t>(random_.Between(1, 32));
    TileInput input(shape, type, rows, Content::kNormal, random_);
    const RotationView rotation =
        rotated ? SomeOf(rotations.view(), shape, random_) : RotationView{};
    ASSERT_TRUE(EncodeTile(ops(), shape, input, rotation).has_value());
    const bool value = random_.OneIn(2);
    const auto row = static_cast<std::uint32_t>(random_.Below(rows));
    const auto channel = static_cast<std::uint32_t>(random_.Below(shape.head_dim));
    input.Set(value, row, channel, random_.Pick(kBad));
    ASSERT_FALSE(EncodeTile(ops(), shape, input, rotation).has_value())
        << Describe(shape) << (value ? " value" : " key") << " row " << row << " channel "
        << channel << (rotated ? " rotated" : "");
  }
}

// Refuses the smallest magnitude that would be stored as infinity, and accepts the one below.
TEST_P(PackConformance, EncodeRefusesWhatCannotBeStored) {
  TESSERA_NEEDS(encode);
  constexpr float kBeyondAll = std::numeric_limits<float>::infinity();
  struct Border {
    ValueType values;
    float last;
  };
  for (const Border& border : {Border{ValueType::kFp16, std::nextafter(65520.0f, 0.0f)},
                               Border{ValueType::kBf16, std::nextafter(0x1.ffp127f, 0.0f)}}) {
    const TileShape shape = {
        .format = PackedFormat(border.values), .key = {128, 32}, .value = {128, 32}};
    TileInput input(shape, ElementType::kFp32, 3, Content::kNormal, random_);
    const bool value = random_.OneIn(2);
    const auto channel = static_cast<std::uint32_t>(random_.Below(shape.head_dim));
    input.Set(value, 2, channel, border.last);
    EXPECT_TRUE(EncodeTile(ops(), shape, input, {}).has_value());
    for (float beyond :
         {std::nextafter(border.last, kBeyondAll), -std::nextafter(border.last, kBeyondAll)}) {
      input.Set(value, 2, channel, beyond);
      EXPECT_FALSE(EncodeTile(ops(), shape, input, {}).has_value()) << beyond;
    }
  }
}

}  // namespace
}  // namespace tessera::kernels
