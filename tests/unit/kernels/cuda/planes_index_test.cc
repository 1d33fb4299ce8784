// The operands that planes_index.h makes of a tile's words, against the codes that the reference
// reads from it.
#include "kernels/cuda/common/planes_index.h"

#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/planes.h"

namespace tessera::kernels::cuda {
namespace {

constexpr std::uint8_t kWidths[] = {2, 4, 6, 8};
constexpr std::uint32_t kWarpLanes = 32;
constexpr std::uint32_t kGroups = kTileEntries / kGroupRows;

std::uint32_t WordAt(const std::byte* at) {
  std::uint32_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

std::uint32_t ByteOf(std::uint32_t word, std::uint32_t i) { return word >> (8 * i) & 0xff; }

// A tile of random bytes, read as the kernels and as the reference do.
struct Tile {
  Tile(std::uint32_t head_dim, PlaneWidths key, PlaneWidths value)
      : shape(PlanesShape(head_dim, key, value)), layout(LayoutOf(shape)), bytes(layout.bytes) {
    std::mt19937 random(head_dim);
    for (std::byte& byte : bytes) byte = std::byte(random() & 0xff);
  }
  const std::byte* quad(std::uint32_t index) const {
    return bytes.data() + index * layout.quad.bytes;
  }
  HalfPlane half(bool of_value, std::uint32_t half) const {
    return HalfPlaneOf(shape, layout.quad, of_value, half);
  }
  // The code of a channel of a half.
  std::uint32_t Code(bool of_value, std::uint32_t row, std::uint32_t half,
                     std::uint32_t channel) const {
    const SidePlanes side = of_value ? ValuePlanes(shape, layout) : KeyPlanes(shape, layout);
    const bool two = side.planes == 2;
    return ReadCode(side, bytes.data(), row, two ? half : 0,
                    two ? channel : half * shape.head_dim / 2 + channel);
  }

  TileShape shape;
  TileLayout layout;
  std::vector<std::byte> bytes;
};

template <class Test>
void ForEachTile(Test test) {
  for (const std::uint32_t head_dim : kHeadDims) {
    for (const std::uint8_t first : kWidths) {
      for (const std::uint8_t second : {0, 2, 4, 6, 8}) {
        const PlaneWidths widths = {first, second};
        SCOPED_TRACE(testing::Message()
                     << head_dim << " channels, widths " << int{first} << ", " << int{second});
        test(Tile(head_dim, widths, widths));
        if (testing::Test::HasFailure()) return;
      }
    }
  }
}

// The codes of byte j of register r of a lane's operand of K, as the kernel adds them up.
std::uint32_t KeyCode(const HalfPlane& plane, const std::byte* quad, std::uint32_t slot,
                      std::uint32_t step, std::uint32_t row, std::uint32_t r, std::uint32_t j) {
  const auto pair = [&](std::uint32_t words, std::uint32_t word) {
    const std::byte* at = quad + words + (word * kQuadRows + slot) * 4;
    return std::pair(WordAt(at), WordAt(at + 4));
  };
  const std::uint32_t register_of = 2 * r + row;
  std::uint32_t code = 0;
  if (plane.has_nibbles()) {
    const auto [low, high] = pair(plane.words, step);
    code = ByteOf(KeyNibbles(low, high).a[register_of], j);
  }
  if (plane.has_nibbles() && plane.has_crumbs()) code *= 4;
  if (plane.has_crumbs()) {
    const auto [low, high] = pair(plane.crumbs, step / 2);
    code += ByteOf(KeyCrumbs(low, high, 4 * (step % 2)).a[register_of], j);
  }
  if (plane.has_bytes()) {
    const auto [low, high] = pair(plane.words, 2 * step + r);
    code = ByteOf(row == 0 ? low : high, j);
  }
  return code;
}

TEST(PlanesIndex, OperandsOfKeysHoldEveryCodeOnce) {
  ForEachTile([](const Tile& tile) {
    const std::uint32_t dim = tile.shape.head_dim;
    std::set<std::pair<std::uint32_t, std::uint32_t>> seen;
    for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
      const std::uint32_t slot = KeySlotOf(lane);
      for (std::uint32_t at = 0; at < kGroups * 2 * kHalves * KeySteps(dim); ++at) {
        const std::uint32_t group = at % kGroups;
        const std::uint32_t i = at / kGroups % 2;
        const std::uint32_t half = at / kGroups / 2 % kHalves;
        const std::uint32_t step = KeyStepOf(dim, lane, at / kGroups / 2 / kHalves);
        const std::uint32_t quad = group * kGroupQuads + KeyQuadOf(lane);
        const std::uint32_t row = QuadRowOf(lane, group, i);
        ASSERT_EQ(row, quad * kQuadRows + slot + i);
        for (std::uint32_t element = 0; element < 8; ++element) {
          const std::uint32_t channel = KeyChannelOf(step, element / 4) + element % 4;
          ASSERT_EQ(KeyCode(tile.half(false, half), tile.quad(quad), slot, step, i, element / 4,
                            element % 4),
                    tile.Code(false, row, half, channel))
              << "row " << row << " half " << half << " channel " << channel;
          ASSERT_TRUE(seen.emplace(row, half * dim / 2 + channel).second);
        }
      }
    }
    ASSERT_EQ(seen.size(), std::size_t{kTileEntries} * dim);
  });
}

// The 4-bit or 2-bit fields of a word of V as an operand: register r, half h.
std::uint32_t ValueField(std::uint32_t word, std::uint32_t mask, std::uint32_t shift,
                         std::uint32_t h) {
  return (word >> shift & mask) >> (16 * h);
}

// The code of register r (rows g, g + 8 at k 0-7, then k 8-15) and half h of a pair of channels.
std::uint32_t ValueCode(const HalfPlane& plane, const std::byte* quad, std::uint32_t pair,
                        std::uint32_t r, std::uint32_t h) {
  std::uint32_t code = 0;
  if (plane.has_nibbles()) {
    const std::uint32_t word = WordAt(quad + plane.words + pair * 4);
    code = ValueField(word, kNibblePair, 4 * r, h) & 0xf;
  }
  if (plane.has_nibbles() && plane.has_crumbs()) code *= 4;
  if (plane.has_crumbs()) {
    const std::uint32_t word = WordAt(quad + plane.crumbs + pair / 2 * 4) >> (4 * (pair % 2));
    code += ValueField(word, kCrumbPair, r / 2 * 8 + r % 2 * 2, h) & 3;
  }
  if (plane.has_bytes()) {
    const std::uint32_t word = WordAt(quad + plane.words + (2 * pair + r % 2) * 4);
    code = 16 * (ValueField(word, kNibblePair, r / 2 * 8 + 4, h) & 0xf) +
           (ValueField(word, kNibblePair, r / 2 * 8, h) & 0xf);
  }
  return code;
}

TEST(PlanesIndex, OperandsOfValuesHoldEveryCodeOnce) {
  // The slot of "k" 2t + h (r / 2 = 0) or 2t + 8 + h: the order in which weights are transposed.
  const auto slot_of = [](std::uint32_t r, std::uint32_t h) { return r / 2 + 2 * h; };
  ForEachTile([&](const Tile& tile) {
    const std::uint32_t dim = tile.shape.head_dim;
    std::set<std::pair<std::uint32_t, std::uint32_t>> seen;
    for (std::uint32_t lane = 0; lane < kWarpLanes; ++lane) {
      for (std::uint32_t at = 0; at < kGroups * kHalves * ValueSteps(dim); ++at) {
        const std::uint32_t group = at % kGroups;
        const std::uint32_t half = at / kGroups % kHalves;
        const std::uint32_t pair = ChannelPairOf(dim, lane, at / kGroups / kHalves);
        const std::uint32_t quad = group * kGroupQuads + ValueQuadOf(lane);
        for (std::uint32_t i = 0; i < 8; ++i) {
          const std::uint32_t r = i / 2;
          const std::uint32_t row = quad * kQuadRows + slot_of(r, i % 2);
          const std::uint32_t channel = 2 * pair + r % 2;
          ASSERT_EQ(ValueCode(tile.half(true, half), tile.quad(quad), pair, r, i % 2),
                    tile.Code(true, row, half, channel))
              << "row " << row << " half " << half << " channel " << channel;
          ASSERT_TRUE(seen.emplace(row, half * dim / 2 + channel).second);
        }
      }
    }
    ASSERT_EQ(seen.size(), std::size_t{kTileEntries} * dim);
  });
}

// Weights leave the softmax by accumulator rows; the operand of V counts them as "k".
TEST(PlanesIndex, WeightsMeetTheirRows) {
  for (std::uint32_t t = 0; t < 4; ++t) {
    for (std::uint32_t h = 0; h < 2; ++h) {
      // Accumulator row 2 t + h of the first eight is lane 4 (2 t + h); of the last eight i = 1.
      for (std::uint32_t i = 0; i < 2; ++i) {
        EXPECT_EQ(QuadRowOf(4 * (2 * t + h), 0, i), t * kQuadRows + i + 2 * h);
      }
    }
  }
}

TEST(PlanesIndex, CentresAreThoseOfTheOperands) {
  for (const std::uint32_t width : kWidths) {
    // A value of 0 is the mean of all codes; the operands are linear in the code.
    const std::uint32_t codes = 1u << width;
    double sum = 0;
    for (std::uint32_t code = 0; code < codes; ++code) {
      const std::uint32_t low_bits = width == 8 ? 4 : width == 6 ? 2 : 0;
      const std::uint32_t upper = code >> low_bits;
      const std::uint32_t lower = code & ((1u << low_bits) - 1);
      sum += UpperFactor(width) * (128.0 + upper) + (low_bits == 0 ? 0 : 128.0 + lower);
    }
    EXPECT_EQ(ValueCentre(width), sum / codes) << width;
    EXPECT_EQ(KeyCentre(width), (codes - 1) / 2.0) << width;
  }
}

}  // namespace
}  // namespace tessera::kernels::cuda
