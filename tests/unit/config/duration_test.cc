#include "daemon/config/values/duration.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace tessera::config {
namespace {

using ::testing::HasSubstr;

std::uint64_t Of(std::string_view text) {
  const auto parsed = ParseMilliseconds(text);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.value_or(0);
}

std::string DurationError(std::string_view text) {
  const auto parsed = ParseMilliseconds(text);
  return parsed.ok() ? "(no error)" : std::string(parsed.status().message());
}

TEST(ParseMilliseconds, TakesUnits) {
  EXPECT_EQ(Of("0"), 0u);
  EXPECT_EQ(Of("250"), 250u);
  EXPECT_EQ(Of("250ms"), 250u);
  EXPECT_EQ(Of("10s"), 10'000u);
  EXPECT_EQ(Of("1.5 s"), 1500u);
  EXPECT_EQ(Of(" 0.001s "), 1u);
  EXPECT_EQ(Of("5m"), 300'000u);
  EXPECT_EQ(Of("5min"), 300'000u);
  EXPECT_EQ(Of("0.5h"), 1'800'000u);
  EXPECT_EQ(Of("18446744073709551615"), ~std::uint64_t{0});
  EXPECT_EQ(Of("18446744073709551.615s"), ~std::uint64_t{0});
}

TEST(ParseMilliseconds, ErrorsNameTheTextAndWhatIsAccepted) {
  EXPECT_THAT(DurationError("ten"),
              HasSubstr("\"ten\" is not a time: it does not start with a digit "
                        "(write 500, 500ms, 1.5s, 5m or 1h)"));
  EXPECT_THAT(DurationError(""), HasSubstr("does not start with a digit"));
  EXPECT_THAT(DurationError("-1"), HasSubstr("does not start with a digit"));
  EXPECT_THAT(DurationError("10 parsecs"), HasSubstr("\"parsecs\" is not one of"));
  EXPECT_THAT(DurationError("10M"), HasSubstr("\"M\" is not one of"));
  EXPECT_THAT(DurationError("1.s"), HasSubstr("1 to 6 digits"));
  EXPECT_THAT(DurationError("1.0000000s"), HasSubstr("1 to 6 digits"));
  EXPECT_THAT(DurationError("1.5"), HasSubstr("not a whole number of milliseconds"));
  EXPECT_THAT(DurationError("0.0001s"), HasSubstr("not a whole number of milliseconds"));
  EXPECT_THAT(DurationError("18446744073709551616"), HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(DurationError("18446744073709551.616s"), HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(DurationError("5124095576031h"), HasSubstr("does not fit 64 bits"));
}

}  // namespace
}  // namespace tessera::config
