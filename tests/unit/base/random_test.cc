#include "daemon/base/random.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>

namespace tessera {
namespace {

TEST(Secrets, AreNotRepeatedAndNotZero) {
  std::set<std::uint64_t> short_ones;
  std::set<std::pair<std::uint64_t, std::uint64_t>> long_ones;
  for (int i = 0; i < 1000; ++i) {
    const Secret128 secret = NewSecret128();
    short_ones.insert(NewSecret64());
    long_ones.insert({secret.high, secret.low});
  }
  EXPECT_EQ(short_ones.size(), 1000u);
  EXPECT_EQ(long_ones.size(), 1000u);
  EXPECT_EQ(short_ones.count(0), 0u);
}

// Every bit is set about half of the time: 1000 draws of a fair bit are outside 350..650 with a
// probability below 1e-20.
TEST(Secrets, EveryBitVaries) {
  int set[128] = {};
  for (int i = 0; i < 1000; ++i) {
    const Secret128 secret = NewSecret128();
    for (int bit = 0; bit < 64; ++bit) {
      set[bit] += static_cast<int>(secret.high >> bit & 1);
      set[64 + bit] += static_cast<int>(secret.low >> bit & 1);
    }
  }
  for (const int count : set) {
    EXPECT_GT(count, 350);
    EXPECT_LT(count, 650);
  }
}

TEST(SecretsEqual, AgreesWithEquality) {
  const std::string values[] = {"", "a", "b", "ab", "abab", "aba", std::string("a\0", 2), "token"};
  for (const std::string& presented : values) {
    for (const std::string& expected : values) {
      EXPECT_EQ(SecretsEqual(presented, expected), presented == expected)
          << '"' << presented << "\" against \"" << expected << '"';
    }
  }
}

}  // namespace
}  // namespace tessera
