// Lanes after token policies: stored rows are gathered unchanged, and keys re-rotated to other
// positions.

#include "daemon/compaction/lanes/entry_dropper.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/compaction/lanes/element.h"
#include "daemon/compaction/lanes/rope_shift.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compaction_fixture.h"

namespace tessera::compaction {
namespace {

using kernels::kTileEntries;

// An entry of the only lane, as its tile stores it.
struct Stored {
  std::uint64_t position;
  float weight;
  std::string row;  // bits, scales and values of K, then those of V
  std::string form;

  bool operator==(const Stored&) const = default;
};

class LaneGatherTest : public CompactionFixture {
 protected:
  LaneGatherTest() { model_ = world_.Register(cache::SmallModel("one", 1, 1)); }

  Track Empty() { return {world_.NewSequence(worker_->session(), *model_), {}, std::nullopt}; }

  std::vector<Stored> StoredOf(const Track& track) {
    const cache::SequenceView view = View(track);
    std::vector<Stored> stored;
    for (const kernels::SegmentView& segment : view.segments) {
      const kernels::TileLayout at = kernels::LayoutOf(segment.shape);
      const kernels::TileShape& form = segment.shape;
      for (std::uint32_t e = 0; e < segment.entries; ++e) {
        const std::byte* const tile = segment.arena + segment.tile_offsets[e / kTileEntries];
        const std::uint32_t row = e % kTileEntries;
        Stored entry = {segment.first_position + e, 1, "", ""};
        if (segment.shape.positions) {
          std::uint32_t behind;
          std::memcpy(&behind, tile + at.positions + 4 * row, 4);
          entry.position = segment.first_position + behind;
        }
        if (segment.shape.weights) std::memcpy(&entry.weight, tile + at.weights + 4 * row, 4);
        const auto add = [&](std::uint32_t array, std::uint32_t bytes) {
          entry.row.append(reinterpret_cast<const char*>(tile + array + row * bytes), bytes);
        };
        add(at.key_bits, at.key_row.bits);
        add(at.key_scales, at.key_row.scale);
        add(at.key_data, at.key_row.data);
        add(at.value_bits, at.value_row.bits);
        add(at.value_scales, at.value_row.scale);
        add(at.value_data, at.value_row.data);
        // Compared field by field: the bytes in between are undefined.
        entry.form = Concat(static_cast<int>(form.format), " ", form.key.channels, " ",
                            form.key.kept, " ", form.value.channels, " ", form.value.kept, " ",
                            static_cast<int>(form.group), " ", static_cast<int>(form.summary), " ",
                            static_cast<int>(form.block), " ", static_cast<int>(form.weights), " ",
                            reinterpret_cast<std::uintptr_t>(segment.rotation.key));
        stored.push_back(std::move(entry));
      }
    }
    return stored;
  }

  // Merges the first of a few entries with those after it, about every `in` entries.
  policies::LaneDecision AnyMerges(std::uint32_t count) {
    policies::LaneDecision decision;
    for (std::uint32_t i = 0; i < count;) {
      const auto members = static_cast<std::uint32_t>(
          std::min<std::uint64_t>(count - i, random_.OneIn(3) ? random_.Between(2, 5) : 1));
      decision.kept.push_back(i);
      decision.begins.push_back(static_cast<std::uint32_t>(decision.members.size()));
      for (std::uint32_t m = 0; m < members; ++m) decision.members.push_back(i + m);
      i += members;
    }
    decision.begins.push_back(static_cast<std::uint32_t>(decision.members.size()));
    return decision;
  }

  // A lane with up to four forms.
  Track AnyLane() {
    Track track = Empty();
    LaneState state;
    policies::Policy policy = SmallMosaic();
    policy.mosaic->segments.tokens = 32 * random_.Between(1, 3);
    policy.mosaic->segments.min_tokens = 32;
    for (std::uint64_t part = random_.Between(1, 4); part > 0; --part) {
      Append(track, random_.Between(1, 150), part);
      const std::uint64_t form = random_.Below(4);
      if (form == 0) continue;  // dense
      if (form == 1) {
        const cache::TestPacking packing = cache::RandomPacking(random_, *model_, 0, 1);
        // The form may not be able to hold the rows.
        (void)track.sequence->Pack(packing.spec, cache::Proceed);
        continue;
      }
      policies::LaneDecision decision;
      const absl::Status status =
          track.sequence->Recode({.lane = 0}, [&](const cache::OpenRun& run) {
            LaneCoder::Options options = {.memory = &track.sequence->memory(),
                                          .model = model_.get(),
                                          .policy = &policy,
                                          .state = &state,
                                          .operations = &operations_,
                                          .counters = &counters_};
            decision = AnyMerges(static_cast<std::uint32_t>(run.plain_entries()));
            options.decision = &decision;
            options.decided = run.plain_entries();
            options.first_position = run.first_position;
            if (form == 2) return LaneCoder(options, run).Seal(SealRequest::Everything());
            policies::Policy none;
            options.policy = &none;
            return LaneCoder(options, run).Retain();
          });
      EXPECT_TRUE(status.ok()) << status;
    }
    return track;
  }

