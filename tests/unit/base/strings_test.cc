#include "daemon/base/strings.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "absl/strings/string_view.h"

namespace tessera {
namespace {

TEST(Concat, TakesEveryKindOfText) {
  const std::string text = "std";
  const std::string_view view = "view";
  const absl::string_view absl_view = "absl";
  EXPECT_EQ(Concat("literal ", text, ' ', view, " ", absl_view), "literal std view absl");
  EXPECT_EQ(Concat(), "");
}

TEST(Concat, WritesNumbersInFull) {
  EXPECT_EQ(
      Concat(std::numeric_limits<std::uint64_t>::max(), ",",
             std::numeric_limits<std::int64_t>::min(), ",", 0.1, ",", std::uint8_t{7}, ",", 1e300),
      "18446744073709551615,-9223372036854775808,0.1,7,1e+300");
}

TEST(Append, KeepsWhatIsThere) {
  std::string out = "a";
  Append(out, "b", 1);
  EXPECT_EQ(out, "ab1");
}

TEST(Quoted, ControlCharactersAreSpelt) {
  EXPECT_EQ(Quoted("a\x1b[31m\n\x7f"), "\"a\\x1b[31m\\x0a\\x7f\"");
  EXPECT_EQ(Quoted("Größe"), "\"Größe\"");
}

TEST(Quoted, LongTextIsCut) {
  EXPECT_EQ(Quoted("dense"), "\"dense\"");
  const std::string text = Quoted(std::string(1000000, 'x'));
  EXPECT_LT(text.size(), 300u);
  EXPECT_NE(text.find("(1000000 bytes)"), std::string::npos) << text;
}

TEST(Trim, TakesOffBothEnds) {
  EXPECT_EQ(Trim(" \t a b\r\n"), "a b");
  EXPECT_EQ(Trim("ab"), "ab");
  EXPECT_EQ(Trim(" \n"), "");
  EXPECT_EQ(Trim(""), "");
}

}  // namespace
}  // namespace tessera
