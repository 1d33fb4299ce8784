// Keys indexed by signs, end to end: each query reads the quads that Select reports for it, and
// both transports give the same bits.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "client/api/worker_access.h"
#include "kernels/format/element.h"
#include "tests/e2e/packed_lanes.h"

namespace tessera {
namespace {

constexpr std::uint32_t kDrafts = 3;

class SignsLanes : public PackedLanes {
 protected:
  client::Sequence Indexed(const std::string& policy, SyntheticSequence& truth,
                           std::uint64_t tokens) {
    auto sequence = mapped_->CreateSequence(model_, policy);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    Append(*sequence, truth, tokens);
    const auto compressed = sequence->Compress();
    EXPECT_TRUE(compressed.ok()) << compressed.status();
    return *std::move(sequence);
  }
  // The queries of the newest `kDrafts` tokens.
  std::vector<std::uint16_t> Queries(const SyntheticSequence& truth, std::uint32_t layer) {
    std::vector<std::uint16_t> all;
    for (std::uint64_t t = truth.tokens() - kDrafts; t < truth.tokens(); ++t) {
      const auto query = truth.Query(layer, t);
      all.insert(all.end(), query.begin(), query.end());
    }
    return all;
  }
  // Decodes `kDrafts` tokens in one step of the mapped transport.
  std::vector<Output> DecodeDrafts(client::Sequence& sequence, SyntheticSequence& truth) {
    truth.Grow(kDrafts);
    const std::uint64_t first = truth.tokens() - kDrafts;
    client::Sequence* const batch[] = {&sequence};
    std::vector<Output> outputs;
    absl::Status status;
    do {
      outputs.assign(shape_.layers, NewOutput(kDrafts));
      auto step = mapped_->BeginStep(batch, {.new_tokens = kDrafts});
      EXPECT_TRUE(step.ok()) << step.status();
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const auto query = Queries(truth, layer);
        status = step->AppendAndAttend(layer, {.key = BytesOf(truth.Key(layer, first, kDrafts)),
                                               .value = BytesOf(truth.Value(layer, first, kDrafts)),
                                               .query = BytesOf(query),
                                               .output = WritableBytesOf(outputs[layer].output),
                                               .lse = outputs[layer].lse});
        EXPECT_TRUE(status.ok() || absl::IsAborted(status)) << status;
      }
      status = step->End();
    } while (absl::IsAborted(status));
    EXPECT_TRUE(status.ok()) << status;
    return outputs;
  }
  // The same by RPC, after the step.
  Output DraftsByRpc(client::Sequence& sequence, const SyntheticSequence& truth,
                     std::uint32_t layer) {
    Output out = NewOutput(kDrafts);
    const auto query = Queries(truth, layer);
    const client::AttendQuery queries[] = {{.sequence = &sequence,
                                            .queries = kDrafts,
                                            .query = BytesOf(query),
                                            .output = WritableBytesOf(out.output),
                                            .lse = out.lse,
                                            .first_query_position = truth.tokens() - kDrafts}};
    const absl::Status status = mapped_->AttendRpc(layer, queries, {});
    EXPECT_TRUE(status.ok()) << status;
    return out;
  }
  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    std::uint64_t bytes = 0;  // of the index
  };
  // The positions of a lane that have an index.
  static Range IndexedOf(client::Sequence& sequence) {
    const auto described = sequence.Describe(/*lanes=*/true);
    EXPECT_TRUE(described.ok()) << described.status();
    Range range;
    for (const auto& run : described->lanes.front().runs) {
      if (run.summary != Summary::kSigns) continue;
      EXPECT_EQ(run.block, 4u);
      if (range.end == 0) range.begin = run.first_position;
      range.end = run.first_position + run.entries;
      range.bytes += run.summary_bytes;
    }
    return range;
  }
  void Check(const v1::HeadSelection& head, const Output& attended, const Range& indexed,
             std::uint32_t layer, const SyntheticSequence& truth);
};

// Attention over what was selected, and over everything without an index, by definition.
void SignsLanes::Check(const v1::HeadSelection& head, const Output& attended, const Range& indexed,
                       std::uint32_t layer, const SyntheticSequence& truth) {
  const std::uint64_t position = truth.tokens() - kDrafts + head.query();
  std::vector<bool> read(position + 1, true);
  std::fill(read.begin() + static_cast<std::ptrdiff_t>(indexed.begin),
            read.begin() + static_cast<std::ptrdiff_t>(indexed.end), false);
  for (const v1::PositionRun& run : head.runs()) {
    ASSERT_GE(run.first_position(), indexed.begin);
    ASSERT_LE(run.first_position() + run.entries(), indexed.end);
    ASSERT_EQ((run.first_position() - indexed.begin) % 4, 0u) << "a quad is chosen whole";
    for (std::uint64_t i = 0; i < run.entries(); ++i) read[run.first_position() + i] = true;
  }
  const auto query = truth.Query(layer, position);
  const auto keys = truth.Key(layer, 0, position + 1);
  const std::size_t row = shape_.kv_row();
  for (std::uint32_t g = 0; g < shape_.group(); ++g) {
    const std::uint32_t h = head.kv_head() * shape_.group() + g;
    std::vector<double> logits;
    double most = -1e300;
    for (std::uint64_t t = 0; t <= position; ++t) {
      double dot = 0;
      for (std::uint32_t d = 0; d < shape_.head_dim; ++d) {
        dot += double{kernels::Bf16ToFloat(query[h * shape_.head_dim + d])} *
               kernels::Bf16ToFloat(keys[t * row + head.kv_head() * shape_.head_dim + d]);
      }
      logits.push_back(dot / std::sqrt(static_cast<double>(shape_.head_dim)));
      if (read[t]) most = std::max(most, logits.back());
    }
    double sum = 0;
    for (std::uint64_t t = 0; t <= position; ++t) sum += read[t] ? std::exp(logits[t] - most) : 0;
    EXPECT_NEAR(attended.lse[head.query() * shape_.query_heads + h], most + std::log(sum), 1e-3);
  }
}

