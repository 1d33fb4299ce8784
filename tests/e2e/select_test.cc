// Which entries a query reads: as reported by Select, as read by Attend, and as selected by the
// kernels.

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include "client/api/worker_access.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/implementation.h"
#include "tests/e2e/packed_lanes.h"

namespace tessera {
namespace {

// Attend reads exactly the entries that Select reports: attention over those alone gives the same.
TEST_F(PackedLanes, SelectSaysWhatAttendReads) {
  client::Sequence sequence = NewSequence(*mapped_);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, random_.Between(40, 250));
  Packing packing = {.summary = static_cast<Summary>(random_.Between(1, 2)),
                     .block = 4u << random_.Below(3),
                     .dense = true};
  ASSERT_TRUE(Compress(sequence, packing, {}));
  const std::uint64_t summed_up = truth.tokens();
  Append(sequence, truth, random_.Between(1, 30));
  const std::uint64_t in_segments = truth.tokens();
  Decode(*mapped_, sequence, truth, std::nullopt);
  const SelectionRule rule = RandomRule();
  const std::uint64_t position = truth.tokens() - 1;
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const auto query = truth.Query(layer, position);
    const auto selected = client::SelectMessage(
        *mapped_, layer, {.sequence = &sequence, .query = BytesOf(query)}, rule);
    ASSERT_TRUE(selected.ok()) << selected.status();
    EXPECT_EQ(selected->tokens(), truth.tokens());
    ASSERT_EQ(selected->heads_size(),
              static_cast<int>(rule.each_head ? shape_.query_heads : shape_.kv_heads));
    const Output attended = ByRpc(*mapped_, sequence, truth, layer, position, rule);
    for (const v1::HeadSelection& head : selected->heads()) {
      EXPECT_EQ(head.visible_entries(), truth.tokens());
      EXPECT_EQ(head.entries_without_summary(), in_segments - summed_up);
      EXPECT_EQ(head.tail_entries(), truth.tokens() - in_segments);
      std::vector<bool> read(truth.tokens(), false);
      std::fill(read.begin() + static_cast<std::ptrdiff_t>(summed_up), read.end(), true);
      std::uint64_t taken = 0;
      for (const v1::PositionRun& run : head.runs()) {
        ASSERT_LE(run.first_position() + run.entries(), summed_up);
        for (std::uint64_t i = 0; i < run.entries(); ++i) read[run.first_position() + i] = true;
        taken += run.entries();
      }
      EXPECT_EQ(head.selected_entries(), taken);
      // The budget, rounded up to whole blocks.
      const double budget = rule.entries != 0
                                ? static_cast<double>(std::min(rule.entries, summed_up))
                                : std::max(rule.rate * static_cast<double>(summed_up),
                                           static_cast<double>(std::min(rule.floor, summed_up)));
      EXPECT_GE(static_cast<double>(taken) + 1e-3, budget);
      EXPECT_LE(static_cast<double>(taken), budget + 16 + 1);
      const std::uint32_t group = shape_.group();
      ASSERT_EQ(head.has_query_head(), rule.each_head);
      const std::uint32_t first = rule.each_head ? head.query_head() : head.kv_head() * group;
      ASSERT_EQ(first / group, head.kv_head());
      for (std::uint32_t h = first; h < first + (rule.each_head ? 1 : group); ++h) {
        // Attention over those entries alone, by definition.
        std::vector<double> logits, weights;
        double most = -1e300;
        const std::size_t row = shape_.kv_row();
        const auto keys = truth.Key(layer, 0, truth.tokens());
        const auto values = truth.Value(layer, 0, truth.tokens());
        for (std::uint64_t t = 0; t < truth.tokens(); ++t) {
          double dot = 0;
          for (std::uint32_t d = 0; d < shape_.head_dim; ++d) {
            dot += double{kernels::Bf16ToFloat(query[h * shape_.head_dim + d])} *
                   kernels::Bf16ToFloat(keys[t * row + head.kv_head() * shape_.head_dim + d]);
          }
          logits.push_back(dot / std::sqrt(static_cast<double>(shape_.head_dim)));
          if (read[t]) most = std::max(most, logits.back());
        }
        double sum = 0;
        for (std::uint64_t t = 0; t < truth.tokens(); ++t) {
          weights.push_back(read[t] ? std::exp(logits[t] - most) : 0);
          sum += weights.back();
        }
        EXPECT_NEAR(attended.lse[h], most + std::log(sum), 1e-3);
        for (std::uint32_t d = 0; d < shape_.head_dim; ++d) {
          double out = 0;
          for (std::uint64_t t = 0; t < truth.tokens(); ++t) {
            out += weights[t] / sum *
                   kernels::Bf16ToFloat(values[t * row + head.kv_head() * shape_.head_dim + d]);
          }
          ASSERT_NEAR(attended.output[h * shape_.head_dim + d], out, 0.02);
        }
      }
    }
  }
}