  absl::Status Keep(const Track& track, const policies::LaneDecision& decision,
                    std::uint64_t decided) {
    return track.sequence->Recode({.lane = 0, .whole = true}, [&](const cache::OpenRun& run) {
      return EntryDropper(track.sequence->memory(), run).Keep(decision, decided);
    });
  }

  const kernels::Operations& operations_ = kernels::OperationsOf(kernels::BestImplementation());
  CodingCounters counters_;
};

TEST_F(LaneGatherTest, RowsStayAsTheyAreStoredWhateverTheirForm) {
  std::vector<std::string> forms;
  for (int round = 0; round < 60; ++round) {
    Track track = AnyLane();
    const Track fork = Fork(track);
    const std::vector<Stored> before = StoredOf(fork);
    const std::uint64_t decided = before.size() - random_.Below(before.size() / 2 + 1);
    policies::LaneDecision decision;
    std::vector<Stored> expected;
    const std::uint64_t in = random_.Between(1, 20);
    for (std::uint32_t i = 0; i < before.size(); ++i) {
      if (i < decided && random_.OneIn(in)) continue;
      if (i < decided) decision.kept.push_back(i);
      expected.push_back(before[i]);
      forms.push_back(before[i].form);
    }
    ASSERT_TRUE(Keep(track, decision, decided).ok());
    EXPECT_EQ(StoredOf(track), expected);
    EXPECT_EQ(StoredOf(fork), before) << "the fork's are others";
    // Again, on the remaining entries.
    policies::LaneDecision every_third;
    std::vector<Stored> third;
    for (std::uint32_t i = 0; i < expected.size(); i += 3) {
      every_third.kept.push_back(i);
      third.push_back(expected[i]);
    }
    ASSERT_TRUE(Keep(track, every_third, expected.size()).ok());
    EXPECT_EQ(StoredOf(track), third);
    world_.Validate();
    ASSERT_TRUE(world_.tenant().FreeSequence(fork.sequence->id()).ok());
    ASSERT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
    Collect();
    if (HasFailure()) return;
  }
  std::ranges::sort(forms);
  forms.erase(std::ranges::unique(forms).begin(), forms.end());
  std::printf("%zu forms\n", forms.size());
  EXPECT_GT(forms.size(), 10u);
}

TEST_F(LaneGatherTest, BlocksAreSummedUpAnew) {
  for (const kernels::Summary summary : {kernels::Summary::kMean, kernels::Summary::kMinMax}) {
    kernels::TileShape shape = kernels::DenseShape(64, kernels::ElementType::kBf16);
    shape.summary = summary;
    shape.block = static_cast<std::uint8_t>(4u << random_.Below(3));
    Track track = Empty();
    Append(track, 200, 1);
    cache::PackSpec spec;
    spec.shapes = {shape};
    ASSERT_TRUE(track.sequence->Pack(spec, cache::Proceed).ok());
    policies::LaneDecision decision;
    Stamps stamps;
    for (std::uint32_t i = 0; i < 200; ++i) {
      if (random_.OneIn(3)) continue;
      decision.kept.push_back(i);
      stamps.push_back(track.stamps[i]);
    }
    ASSERT_TRUE(Keep(track, decision, 200).ok());
    const cache::SequenceView view = View(track);
    ASSERT_EQ(view.lanes[0].resolved.segments, 1u);
    const kernels::SegmentView& segment = view.segments[0];
    const kernels::DenseTile dense = model_->layout().tile(0);
    const cache::TileEncoder encoder(shape, {}, dense.type);
    for (std::uint32_t first = 0; first + kTileEntries <= segment.entries; first += kTileEntries) {
      std::vector<std::byte> keys(kTileEntries * dense.row_bytes()), values(keys.size());
      for (std::uint32_t r = 0; r < kTileEntries; ++r) {
        DrawRow(stamps[first + r], {0, 0, cache::RowKind::kKey}, dense,
                keys.data() + r * dense.row_bytes());
        DrawRow(stamps[first + r], {0, 0, cache::RowKind::kValue}, dense,
                values.data() + r * dense.row_bytes());
      }
      const std::vector<std::byte> made =
          encoder.Tile(keys.data(), values.data(), dense.row_bytes(), kTileEntries);
      const std::byte* const tile = segment.arena + segment.tile_offsets[first / kTileEntries];
      const kernels::TileLayout layout = kernels::LayoutOf(shape);
      EXPECT_EQ(std::memcmp(tile, made.data(), layout.weights), 0) << "the tile of entry " << first;
      EXPECT_TRUE(cache::HasSummaries(segment, first / kTileEntries, made.data() + layout.bytes))
          << "those of the tile of entry " << first;
    }
  }
}

TEST_F(LaneGatherTest, SegmentsThatLoseNothingStay) {
  Track track = Empty();
  for (int part = 0; part < 3; ++part) {
    Append(track, 64, 1);
    (void)Fork(track).sequence->Free();  // ends the segment
    Track freeze = Fork(track);
    Append(track, 1, 1);
    freeze.sequence->Free();
  }
  // Those that take appends are one: how they lie depends on when the rows came.
  const auto runs = track.sequence->LookAt(0, /*whole=*/true);
  ASSERT_TRUE(runs.ok()) << runs.status();
  for (const cache::HeldSegment& held : runs->front().plain) held.segment->SealDense();
  const cache::SequenceView before = View(track);
  ASSERT_GE(before.segments.size(), 3u);
  policies::LaneDecision decision;
  const std::uint32_t gone = before.segments[0].entries + 3;  // of the second segment
  for (std::uint32_t i = 0; i < track.stamps.size(); ++i) {
    if (i != gone) decision.kept.push_back(i);
  }
  ASSERT_TRUE(Keep(track, decision, track.stamps.size()).ok());
  const cache::SequenceView after = View(track);
  ASSERT_EQ(after.segments.size(), before.segments.size());
  for (std::size_t s = 0; s < after.segments.size(); ++s) {
    const bool same = after.segments[s].tile_offsets[0] == before.segments[s].tile_offsets[0];
    EXPECT_EQ(same, s != 1) << s;
  }
}

TEST_F(LaneGatherTest, NothingIsKeptOfALaneAndItGoesOn) {
  Track track = Empty();
  Append(track, 70, 1);
  ASSERT_TRUE(Keep(track, {}, 70).ok());
  EXPECT_TRUE(StoredOf(track).empty());
  Append(track, 5, 1);
  const std::vector<Stored> stored = StoredOf(track);
  ASSERT_EQ(stored.size(), 5u);
  EXPECT_EQ(stored.front().position, 70u);
}

// ---- Keys re-rotated to other positions

class KeyTurnerTest : public testing::Test {
 protected:
  static constexpr std::uint32_t kDim = 64;
  static constexpr kernels::DenseTile kTile = {.head_dim = kDim,
                                               .type = kernels::ElementType::kFp32};
  using Row = std::array<float, kDim>;

