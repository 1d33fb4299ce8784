#include "proto/shm/resolve.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/dispatch/attend.h"
#include "kernels/dispatch/implementation.h"
#include "proto/shm/segment_ref.h"
#include "tests/fakes/seed.h"

namespace tessera::shm {
namespace {

// Memory of exactly this size, so that AddressSanitizer detects an overrun of one byte.
class Memory {
 public:
  explicit Memory(std::uint64_t bytes)
      : data_(static_cast<std::byte*>(std::aligned_alloc(64, bytes)), &std::free), bytes_(bytes) {
    std::memset(data_.get(), 0, bytes);
  }
  MappedArena arena() const { return {data_.get(), bytes_}; }
  std::byte* at(std::uint64_t offset) { return data_.get() + offset; }
  std::uint64_t bytes() const { return bytes_; }
  template <typename T>
  void Put(std::uint64_t offset, const T& value) {
    ASSERT_LE(offset + sizeof value, bytes_);
    std::memcpy(at(offset), &value, sizeof value);
  }
  void Randomise(TestRandom& random) {
    for (std::uint64_t i = 0; i < bytes_; i += 8) {
      const std::uint64_t word = random.OneIn(3) ? random.Border() : random.Bits();
      std::memcpy(at(i), &word, 8);
    }
  }
  // Words that may be positions.
  void FillSmall(TestRandom& random) {
    for (std::uint64_t i = 0; i < bytes_; i += 4) {
      const auto word = static_cast<std::uint32_t>(random.Below(3000));
      std::memcpy(at(i), &word, 4);
    }
  }