// Lets the kernels select over tiles made in the test from the same rows that the daemon received.
class LocalLane {
 public:
  LocalLane(const SyntheticSequence& truth, std::uint32_t layer, std::uint32_t kv_head,
            const kernels::TileShape& shape) {
    const kernels::Operations& operations = kernels::OperationsOf(kernels::BestImplementation());
    const std::uint32_t tiles =
        static_cast<std::uint32_t>((truth.tokens() + 31) / kernels::kTileEntries);
    const kernels::TileLayout layout = kernels::LayoutOf(shape);
    tile_bytes_ = (kernels::TileAndSummaryBytes(layout) + 63) / 64 * 64;
    std::byte* const prepared =
        Aligned(operations.prepared_bytes(shape, kernels::ElementType::kBf16));
    operations.prepare_encode(shape, kernels::ElementType::kBf16, {}, prepared);
    std::byte* const arena = Aligned(tiles * tile_bytes_);
    const std::size_t row = truth.shape().kv_row();
    for (std::uint32_t t = 0; t < tiles; ++t) {
      const std::uint64_t first = std::uint64_t{t} * kernels::kTileEntries;
      const auto rows = static_cast<std::uint32_t>(
          std::min<std::uint64_t>(kernels::kTileEntries, truth.tokens() - first));
      const std::size_t head = std::size_t{kv_head} * truth.shape().head_dim;
      offsets_.push_back(t * tile_bytes_);
      EXPECT_TRUE(operations.encode(
          {.key = BytesOf(truth.Key(layer, first, rows)).data() + 2 * head,
           .value = BytesOf(truth.Value(layer, first, rows)).data() + 2 * head,
           .stride = row * 2,
           .type = kernels::ElementType::kBf16,
           .rows = rows,
           .weights = nullptr,
           .positions = nullptr,
           .shape = shape,
           .layout = layout,
           .prepared = prepared,
           .tile = arena + offsets_.back(),
           .summaries = kernels::SummariesAfter(arena + offsets_.back(), layout)}));
    }
    segment_ = {.arena = arena,
                .arena_bytes = tiles * tile_bytes_,
                .tile_offsets = offsets_.data(),
                .entries = static_cast<std::uint32_t>(truth.tokens()),
                .shape = shape};
  }
  kernels::LaneView view() const { return {.segments = &segment_, .segment_count = 1}; }

 private:
  std::byte* Aligned(std::size_t bytes) {
    memory_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64)),
                         &std::free);
    return memory_.back().get();
  }
  std::vector<std::unique_ptr<std::byte, void (*)(void*)>> memory_;
  std::uint64_t tile_bytes_ = 0;
  std::vector<std::uint64_t> offsets_;
  kernels::SegmentView segment_;
};

