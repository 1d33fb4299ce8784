// The contract of Attend apart from numeric results, which tests/contract covers.
#include "kernels/dispatch/attend.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::kernels {
namespace {

constexpr std::uint32_t kDim = 64;

struct Free {
  void operator()(std::byte* bytes) const { std::free(bytes); }
};
using Memory = std::unique_ptr<std::byte[], Free>;

Memory Aligned(std::size_t bytes) {
  return Memory(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64)));
}

struct OneTail {
  OneTail() : ring(DenseTile{kDim, ElementType::kBf16}.bytes()), query(2 * kDim), output(kDim) {
    lane.tail = {.ring = ring.data(), .ring_tiles = 1, .begin = 0, .end = 3};
    item = {.lane = &lane, .query = query.data(), .output = output.data()};
    batch.geometry = {.query_heads = 1, .kv_heads = 1, .head_dim = kDim, .scale = 1};
    batch.items = {&item, 1};
  }

  std::vector<std::byte> ring;
  std::vector<std::byte> query;
  std::vector<float> output;
  LaneView lane;
  AttendItem item;
  AttendBatch batch;
  InlineExecutor executor;
};

TEST(Attend, WorkspaceOfExactlyTheSizeAskedForIsEnough) {
  OneTail one;
  const std::size_t bytes = AttendWorkspaceBytes(one.batch);
  const Memory memory = Aligned(bytes + 64);
  const Implementation& best = BestImplementation();
  EXPECT_EQ(Attend(best, one.batch, {memory.get(), bytes}, one.executor).status, AttendStatus::kOk);
  EXPECT_EQ(Attend(best, one.batch, {memory.get(), bytes - 1}, one.executor).status,
            AttendStatus::kWorkspaceTooSmall);
  EXPECT_EQ(Attend(best, one.batch, {memory.get() + 8, bytes}, one.executor).status,
            AttendStatus::kWorkspaceTooSmall);
}

TEST(Attend, EmptyBatchTouchesNothing) {
  AttendBatch batch;
  batch.geometry = {.query_heads = 1, .kv_heads = 1, .head_dim = kDim};
  InlineExecutor executor;
  EXPECT_EQ(AttendWorkspaceBytes(batch), 0u);
  const AttendResult result = Attend(BestImplementation(), batch, {}, executor);
  EXPECT_EQ(result.status, AttendStatus::kOk);
}

// Multiplying a row by a subnormal weight takes about a hundred times as long on Intel cores.
TEST(Attend, WeightsBelowTheSmallestNormalOneAreZero) {
  constexpr std::uint16_t kOne = 0x3f80, kMinus87 = 0xc2ae, kMinus90 = 0xc2b4;
  constexpr std::uint16_t kHuge = 0x7f00;  // 2^127
  const DenseTile tile{kDim, ElementType::kBf16};
  OneTail one;
  std::vector<std::uint16_t> rows(one.ring.size() / 2), query(kDim);
  const auto key = [&](int row) { return &rows[row * kDim]; };
  const auto value = [&](int row) { return &rows[(kTileEntries + row) * kDim]; };
  query[0] = kOne;
  value(0)[0] = kOne;
  value(1)[0] = kHuge;
  one.lane.tail.end = 2;
  one.item.query = query.data();
  one.item.first_query_position = 1;
  const Memory memory = Aligned(AttendWorkspaceBytes(one.batch));
  for (const Implementation* implementation : Implementations()) {
    if (!ImplementationSupported(*implementation)) continue;
    if (ImplementationName(*implementation) == "reference") continue;  // computes in double
    SCOPED_TRACE(ImplementationName(*implementation));
    const auto output = [&](std::uint16_t logit) {
      key(1)[0] = logit;
      std::memcpy(one.ring.data(), rows.data(), tile.bytes());
      const std::span workspace(memory.get(), AttendWorkspaceBytes(one.batch));
      EXPECT_EQ(Attend(*implementation, one.batch, workspace, one.executor).status,
                AttendStatus::kOk);
      return one.output[0];
    };
    EXPECT_EQ(output(kMinus90), 1.0f);                                          // 2^-129.8
    EXPECT_NEAR(output(kMinus87), 1 + std::ldexp(std::exp(-87.0), 127), 1e-3);  // 2^-125.5
  }
}

// Parts that no query sees must cost no task. Otherwise a long lane with a short window would cost
// as much as without one.
TEST(Attend, SkipsWhatNoQuerySees) {
  struct CountingExecutor final : Executor {
    void ParallelFor(std::uint32_t n, Task task, void* context) override {
      tasks = n;
      for (std::uint32_t i = 0; i < n; ++i) task(context, i);
    }
    std::uint32_t tasks = 0;
  } executor;
  const DenseTile tile{kDim, ElementType::kBf16};
  const std::vector<std::byte> arena(tile.bytes());
  constexpr std::uint32_t kEntries = 8 * kPartEntries;
  const std::vector<std::uint64_t> offsets(kEntries / kTileEntries, 0);  // the same tile many times
  const SegmentView segment = {.arena = arena.data(),
                               .arena_bytes = arena.size(),
                               .tile_offsets = offsets.data(),
                               .entries = kEntries,
                               .shape = DenseShape(kDim, ElementType::kBf16)};
  OneTail one;
  one.lane = {.segments = &segment, .segment_count = 1};
  one.item.first_query_position = kEntries - 1;

  struct Case {
    std::uint32_t window;
    std::uint64_t position;
    std::uint32_t tasks;
  };
  for (const Case& c : {Case{0, kEntries - 1, 8}, Case{kPartEntries, kEntries - 1, 1},
                        Case{kPartEntries + 1, kEntries - 1, 2}, Case{0, 0, 1},
                        Case{0, kPartEntries, 2}, Case{1, kPartEntries, 1}}) {
    one.batch.geometry.sliding_window = c.window;
    one.item.first_query_position = c.position;
    const std::size_t bytes = AttendWorkspaceBytes(one.batch);
    const Memory memory = Aligned(bytes);
    ASSERT_EQ(Attend(BestImplementation(), one.batch, {memory.get(), bytes}, executor).status,
              AttendStatus::kOk);
    EXPECT_EQ(executor.tasks, c.tasks) << "window " << c.window << " position " << c.position;
  }
}

TEST(Implementations, AreListedAndFound) {
  ASSERT_FALSE(Implementations().empty());
  EXPECT_EQ(ImplementationName(*Implementations().front()), "reference");
  EXPECT_TRUE(ImplementationSupported(*Implementations().front()));
  for (const Implementation* implementation : Implementations()) {
    EXPECT_EQ(FindImplementation(ImplementationName(*implementation)), implementation);
    EXPECT_EQ(ImplementationSupported(*implementation),
              ImplementationReason(*implementation).empty());
    if (ImplementationSupported(*implementation)) continue;
    OneTail one;
    const std::size_t bytes = AttendWorkspaceBytes(one.batch);
    const Memory memory = Aligned(bytes);
    EXPECT_DEATH(Attend(*implementation, one.batch, {memory.get(), bytes}, one.executor),
                 "cannot run here");
  }
  EXPECT_EQ(FindImplementation("none"), nullptr);
  EXPECT_TRUE(ImplementationSupported(BestImplementation()));
}

}  // namespace
}  // namespace tessera::kernels