 private:
  std::unique_ptr<std::byte, void (*)(void*)> data_;
  std::uint64_t bytes_;
};

Snapshot GoodSnapshot(std::uint32_t segments) {
  return {.magic = kSnapshotMagic,
          .segment_count = segments,
          .entries = 40,
          .tail_start = 40,
          .reserved = 0};
}

SegmentRef GoodRef() {
  SegmentRef ref = {};
  ref.tile_table = 64;
  ref.entries = 40;
  SetShape(kernels::DenseShape(128, kernels::ElementType::kBf16), ref);
  return ref;
}

// Any supported shape with this head_dim.
kernels::TileShape RandomShape(TestRandom& random, std::uint16_t head_dim) {
  kernels::TileShape shape = kernels::DenseShape(head_dim, kernels::ElementType::kBf16);
  shape.summary = static_cast<kernels::Summary>(random.Below(3));
  if (shape.summary != kernels::Summary::kNone) {
    shape.block = static_cast<std::uint8_t>(4u << random.Below(3));
  }
  shape.weights = random.OneIn(3);
  shape.positions = random.OneIn(3);
  if (random.OneIn(3)) return shape;
  shape.format = kernels::PackedFormat(static_cast<kernels::ValueType>(random.Between(1, 4)));
  shape.group = static_cast<std::uint8_t>(1u << random.Below(3));
  const auto multiple = [&](std::uint32_t most) {
    return static_cast<std::uint16_t>(shape.group * random.Between(1, most / shape.group));
  };
  const auto side = [&] {
    kernels::RowShape row = {.channels = random.OneIn(2) ? head_dim : multiple(head_dim)};
    row.kept = random.OneIn(3) ? row.channels : multiple(row.channels);
    return row;
  };
  shape.key = side();
  shape.value = random.OneIn(2) ? shape.key : side();
  return shape;
}

class ResolveLaneTest : public testing::Test {
 protected:
  ResolveStatus Resolve(std::uint64_t word) {
    return ResolveLane(word, directory_.arena(), pool_.arena(), segments_, lane_);
  }
  Memory directory_{4096};
  Memory pool_{4096};
  std::vector<kernels::SegmentView> segments_;
  ResolvedLane lane_;
};

TEST_F(ResolveLaneTest, AnEmptyLaneHasNoSnapshot) {
  EXPECT_EQ(Resolve(0), ResolveStatus::kNoSnapshot);
  EXPECT_EQ(lane_.segments, 0u);
}

TEST_F(ResolveLaneTest, ShowsWhatTheSnapshotSaysAfterWhatWasThere) {
  directory_.Put(128, GoodSnapshot(2));
  SegmentRef second = GoodRef();
  second.tile_table = 128;
  second.first_position = 40;
  second.entries = 7;
  directory_.Put(128 + sizeof(Snapshot), GoodRef());
  directory_.Put(128 + sizeof(Snapshot) + sizeof(SegmentRef), second);
  segments_.resize(3);
  ASSERT_EQ(Resolve(LaneWord::Pack(1, 128)), ResolveStatus::kOk);
  ASSERT_EQ(segments_.size(), 5u);
  EXPECT_EQ(lane_.segments, 2u);
  EXPECT_EQ(lane_.entries, 40u);
  EXPECT_EQ(lane_.tail_start, 40u);
  EXPECT_EQ(reinterpret_cast<const std::byte*>(segments_[4].tile_offsets), pool_.at(128));
  EXPECT_EQ(segments_[4].first_position, 40u);
  EXPECT_EQ(segments_[4].entries, 7u);
  EXPECT_EQ(segments_[4].arena_bytes, pool_.bytes());
}

TEST_F(ResolveLaneTest, EveryFieldBeyondItsBorderIsRefusedAndNothingIsAdded) {
  const auto refused = [&](const Snapshot& snapshot, const SegmentRef& ref, std::uint64_t at) {
    directory_.Put(at, snapshot);
    if (at + sizeof(Snapshot) + sizeof(SegmentRef) <= directory_.bytes()) {
      directory_.Put(at + sizeof(Snapshot), GoodRef());
    }
    if (at + sizeof(Snapshot) + 2 * sizeof(SegmentRef) <= directory_.bytes()) {
      directory_.Put(at + sizeof(Snapshot) + sizeof(SegmentRef), ref);
    }
    segments_.assign(1, {});
    const bool out = Resolve(LaneWord::Pack(1, at)) == ResolveStatus::kOutOfBounds;
    return out && segments_.size() == 1 && lane_.segments == 0;
  };
  Snapshot snapshot = GoodSnapshot(2);
  SegmentRef ref = GoodRef();
  EXPECT_FALSE(refused(snapshot, ref, 64));
  snapshot.magic ^= 1;
  EXPECT_TRUE(refused(snapshot, ref, 64));
  for (std::uint32_t count : {kMaxSegments + 1, 0x80000000u, 0xffffffffu, 64u}) {
    EXPECT_TRUE(refused(GoodSnapshot(count), ref, 64)) << count;
  }
  EXPECT_TRUE(refused(GoodSnapshot(2), ref, directory_.bytes() - 64));  // refs beyond the end
  for (std::uint64_t table : {std::uint64_t{1}, std::uint64_t{4}, pool_.bytes() - 8, pool_.bytes(),
                              ~std::uint64_t{0}, ~std::uint64_t{7}, std::uint64_t{1} << 63}) {
    ref = GoodRef();
    ref.tile_table = table;
    EXPECT_TRUE(refused(GoodSnapshot(2), ref, 64)) << table;
  }
  kernels::TileShape summed = kernels::DenseShape(128, kernels::ElementType::kBf16);
  summed.summary = kernels::Summary::kMean;
  summed.block = 8;
  for (std::uint64_t table : {std::uint64_t{4}, pool_.bytes() - 8, ~std::uint64_t{7}}) {
    ref = GoodRef();
    ref.summary_table = table;
    EXPECT_FALSE(refused(GoodSnapshot(2), ref, 64)) << "nobody looks there";
    SetShape(summed, ref);
    EXPECT_TRUE(refused(GoodSnapshot(2), ref, 64)) << table;
  }
  ref = GoodRef();
  ref.tile_table = pool_.bytes() - 16;
  EXPECT_FALSE(refused(GoodSnapshot(2), ref, 64));  // two tiles just fit
  for (std::uint32_t entries : {65u, 0x80000000u, 0xffffffffu, 0xffffffe1u}) {
    ref.entries = entries;
    EXPECT_TRUE(refused(GoodSnapshot(2), ref, 64)) << entries;
  }
  for (int format : {0, 8, 255}) {
    ref = GoodRef();
    ref.format = static_cast<std::uint8_t>(format);
    EXPECT_TRUE(refused(GoodSnapshot(2), ref, 64)) << format;
  }
  ref = GoodRef();
  ref.entries = 0;
  EXPECT_TRUE(refused(GoodSnapshot(2), ref, 64));
  for (std::uint64_t span : {std::uint64_t{39}, std::uint64_t{41}, ~std::uint64_t{0}}) {
    ref = GoodRef();
    ref.position_span = span;
    EXPECT_TRUE(refused(GoodSnapshot(2), ref, 64)) << span;
  }
  ref = GoodRef();
  ref.first_position = ~std::uint64_t{0} - 38;
  EXPECT_TRUE(refused(GoodSnapshot(2), ref, 64));
  for (std::uint64_t at : {directory_.bytes(), directory_.bytes() + 64, std::uint64_t{1} << 45}) {
    segments_.clear();
    EXPECT_EQ(Resolve(LaneWord::Pack(1, at)), ResolveStatus::kOutOfBounds) << at;
  }
}

TEST_F(ResolveLaneTest, ASegmentHasSoManyEntriesAtMost) {
  const Memory pool(32 * 1024);  // tables of either length fit
  for (const std::uint32_t more : {0u, 1u}) {
    SegmentRef ref = GoodRef();
    ref.entries = kMaxSegmentEntries + more;
    directory_.Put(64, GoodSnapshot(1));
    directory_.Put(64 + sizeof(Snapshot), ref);
    EXPECT_EQ(
        ResolveLane(LaneWord::Pack(1, 64), directory_.arena(), pool.arena(), segments_, lane_),
        more == 0 ? ResolveStatus::kOk : ResolveStatus::kOutOfBounds);
  }
}

// Reads everything that the views declare readable, as a kernel would.
std::uint64_t Follow(const std::vector<kernels::SegmentView>& segments) {
  std::uint64_t sum = 0;
  for (const kernels::SegmentView& segment : segments) {
    const std::uint64_t tiles = (std::uint64_t{segment.entries} + 31) / 32;
    for (std::uint64_t t = 0; t < tiles; ++t) sum += segment.tile_offsets[t];
  }
  return sum;
}

TEST_F(ResolveLaneTest, RandomBytesNeverLeadOutOfTheMappings) {
  TestRandom random;
  std::uint64_t sum = 0;
  int resolved = 0;
  for (int round = 0; round < 20000; ++round) {
    if (round % 50 == 0) {
      directory_.Randomise(random);
      pool_.Randomise(random);
    }
    const std::uint64_t at = random.Below(directory_.bytes() / 64) * 64;
    // Plausible first; then a few words are replaced by boundary values.
    const auto count = static_cast<std::uint32_t>(random.Below(5));
    directory_.Put(std::min(at, directory_.bytes() - sizeof(Snapshot)), GoodSnapshot(count));
    for (std::uint32_t i = 0; i < count; ++i) {
      SegmentRef ref = GoodRef();
      if (random.OneIn(3)) ref.tile_table = random.Border() & (random.OneIn(2) ? 0xff8 : ~0ull);
      if (random.OneIn(3)) ref.entries = static_cast<std::uint32_t>(random.Border());
      if (random.OneIn(5)) ref.format = static_cast<std::uint8_t>(random.Bits());
      if (random.OneIn(2)) ref.first_position = random.Border();
      const std::uint64_t place = at + sizeof(Snapshot) + i * sizeof(SegmentRef);
      if (place + sizeof ref <= directory_.bytes()) directory_.Put(place, ref);
    }
    segments_.clear();
    const std::uint64_t word =
        random.OneIn(4) ? random.Border() : LaneWord::Pack(random.Bits(), at);
    if (Resolve(word) == ResolveStatus::kOk) {
      ++resolved;
      ASSERT_EQ(segments_.size(), lane_.segments);
      sum += Follow(segments_);
    }
  }
  EXPECT_GT(resolved, 100);
  RecordProperty("sum", static_cast<int>(sum));
}

// What a reader with a revoked pin may find in place of a snapshot: fields of other snapshots,
// halves of them, or zeros.
SegmentRef HostileRef(TestRandom& random, std::uint64_t pool_bytes) {
  SegmentRef ref = GoodRef();
  SetShape(RandomShape(random, 64), ref);
  if (ref.key_channels != 64 || ref.value_channels != 64 || random.OneIn(2)) {
    if (ref.key_channels != 64 || random.OneIn(2)) ref.flags |= kSegmentRotatesKeys;
    if (ref.value_channels != 64 || random.OneIn(2)) ref.flags |= kSegmentRotatesValues;
    ref.rotations = random.Below(pool_bytes / 64) * 64;
    ref.rotation_type = static_cast<std::uint8_t>(random.Between(1, 3));
  }
  const auto entries = [&] {
    constexpr std::uint32_t kBorders[] = {0, 1, 31, 32, 33, 2048, 2049};
    return random.OneIn(3) ? random.Pick(kBorders)
                           : static_cast<std::uint32_t>(random.Between(1, 400));
  };
  ref.entries = entries();
  ref.position_span = random.OneIn(2) ? ref.entries : random.OneIn(2) ? entries() : random.Border();
  if (random.OneIn(3)) ref.first_position = random.OneIn(2) ? random.Below(600) : random.Border();
  ref.tile_table = random.Below(pool_bytes / 8) * 8;
  ref.summary_table = random.Below(pool_bytes / 8) * 8;
  return ref;
}

// The same including the kernel: for any tile table, attention stays inside or reports a bad tile.
TEST_F(ResolveLaneTest, AttentionOverHostileTablesStaysInside) {
  TestRandom random;
  Memory pool(128 * 1024);
  constexpr std::uint32_t kMostQueries = 40;
  const std::vector<std::uint16_t> query(kMostQueries * 2 * 64, 0x3f80);
  std::vector<float> output(query.size()), lse(kMostQueries * 2);
  int bad = 0, good = 0;
  for (int round = 0; round < 4000; ++round) {
    if (round % 20 == 0) random.OneIn(2) ? pool.Randomise(random) : pool.FillSmall(random);
    const auto count = static_cast<std::uint32_t>(random.Between(1, 3));
    directory_.Put(64, GoodSnapshot(count));
    for (std::uint32_t i = 0; i < count; ++i) {
      const SegmentRef ref = HostileRef(random, pool.bytes());
      for (std::uint64_t t = 0; t < 72; ++t) {
        const std::uint64_t offset =
            random.OneIn(200) ? random.Border() : random.Below((pool.bytes() - 8192) / 64) * 64;
        for (const std::uint64_t table : {ref.tile_table, ref.summary_table}) {
          const std::uint64_t place = table + 8 * t;
          if (place + 8 <= pool.bytes()) pool.Put(place, offset);
        }
      }
      directory_.Put(64 + sizeof(Snapshot) + i * sizeof ref, ref);
    }
    segments_.clear();
    if (ResolveLane(LaneWord::Pack(1, 64), directory_.arena(), pool.arena(), segments_, lane_) !=
        ResolveStatus::kOk) {
      continue;
    }
    const kernels::LayerGeometry geometry = {
        .query_heads = static_cast<std::uint32_t>(random.Between(1, 2)),
        .kv_heads = 1,
        .head_dim = 64,
        .type = kernels::ElementType::kBf16,
        .scale = 0.125f,
        .sliding_window = random.OneIn(3) ? static_cast<std::uint32_t>(random.Between(1, 600)) : 0};
    const kernels::LaneView view = {.segments = segments_.data(), .segment_count = lane_.segments};
    kernels::SelectionRule rule = {.first_block = random.OneIn(2)};
    random.OneIn(2) ? rule.rate = 0.2 : rule.entries = random.Between(1, 2100);
    const kernels::AttendItem item = {
        .lane = &view,
        .queries = static_cast<std::uint32_t>(random.OneIn(3) ? kMostQueries : 1),
        .first_query_position = random.OneIn(4) ? random.Border() >> 2 : random.Below(2500),
        .query = query.data(),
        .output = output.data(),
        .lse = lse.data(),
        .selection = random.OneIn(2) ? &rule : nullptr};
    const kernels::AttendBatch batch = {
        .geometry = geometry, .causal = !random.OneIn(4), .items = {&item, 1}};
    Memory workspace((kernels::AttendWorkspaceBytes(batch) + 63) / 64 * 64);
    kernels::InlineExecutor executor;
    const kernels::AttendResult result = kernels::Attend(
        kernels::BestImplementation(), batch, {workspace.at(0), workspace.bytes()}, executor);
    (result.status == kernels::AttendStatus::kOk ? good : bad) += 1;
  }
  EXPECT_GT(good, 100);
  EXPECT_GT(bad, 20);
}

// Position words rise unless their tile's memory was reused. Then any block may be partly visible,
// and a budget of entries selects more blocks than usual.
TEST_F(ResolveLaneTest, AttentionOverPositionsThatDoNotRiseStaysInside) {
  constexpr std::uint32_t kBlock = 16, kBlocks = 2000;
  Memory pool(128 * 1024);
  kernels::TileShape shape = kernels::DenseShape(64, kernels::ElementType::kBf16);
  shape.summary = kernels::Summary::kMean;
  shape.block = kBlock;
  shape.positions = true;
  const std::uint64_t tile = 64 * 1024;  // for all entries
  for (std::uint32_t e = 0; e < kernels::kTileEntries; ++e) {
    pool.Put(tile + kernels::LayoutOf(shape).positions + 4 * e, e % kBlock == 0 ? 0u : 1u << 30);
  }
  const std::uint64_t summaries = tile + kernels::LayoutOf(shape).bytes;
  for (std::uint32_t t = 0; t < kBlocks / 2; ++t) {
    pool.Put(64 + 8 * t, tile);
    pool.Put(64 + 8 * (kBlocks / 2 + t), summaries);
  }
  SegmentRef ref = GoodRef();
  SetShape(shape, ref);
  ref.entries = kBlock * kBlocks;
  ref.summary_table = 64 + 8 * (kBlocks / 2);
  ref.position_span = std::uint64_t{1} << 31;
  directory_.Put(64, GoodSnapshot(1));
  directory_.Put(64 + sizeof(Snapshot), ref);
  ASSERT_EQ(ResolveLane(LaneWord::Pack(1, 64), directory_.arena(), pool.arena(), segments_, lane_),
            ResolveStatus::kOk);
  const kernels::LaneView view = {.segments = segments_.data(), .segment_count = lane_.segments};
  const kernels::SelectionRule rule = {.entries = kBlocks};
  std::vector<std::uint16_t> query(64, 0x3f80);
  std::vector<float> output(64);
  const kernels::AttendItem item = {.lane = &view,
                                    .first_query_position = 100,
                                    .query = query.data(),
                                    .output = output.data(),
                                    .selection = &rule};
  const kernels::LayerGeometry geometry = {.query_heads = 1,
                                           .kv_heads = 1,
                                           .head_dim = 64,
                                           .type = kernels::ElementType::kBf16,
                                           .scale = 0.125f};
  const kernels::AttendBatch batch = {.geometry = geometry, .items = {&item, 1}};
  const std::uint64_t needed = (kernels::AttendWorkspaceBytes(batch) + 63) / 64 * 64;
  Memory workspace(needed + 256 * 1024);
  std::memset(workspace.at(needed), 0x5a, 256 * 1024);
  kernels::InlineExecutor executor;
  ASSERT_EQ(
      kernels::Attend(kernels::BestImplementation(), batch, {workspace.at(0), needed}, executor)
          .status,
      kernels::AttendStatus::kOk);
  EXPECT_EQ(std::count(workspace.at(needed), workspace.at(needed + 256 * 1024), std::byte{0x5a}),
            256 * 1024);
}

TEST(LaneWords, ABlockThatDoesNotFitIsRefused) {
  Memory directory(4096);
  const SequenceBlock* block = nullptr;
  const auto lanes = [&](std::uint64_t offset, std::uint32_t count) {
    auto* shown = reinterpret_cast<SequenceBlock*>(directory.at(offset));
    shown->lanes = count;
    return LaneWords(directory.arena(), offset, &block);
  };
  EXPECT_EQ(reinterpret_cast<const std::byte*>(lanes(64, 8)), directory.at(128));
  EXPECT_EQ(reinterpret_cast<const std::byte*>(block), directory.at(64));
  EXPECT_NE(lanes(4096 - 128, 8), nullptr);
  EXPECT_EQ(lanes(4096 - 128, 9), nullptr);
  EXPECT_NE(lanes(4096 - 64, 0), nullptr);
  EXPECT_EQ(lanes(64, 0xffffffff), nullptr);
  for (std::uint64_t offset : {std::uint64_t{4096}, std::uint64_t{4096 + 64}, std::uint64_t{1},
                               std::uint64_t{65}, ~std::uint64_t{0}, ~std::uint64_t{63}}) {
    EXPECT_EQ(LaneWords(directory.arena(), offset, &block), nullptr) << offset;
  }
}

}  // namespace
}  // namespace tessera::shm
