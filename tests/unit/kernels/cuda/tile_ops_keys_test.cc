// Keys of tiles on a device, compared with the reference's decoded rows rotated back in double.
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/format/error_bound.h"
#include "tests/unit/kernels/cuda/tile_ops_rig.h"

namespace tessera::tests {
namespace {

using namespace kernels::cuda;  // NOLINT: a test file
using kernels::kHeadDims;

constexpr ElementType kKeyTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};
constexpr RotationKind kRotations[] = {RotationKind::kNone, RotationKind::kSelection,
                                       RotationKind::kReal};
constexpr std::uint8_t kKeyGroups[] = {1, 2, 4};
// Above it fp16 rounds to infinity.
constexpr double kLargestFp16 = 65000;

// An element of a row rotated back, and its allowed error.
struct ExactElement {
  double value = 0;
  double slack = 0;
};

class KeysTest : public TileOpsTest {
 protected:
  // Dense tiles have the launch's type.
  EncodeCase RandomTile(std::uint16_t head_dim, ElementType type) {
    if (random_.OneIn(3)) {
      return Encoded(EncodeCase(random_, RandomDenseShape(random_, type, head_dim), type,
                                RotationKind::kNone, ElementType::kBf16, /*calm=*/true));
    }
    const auto format = static_cast<TileFormat>(random_.Between(4, 7));
    const RotationKind kind = random_.Pick(kRotations);
    const TileShape shape = RandomPackedShape(random_, format, head_dim, random_.Pick(kKeyGroups),
                                              kind != RotationKind::kNone);
    return Encoded(EncodeCase(random_, shape, type, kind, random_.Pick(kKeyTypes), /*calm=*/true));
  }
  static EncodeCase Encoded(EncodeCase made) {
    std::optional<StoredBytes> stored = made.Expected();
    if (stored.has_value()) made.Take(std::move(*stored));
    return made;
  }

