// The lane arithmetic of packed rows, compared with rows read element by element: over all lanes of
// a warp every channel of every row is visited exactly once.
#include "kernels/cuda/common/packed_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/format/tile_shape.h"
#include "kernels/reference/tile_row.h"
#include "tests/fakes/seed.h"
#include "tests/unit/kernels/cuda/packed_lanes.h"

namespace tessera::kernels::cuda {
namespace {

constexpr std::uint32_t kRows = 16;  // per warp

bool Same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// The 16 rows from `first` on of a tile's keys or values, as a warp sees them: arrays in
// word-aligned memory, followed by other bytes.
struct WarpRows {
  WarpRows(const TileShape& shape, const std::byte* tile, std::uint32_t first, bool value,
           TestRandom& random)
      : side(value ? shape.value : shape.key),
        row(value ? LayoutOf(shape).value_row : LayoutOf(shape).key_row) {
    const TileLayout layout = LayoutOf(shape);
    const auto copy = [&](std::uint32_t at, std::uint32_t row_bytes) {
      std::vector<std::uint32_t> words((kRows * row_bytes + 3) / 4 + 128);
      for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(random.Bits());
      std::memcpy(words.data(), tile + at + first * row_bytes, kRows * row_bytes);
      return words;
    };
    bits = copy(value ? layout.value_bits : layout.key_bits, row.bits);
    data = copy(value ? layout.value_data : layout.key_data, row.data);
    for (std::uint32_t r = 0; r < kRows; ++r) {
      const StoredRow stored =
          value ? ValueRow(shape, layout, tile, first + r) : KeyRow(shape, layout, tile, first + r);
      scales.push_back(stored.scale == nullptr ? 1
                                               : ElementAt(stored.scale, 0, ElementType::kBf16));
      ReadRow(stored, expected.emplace_back(kMaxChannels, 0.0).data());
    }
  }
  const std::byte* row_data(std::uint32_t r) const {
    return reinterpret_cast<const std::byte*>(data.data()) + r * row.data;
  }

  RowShape side;
  RowBytes row;
  std::vector<std::uint32_t> bits, data;
  std::vector<double> scales;
  std::vector<std::vector<double>> expected;  // zeros from `channels` on
};

double Half(ValueType values, std::uint32_t word, std::uint32_t half) {
  const auto bits = static_cast<std::uint16_t>(word >> (16 * half));
  return OperandType(values) == ElementType::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
}

// The elements that one lane visits, and how often.
template <ValueType kValues, std::uint32_t kHeadDim, std::uint32_t kGroup>
class Warp {
 public:
  explicit Warp(const WarpRows& rows) : rows_(rows) {}

  void CheckKeys() {
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      for (std::uint32_t part = 0; part < 4; ++part) {  // the four registers of an A operand
        const std::uint32_t row = lane / 4 + part % 2 * 8;
        const std::uint32_t slice = KeySlice(lane, part / 2);
        auto walk = Walk(row, slice);
        for (std::uint32_t s = 0; s < kHeadDim / 16; ++s) {
          const std::uint32_t word = ToOperand<kValues>(walk.Next(s));
          Check(row, PairChannel(kHeadDim, slice, s), Half(kValues, word, 0));
          Check(row, PairChannel(kHeadDim, slice, s) + 1, Half(kValues, word, 1));
        }
      }
    }
    CheckCount();
  }

  void CheckValues() {
    for (std::uint32_t lane = 0; lane < 32; ++lane) {
      const std::uint32_t slice = ValueSlice(lane);
      for (std::uint32_t pair = 0; pair < 2; ++pair) {
        const std::uint32_t first = ValueEntry(lane, pair * 2);
        ASSERT_EQ(ValueEntry(lane, pair * 2 + 1), first + 1);  // the two k of a register
        auto one = Walk(first, slice);
        auto two = Walk(first + 1, slice);
        for (std::uint32_t s = 0; s < kHeadDim / 16; ++s) {
          const std::uint32_t a = ToOperand<kValues>(one.Next(s));
          const std::uint32_t b = ToOperand<kValues>(two.Next(s));
          const std::uint32_t channel = PairChannel(kHeadDim, slice, s);
          Check(first, channel, Half(kValues, LowHalves(a, b), 0));
          Check(first + 1, channel, Half(kValues, LowHalves(a, b), 1));
          Check(first, channel + 1, Half(kValues, HighHalves(a, b), 0));
          Check(first + 1, channel + 1, Half(kValues, HighHalves(a, b), 1));
        }
      }
    }
    CheckCount();
  }

 private:
  auto Walk(std::uint32_t row, std::uint32_t slice) {
    const std::uint32_t groups = rows_.side.channels / kGroup;
    RowSlice found = WholeSlice<kHeadDim, kGroup>(groups, slice);
    if (rows_.side.has_bitmap()) {
      const std::uint64_t starts =
          SliceStarts<kHeadDim, kGroup>(rows_.bits.data(), row, rows_.row.bits, groups);
      found = FindSlice<kHeadDim, kGroup>(rows_.bits.data(), row, rows_.row.bits, groups, slice,
                                          starts >> (8 * slice) & 0xff);
    }
    return PairWalk<kGroup, static_cast<std::uint32_t>(ValueBytes(kValues))>(found,
                                                                             rows_.row_data(row));
  }
  void Check(std::uint32_t row, std::uint32_t channel, double got) {
    ASSERT_LT(channel, kHeadDim);
    const double expected = rows_.expected[row][channel];
    ASSERT_TRUE(Same(got * rows_.scales[row], expected))
        << "row " << row << " channel " << channel << ": " << got << " x " << rows_.scales[row]
        << ", expected " << expected;
    ++seen_[row * kHeadDim + channel];
  }
  void CheckCount() {
    ASSERT_TRUE(std::all_of(seen_.begin(), seen_.end(), [](int times) { return times == 1; }));
    std::fill(seen_.begin(), seen_.end(), 0);
  }

