// The step image: what the writer refuses, and that kernels find the written values, also after the
// next image replaces it under a captured graph.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "kernels/cuda/common/lane_index.h"
#include "kernels/cuda/host/step_writer.h"
#include "tests/fakes/gpu/emulated_kernels.h"
#include "tests/fakes/seed.h"
#include "tests/unit/kernels/cuda/lanes.h"

namespace tessera::kernels::cuda {
namespace {

constexpr std::uint64_t kExtentBytes = 1 << 16;

struct alignas(64) Line {
  std::byte bytes[64];
};

std::byte* BytesOf(std::vector<Line>& lines) { return lines.data()->bytes; }
std::uint64_t AddressOf(std::vector<Line>& lines) {
  return reinterpret_cast<std::uint64_t>(lines.data());
}

class StepWriterTest : public ::testing::Test {
 protected:
  StepWriter Begin(const StepShape& shape) {
    image_.assign(StepBytes(shape) / 64 + 1, {});
    StepWriter writer({BytesOf(image_), StepBytes(shape)}, shape);
    const std::vector<std::uint64_t> bases(shape.extents, 0x10000);
    writer.SetExtents(bases, kExtentBytes);
    return writer;
  }
  std::vector<Line> image_;
};

TEST_F(StepWriterTest, LayersMayDifferInHeads) {
  const StepShape shape = {
      .batch = 2, .layers = 3, .lanes = 2 * (1 + 4 + 2), .segments = 14, .extents = 1};
  StepWriter writer = Begin(shape);
  std::uint32_t tag = 0;
  for (const std::uint32_t heads : {1u, 4u, 2u}) {
    writer.BeginLayer(heads, ElementType::kFp16);
    for (std::uint32_t lane = 0; lane < 2 * heads; ++lane, ++tag) {
      const SegmentSpec segment = {.tile_table = 8,
                                   .first_position = tag,
                                   .entries = tag * 100,
                                   .shape = DenseShape(128, ElementType::kFp16)};
      writer.AddLane({&segment, 1}, {.ring = tag % 2 * 64, .ring_tiles = 4, .begin = tag});
    }
  }
  ASSERT_EQ(writer.Finish(), StepStatus::kOk);
  const StepReader step(BytesOf(image_));
  tag = 0;
  std::uint32_t most = 0;
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    ASSERT_TRUE(step.Holds(layer));
    std::uint32_t works = 0;
    for (std::uint32_t lane = 0; lane < step.lanes(layer); ++lane, ++tag) {
      ASSERT_EQ(step.lane(layer, lane).tail_begin, tag);
      ASSERT_EQ(step.segments(step.lane(layer, lane))[0].first_position, tag);
      ASSERT_EQ(step.works(layer)[lane], works);
      works += (tag * 100 + kSplitEntries - 1) / kSplitEntries + tag % 2;
    }
    ASSERT_EQ(step.works(layer)[step.lanes(layer)], works);
    most = std::max(most, works);
  }
  StepLimits limits;
  writer.Widen(limits);
  EXPECT_EQ(limits.works, most);
  EXPECT_FALSE(step.Holds(3));
}

TEST_F(StepWriterTest, RefusesWhatDoesNotFitTheShape) {
  const StepShape shape = {.batch = 1, .layers = 1, .lanes = 1, .segments = 1, .extents = 1};
  const SegmentSpec segment = {.tile_table = 0, .entries = 32};
  const SegmentSpec two[] = {segment, segment};
  std::vector<Line> small(1);
  EXPECT_EQ(StepWriter({BytesOf(small), 64}, shape).Finish(), StepStatus::kImageTooSmall);
  EXPECT_EQ(Begin(shape).Finish(), StepStatus::kIncomplete);
  {
    StepWriter writer = Begin(shape);
    writer.BeginLayer(1, ElementType::kBf16);
    EXPECT_EQ(writer.Finish(), StepStatus::kIncomplete);
    EXPECT_FALSE(StepReader(BytesOf(image_)).Holds(0));
  }
  {
    StepWriter writer = Begin(shape);
    writer.BeginLayer(2, ElementType::kBf16);
    EXPECT_EQ(writer.Finish(), StepStatus::kIncomplete);
  }
  {
    StepWriter writer = Begin(shape);
    writer.BeginLayer(1, ElementType::kBf16);
    writer.AddLane(two, {});
    EXPECT_EQ(writer.Finish(), StepStatus::kIncomplete);
  }
  {
    StepWriter writer = Begin(shape);
    writer.BeginLayer(1, ElementType::kBf16);
    writer.AddLane({}, {});
    writer.AddLane({}, {});
    EXPECT_EQ(writer.Finish(), StepStatus::kIncomplete);
  }
}

TEST_F(StepWriterTest, RefusesSegmentsAndTailsThatNoKernelMayFollow) {
  const StepShape shape = {.batch = 1, .layers = 1, .lanes = 1, .segments = 1, .extents = 1};
  const auto status = [&](const SegmentSpec& segment, const TailSpec& tail) {
    StepWriter writer = Begin(shape);
    writer.BeginLayer(1, ElementType::kBf16);
    writer.AddLane({&segment, 1}, tail);
    return writer.Finish();
  };
  EXPECT_EQ(status({.entries = 32}, {}), StepStatus::kOk);
  EXPECT_EQ(status({.entries = 32, .shape = DenseShape(128, ElementType::kFp16)}, {}),
            StepStatus::kBadSegment);
  EXPECT_EQ(status({.tile_table = 4, .entries = 32}, {}), StepStatus::kBadSegment);
  EXPECT_EQ(status({.tile_table = kExtentBytes, .entries = 32}, {}), StepStatus::kBadSegment);
  EXPECT_EQ(status({.tile_table = kExtentBytes - 8, .entries = 33}, {}), StepStatus::kBadSegment);
  EXPECT_EQ(status({.tile_table = ~std::uint64_t{7}, .entries = 33}, {}), StepStatus::kBadSegment);
  EXPECT_EQ(status({}, {.ring = 64, .ring_tiles = 0}), StepStatus::kBadTail);
  EXPECT_EQ(status({}, {.ring = 8, .ring_tiles = 1}), StepStatus::kBadTail);
}

// Two sequences decode one layer with images that replace each other at one address. Rows arrive
// only through the append kernel; the test writes the expected ring.
TEST(Step, AppendedRowsLandInTheRingsOfEverySequence) {
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  constexpr std::uint32_t kBatch = 2, kHeads = 3, kRing = 2, kLimit = 4;
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp32}) {
    const DenseTile tile = {.head_dim = 64, .type = type};
    const auto row_bytes = static_cast<std::uint32_t>(tile.row_bytes());
    std::vector<Line> rings(kBatch * kHeads * kRing * tile.bytes() / 64);
    std::vector<Line> expected = rings;
    const StepShape shape = {.batch = kBatch, .layers = 1, .lanes = kBatch * kHeads};
    std::vector<Line> image(StepBytes(shape) / 64 + 1);
    std::uint64_t committed[kBatch] = {5, 61};
    std::uint64_t begin[kBatch] = {0, 40};
    std::uint64_t fault = kNoFault;
    for (int round = 0; round < 6; ++round) {
      StepWriter writer({BytesOf(image), StepBytes(shape)}, shape);
      const std::uint32_t appended[kBatch] = {static_cast<std::uint32_t>(random() % 5),
                                              static_cast<std::uint32_t>(random() % 5)};
      for (std::uint32_t b = 0; b < kBatch; ++b) {
        writer.SetSequence(b, {.committed = committed[b],
                               .appended = appended[b],
                               .first_append_row = b == 0 ? appended[1] : 0});
      }
      writer.BeginLayer(kHeads, type);
      for (std::uint32_t lane = 0; lane < kBatch * kHeads; ++lane) {
        writer.AddLane({}, {.ring = AddressOf(rings) + lane * kRing * tile.bytes(),
                            .ring_tiles = kRing,
                            .begin = begin[lane / kHeads]});
      }
      ASSERT_EQ(writer.Finish(), StepStatus::kOk);
      const std::uint64_t stride = kHeads * row_bytes + 64;
      std::vector<Line> key((appended[0] + appended[1]) * stride / 64 + 1), value = key;
      for (std::vector<Line>* rows : {&key, &value}) {
        for (Line& line : *rows) {
          for (std::byte& byte : line.bytes) byte = static_cast<std::byte>(random());
        }
      }
      tests::EmulateAppend({.step = BytesOf(image),
                            .key = BytesOf(key),
                            .value = BytesOf(value),
                            .fault = &fault,
                            .row_stride = stride,
                            .layer = 0,
                            .row_bytes = row_bytes,
                            .kv_heads = kHeads,
                            .max_batch = kBatch,
                            .max_appended = kLimit},
                           random());
      for (std::uint32_t b = 0; b < kBatch; ++b) {
        for (std::uint32_t i = 0; i < appended[b]; ++i) {
          const std::uint64_t token = committed[b] + i;
          const std::uint64_t row = (b == 0 ? appended[1] : 0) + i;
          for (std::uint32_t head = 0; head < kHeads; ++head) {
            std::byte* at = BytesOf(expected) +
                            ((b * kHeads + head) * kRing + token / 32 % kRing) * tile.bytes();
            const auto in_tile = static_cast<std::uint32_t>(token % 32);
            const std::uint64_t source = row * stride + head * row_bytes;
            std::memcpy(at + tile.key_offset(in_tile), BytesOf(key) + source, row_bytes);
            std::memcpy(at + tile.value_offset(in_tile), BytesOf(value) + source, row_bytes);
          }
        }
        committed[b] += appended[b];
      }
      ASSERT_EQ(std::memcmp(rings.data(), expected.data(), rings.size() * 64), 0);
    }
    EXPECT_EQ(fault, kNoFault);
  }
}

