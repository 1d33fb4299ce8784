// The parts of the memory together stay below its limit.
#include "daemon/config/memory_budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "daemon/base/strings.h"

namespace tessera::config {
namespace {

using ::testing::HasSubstr;

DeviceMemory Host(std::uint64_t bytes) { return {.bytes = bytes, .source = "the test"}; }
DeviceMemory Gpu(std::uint64_t bytes, std::uint64_t host) {
  return {.bytes = bytes, .source = "the GPU", .host = MemoryLimit{host, "the host"}};
}

MemoryBudget DerivedFrom(const DeviceMemory& memory, Config config = {}) {
  EXPECT_TRUE(ResolveDefaults(memory, config).ok());
  EXPECT_TRUE(Validate(config, memory).ok()) << Validate(config, memory);
  return BudgetOf(config, memory);
}

TEST(MemoryBudget, DefaultsFitIntoEveryMemory) {
  for (std::uint64_t limit = 512 * kMiB; limit <= 256 * kGiB; limit += limit / 3 + 4096) {
    SCOPED_TRACE(FormatBytes(limit));
    const MemoryBudget budget = DerivedFrom(Host(limit));
    EXPECT_LT(budget.sum(), limit);
    EXPECT_GE(budget.pool_bytes, limit / 2 - 64 * kMiB);
    EXPECT_GE(budget.host_tier_bytes, limit / 6);
    EXPECT_GE(budget.raw_copy_bytes, limit / 20);
  }
  for (const std::uint64_t gib : {1, 4, 16, 256}) {
    EXPECT_LE(DerivedFrom(Host(gib * kGiB)).sum(), gib * kGiB / 100 * 99);
  }
}

TEST(MemoryBudget, StatedPartsShrinkTheOthers) {
  Config config;
  config.host_tier_bytes = 2 * kGiB;
  const MemoryBudget large_tier = DerivedFrom(Host(4 * kGiB), config);
  EXPECT_EQ(large_tier.host_tier_bytes, 2 * kGiB);
  EXPECT_GE(large_tier.pool_bytes, kGiB);
  EXPECT_LT(large_tier.pool_bytes, 2 * kGiB);

  config = {};
  config.pool_bytes = 7 * kGiB;
  const MemoryBudget large_pool = DerivedFrom(Host(8 * kGiB), config);
  EXPECT_GE(large_pool.host_tier_bytes, 256 * kMiB);
  EXPECT_GE(large_pool.raw_copy_bytes, 64 * kMiB);
}

TEST(MemoryBudget, ZeroStillMeansNoOffloading) {
  Config config;
  config.host_tier_bytes = 0;
  EXPECT_EQ(DerivedFrom(Host(8 * kGiB), config).host_tier_bytes, 0u);
}

TEST(MemoryBudget, ThePoolOfAGpuTakesNoHostMemory) {
  Config config;
  const DeviceMemory memory = Gpu(80 * kGiB, 16 * kGiB);
  ASSERT_TRUE(ResolveDefaults(memory, config).ok());
  EXPECT_EQ(config.pool_bytes, 40 * kGiB);
  EXPECT_EQ(BudgetOf(config, memory).pool_bytes, 0u);
  EXPECT_LT(DerivedFrom(memory).sum(), 16 * kGiB);
  // More host memory is left to the daemons of other GPUs.
  EXPECT_EQ(DerivedFrom(Gpu(80 * kGiB, kTiB)).host_tier_bytes, 4 * kGiB);

  config.host_tier_bytes = 16 * kGiB;
  EXPECT_THAT(std::string(Validate(config, memory).message()),
              testing::AllOf(HasSubstr("host_tier_bytes: does not fit"),
                             HasSubstr("host_tier_bytes 16.0 GiB + raw_copy_bytes"),
                             HasSubstr("of 16.0 GiB according to the host")));
}

TEST(MemoryBudget, AnUnknownMemoryFitsEverything) {
  Config config;
  config.host_tier_bytes = kTiB;
  ASSERT_TRUE(ResolveDefaults(Host(kUnknownMemory), config).ok());
  EXPECT_TRUE(Validate(config, Host(kUnknownMemory)).ok());
}

}  // namespace
}  // namespace tessera::config
