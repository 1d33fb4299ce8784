#include "client/tools/short_id.h"

#include <gtest/gtest.h>

#include "tests/fakes/seed.h"

namespace tessera::cli {
namespace {

constexpr std::uint64_t kFirstTenant = std::uint64_t{1} << 48;

TEST(ShortIdTest, NamesTheTenantUnlessItIsTheFirst) {
  EXPECT_EQ(ShortId('s', kFirstTenant + 51), "s51");
  EXPECT_EQ(ShortId('p', 2 * kFirstTenant + 51), "p2.51");
  EXPECT_EQ(ShortId('s', 7), "s0.7");
}

TEST(ShortIdTest, ReadsEveryForm) {
  for (const char* text : {"s51", "51", "281474976710707", "1.51", "s1.51"}) {
    EXPECT_EQ(ParseId(text, "s"), kFirstTenant + 51) << text;
  }
  EXPECT_EQ(ParseId("p2.51", "sp"), 2 * kFirstTenant + 51);
  for (const char* text : {"", "s", "p51", "s-1", "0", "s0", "1.", ".5", "70000.1", "s51x",
                           "2.281474976710707", "99999999999999999999"}) {
    EXPECT_EQ(ParseId(text, "s"), std::nullopt) << text;
  }
}

TEST(ShortIdTest, IsUnique) {
  TestRandom random;
  for (int round = 0; round < 1000; ++round) {
    const std::uint64_t id = random.Bits() | 1;
    EXPECT_EQ(ParseId(ShortId('s', id), "s"), id);
  }
}

}  // namespace
}  // namespace tessera::cli
