// Keys of rows in planes.

#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "tests/contract/pack/pack_planes.h"
#include "tests/unit/device/keys_fixture.h"

namespace tessera::device {
namespace {

// x = R^T z + mu: what a key in planes is, and not its distance from the mean.
TEST_P(KeysTest, OfPlanesHaveTheirMean) {
  for (const std::uint32_t head_dim : kernels::kHeadDims) {
    Begin(head_dim, dice_.Pick(kTypes));
    const TileShape shape = kernels::PlanesShape(head_dim, {6, 4}, {4, 0});
    const kernels::TestBook book(shape, dice_);
    const std::uint64_t bytes = std::uint64_t{head_dim} * head_dim * 2;
    const auto put = [&](const std::byte* from, std::uint64_t size) {
      std::byte* const at = Take(size);
      std::memcpy(at, from, size);
      return at;
    };
    const std::byte* const rotation = put(book.view().key, bytes);
    const std::byte* const mean = put(book.view().key_mean, 2 * head_dim);
    const std::vector<std::byte> tile = kernels::AnyTile(shape, kTileEntries, dice_);
    std::byte* const at = Take(tile.size());
    std::memcpy(at, tile.data(), tile.size());
    std::vector<float> z(kTileEntries * head_dim);
    std::vector<float> values(z.size());
    kernels::OperationsOf(*kernels::FindImplementation("reference"))
        .decode({.tile = at,
                 .shape = shape,
                 .layout = kernels::LayoutOf(shape),
                 .rows = kTileEntries,
                 .padded_channels = kernels::PaddedChannels(shape),
                 .keys = z.data(),
                 .values = values.data()});
    for (std::uint32_t r = 0; r < kTileEntries; ++r) {
      Expected exact = {.key = Row(head_dim), .slack = Row(head_dim)};
      for (std::uint32_t d = 0; d < head_dim; ++d) {
        exact.key[d] = ElementAt(mean, d, ElementType::kBf16);
        double mass = std::fabs(exact.key[d]);
        for (std::uint32_t c = 0; c < head_dim; ++c) {
          const double part = z[r * kernels::PaddedChannels(shape) + c] *
                              ElementAt(rotation, c * head_dim + d, ElementType::kBf16);
          exact.key[d] += part;
          mass += std::fabs(part);
        }
        const kernels::Rounding rounding = kernels::RoundingOf(geometry_.type);
        exact.slack[d] =
            1.01 * (kRotationError * mass + rounding.relative * std::fabs(exact.key[d])) +
            rounding.absolute;
      }
      expected_.push_back(std::move(exact));
    }
    tiles_.push_back({at});
    runs_.push_back(
        {.entries = kTileEntries,
         .tiles = tiles_.back(),
         .strategy = {.shape = shape,
                      .rotation = {.key = rotation,
                                   .value = put(book.view().value, bytes),
                                   .type = ElementType::kBf16,
                                   .key_mean = mean,
                                   .value_mean = put(book.view().value_mean, 2 * head_dim)}}});
    const std::unique_ptr<LaneKeys> keys = Load();
    ASSERT_NE(keys, nullptr);
    const std::vector<Row> loaded = Loaded(*keys);
    for (std::size_t t = 0; t < loaded.size(); ++t) {
      for (std::uint32_t d = 0; d < head_dim; ++d) {
        ASSERT_NEAR(loaded[t][d], expected_[t].key[d], expected_[t].slack[d]) << t << ", " << d;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::device
