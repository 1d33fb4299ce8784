// Selection on every device: choice and attention equal the reference's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "kernels/dispatch/attend.h"
#include "kernels/format/operations.h"
#include "tests/unit/device/devices.h"

namespace tessera::device {
namespace {

using testing::HasSubstr;

constexpr std::uint32_t kHeads = 2;
constexpr std::uint32_t kGroup = 2;
constexpr std::uint32_t kEntries = 200;
constexpr std::uint32_t kQueries = 3;

class Runs final : public kernels::SelectionSink {
 public:
  void Take(std::uint32_t item, const kernels::SelectedRun& run) override {
    runs.emplace_back(item, run.segment, run.first_entry, run.entries);
  }
  std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>> runs;
};

// One sequence with two kv heads, each with a segment with block means, in a device's pool. The
// rows are fixed, since near-ties may go either way.
class SelectTest : public DeviceTest {
 protected:
  SelectTest() : query_(kQueries * kHeads * kGroup * kHeadDim), lanes_(kHeads), views_(kHeads) {
    kernels::TileShape shape = kernels::DenseShape(kHeadDim, ElementType::kBf16);
    shape.summary = kernels::Summary::kMean;
    shape.block = 8;
    std::byte* at = pool_.data();
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      const kernels::TileLayout layout = kernels::LayoutOf(shape);
      auto* table = reinterpret_cast<std::uint64_t*>(at);
      auto* summary_table = reinterpret_cast<std::uint64_t*>(at + 64);
      static_assert(kEntries <= 8 * 32, "a table is a unit of 64 bytes");
      at += 128;
      for (std::uint32_t t = 0; t * 32 < kEntries; ++t) {
        std::byte* const summaries = at + (layout.bytes + 63) / 64 * 64;
        table[t] = static_cast<std::uint64_t>(at - pool_.data());
        summary_table[t] = static_cast<std::uint64_t>(summaries - pool_.data());
        FillTile(shape, std::min(32u, kEntries - t * 32), at, summaries);
        at = summaries + (layout.summary_bytes + 63) / 64 * 64;
      }
      views_[head] = {.arena = pool_.data(),
                      .arena_bytes = kPiece,
                      .tile_offsets = table,
                      .summary_offsets = summary_table,
                      .entries = kEntries,
                      .shape = shape};
      lanes_[head] = {.segments = &views_[head], .segment_count = 1};
    }
    for (std::uint16_t& element : query_) element = kernels::FloatToBf16(normal_(fixed_));
  }

  kernels::AttendBatch Batch(std::vector<float>& output) {
    output.assign(query_.size(), 0);
    items_.clear();
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      items_.push_back({.lane = &lanes_[head],
                        .kv_head = head,
                        .queries = kQueries,
                        .first_query_position = kEntries,
                        .query = query_.data(),
                        .output = output.data(),
                        .selection = &rule_});
    }
    return {.geometry = {.query_heads = kHeads * kGroup,
                         .kv_heads = kHeads,
                         .head_dim = kHeadDim,
                         .type = ElementType::kBf16,
                         .scale = 0.125f},
            .items = items_};
  }
  PoolView View() { return {.extents = {pool_.data()}, .extent_bytes = kPiece}; }

  kernels::SelectionRule rule_ = {.rate = 0.2, .first_block = true};
  std::vector<kernels::AttendItem> items_;

 private:
  void FillTile(const kernels::TileShape& shape, std::uint32_t rows, std::byte* tile,
                std::byte* summaries) {
    auto* elements = reinterpret_cast<std::uint16_t*>(tile);
    for (std::uint32_t i = 0; i < 64 * kHeadDim; ++i) {
      elements[i] = kernels::FloatToBf16(normal_(fixed_));
    }
    auto* means = reinterpret_cast<std::uint16_t*>(summaries);
    for (std::uint32_t e = 0; e < rows; e += shape.block) {
      const std::uint32_t here = std::min<std::uint32_t>(shape.block, rows - e);
      for (std::uint32_t c = 0; c < kHeadDim; ++c) {
        float sum = 0;
        for (std::uint32_t i = 0; i < here; ++i) {
          sum += kernels::Bf16ToFloat(elements[(e + i) * kHeadDim + c]);
        }
        means[e / shape.block * kHeadDim + c] =
            kernels::FloatToBf16(sum / static_cast<float>(here));
      }
    }
  }

