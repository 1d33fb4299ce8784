#include "proto/shm/lane_layout.h"

#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::shm {
namespace {

using kernels::ElementType;
using kernels::kTileEntries;

struct RandomModel {
  ElementType type;
  std::uint32_t ring_tiles;
  std::vector<LayerShape> shapes;
};

RandomModel AnyModel(TestRandom& random) {
  RandomModel model;
  constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};
  model.type = random.Pick(kTypes);
  model.ring_tiles = static_cast<std::uint32_t>(random.Between(2, 5));
  for (std::uint64_t layers = random.Between(1, 6); layers > 0; --layers) {
    model.shapes.push_back(
        {static_cast<std::uint32_t>(random.Between(1, 4)), random.Pick(kernels::kHeadDims)});
  }
  return model;
}

TEST(LaneLayout, LanesAreLayerMajorWithoutGaps) {
  TestRandom random;
  for (int i = 0; i < 100; ++i) {
    const RandomModel model = AnyModel(random);
    const LaneLayout layout(model.type, model.ring_tiles, model.shapes);
    std::uint32_t next = 0;
    ASSERT_EQ(layout.layers(), model.shapes.size());
    for (std::uint32_t layer = 0; layer < layout.layers(); ++layer) {
      ASSERT_EQ(layout.kv_heads(layer), model.shapes[layer].kv_heads);
      ASSERT_EQ(layout.tile(layer).head_dim, model.shapes[layer].head_dim);
      for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
        ASSERT_EQ(layout.lane(layer, head), next++);
      }
    }
    ASSERT_EQ(layout.lanes(), next);
    ASSERT_EQ(layout.ring_capacity(), std::uint64_t{model.ring_tiles} * kTileEntries);
  }
}

TEST(LaneLayout, RingsAreAlignedAndDoNotOverlap) {
  TestRandom random;
  for (int i = 0; i < 100; ++i) {
    const RandomModel model = AnyModel(random);
    const LaneLayout layout(model.type, model.ring_tiles, model.shapes);
    std::byte* region = nullptr;
    std::uint64_t end = 0;
    for (std::uint32_t layer = 0; layer < layout.layers(); ++layer) {
      for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
        const TailRing ring = layout.ring(region, layer, head);
        const auto begin = static_cast<std::uint64_t>(ring.base - region);
        ASSERT_EQ(begin % kObjectAlignment, 0u);
        ASSERT_EQ(begin, end);  // in lane order
        ASSERT_EQ(ring.tiles, model.ring_tiles);
        end = begin + (ring.bytes() + kObjectAlignment - 1) / kObjectAlignment * kObjectAlignment;
      }
    }
    ASSERT_EQ(end, layout.tail_bytes());
  }
}

// A reader finds for token t what the worker stored for it, until a token with the same place is
// written. Compares the ring with a map.
TEST(TailRing, HoldsTheNewestTokensThroughAnyNumberOfWraps) {
  TestRandom random;
  for (int i = 0; i < 50; ++i) {
    const RandomModel model = AnyModel(random);
    const LaneLayout layout(model.type, model.ring_tiles, model.shapes);
    std::vector<std::byte> region(layout.tail_bytes());
    const auto layer = static_cast<std::uint32_t>(random.Below(layout.layers()));
    const auto head = static_cast<std::uint32_t>(random.Below(layout.kv_heads(layer)));
    const TailRing ring = layout.ring(region.data(), layer, head);
    const std::size_t row = ring.tile.row_bytes();
    std::map<std::uint64_t, std::pair<std::vector<std::byte>, std::vector<std::byte>>> oracle;
    std::uint64_t token = random.Below(100000);
    for (std::uint64_t steps = 3 * ring.capacity() + random.Below(50); steps > 0; --steps) {
      std::vector<std::byte> key(row), value(row);
      for (std::size_t b = 0; b < row; ++b) {
        key[b] = static_cast<std::byte>(random.Bits());
        value[b] = static_cast<std::byte>(random.Bits());
      }
      StoreRow(ring, token, key.data(), value.data());
      oracle[token] = {key, value};
      if (oracle.size() > ring.capacity()) oracle.erase(oracle.begin());
      ++token;
    }
    for (const auto& [held, rows] : oracle) {
      ASSERT_EQ(std::memcmp(ring.Key(held), rows.first.data(), row), 0) << held;
      ASSERT_EQ(std::memcmp(ring.Value(held), rows.second.data(), row), 0) << held;
      ASSERT_GE(ring.Key(held), ring.base);
      ASSERT_LE(ring.Value(held) + row, ring.base + ring.bytes());
    }
    // Its neighbours in the region are unchanged.
    for (std::byte* at = region.data(); at < region.data() + region.size(); ++at) {
      if (at >= ring.base && at < ring.base + ring.bytes()) continue;
      ASSERT_EQ(*at, std::byte{0}) << at - region.data();
    }
  }
}

TEST(TailRing, AnyTokenNumberStaysInside) {
  TestRandom random;
  const kernels::DenseTile tile{64, ElementType::kBf16};
  std::vector<std::byte> memory(3 * tile.bytes());
  const TailRing ring{memory.data(), 3, tile};
  for (int i = 0; i < 10000; ++i) {
    const std::uint64_t token = random.Border();
    ASSERT_GE(ring.Key(token), memory.data());
    ASSERT_LE(ring.Value(token) + tile.row_bytes(), memory.data() + memory.size()) << token;
  }
}

}  // namespace
}  // namespace tessera::shm
