// Every implementation reads and writes the bytes of the committed golden tiles of each version.
#include "tests/golden/golden_tiles.h"

#include <cstdlib>
#include <fstream>
#include <set>
#include <string>

#include "gtest/gtest.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::kernels {
namespace {

const std::filesystem::path kFolder =
    std::string(TESSERA_GOLDEN_FOLDER) + "/tiles_v" + std::to_string(kTileFormatVersion);

class GoldenTiles : public testing::TestWithParam<const Implementation*> {
 protected:
  void SetUp() override {
    const std::string name(ImplementationName(*GetParam()));
    if (!ImplementationSupported(*GetParam())) {
      GTEST_SKIP() << name << " did not run: " << ImplementationReason(*GetParam());
    }
    ASSERT_NE(ops().encode, nullptr) << name;
    ASSERT_NE(ops().decode, nullptr) << name;
  }
  const Operations& ops() const { return OperationsOf(*GetParam()); }
};

TEST_P(GoldenTiles, DecodeToTheCommittedValues) {
  for (const NamedGoldenTile& named : MakeGoldenTiles()) {
    const auto committed = ReadGolden(kFolder / (named.name + ".bin"));
    ASSERT_TRUE(committed.has_value()) << named.name;
    GoldenTile decoded = *committed;
    DecodeGolden(ops(), decoded);
    ASSERT_EQ(decoded.decoded_keys, committed->decoded_keys) << named.name;
    ASSERT_EQ(decoded.decoded_values, committed->decoded_values) << named.name;
  }
}

TEST_P(GoldenTiles, AreWhatTheCommittedInputsEncodeTo) {
  for (const NamedGoldenTile& named : MakeGoldenTiles()) {
    const auto committed = ReadGolden(kFolder / (named.name + ".bin"));
    ASSERT_TRUE(committed.has_value()) << named.name;
    GoldenTile encoded = *committed;
    encoded.tile.clear();
    ASSERT_TRUE(EncodeGolden(ops(), encoded)) << named.name;
    ASSERT_EQ(encoded.tile, committed->tile) << named.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, GoldenTiles, testing::ValuesIn(Implementations()),
                         [](const auto& param) {
                           return std::string(ImplementationName(*param.param));
                         });

// The set of cases is part of the version, too.
TEST(GoldenFolder, HoldsEveryValueTypeAndEveryKindOfArray) {
  std::set<TileFormat> formats;
  bool truncated = false;
  bool words = false;
  bool mean = false;
  bool min_max = false;
  for (const auto& entry : std::filesystem::directory_iterator(kFolder)) {
    const auto golden = ReadGolden(entry.path());
    ASSERT_TRUE(golden.has_value()) << entry.path();
    ASSERT_LE(entry.file_size(), 16384u) << entry.path();
    const TileShape& shape = golden->shape;
    formats.insert(shape.format);
    truncated = truncated || shape.key.channels < shape.head_dim;
    words = words || (shape.weights && shape.positions);
    mean = mean || shape.summary == Summary::kMean;
    min_max = min_max || shape.summary == Summary::kMinMax;
  }
  for (ValueType type : {ValueType::kBf16, ValueType::kFp16, ValueType::kInt8, ValueType::kFp8}) {
    ASSERT_TRUE(formats.contains(PackedFormat(type))) << ValueTypeName(type);
  }
  ASSERT_TRUE(truncated && words && mean && min_max);
}

TEST(GoldenFolder, IsWhatTheGeneratorWritesAndIsNeverWrittenAgain) {
  char name[] = "/tmp/tessera-golden-XXXXXX";
  ASSERT_NE(mkdtemp(name), nullptr);
  const std::filesystem::path base = name;
  ASSERT_EQ(WriteGoldenTiles(base / "tiles"), "");
  std::size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(base / "tiles")) {
    ++files;
    ASSERT_EQ(ReadGolden(entry.path()), ReadGolden(kFolder / entry.path().filename()))
        << entry.path().filename();
  }
  ASSERT_EQ(files, MakeGoldenTiles().size());
  std::ofstream(base / "tiles" / "bf16.bin") << "marked";
  ASSERT_NE(WriteGoldenTiles(base / "tiles"), "");
  ASSERT_EQ(std::filesystem::file_size(base / "tiles" / "bf16.bin"), 6u) << "overwritten";
  std::filesystem::remove_all(base);
}

TEST(GoldenFolder, DamagedFilesAreNotRead) {
  const auto golden = MakeGoldenTiles()[5].golden;
  const std::vector<std::byte> bytes = SerialiseGolden(golden);
  ASSERT_EQ(ParseGolden(bytes), golden);
  for (std::size_t size = 0; size < bytes.size(); size += 17) {
    ASSERT_FALSE(ParseGolden({bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size)}));
  }
  for (std::size_t at : {0u, 8u}) {  // magic and version
    std::vector<std::byte> other = bytes;
    other[at] ^= std::byte{1};
    ASSERT_FALSE(ParseGolden(other).has_value());
  }
}

}  // namespace
}  // namespace tessera::kernels
