// What a sequence keeps on the heap before it has rows, and that it is charged.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include "daemon/base/bytes.h"
#include "daemon/policies/grammar/parse.h"
#include "tests/unit/compaction/compaction_fixture.h"

namespace tessera::compaction {
namespace {

struct Case {
  const char* policy;
  std::uint32_t layers;
  std::uint32_t kv_heads;
  std::uint32_t lanes() const { return layers * kv_heads; }
};

class StateMemory : public testing::TestWithParam<Case> {
 protected:
  StateMemory() {
    cache::ModelSpec spec = {.name = "state", .type = kernels::ElementType::kFp32};
    spec.layers.assign(
        GetParam().layers,
        {.query_heads = GetParam().kv_heads, .kv_heads = GetParam().kv_heads, .head_dim = 64});
    session_ = world_.OpenSession();
    model_ = world_.Register(spec);
    policy_ = *policies::ParsePolicy(GetParam().policy);
  }
  ~StateMemory() override { world_.tenant().EndSession(session_->id()); }

  std::shared_ptr<cache::Sequence> NewSequence() {
    std::shared_ptr<cache::Sequence> sequence = world_.NewSequence(*session_, *model_);
    const absl::Status status = compactor_.SetPolicy(*sequence, policy_);
    EXPECT_TRUE(status.ok()) << status;
    return sequence;
  }
  std::uint64_t Charged() { return world_.tenant().account().used_bytes(pool::MemoryTag::kState); }
  static std::uint64_t Heap() {
    const struct mallinfo2 info = ::mallinfo2();
    return info.uordblks + info.hblkhd;
  }

  cache::World world_{cache::World::Options{.ring_tiles = 4}};
  Logger logger_{LogOptions{.level = LogLevel::kOff}};
  ManualScheduler scheduler_;
  Compactor compactor_{
      Compactor::Options{.scheduler = &scheduler_,
                         .logger = &logger_,
                         .clock = &world_.clock(),
                         .operations = &kernels::OperationsOf(kernels::BestImplementation())}};
  std::shared_ptr<cache::SessionState> session_;
  std::shared_ptr<const cache::Model> model_;
  policies::Policy policy_;
};

TEST_P(StateMemory, IdleSequencesAreSmallAndCharged) {
  constexpr std::uint64_t kCount = 8;
  (void)NewSequence();  // tables of the tenant grow
  const std::uint64_t heap = Heap();
  const std::uint64_t charged = Charged();
  for (std::uint64_t i = 0; i < kCount; ++i) (void)NewSequence();
  const std::uint64_t grown = (Heap() - heap) / kCount;
  const std::uint64_t paid = (Charged() - charged) / kCount;
  EXPECT_LE(grown, kMiB);
  EXPECT_LE(grown, paid + paid / 5 + 512);
  EXPECT_LE(paid, 2 * grown + 2048);
  std::printf("%s, %u lanes: %lu bytes of heap, %lu charged\n", GetParam().policy,
              GetParam().lanes(), grown, paid);
}

TEST_P(StateMemory, LanesAreChargedWithTheFirstRows) {
  const std::shared_ptr<cache::Sequence> sequence = NewSequence();
  const std::uint64_t heap = Heap();
  const std::uint64_t charged = Charged();
  EXPECT_FALSE(sequence->has_lanes());
  const Compactor::Rows rows = {.layers = 1, .until = 1};
  const absl::StatusOr<std::uint64_t> tokens =
      compactor_.Append(sequence, rows, DrawnRows(model_->layout(), {1}));
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_TRUE(sequence->has_lanes());
  const std::uint64_t grown = Heap() - heap;
  const std::uint64_t paid = Charged() - charged;
  // One segment for each lane of the layer is not part of the state.
  EXPECT_LE(grown, paid + paid / 5 + 4096 + GetParam().kv_heads * 1024);
  EXPECT_GE(paid, GetParam().lanes() * sizeof(cache::Lane));
  std::printf("%s, %u lanes: %lu bytes of heap with rows, %lu charged\n", GetParam().policy,
              GetParam().lanes(), grown, paid);
}

INSTANTIATE_TEST_SUITE_P(PoliciesAndLanes, StateMemory,
                         testing::Values(Case{"", 1, 1}, Case{"", 32, 8}, Case{"", 1024, 16},
                                         Case{"mosaickv", 1, 1}, Case{"mosaickv", 32, 8},
                                         Case{"mosaickv", 1024, 16}, Case{"snapkv", 1, 1},
                                         Case{"snapkv", 32, 8}, Case{"snapkv", 1024, 16},
                                         Case{"quest", 1, 1}, Case{"quest", 32, 8},
                                         Case{"quest", 1024, 16}));

}  // namespace
}  // namespace tessera::compaction