TEST(Step, AppendingToAFullRingIsAFaultAndWritesNothing) {
  const DenseTile tile = {.head_dim = 64, .type = ElementType::kBf16};
  std::vector<Line> ring(tile.bytes() / 64);
  const StepShape shape = {.batch = 1, .layers = 1, .lanes = 1};
  std::vector<Line> image(StepBytes(shape) / 64 + 1);
  std::vector<Line> rows(tile.row_bytes() / 64 + 1, Line{{std::byte{1}}});
  for (const std::uint64_t committed : {32ull, 0ull}) {  // full; before the ring's begin
    StepWriter writer({BytesOf(image), StepBytes(shape)}, shape);
    writer.SetSequence(0, {.committed = committed, .appended = 1});
    writer.BeginLayer(1, ElementType::kBf16);
    writer.AddLane(
        {}, {.ring = AddressOf(ring), .ring_tiles = 1, .begin = committed == 0 ? 1ull : 0ull});
    ASSERT_EQ(writer.Finish(), StepStatus::kOk);
    std::uint64_t fault = kNoFault;
    tests::EmulateAppend({.step = BytesOf(image),
                          .key = BytesOf(rows),
                          .value = BytesOf(rows),
                          .fault = &fault,
                          .row_stride = 128,
                          .layer = 0,
                          .row_bytes = 128,
                          .kv_heads = 1,
                          .max_batch = 1,
                          .max_appended = 1},
                         1);
    EXPECT_EQ(fault, FaultWord::Pack(FaultKind::kBadTail, 0, 0));
    for (const Line& line : ring) ASSERT_EQ(line.bytes[0], std::byte{0});
  }
}