  Row AnyRow() {
    Row row;
    for (float& element : row) element = Drawn(random_.Bits() >> 9);
    return row;
  }
  static Row Turned(const cache::ModelSpec& spec, Row row, std::int64_t by) {
    RopeShift(spec.rope(), kTile).Turn(reinterpret_cast<std::byte*>(row.data()), by);
    return row;
  }
  static void ExpectNear(const Row& a, const Row& b) {
    for (std::uint32_t d = 0; d < kDim; ++d) EXPECT_NEAR(a[d], b[d], 1e-4) << d;
  }

  TestRandom random_;
  cache::ModelSpec spec_ = [] {
    cache::ModelSpec spec = cache::SmallModel("turned", 1, 1, kernels::ElementType::kFp32);
    spec.rope_theta = 10000;
    return spec;
  }();
};

TEST_F(KeyTurnerTest, TurnsAddUp) {
  for (int round = 0; round < 50; ++round) {
    spec_.rope_interleaved = random_.OneIn(2);
    spec_.rope_scaling = random_.OneIn(2) ? "linear" : "";
    spec_.rope_scaling_factor = 4;
    const Row row = AnyRow();
    const auto a = static_cast<std::int64_t>(random_.Below(2000)) - 1000;
    const auto b = static_cast<std::int64_t>(random_.Below(2000)) - 1000;
    ExpectNear(Turned(spec_, Turned(spec_, row, a), b), Turned(spec_, row, a + b));
    ExpectNear(Turned(spec_, Turned(spec_, row, a), -a), row);
    EXPECT_EQ(Turned(spec_, row, 0), row);
  }
}

TEST_F(KeyTurnerTest, IsTheRotationOfTheModel) {
  const Row row = AnyRow();
  const auto by = static_cast<std::int64_t>(random_.Between(1, 5000));
  const Row halves = Turned(spec_, row, by);
  for (std::uint32_t i = 0; i < kDim / 2; ++i) {
    const double angle = static_cast<double>(by) * std::pow(10000.0, -2.0 * i / kDim);
    EXPECT_NEAR(halves[i], row[i] * std::cos(angle) - row[i + 32] * std::sin(angle), 1e-4) << i;
    EXPECT_NEAR(halves[i + 32], row[i] * std::sin(angle) + row[i + 32] * std::cos(angle), 1e-4);
  }
  // The same pairs, interleaved: next to each other.
  Row shuffled;
  for (std::uint32_t i = 0; i < kDim / 2; ++i) {
    shuffled[2 * i] = row[i];
    shuffled[2 * i + 1] = row[i + 32];
  }
  spec_.rope_interleaved = true;
  const Row next_to = Turned(spec_, shuffled, by);
  for (std::uint32_t i = 0; i < kDim / 2; ++i) {
    EXPECT_EQ(next_to[2 * i], halves[i]);
    EXPECT_EQ(next_to[2 * i + 1], halves[i + 32]);
  }
  // Linear scaling divides the angle.
  spec_.rope_interleaved = false;
  spec_.rope_scaling = "linear";
  spec_.rope_scaling_factor = 4;
  ExpectNear(Turned(spec_, row, 4 * by), halves);
}

// Frequencies of a Llama 3 model: low ones are divided and those in between are blended. Then a
// model that rotates only part of its channels.
TEST_F(KeyTurnerTest, TurnsByTheModelsOwnFrequencies) {
  const Row row = AnyRow();
  const auto by = static_cast<std::int64_t>(random_.Between(1, 5000));
  spec_.rope_scaling = "llama3";
  for (std::uint32_t i = 0; i < kDim / 2; ++i) {
    const double plain = std::pow(10000.0, -2.0 * i / kDim);
    const double turns = 8192 * plain / (2 * std::acos(-1.0));
    const double share = std::min(1.0, std::max(0.0, (turns - 1) / (4 - 1)));
    spec_.rope_frequencies.push_back((1 - share) * plain / 8 + share * plain);
  }
  for (const std::uint32_t pairs : {kDim / 2, kDim / 4}) {
    spec_.rope_frequencies.resize(pairs);
    const Row turned = Turned(spec_, row, by);
    for (std::uint32_t i = 0; i < pairs; ++i) {
      const double angle = static_cast<double>(by) * spec_.rope_frequencies[i];
      const float x = row[i];
      const float y = row[i + pairs];
      EXPECT_NEAR(turned[i], x * std::cos(angle) - y * std::sin(angle), 1e-4) << i;
      EXPECT_NEAR(turned[i + pairs], x * std::sin(angle) + y * std::cos(angle), 1e-4) << i;
    }
    for (std::uint32_t d = 2 * pairs; d < kDim; ++d) EXPECT_EQ(turned[d], row[d]) << d;
  }
}

TEST_F(KeyTurnerTest, SaysWhatItCannotTurn) {
  EXPECT_TRUE(RopeShift::WhyNot(spec_).ok());
  for (const char* const scaling : {"yarn", "llama3"}) {
    spec_.rope_scaling = scaling;
    spec_.rope_frequencies.clear();
    const absl::Status status = RopeShift::WhyNot(spec_);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find("Rope.frequency"), std::string::npos) << status;
    spec_.rope_frequencies = {1, 0.5};
    EXPECT_TRUE(RopeShift::WhyNot(spec_).ok());
  }
  // Frequencies that depend on the sequence length.
  for (const char* const scaling : {"dynamic", "Dynamic", "longrope", "ntk"}) {
    spec_.rope_scaling = scaling;
    const absl::Status status = RopeShift::WhyNot(spec_);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(status.message().find(scaling), std::string::npos) << status;
  }
  spec_.rope_scaling.clear();
  spec_.rope_frequencies.clear();
  spec_.rope_theta = 0;
  EXPECT_EQ(RopeShift::WhyNot(spec_).code(), absl::StatusCode::kInvalidArgument);
  // A layer's own RoPE counts for that layer alone.
  spec_.rope_theta = 10000;
  spec_.layers.resize(2);
  spec_.layers[1].rope = cache::RopeSpec{.theta = 1e6};
  EXPECT_TRUE(RopeShift::WhyNot(spec_).ok());
  spec_.layers[1].rope = cache::RopeSpec{};
  EXPECT_NE(RopeShift::WhyNot(spec_).ToString().find("layer 1 of model"), std::string::npos);
  spec_.layers[0].rope = spec_.layers[1].rope = cache::RopeSpec{.theta = 1e6};
  spec_.rope_theta = 0;
  EXPECT_TRUE(RopeShift::WhyNot(spec_).ok());
}

}  // namespace
}  // namespace tessera::compaction
