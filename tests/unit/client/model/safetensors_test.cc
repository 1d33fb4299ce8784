// Valid files, and files whose header contradicts their content.

#include "client/model/checkpoint/safetensors.h"

#include <gmock/gmock.h>

#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/strings.h"
#include "tests/fakes/seed.h"
#include "tests/unit/client/model/temporary_file.h"

namespace tessera::llm {
namespace {

using testing::HasSubstr;

// Data begins at a multiple of 8, as writers align it, so that no file is refused for its
// alignment.
std::string File(std::string header, const std::string& data) {
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + data;
}

std::string Entry(const std::string& type, const std::string& shape, const std::string& range) {
  return R"({"a":{"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":)" + range +
         R"(}}  )";
}

std::string Refusal(const std::string& content) {
  const TemporaryFile file(content);
  const auto opened = Safetensors::Open(file.path());
  EXPECT_TRUE(absl::IsInvalidArgument(opened.status())) << opened.status();
  return std::string(opened.status().message());
}

std::string Mismatch(const std::string& content) {
  const TemporaryFile file(content);
  const auto opened = Safetensors::Open(file.path());
  EXPECT_TRUE(opened.ok()) << opened.status();
  const auto rows = opened->FindTensor("a");
  EXPECT_TRUE(absl::IsInvalidArgument(rows.status())) << rows.status();
  return std::string(rows.status().message());
}

TEST(Safetensors, GivesWhatTheFileHolds) {
  const std::string header = R"({"__metadata__":{"format":"pt"},)"
                             R"("a":{"dtype":"BF16","shape":[2,3],"data_offsets":[2,14]}})";
  const TemporaryFile file(File(header, "..AaBbCcDdEeFf"));
  const auto opened = Safetensors::Open(file.path());
  ASSERT_TRUE(opened.ok()) << opened.status();
  const auto rows = opened->FindTensor("a");
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(rows->type, TensorType::kBf16);
  EXPECT_THAT(rows->shape, testing::ElementsAre(2, 3));
  EXPECT_EQ(rows->bytes.size(), 12u);
  EXPECT_EQ(std::memcmp(rows->bytes.data(), "AaBbCcDdEeFf", 12), 0);
  EXPECT_TRUE(absl::IsNotFound(opened->FindTensor("b").status()));
}

TEST(Safetensors, FilesThatContradictThemselvesAreRefused) {
  EXPECT_THAT(Refusal(""), HasSubstr("0 bytes"));
  EXPECT_THAT(Refusal("1234567"), HasSubstr("7 bytes"));
  EXPECT_THAT(Refusal(std::string(8, '\xff')), HasSubstr("18446744073709551615"));
  EXPECT_THAT(Refusal(File("{}", "").substr(0, 9)), HasSubstr("a header of 8"));
  EXPECT_THAT(Refusal(File("{]", "")), HasSubstr("JSON"));
  EXPECT_THAT(Refusal(File(R"({"a":1})", "")), HasSubstr("dtype"));
  EXPECT_THAT(Refusal(File(Entry("BF16", "[1]", "[0,4]"), "12")), HasSubstr("data_offsets"));
  EXPECT_THAT(Refusal(File(Entry("BF16", "[1]", "[2,0]"), "12")), HasSubstr("data_offsets"));
  EXPECT_THAT(Refusal(File(Entry("BF16", "[1]", "[-1,1]"), "12")), HasSubstr("data_offsets"));
  EXPECT_THAT(Refusal(File(Entry("BF16", "[1]", "[0]"), "12")), HasSubstr("data_offsets"));
  EXPECT_THAT(Refusal(File(Entry("BF16", "[0.5]", "[0,2]"), "12")), HasSubstr("shape"));
  EXPECT_THAT(Refusal(File(Entry("BF16", "[1,1,1,1,1,1,1,1,1]", "[0,2]"), "12")),
              HasSubstr("limit is 8"));
  EXPECT_TRUE(absl::IsInvalidArgument(Safetensors::Open("/dev/zero").status()));
}

TEST(Safetensors, TensorsThatAreNotWhatIsWantedAreRefused) {
  EXPECT_THAT(Mismatch(File(Entry("I32", "[1]", "[0,4]"), "1234")), HasSubstr("I32"));
  // The shape needs more bytes than there are; in one case its product would overflow to the right
  // size.
  EXPECT_THAT(Mismatch(File(Entry("BF16", "[3]", "[0,4]"), "1234")), HasSubstr("4 bytes"));
  EXPECT_THAT(Mismatch(File(Entry("BF16", "[4294967296,4294967296]", "[0,0]"), "")),
              HasSubstr("0 bytes"));
  EXPECT_THAT(Mismatch(File(Entry("BF16", "[1]", "[0,3]"), "123")), HasSubstr("3 bytes"));
}

TEST(Safetensors, NumbersOfEveryTypeAndAtOddOffsets) {
  const auto first = [](const std::string& type, const std::string& data) {
    const TemporaryFile file(
        File(Entry(type, "[1]", Concat("[1,", data.size() + 1, "]")), "." + data));
    const auto opened = Safetensors::Open(file.path());
    EXPECT_TRUE(opened.ok()) << opened.status();
    float value = 0;
    opened->FindTensor("a")->ReadRow(0, {&value, 1});
    return value;
  };
  EXPECT_EQ(first("F32", std::string("\0\0\xC0\x3F", 4)), 1.5f);
  EXPECT_EQ(first("BF16", "\xC0\x3F"), 1.5f);
  EXPECT_EQ(first("F16", std::string("\0\x3E", 2)), 1.5f);
}

// Any damage gives an error, or tensors inside the file.
TEST(Safetensors, DamageIsNoHarm) {
  TestRandom random;
  const std::string header = R"({"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}} )";
  const std::string whole = File(header, "AaBbCcDdEeFf");
  for (int round = 0; round < 2000; ++round) {
    std::string damaged = whole;
    for (std::uint64_t i = random.Between(1, 4); i > 0; --i) {
      damaged[random.Below(damaged.size())] = static_cast<char>(random.Bits());
    }
    damaged.resize(random.OneIn(4) ? random.Below(damaged.size()) : damaged.size());
    const TemporaryFile file(damaged);
    const auto opened = Safetensors::Open(file.path());
    if (!opened.ok()) continue;
    const auto rows = opened->FindTensor("a");
    if (!rows.ok()) continue;
    // Its bytes are inside the file.
    const std::string_view bytes(reinterpret_cast<const char*>(rows->bytes.data()),
                                 rows->bytes.size());
    EXPECT_NE(damaged.find(bytes), std::string::npos) << damaged;
  }
}

}  // namespace
}  // namespace tessera::llm