// A launch captured with smaller limits than the image needs reports a fault and writes nothing out
// of bounds.
TEST(Step, AnImageBeyondTheCapturedLimitsIsAFault) {
  const StepShape shape = {.batch = 2, .layers = 1, .lanes = 2};
  std::vector<Line> image(StepBytes(shape) / 64 + 1);
  std::vector<Line> ring(DenseTile{64, ElementType::kFp32}.bytes() / 64);
  StepWriter writer({BytesOf(image), StepBytes(shape)}, shape);
  for (std::uint32_t b = 0; b < 2; ++b) {
    writer.SetSequence(b, {.committed = 3, .queries = 2, .first_query_row = 2 * b});
  }
  writer.BeginLayer(1, ElementType::kFp32);
  for (int b = 0; b < 2; ++b) writer.AddLane({}, {.ring = AddressOf(ring), .ring_tiles = 1});
  ASSERT_EQ(writer.Finish(), StepStatus::kOk);
  const LayerGeometry geometry = {
      .query_heads = 1, .kv_heads = 1, .head_dim = 64, .type = ElementType::kFp32, .scale = 1};
  const StepLimits enough = {.batch = 2, .queries = 2, .works = 2};
  for (const StepLimits& limits : {enough, StepLimits{.batch = 1, .queries = 2, .works = 2},
                                   StepLimits{.batch = 2, .queries = 1, .works = 2},
                                   StepLimits{.batch = 2, .queries = 2, .works = 1}}) {
    std::vector<Line> query(4 * 64 * 4 / 64), output = query;
    std::vector<Line> scratch(AttendScratchBytes(geometry, limits) / 64 + 1);
    std::uint64_t fault = kNoFault;
    tests::EmulateAttend({.geometry = geometry,
                          .limits = limits,
                          .step = BytesOf(image),
                          .query = query.data(),
                          .output = output.data(),
                          .scratch = scratch.data(),
                          .scratch_bytes = scratch.size() * 64,
                          .fault = &fault},
                         {});
    const bool fits = limits.batch == 2 && limits.queries == 2 && limits.works == 2;
    EXPECT_EQ(fault == kNoFault, fits);
    if (!fits) {
      EXPECT_EQ(FaultWord::Kind(fault), FaultKind::kBadStep);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels::cuda
