// Seeds of random tests. By default a test case has the same seed in every run, made from its name,
// so that a failure is never an accident of the run. TESSERA_TEST_SEED=random draws new seeds;
// TESSERA_TEST_SEED=N repeats a run. No other test code reads the environment.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <random>
#include <string>

#include "gtest/gtest.h"

namespace tessera {

// The same for each run of the running test case, and different from those of other cases.
inline std::uint64_t SeedOfTestName() {
  const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
  std::uint64_t seed = 0xcbf29ce484222325;  // FNV-1a
  if (test == nullptr) return seed;         // a program that is no GoogleTest
  for (const char byte : std::string(test->test_suite_name()) + "." + test->name()) {
    seed = (seed ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  }
  return seed;
}

// The seed of the running test case. It is printed and recorded in the XML result.
inline std::uint64_t TestSeed() {
  const char* given = std::getenv("TESSERA_TEST_SEED");
  std::uint64_t seed = 0;
  if (given == nullptr) {
    seed = SeedOfTestName();
  } else if (std::string(given) == "random") {
    std::random_device device;
    seed = (std::uint64_t{device()} << 32) ^ device();
  } else {
    seed = std::strtoull(given, nullptr, 0);
  }
  std::printf("TESSERA_TEST_SEED=%llu\n", static_cast<unsigned long long>(seed));
  std::fflush(stdout);
  testing::Test::RecordProperty("seed", std::to_string(seed));
  return seed;
}

// Random numbers in the distributions that tests need.
class TestRandom {
 public:
  explicit TestRandom(std::uint64_t seed = TestSeed()) : engine_(seed) {}

  std::uint64_t Bits() { return engine_(); }
  // In [low, high].
  std::uint64_t Between(std::uint64_t low, std::uint64_t high) {
    return std::uniform_int_distribution<std::uint64_t>(low, high)(engine_);
  }
  std::uint64_t Below(std::uint64_t bound) { return Between(0, bound - 1); }
  bool OneIn(std::uint64_t n) { return Below(n) == 0; }
  template <typename Container>
  auto& Pick(Container& items) {
    return items[Below(std::size(items))];
  }
  // A boundary value: 0, a small number, a power of two or a neighbour of one, or the maximum.
  std::uint64_t Border() {
    switch (Below(4)) {
      case 0:
        return Below(3);
      case 1:
        return ~std::uint64_t{0} - Below(3);
      case 2:
        return (std::uint64_t{1} << Below(64)) + Below(3) - 1;
      default:
        return Bits();
    }
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace tessera