TEST_F(SignsLanes, EachQueryReadsWhatSelectReportsForIt) {
  SyntheticSequence truth(shape_, random_.Bits());
  const std::uint64_t tokens = random_.Between(1300, 1500);
  client::Sequence sequence = Indexed("signs:rate=0.25,floor=32", truth, tokens);
  const Range indexed = IndexedOf(sequence);
  ASSERT_EQ(indexed.begin, 32u);
  ASSERT_GE(indexed.end, 1024u + 32);
  EXPECT_GE(indexed.bytes, (indexed.end - indexed.begin) * (shape_.head_dim / 16 + 1));
  const std::vector<Output> by_step = DecodeDrafts(sequence, truth);
  int unlike = 0;
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const Output by_rpc = DraftsByRpc(sequence, truth, layer);
    EXPECT_TRUE(by_rpc == by_step[layer]) << "layer " << layer;
    const auto query = Queries(truth, layer);
    const SelectionRule rule = {
        .rate = 0.25, .floor = 32, .judge = SelectionRule::Judge::kLogit, .each_query = true};
    const auto selected = client::SelectMessage(
        *mapped_, layer, {.sequence = &sequence, .queries = kDrafts, .query = BytesOf(query)},
        rule);
    ASSERT_TRUE(selected.ok()) << selected.status();
    ASSERT_EQ(selected->heads_size(), static_cast<int>(kDrafts * shape_.kv_heads));
    for (int i = 0; i < selected->heads_size(); ++i) {
      const v1::HeadSelection& head = selected->heads(i);
      EXPECT_EQ(head.kv_head(), static_cast<std::uint32_t>(i) / kDrafts);
      EXPECT_EQ(head.query(), static_cast<std::uint32_t>(i) % kDrafts);
      const std::uint64_t budget = (indexed.end - indexed.begin + 3) / 4;
      EXPECT_EQ(head.selected_entries(), (budget + 3) / 4 * 4);
      ASSERT_NO_FATAL_FAILURE(Check(head, by_rpc, indexed, layer, truth));
      if (i % kDrafts == 0) continue;
      const auto& before = selected->heads(i - 1).runs();
      unlike += !std::equal(
          head.runs().begin(), head.runs().end(), before.begin(), before.end(),
          [](const auto& a, const auto& b) { return a.first_position() == b.first_position(); });
    }
  }
  EXPECT_GT(unlike, 0) << "the queries made the same choice";
}

TEST_F(SignsLanes, BothTransportsGiveTheSameBitsOverPlanes) {
  SyntheticSequence truth(shape_, random_.Bits());
  for (const char* choice : {"row", "call"}) {
    SyntheticSequence own = truth;
    client::Sequence sequence = Indexed(
        std::string("planes:book_rows=256,recent=32+signs:rate=0.2,floor=64,choice=") + choice, own,
        700);
    for (int round = 0; round < 12; ++round) {
      const auto settled = sequence.Compress();  // full tiles of earlier steps are coded now
      ASSERT_TRUE(settled.ok()) << settled.status();
      const Range before = IndexedOf(sequence);
      const std::vector<Output> by_step = DecodeDrafts(sequence, own);
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const Output by_rpc = DraftsByRpc(sequence, own, layer);
        // Unless the step has filled a tile, which is coded meanwhile.
        ASSERT_TRUE(by_rpc == by_step[layer] || IndexedOf(sequence).end != before.end)
            << choice << ", layer " << layer << ", round " << round;
      }
    }
    // A fork reads the same segments; a restored sequence has the same bits.
    const auto settled = sequence.Compress();
    ASSERT_TRUE(settled.ok()) << settled.status();
    const Output before = DraftsByRpc(sequence, own, 0);
    auto fork = sequence.Fork();
    ASSERT_TRUE(fork.ok()) << fork.status();
    EXPECT_TRUE(before == DraftsByRpc(*fork, own, 0));
    ASSERT_TRUE(fork->Free().ok());
    ASSERT_TRUE(sequence.Offload().ok());
    const absl::Status restored = sequence.Restore();
    ASSERT_TRUE(restored.ok()) << restored;
    EXPECT_TRUE(before == DraftsByRpc(sequence, own, 0));
  }
}

// An explicit packing cannot make an index: it has no book.
TEST_F(SignsLanes, PackingsWithSignsAreRefused) {
  client::Sequence sequence = NewSequence(*mapped_);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 64);
  const auto refused =
      sequence.Compress({.summary = Summary::kSigns, .block = 4, .dense = true}, {});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(refused.status().ToString().find("set a policy with signs"), std::string::npos)
      << refused.status();
}

}  // namespace
}  // namespace tessera
