// Attention against its definition: shapes, masks, boundaries and extreme values.
#include "tests/contract/attend/attend_conformance.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace tessera::kernels {
namespace {

using Lanes = std::vector<std::unique_ptr<TestLane>>;

BatchShape Shape(std::uint32_t head_dim, ElementType type, std::uint32_t group,
                 std::uint32_t kv_heads = 1) {
  return {.geometry = {.query_heads = group * kv_heads,
                       .kv_heads = kv_heads,
                       .head_dim = head_dim,
                       .type = type,
                       .scale = 1 / std::sqrt(static_cast<float>(head_dim))}};
}

ElementType AnyType(TestRandom& random) { return static_cast<ElementType>(random.Between(1, 3)); }

// Draws options, so that over time every shape is tested with every combination.
void ChooseOptions(BatchShape& shape, TestRandom& random) {
  constexpr std::uint32_t kWindows[] = {0, 0, 1, 17, 32, 64, 1000};
  shape.causal = !random.OneIn(3);
  shape.geometry.sliding_window = random.Pick(kWindows);
  shape.geometry.logit_softcap = random.OneIn(3) ? 1.5f : 0;
  shape.sinks = random.OneIn(2);
  shape.output_type = random.OneIn(2) ? ElementType::kFp32 : shape.geometry.type;
}

TEST_P(AttendConformance, EveryShape) {
  for (std::uint32_t head_dim : kHeadDims) {
    for (ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
      for (std::uint32_t group : {1u, 2u, 3u, 4u, 8u}) {
        for (std::uint32_t queries : {1u, 2u, 5u, 33u}) {
          BatchShape shape = Shape(head_dim, type, group);
          ChooseOptions(shape, random_);
          SCOPED_TRACE(testing::Message()
                       << "D " << head_dim << ' ' << ElementName(type) << " G " << group << " n_q "
                       << queries << " causal " << shape.causal << " window "
                       << shape.geometry.sliding_window << " cap " << shape.geometry.logit_softcap
                       << " sinks " << shape.sinks << " to " << ElementName(shape.output_type));
          LaneShape lane_shape = shape.Lane({33, 0, 41}, 39);
          lane_shape.first_position = random_.Below(1000);
          TestLane lane(lane_shape, random_);
          TestBatch batch(shape, random_);
          batch.Add({&lane}, queries);
          RunAndJudge(batch);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST_P(AttendConformance, RandomShapes) {
  constexpr std::uint32_t kGroups[] = {1, 2, 3, 4, 5, 7, 8, 16, 40};
  for (int round = 0; round < subject().rounds(60); ++round) {
    BatchShape shape = Shape(random_.Pick(kHeadDims), AnyType(random_), random_.Pick(kGroups),
                             static_cast<std::uint32_t>(random_.Between(1, 3)));
    ChooseOptions(shape, random_);
    TestBatch batch(shape, random_);
    Lanes lanes;
    for (std::uint64_t sequences = random_.Between(1, 3); sequences > 0; --sequences) {
      std::vector<TestLane*> heads;
      const std::uint64_t first_position = random_.OneIn(2) ? 0 : random_.Below(1u << 30);
      for (std::uint32_t head = 0; head < shape.geometry.kv_heads; ++head) {
        if (random_.OneIn(6)) {
          heads.push_back(nullptr);
          continue;
        }
        std::vector<std::uint32_t> segments(random_.Below(4));
        for (std::uint32_t& entries : segments) {
          entries = static_cast<std::uint32_t>(random_.Below(random_.OneIn(2) ? 300 : 40));
        }
        LaneShape lane = shape.Lane(segments, static_cast<std::uint32_t>(random_.Below(100)));
        lane.first_position = first_position;
        lanes.push_back(std::make_unique<TestLane>(lane, random_));
        heads.push_back(lanes.back().get());
      }
      const auto queries = static_cast<std::uint32_t>(random_.Between(1, 9));
      if (random_.OneIn(3)) {  // queries before, among or after the entries
        batch.Add(heads, queries, first_position + random_.Below(800));
      } else {
        batch.Add(heads, queries);
      }
    }
    SCOPED_TRACE(testing::Message() << "round " << round);
    RunAndJudge(batch);
    if (HasFatalFailure()) return;
  }
}

TEST_P(AttendConformance, PartBorders) {
  for (std::uint32_t entries : {2047u, 2048u, 2049u, 4097u}) {
    BatchShape shape = Shape(64, AnyType(random_), 2);
    TestLane lane(shape.Lane({entries}, 1), random_);
    TestBatch batch(shape, random_);
    batch.Add({&lane}, 1);
    RunAndJudge(batch);
  }
}

// Tries every position of the window's lower end around a part boundary and inside a tile.
TEST_P(AttendConformance, WindowBorders) {
  BatchShape shape = Shape(64, ElementType::kBf16, 1);
  TestLane lane(shape.Lane({2100}, 30), random_);
  for (std::uint32_t window : {1u, 29u, 30u, 31u, 81u, 82u, 83u, 2129u, 2130u, 5000u}) {
    shape.geometry.sliding_window = window;
    for (std::uint32_t queries : {1u, 5u}) {
      TestBatch batch(shape, random_);
      batch.Add({&lane}, queries);
      RunAndJudge(batch);
    }
  }
}

// Tries every position where a tail can begin in its ring, including those where the newest tokens
// share a tile with the oldest. Also uses a ring longer than one part.
TEST_P(AttendConformance, TailWraps) {
  BatchShape shape = Shape(64, AnyType(random_), 1);
  for (std::uint64_t begin = 0; begin < 2 * kTileEntries; ++begin) {
    for (std::uint32_t tokens : {1u, 31u, 64u, 96u}) {
      LaneShape lane_shape = shape.Lane({}, tokens);
      lane_shape.first_position = begin + 32 * random_.Below(100);
      TestLane lane(lane_shape, random_);
      TestBatch batch(shape, random_);
      batch.Add({&lane}, 2);
      RunAndJudge(batch);
      if (HasFatalFailure()) return;
    }
  }
  LaneShape long_ring = shape.Lane({40}, 70 * kTileEntries);
  TestLane lane(long_ring, random_);
  TestBatch batch(shape, random_);
  batch.Add({&lane}, 3);
  RunAndJudge(batch);
}

TEST_P(AttendConformance, NothingVisible) {
  for (bool sinks : {false, true}) {
    BatchShape shape = Shape(128, AnyType(random_), 3, 2);
    shape.sinks = sinks;
    TestLane empty(shape.Lane({}, 0), random_);
    TestLane hollow(shape.Lane({0, 0}, 0), random_);
    LaneShape future_shape = shape.Lane({50}, 10);
    future_shape.first_position = 1000;
    TestLane future(future_shape, random_);
    TestBatch batch(shape, random_);
    batch.Add({&empty, &hollow}, 2, 5);
    batch.Add({&future, &empty}, 2, 5);     // entirely after the queries
    batch.Add({&future, nullptr}, 3, 998);  // only the last query sees one entry
    RunAndJudge(batch);
  }
}

TEST_P(AttendConformance, RaggedBatch) {
  BatchShape shape = Shape(128, ElementType::kBf16, 4, 2);
  TestBatch batch(shape, random_);
  Lanes lanes;
  for (std::uint32_t entries : {0u, 1u, 31u, 32u, 33u, 500u, 2049u}) {
    for (std::uint32_t tail : {0u, 1u, 33u}) {
      const std::size_t first = lanes.size();
      lanes.push_back(std::make_unique<TestLane>(shape.Lane({entries}, tail), random_));
      lanes.push_back(std::make_unique<TestLane>(shape.Lane({entries / 2, 3}, tail), random_));
      batch.Add({lanes[first].get(), lanes[first + 1].get()}, 1);
    }
  }
  RunAndJudge(batch);
}

TEST_P(AttendConformance, ExtremeLogits) {
  for (Values values : {Values::kLarge, Values::kHuge, Values::kEqual, Values::kZeros}) {
    for (ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
      for (float softcap : {0.0f, 30.0f}) {
        BatchShape shape = Shape(64, type, 2);
        shape.geometry.logit_softcap = softcap;
        shape.sinks = random_.OneIn(2);
        LaneShape lane_shape = shape.Lane({150}, 20);
        lane_shape.values = values;
        TestLane lane(lane_shape, random_);
        TestBatch batch(shape, random_);
        batch.Add({&lane}, 2);
        SCOPED_TRACE(testing::Message()
                     << static_cast<int>(values) << ' ' << ElementName(type) << " cap " << softcap);
        RunAndJudge(batch);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// An overflowing fp32 dot product saturates: the largest entry wins, and no output is NaN.
TEST_P(AttendConformance, OverflowSaturates) {
  BatchShape shape = Shape(64, ElementType::kFp32, 1);
  shape.geometry.scale = 1;
  TestLane lane(shape.Lane({40}, 3), random_);
  TestBatch batch(shape, random_);
  batch.Add({&lane}, 1);
  for (std::uint32_t c = 0; c < 64; ++c) {
    StoreElement(ElementType::kFp32, batch.query(0), c, 0x1p62f);
    StoreElement(ElementType::kFp32, lane.Key(17), c, 0x1p62f);
    StoreElement(ElementType::kFp32, lane.Key(18), c, -0x1p62f);
  }
  for (std::uint64_t e = 0; e < lane.entries(); ++e) {
    if (e == 17 || e == 18) continue;
    for (std::uint32_t c = 0; c < 64; ++c) StoreElement(ElementType::kFp32, lane.Key(e), c, 0);
  }
  ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kOk);
  for (std::uint32_t c = 0; c < 64; ++c) {
    const auto* output = static_cast<const std::byte*>(batch.items()[0].output);
    ASSERT_EQ(OutputElement(ElementType::kFp32, output, c),
              OutputElement(ElementType::kFp32, lane.Value(17), c));
  }
}

// A NaN in a visible row gives a NaN output, never a plausible number. A NaN elsewhere has no
// effect.
TEST_P(AttendConformance, NanIsSeenWhereVisibleOnly) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
    BatchShape shape = Shape(64, type, 1);
    TestLane lane(shape.Lane({40}, 30), random_);
    const std::uint64_t poisoned = random_.Below(lane.entries());
    StoreElement(type, lane.Key(poisoned), random_.Below(64), kNan);

    TestBatch seeing(shape, random_);
    seeing.Add({&lane}, 1);
    ASSERT_EQ(seeing.Run(subject()).status, AttendStatus::kOk);
    ASSERT_TRUE(std::isnan(*seeing.items()[0].lse)) << "entry " << poisoned;

    if (poisoned == 0) continue;
    TestBatch before(shape, random_);
    before.Add({&lane}, 1, poisoned - 1);
    RunAndJudge(before);
  }
}

TEST_P(AttendConformance, NullLseIsNotWritten) {
  BatchShape shape = Shape(64, ElementType::kBf16, 2);
  TestLane lane(shape.Lane({40}, 3), random_);
  TestBatch batch(shape, random_);
  batch.Add({&lane}, 2);
  batch.items()[0].lse = nullptr;
  ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kOk);
}

// AttendResult::implementation is set by the code that ran. A subject that silently falls back to
// another implementation fails here and in every other test of the suite.
TEST_P(AttendConformance, ForcedImplementationRuns) {
  BatchShape shape = Shape(64, ElementType::kBf16, 2);
  TestLane lane(shape.Lane({40}, 3), random_);
  TestBatch batch(shape, random_);
  batch.Add({&lane}, 1);
  InlineExecutor executor;
  ASSERT_EQ(subject().Run(batch.batch(), executor).implementation, subject().name());
}

}  // namespace
}  // namespace tessera::kernels
