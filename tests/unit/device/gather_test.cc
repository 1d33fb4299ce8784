// Gathering of stored rows on every device: equals the reference's bytes.

#include <gmock/gmock.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <optional>
#include <vector>

#include "kernels/format/operations.h"
#include "tests/contract/pack/pack_data.h"
#include "tests/unit/device/devices.h"

namespace tessera::device {
namespace {

using kernels::TileShape;

class GatherTest : public DeviceTest {
 protected:
  std::byte* Take(std::uint64_t bytes) {
    std::byte* const at = pool_.data() + used_;
    used_ += (bytes + 63) / 64 * 64;
    EXPECT_LE(used_, kPoolBytes);
    return at;
  }
  // Full tiles of the shape with rows encoded by the reference.
  std::vector<const std::byte*> Tiles(const TileShape& shape, ElementType type, std::size_t count) {
    const kernels::Operations& reference =
        kernels::OperationsOf(*kernels::FindImplementation("reference"));
    const kernels::Rotations rotations(shape, type, dice_);
    std::vector<const std::byte*> tiles;
    while (tiles.size() < count) {
      const kernels::TileInput input(shape, type, kernels::kTileEntries, kernels::Content::kNormal,
                                     dice_);
      const std::optional<std::vector<std::byte>> bytes = kernels::EncodeTile(
          reference, shape, input, shape.packed() ? rotations.view() : kernels::RotationView{});
      if (!bytes.has_value()) continue;
      std::byte* const at = Take(bytes->size());
      std::memcpy(at, bytes->data(), bytes->size());
      tiles.push_back(at);
    }
    return tiles;
  }

  static constexpr std::uint64_t kGuard = 64;  // bytes after a tile, which must not change
  static constexpr std::uint64_t kPoolBytes = 16 * kPiece;
  TestRandom dice_;
  const Pool pool_ = PoolMemory(kPoolBytes);
  std::uint64_t used_ = 0;
};

TEST_P(GatherTest, RowsAreTheReferences) {
  const kernels::Operations& reference =
      kernels::OperationsOf(*kernels::FindImplementation("reference"));
  for (int round = 0; round < 25; ++round) {
    used_ = 0;
    const TileShape from = kernels::RandomShape(dice_, {.cut = true, .dense = true});
    TileShape to = from;
    to.positions = dice_.OneIn(2);
    to.weights = dice_.OneIn(2);
    SCOPED_TRACE(kernels::Describe(from) + " into " + kernels::Describe(to));
    const ElementType type = from.packed() ? ElementType::kBf16 : kernels::ElementsOf(from.format);
    const std::vector<const std::byte*> sources = Tiles(from, type, 4);
    const kernels::TileLayout layout = kernels::LayoutOf(to);
    std::deque<std::vector<kernels::GatherRow>> rows;
    std::vector<TileGather> tiles;
    for (std::uint64_t count = 1 + dice_.Below(4); count > 0; --count) {
      std::vector<kernels::GatherRow>& own = rows.emplace_back(1 + dice_.Below(32));
      for (kernels::GatherRow& row : own) {
        row = {.tile = sources[dice_.Below(sources.size())],
               .row = static_cast<std::uint32_t>(dice_.Below(kernels::kTileEntries)),
               .position = static_cast<std::uint32_t>(dice_.Below(1000000))};
      }
      tiles.push_back({.rows = own,
                       .to = {.tile = Take(layout.bytes + kGuard),
                              .summaries = Take(layout.summary_bytes + kGuard)}});
      std::memset(tiles.back().to.tile, 0xa5, layout.bytes + kGuard);
      std::memset(tiles.back().to.summaries, 0xa5, layout.summary_bytes + kGuard);
    }
    const absl::Status status = device_->Gather(from, to, tiles);
    ASSERT_TRUE(status.ok()) << status;
    for (const TileGather& tile : tiles) {
      std::vector<std::byte> expected(kernels::TileAndSummaryBytes(layout) + 64);
      reference.gather({.rows = tile.rows.data(),
                        .row_count = static_cast<std::uint32_t>(tile.rows.size()),
                        .from = from,
                        .from_layout = kernels::LayoutOf(from),
                        .to = to,
                        .to_layout = layout,
                        .tile = expected.data(),
                        .summaries = kernels::SummariesAfter(expected.data(), layout)});
      expected.resize(kernels::TileAndSummaryBytes(layout));
      std::vector<std::byte> stored(tile.to.tile, tile.to.tile + layout.bytes);
      stored.insert(stored.end(), tile.to.summaries, tile.to.summaries + layout.summary_bytes);
      ASSERT_EQ(kernels::FirstDifference(to, expected, stored), "");
      for (std::uint64_t i = 0; i < kGuard; ++i) {
        ASSERT_EQ(tile.to.tile[layout.bytes + i], std::byte{0xa5})
            << "written " << i << " bytes behind";
        ASSERT_EQ(tile.to.summaries[layout.summary_bytes + i], std::byte{0xa5})
            << "written " << i << " bytes behind the summaries";
      }
    }
  }
  EXPECT_TRUE(device_->Gather(TileShape(), TileShape(), {}).ok()) << "of nothing";
}

INSTANTIATE_TEST_SUITE_P(Devices, GatherTest, testing::ValuesIn(kKinds), KindName);

}  // namespace
}  // namespace tessera::device
