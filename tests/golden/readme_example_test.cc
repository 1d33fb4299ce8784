// The worked example of kernels/format/README.md shows the bytes that the reference writes.
#include <cctype>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/reference/attend_part.h"
#include "tests/golden/golden_tiles.h"

namespace tessera::kernels {
namespace {

constexpr TileShape kShape = {.format = TileFormat::kPackedInt8,
                              .head_dim = 64,
                              .key = {64, 8},
                              .value = {64, 8},
                              .group = 2,
                              .summary = Summary::kMean,
                              .block = 16};

// The two entries of the example, in fp32.
GoldenTile Example() {
  std::vector<float> keys(2 * 64, 0.0f);
  std::vector<float> values(2 * 64, 0.0f);
  keys[2] = 100;
  keys[3] = -27;
  keys[10] = 127;
  keys[11] = 5;
  keys[40] = -64;
  keys[50] = 3;
  keys[63] = 31;
  for (std::size_t c = 64; c < 128; ++c) keys[c] = 1;
  values[0] = 254;
  values[1] = 3;
  values[2] = 5;
  values[8] = -254;
  values[9] = -7;
  GoldenTile golden = {.shape = kShape, .type = ElementType::kFp32, .rows = 2};
  golden.keys.resize(keys.size() * sizeof(float));
  golden.values.resize(golden.keys.size());
  std::memcpy(golden.keys.data(), keys.data(), golden.keys.size());
  std::memcpy(golden.values.data(), values.data(), golden.values.size());
  return golden;
}

// Reads lines "OFFSET  XX XX ..  words" from the block fenced with ```tile. All other bytes are
// zero.
std::vector<std::byte> BytesOfTheReadme(std::size_t size) {
  std::vector<std::byte> bytes(size, std::byte{0});
  std::ifstream readme(TESSERA_FORMAT_README);
  std::string line;
  bool inside = false;
  while (std::getline(readme, line)) {
    if (line.rfind("```", 0) == 0) inside = line == "```tile";
    std::istringstream words(line);
    std::size_t offset = 0;
    if (!inside || !(words >> offset)) continue;
    std::string word;
    while (words >> word && word.size() == 2 &&
           std::isxdigit(static_cast<unsigned char>(word[0])) &&
           std::isxdigit(static_cast<unsigned char>(word[1]))) {
      if (offset < size) bytes[offset++] = static_cast<std::byte>(std::stoul(word, nullptr, 16));
    }
  }
  return bytes;
}

TEST(FormatReadme, TheExampleIsWhatTheEncoderGives) {
  GoldenTile golden = Example();
  ASSERT_TRUE(EncodeGolden(ReferenceOperations(), golden));
  const std::vector<std::byte> written = BytesOfTheReadme(golden.tile.size());
  for (std::size_t i = 0; i < written.size(); ++i) {
    ASSERT_EQ(std::to_integer<int>(written[i]), std::to_integer<int>(golden.tile[i]))
        << "offset " << i;
  }
}

TEST(FormatReadme, TheExampleHasTheOffsetsThatItDraws) {
  const TileLayout layout = LayoutOf(kShape);
  ASSERT_EQ(layout.key_scales, 128u);
  ASSERT_EQ(layout.key_data, 192u);
  ASSERT_EQ(layout.value_bits, 448u);
  ASSERT_EQ(layout.value_scales, 576u);
  ASSERT_EQ(layout.value_data, 640u);
  ASSERT_EQ(layout.bytes, 896u);
  ASSERT_EQ(layout.block_bits, 0u);
  ASSERT_EQ(layout.block_scales, 8u);
  ASSERT_EQ(layout.block_data, 12u);
  ASSERT_EQ(layout.summary_bytes, 28u);
}

}  // namespace
}  // namespace tessera::kernels