  // Rows of the tile as stored, [rows][PaddedChannels].
  static std::vector<float> Decoded(const EncodeCase& made) {
    std::vector<float> keys(made.rows * PaddedChannels(made.shape));
    std::vector<float> values(keys.size());
    kernels::DecodeReference({.tile = made.tile.data(),
                              .shape = made.shape,
                              .layout = made.layout,
                              .rows = made.rows,
                              .padded_channels = PaddedChannels(made.shape),
                              .keys = keys.data(),
                              .values = values.data()});
    return keys;
  }
  static ExactElement UnrotatedKeys(const EncodeCase& made, const float* row, std::uint32_t dim) {
    if (made.rotation_kind == RotationKind::kNone) {
      return {.value = dim < made.shape.key.channels ? row[dim] : 0.0};
    }
    ExactElement exact;
    const std::size_t bytes = ElementBytes(made.rotation_type);
    for (std::uint32_t c = 0; c < made.shape.key.channels; ++c) {
      const double product =
          double{row[c]} *
          LoadElement(made.rotation_type, made.key_rotation.data() +
                                              (std::size_t{c} * made.shape.head_dim + dim) * bytes);
      exact.value += product;
      exact.slack += kRotationError * std::fabs(product);
    }
    return exact;
  }
};

TEST_F(KeysTest, AreWhatTilesHoldRotatedBack) {
  for (const std::uint32_t head_dim : kHeadDims) {
    for (const ElementType type : kKeyTypes) {
      std::vector<EncodeCase> tiles;
      std::vector<DeviceStrategy> strategies;
      std::vector<KeysTileJob> jobs;
      for (std::uint32_t i = 0; i < 10; ++i) {
        tiles.push_back(RandomTile(static_cast<std::uint16_t>(head_dim), type));
        const EncodeCase& made = tiles.back();
        const bool rotated = made.rotation_kind != RotationKind::kNone;
        strategies.push_back({.shape = made.shape,
                              .layout = made.layout,
                              .rotation_type = made.rotation_type,
                              .key_rotation = rotated ? Put(made.key_rotation) : 0,
                              .value_rotation = rotated ? Put(made.value_rotation) : 0});
        jobs.push_back({.tile = Put(made.tile),
                        .keys = Put(Bytes(made.rows * head_dim * ElementBytes(type))),
                        .rows = made.rows,
                        .strategy = i});
      }
      ASSERT_TRUE(calls().Keys(strategies, type, jobs).ok());
      const kernels::Rounding rounding = kernels::RoundingOf(type);
      for (std::size_t i = 0; i < tiles.size(); ++i) {
        const EncodeCase& made = tiles[i];
        Bytes keys(made.rows * head_dim * ElementBytes(type));
        Get(jobs[i].keys, keys);
        const std::vector<float> stored = Decoded(made);
        for (std::uint32_t at = 0; at < made.rows * head_dim; ++at) {
          const float* const row = stored.data() + at / head_dim * PaddedChannels(made.shape);
          const ExactElement exact = UnrotatedKeys(made, row, at % head_dim);
          if (type == ElementType::kFp16 && std::fabs(exact.value) > kLargestFp16) continue;
          const double got = LoadElement(type, keys.data() + at * ElementBytes(type));
          ASSERT_LE(
              std::fabs(got - exact.value),
              1.01 * (exact.slack + rounding.relative * std::fabs(exact.value)) + rounding.absolute)
              << Describe(made.shape) << " row " << at / head_dim << " dim " << at % head_dim
              << ": " << got << " is not " << exact.value;
        }
      }
    }
  }
}

// Dense keys are copied bit by bit, whatever the bits are.
TEST_F(KeysTest, OfDenseTilesAreTheirBits) {
  for (const ElementType type : kKeyTypes) {
    const TileShape shape = RandomDenseShape(random_, type, 64);
    const EncodeCase made = Encoded(
        EncodeCase(random_, shape, type, RotationKind::kNone, ElementType::kBf16, /*calm=*/false));
    const DeviceStrategy strategies[] = {{.shape = shape, .layout = made.layout}};
    Bytes keys(made.rows * 64 * ElementBytes(type));
    const KeysTileJob jobs[] = {{.tile = Put(made.tile), .keys = Put(keys), .rows = made.rows}};
    ASSERT_TRUE(calls().Keys(strategies, type, jobs).ok());
    Get(jobs[0].keys, keys);
    EXPECT_EQ(std::memcmp(keys.data(), made.tile.data() + made.layout.key_data, keys.size()), 0);
  }
}

TEST_F(KeysTest, NoTilesAreNoWork) { EXPECT_TRUE(calls().Keys({}, ElementType::kBf16, {}).ok()); }

TEST(KeysProblems, AreNamed) {
  TileShape packed = kernels::DenseShape(128, ElementType::kBf16);
  packed.format = TileFormat::kPackedBf16;
  DeviceStrategy strategies[] = {
      {.shape = packed, .layout = LayoutOf(packed)},
      {.shape = kernels::DenseShape(128, ElementType::kFp16),
       .layout = LayoutOf(kernels::DenseShape(128, ElementType::kFp16))}};
  const KeysTileJob good = {.tile = 4096, .keys = 8192, .rows = 32};  // not accessed
  const auto problem = [&](const KeysTileJob& job, ElementType type = ElementType::kBf16) {
    return KeysProblem(strategies, type, job);
  };
  EXPECT_EQ(problem(good), "");
  const auto refused = [&](auto change) {
    KeysTileJob bad = good;
    change(bad);
    return !problem(bad).empty();
  };
  EXPECT_TRUE(refused([](KeysTileJob& j) { j.tile += 8; }));
  EXPECT_TRUE(refused([](KeysTileJob& j) { j.tile = 0; }));
  EXPECT_TRUE(refused([](KeysTileJob& j) { j.keys += 4; }));
  EXPECT_TRUE(refused([](KeysTileJob& j) { j.rows = 0; }));
  EXPECT_TRUE(refused([](KeysTileJob& j) { j.rows = 33; }));
  EXPECT_TRUE(refused([](KeysTileJob& j) { j.strategy = 2; }));
  EXPECT_TRUE(refused([](KeysTileJob& j) { j.strategy = 1; })) << "fp16 tiles, bf16 keys";
  KeysTileJob dense = good;
  dense.strategy = 1;
  EXPECT_EQ(problem(dense, ElementType::kFp16), "");
  EXPECT_NE(problem(good, ElementType{0}), "");
  strategies[0].key_rotation = 24;
  EXPECT_NE(problem(good), "");
}

}  // namespace
}  // namespace tessera::tests