  const WarpRows& rows_;
  std::vector<int> seen_ = std::vector<int>(kRows * kHeadDim, 0);
};

template <ValueType kValues, std::uint32_t kHeadDim, std::uint32_t kGroup>
void CheckTile(const TileShape& shape, TestRandom& random) {
  const tests::PackedTile tile(shape, random);
  for (const bool value : {false, true}) {
    const WarpRows rows(shape, tile.data(), random.OneIn(2) ? 16 : 0, value, random);
    Warp<kValues, kHeadDim, kGroup> warp(rows);
    value ? warp.CheckValues() : warp.CheckKeys();
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Every number of channels, truncated or not, with random numbers kept; always includes the limits.
template <ValueType kValues, std::uint32_t kHeadDim, std::uint32_t kGroup>
void CheckEveryWidth(TestRandom& random) {
  for (std::uint32_t channels = kGroup; channels <= kHeadDim; channels += kGroup) {
    const std::uint32_t groups = channels / kGroup;
    const std::uint32_t choices[] = {
        1, groups, static_cast<std::uint32_t>(random.Between(1, groups)), std::max(1u, groups / 4)};
    for (const std::uint32_t kept : choices) {
      const RowShape row = {static_cast<std::uint16_t>(channels),
                            static_cast<std::uint16_t>(kept * kGroup)};
      const RowShape other = {
          kHeadDim, static_cast<std::uint16_t>(random.OneIn(2) ? kHeadDim : kept * kGroup)};
      const TileShape shape = {.format = PackedFormat(kValues),
                               .head_dim = kHeadDim,
                               .key = row,
                               .value = random.OneIn(2) ? row : other,
                               .group = kGroup};
      ASSERT_EQ(UnsupportedReason(shape), nullptr);
      SCOPED_TRACE(testing::Message() << "channels " << channels << " kept " << kept * kGroup);
      CheckTile<kValues, kHeadDim, kGroup>(shape, random);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

template <ValueType kValues>
void CheckValueType() {
  TestRandom random;
  CheckEveryWidth<kValues, 64, 1>(random);
  CheckEveryWidth<kValues, 64, 2>(random);
  CheckEveryWidth<kValues, 64, 4>(random);
  CheckEveryWidth<kValues, 128, 1>(random);
  CheckEveryWidth<kValues, 128, 2>(random);
  CheckEveryWidth<kValues, 128, 4>(random);
  CheckEveryWidth<kValues, 256, 1>(random);
  CheckEveryWidth<kValues, 256, 2>(random);
  CheckEveryWidth<kValues, 256, 4>(random);
}

TEST(PackedIndex, LanesFindEveryBf16Value) { CheckValueType<ValueType::kBf16>(); }
TEST(PackedIndex, LanesFindEveryFp16Value) { CheckValueType<ValueType::kFp16>(); }
TEST(PackedIndex, LanesFindEveryInt8Value) { CheckValueType<ValueType::kInt8>(); }
TEST(PackedIndex, LanesFindEveryFp8Value) { CheckValueType<ValueType::kFp8>(); }

TEST(PackedIndex, StoredBytesBecomeOperandsExactly) {
  for (std::uint32_t low = 0; low < 256; ++low) {
    const std::uint32_t high = 255 - low;
    const auto check = [&](ValueType type, std::uint32_t word) {
      const float expected[] = {FromScaled(type, static_cast<std::uint8_t>(low)),
                                FromScaled(type, static_cast<std::uint8_t>(high))};
      ASSERT_TRUE(Same(Half(type, word, 0), expected[0])) << low;
      ASSERT_TRUE(Same(Half(type, word, 1), expected[1])) << high;
      if (low == 0x80 && type == ValueType::kFp8) {
        ASSERT_EQ(word & 0xffffu, 0x8000u);  // -0 stays -0
      }
    };
    check(ValueType::kInt8, ToOperand<ValueType::kInt8>(low | high << 8));
    check(ValueType::kFp8, ToOperand<ValueType::kFp8>(low | high << 8));
  }
}

TEST(PackedIndex, BitsAtReadsAnyRun) {
  TestRandom random;
  std::vector<std::uint32_t> words(8);
  for (std::uint32_t& word : words) word = static_cast<std::uint32_t>(random.Bits());
  for (std::uint32_t first = 0; first < 7 * 32; ++first) {
    for (std::uint32_t count = 0; count <= 32; ++count) {
      std::uint32_t expected = 0;
      for (std::uint32_t i = 0; i < count; ++i) {
        expected |= (words[(first + i) / 32] >> ((first + i) % 32) & 1) << i;
      }
      ASSERT_EQ(BitsAt(words.data(), first, count), expected) << first << ", " << count;
    }
  }
}

}  // namespace
}  // namespace tessera::kernels::cuda