  std::mt19937_64 fixed_{20};
  std::normal_distribution<float> normal_;
  Pool pool_ = PoolMemory();
  std::vector<std::uint16_t> query_;
  std::vector<kernels::LaneView> lanes_;
  std::vector<kernels::SegmentView> views_;
};

TEST_P(SelectTest, ChoosesAndReadsAsTheReference) {
  CpuDevice reference(*kernels::FindImplementation("reference"));
  for (const kernels::SelectionRule::Judge judge :
       {kernels::SelectionRule::Judge::kShare, kernels::SelectionRule::Judge::kLogit}) {
    rule_.judge = judge;
    std::vector<float> expected, output;
    Runs expected_runs, runs;
    ASSERT_TRUE(reference.Select(Batch(expected), View(), expected_runs).ok());
    ASSERT_TRUE(reference.Attend(Batch(expected), View()).ok());
    const auto selected = device_->Select(Batch(output), View(), runs);
    ASSERT_TRUE(selected.ok()) << selected.status();
    EXPECT_EQ(*selected, device_->description().kernels);
    EXPECT_EQ(runs.runs, expected_runs.runs);
    EXPECT_GE(runs.runs.size(), 4u);
    EXPECT_LT(runs.runs.size(), kHeads * kEntries / 8);
    EXPECT_EQ(output, std::vector<float>(output.size(), 0)) << "nothing is attended over";
    const auto attended = device_->Attend(Batch(output), View());
    ASSERT_TRUE(attended.ok()) << attended.status();
    for (std::size_t i = 0; i < output.size(); ++i) {
      ASSERT_NEAR(output[i], expected[i], 0.02) << "element " << i;
    }
  }
}

TEST_P(SelectTest, RulesThatDifferByHeadAreHonouredOrRefused) {
  std::vector<float> output;
  const kernels::AttendBatch batch = Batch(output);
  kernels::SelectionRule other = rule_;
  other.entries = 16;
  items_[1].selection = &other;
  Runs runs;
  const absl::Status status = device_->Select(batch, View(), runs).status();
  if (GetParam() == Kind::kCpu) {
    EXPECT_TRUE(status.ok()) << status;
    return;
  }
  EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("items 0 and 1 differ"));
  EXPECT_TRUE(absl::IsUnimplemented(device_->Attend(batch, View()).status()));
  items_[1].selection = nullptr;
  EXPECT_TRUE(absl::IsUnimplemented(device_->Attend(batch, View()).status()));
  EXPECT_TRUE(device_->health().ok());
}

// A selection per query head needs a layer without groups; otherwise the call is refused.
TEST_P(SelectTest, ChoicesOfHeadsAreNotMadeForGroups) {
  rule_.each_head = true;
  std::vector<float> output;
  const kernels::AttendBatch batch = Batch(output);
  if (GetParam() == Kind::kCpu) {
    EXPECT_TRUE(absl::IsInternal(device_->Attend(batch, View()).status()));
  } else {
    EXPECT_DEATH((void)device_->Attend(batch, View()), "needs one kv head per query head");
  }
}

TEST_P(SelectTest, ABadTileIsAnError) {
  std::vector<float> output;
  const kernels::AttendBatch batch = Batch(output);
  const auto* table = items_[1].lane->segments[0].tile_offsets;
  const_cast<std::uint64_t*>(table)[3] = kPiece;
  Runs runs;
  EXPECT_TRUE(absl::IsInternal(device_->Select(batch, View(), runs).status()));
  EXPECT_TRUE(runs.runs.empty() || GetParam() == Kind::kCpu);
  EXPECT_TRUE(device_->health().ok());
}

INSTANTIATE_TEST_SUITE_P(Devices, SelectTest, testing::ValuesIn(kKinds), KindName);

}  // namespace
}  // namespace tessera::device