TEST_F(PackedLanes, SelectIsTheKernelsChoice) {
  for (int round = 0; round < 4; ++round) {
    client::Sequence sequence = NewSequence(*mapped_);
    SyntheticSequence truth(shape_, random_.Bits());
    Append(sequence, truth, random_.Between(20, 300));
    const Packing packing = {
        .kept_channels = 4 * static_cast<std::uint32_t>(random_.Between(1, shape_.head_dim / 4)),
        .group = 1u << random_.Below(3),
        .values = static_cast<client::ValueType>(random_.Between(1, 4)),
        .summary = static_cast<Summary>(random_.Between(1, 2)),
        .block = 4u << random_.Below(3)};
    ASSERT_TRUE(Compress(sequence, packing, {}));
    kernels::TileShape shape = kernels::DenseShape(shape_.head_dim, kernels::ElementType::kBf16);
    shape.format = kernels::PackedFormat(client::ToKernels(packing.values));
    shape.key.kept = shape.value.kept = static_cast<std::uint16_t>(packing.kept_channels);
    shape.group = static_cast<std::uint8_t>(packing.group);
    shape.summary = client::ToKernels(packing.summary);
    shape.block = static_cast<std::uint8_t>(packing.block);
    const SelectionRule rule = RandomRule();
    const auto queries =
        static_cast<std::uint32_t>(random_.Between(1, std::min<std::uint64_t>(40, truth.tokens())));
    const std::uint64_t position = random_.Between(0, truth.tokens() - 1);
    const std::uint32_t layer = static_cast<std::uint32_t>(random_.Below(shape_.layers));
    std::vector<std::uint16_t> query;
    for (std::uint32_t q = 0; q < queries; ++q) {
      const std::vector<std::uint16_t> one = truth.Query(layer, q);
      query.insert(query.end(), one.begin(), one.end());
    }
    const auto selected = client::SelectMessage(*mapped_, layer,
                                                {.sequence = &sequence,
                                                 .queries = queries,
                                                 .query = BytesOf(query),
                                                 .first_query_position = position},
                                                rule);
    ASSERT_TRUE(selected.ok()) << selected.status();
    const std::uint32_t choices = rule.each_head ? shape_.query_heads : shape_.kv_heads;
    ASSERT_EQ(selected->heads_size(), static_cast<int>(choices));
    const kernels::SelectionRule kernel_rule = client::ToKernels(rule);
    for (std::uint32_t head = 0; head < choices; ++head) {
      const std::uint32_t kv_head = rule.each_head ? head / shape_.group() : head;
      const LocalLane lane(truth, layer, kv_head, shape);
      const kernels::LaneView view = lane.view();
      const kernels::AttendItem item = {.lane = &view,
                                        .kv_head = head,
                                        .queries = queries,
                                        .first_query_position = position,
                                        .query = query.data(),
                                        .selection = &kernel_rule};
      const kernels::AttendBatch batch = {
          .geometry = {.query_heads = shape_.query_heads,
                       .kv_heads = choices,
                       .head_dim = shape_.head_dim,
                       .type = kernels::ElementType::kBf16,
                       .scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim))},
          .items = {&item, 1}};
      struct Sink final : kernels::SelectionSink {
        void Take(std::uint32_t, const kernels::SelectedRun& run) override { runs.push_back(run); }
        std::vector<kernels::SelectedRun> runs;
      };
      Sink sink;
      const std::size_t bytes = (kernels::AttendWorkspaceBytes(batch) + 63) / 64 * 64;
      const std::unique_ptr<std::byte, void (*)(void*)> workspace(
          static_cast<std::byte*>(std::aligned_alloc(64, bytes)), &std::free);
      kernels::InlineExecutor executor;
      ASSERT_EQ(kernels::Select(kernels::BestImplementation(), batch, {workspace.get(), bytes},
                                executor, sink)
                    .status,
                kernels::AttendStatus::kOk);
      const v1::HeadSelection& answer = selected->heads(static_cast<int>(head));
      EXPECT_EQ(answer.kv_head(), kv_head);
      EXPECT_EQ(answer.query_head(), rule.each_head ? head : 0);
      EXPECT_EQ(answer.visible_entries(),
                std::min<std::uint64_t>(truth.tokens(), position + queries));
      ASSERT_EQ(answer.runs_size(), static_cast<int>(sink.runs.size()));
      for (int i = 0; i < answer.runs_size(); ++i) {
        EXPECT_EQ(answer.runs(i).first_position(), sink.runs[i].first_entry);
        EXPECT_EQ(answer.runs(i).entries(), sink.runs[i].entries);
      }
    }
  }
}

// The page budget counts all rows held, including the tail and rows without a summary yet.
TEST_F(PackedLanes, QuestReadsSoManyPagesInAll) {
  constexpr std::uint64_t kPages = 10;
  for (int round = 0; round < 8; ++round) {
    const std::uint64_t page = 4u << random_.Below(3);
    const SelectionRule rule = {
        .entries = kPages * page, .judge = SelectionRule::Judge::kLogit, .counts_tail = true};
    auto sequence = mapped_->CreateSequence(
        model_, Concat("quest:dense_layers=0,page=", page, ",tokens=", kPages * page));
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    SyntheticSequence truth(shape_, random_.Bits());
    Append(*sequence, truth, random_.Between(200, 400));
    ASSERT_TRUE(sequence->Compress().ok());
    // At most what its last tile has room for: the background would summarise a full one.
    const std::uint64_t room = 31 - truth.tokens() % 32;
    for (std::uint64_t i = random_.Between(0, room); i > 0; --i) {
      Decode(*mapped_, *sequence, truth, std::nullopt);
    }
    const auto query = truth.Query(0, truth.tokens() - 1);
    const auto selected =
        client::SelectMessage(*mapped_, 0, {.sequence = &*sequence, .query = BytesOf(query)}, rule);
    ASSERT_TRUE(selected.ok()) << selected.status();
    for (const v1::HeadSelection& head : selected->heads()) {
      std::vector<bool> pages((truth.tokens() + page - 1) / page);
      const auto read = [&](std::uint64_t first, std::uint64_t count) {
        for (std::uint64_t t = first; t < first + count; ++t) pages[t / page] = true;
      };
      for (const v1::PositionRun& run : head.runs()) read(run.first_position(), run.entries());
      const std::uint64_t whole = head.entries_without_summary() + head.tail_entries();
      read(truth.tokens() - whole, whole);
      EXPECT_EQ(static_cast<std::uint64_t>(std::count(pages.begin(), pages.end(), true)), kPages)
          << truth.tokens() << " tokens, pages of " << page << ", " << whole << " in no page";
      EXPECT_TRUE(pages.back());
    }
  }
}

TEST_F(PackedLanes, ASelectionOfTooManyTokensIsRefusedByBothTransports) {
  for (client::Worker* worker : {mapped_.get(), remote_.get()}) {
    client::Sequence sequence = NewSequence(*worker);
    client::Sequence* const batch[] = {&sequence};
    const std::uint32_t tokens = worker == mapped_.get() ? 97 : 257;
    auto step = worker->BeginStep(batch, {.new_tokens = tokens});
    ASSERT_TRUE(step.ok()) << step.status();
    const std::vector<std::uint16_t> row(tokens * shape_.kv_row());
    const std::vector<std::uint16_t> query(tokens * shape_.query_row());
    Output out = NewOutput(tokens);
    client::StepTensors tensors = {.key = BytesOf(row),
                                   .value = BytesOf(row),
                                   .query = BytesOf(query),
                                   .output = WritableBytesOf(out.output),
                                   .selection = SelectionRule{.rate = 2}};
    const absl::Status rate = step->Attend(0, tensors);
    EXPECT_EQ(rate.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(rate.message()), testing::HasSubstr("rate is 2"));
    tensors.selection->rate = 1;
    const absl::Status many = step->Attend(0, tensors);
    if (tokens <= 256) {
      EXPECT_TRUE(many.ok()) << many;
    } else {
      EXPECT_EQ(many.code(), absl::StatusCode::kInvalidArgument);
      EXPECT_THAT(std::string(many.message()), testing::HasSubstr("257 new tokens"));
    }
  }
}

}  // namespace
}  // namespace tessera
