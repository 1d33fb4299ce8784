// Token policies combined with everything that may follow them, end to end: rows packed as every
// value type, blocks selected. Attention is compared with its definition over the entries that the
// daemon reports.

#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "client/api/worker_access.h"
#include "client/sequence/sequence_state.h"
#include "client/session/kernel_types.h"
#include "daemon/base/strings.h"
#include "tests/e2e/tokens/token_lanes.h"

namespace tessera {
namespace {

// Keeps all channels: packed rows differ only by rounding.
constexpr const char* kPacked =
    "+mosaickv:sinks=0,recent=0,keep=1,group=1,loss_k=1,loss_v=1,min_segment=32,select=";

// Keeps 240 of 600 tokens, or slightly more.
struct TokenTerm {
  const char* name;
  const char* text;
  bool merges = false;
  bool continues = false;  // continues while decoding
};

struct Form {
  const char* name;
  std::string text;
  double tolerance;
  bool packs = true;
  bool selects = false;
};

class Composition : public Tokens, public testing::WithParamInterface<std::tuple<TokenTerm, Form>> {
 protected:
  // Reduces the reported entries of a lane to those that are selected.
  void KeepSelected(client::Sequence& sequence, const SyntheticSequence& truth, std::uint32_t layer,
                    v1::DescribeResponse& held) {
    const client::PolicySelection selection = client::FromProto(held.selection());
    const auto query = truth.Query(layer, truth.tokens() - 1);
    const auto selected =
        client::SelectMessage(*mapped_, layer, {.sequence = &sequence, .query = BytesOf(query)},
                              client::FromKernels(selection.rule));
    ASSERT_TRUE(selected.ok()) << selected.status();
    for (const v1::HeadSelection& head : selected->heads()) {
      Positions read;
      for (const v1::PositionRun& run : head.runs()) {
        for (std::uint64_t i = 0; i < run.entries(); ++i) read.push_back(run.first_position() + i);
      }
      v1::LaneDescription& lane =
          *held.mutable_lane(static_cast<int>(layer * shape_.kv_heads + head.kv_head()));
      Positions both;
      std::ranges::set_intersection(lane.position(), read, std::back_inserter(both));
      EXPECT_EQ(both, read) << "what is selected is held";
      EXPECT_LT(read.size(), static_cast<std::size_t>(lane.position_size()));
      // Entries without a summary are always read: the newest ones.
      const std::uint64_t whole = head.entries_without_summary() + head.tail_entries();
      ASSERT_LE(both.size() + whole, static_cast<std::size_t>(lane.position_size()));
      const Positions newest(lane.position().end() - static_cast<std::ptrdiff_t>(whole),
                             lane.position().end());
      both.insert(both.end(), newest.begin(), newest.end());
      lane.mutable_position()->Assign(both.begin(), both.end());
    }
  }
  void ExpectRight(client::Sequence& sequence, const SyntheticSequence& truth, const Form& form) {
    // Rows that are still being encoded belong to other blocks before and after, so retry until
    // nothing changes.
    for (bool still = false; !still;) {
      const v1::DescribeResponse described = Entries(sequence);
      const std::vector<Difference> differences = Differences(sequence, truth, form, described);
      ASSERT_FALSE(HasFatalFailure());
      const v1::DescribeResponse after = Entries(sequence);
      ASSERT_FALSE(HasFailure());
      still = google::protobuf::util::MessageDifferencer::Equals(described, after);
      if (!still) continue;
      for (const Difference& one : differences) {
        EXPECT_LE(one.most, form.tolerance) << "layer " << one.layer;
      }
    }
  }
  struct Difference {
    std::uint32_t layer = 0;
    double most = 0;
  };
  // The differences of each layer's outputs from the definition, through both transports.
  std::vector<Difference> Differences(client::Sequence& sequence, const SyntheticSequence& truth,
                                      const Form& form, v1::DescribeResponse held) {
    std::vector<Difference> differences;
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      if (form.selects) KeepSelected(sequence, truth, layer, held);
      if (HasFatalFailure()) break;
      const std::vector<double> exact = ByDefinition(held, truth, layer);
      Difference& own = differences.emplace_back(Difference{.layer = layer});
      for (client::Worker* worker : {mapped_.get(), remote_.get()}) {
        const std::vector<float> output = Attend(*worker, sequence, truth, layer, std::nullopt);
        for (std::size_t i = 0; i < output.size(); ++i) {
          const double off = std::abs(output[i] - exact[i]);
          own.most =
              std::isnan(off) ? std::numeric_limits<double>::infinity() : std::max(own.most, off);
        }
      }
    }
    return differences;
  }
  std::vector<float> Attend(client::Worker& worker, client::Sequence& sequence,
                            const SyntheticSequence& truth, std::uint32_t layer,
                            const std::optional<client::SelectionRule>& rule) {
    std::vector<float> output(shape_.query_row());
    const auto query = truth.Query(layer, truth.tokens() - 1);
    const client::AttendQuery asked[] = {
        {.sequence = &sequence, .query = BytesOf(query), .output = WritableBytesOf(output)}};
    const absl::Status status = worker.AttendRpc(layer, asked, {.selection = rule});
    EXPECT_TRUE(status.ok()) << status;
    return output;
  }
  // Merged rows are means that the daemon does not report, so compare with the same policy without
  // packing.
  void ExpectLikePlain(client::Sequence& sequence, client::Sequence& plain,
                       const SyntheticSequence& truth, const Form& form) {
    const client::SelectionRule all = {.rate = 1};
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const std::vector<float> expected = Attend(*mapped_, plain, truth, layer, all);
      for (client::Worker* worker : {mapped_.get(), remote_.get()}) {
        const std::vector<float> output = Attend(*worker, sequence, truth, layer, all);
        for (std::size_t i = 0; i < output.size(); ++i) {
          ASSERT_NEAR(output[i], expected[i], form.tolerance) << "layer " << layer;
        }
      }
    }
  }
  void Fill(client::Sequence& sequence, SyntheticSequence& truth) {
    Append(sequence, truth, 600);
    const std::vector<std::uint32_t> ids(600, 7);
    const auto& [term, form] = GetParam();
    if (term.merges) {
      ASSERT_TRUE(sequence.ObserveTokens(0, ids).ok());
    }
    Compress(sequence);
  }
};

TEST_P(Composition, AttentionIsThatOverWhatIsLeft) {
  const auto& [term, form] = GetParam();
  Shape({.layers = 4, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
  client::Sequence sequence = NewSequence(Concat(term.text, form.text));
  const std::uint64_t seed = random_.Bits();
  SyntheticSequence truth(shape_, seed);
  ASSERT_NO_FATAL_FAILURE(Fill(sequence, truth));
  const v1::DescribeResponse held = Entries(sequence);
  EXPECT_LT(held.tokens_kept(), 0.8);
  EXPECT_EQ(Lane(held, 0).segment_run(0).format().starts_with("packed"), form.packs);
  if (term.merges) {
    client::Sequence plain = NewSequence(term.text);
    SyntheticSequence again(shape_, seed);
    ASSERT_NO_FATAL_FAILURE(Fill(plain, again));
    ExpectLikePlain(sequence, plain, truth, form);
    return;
  }
  ASSERT_NO_FATAL_FAILURE(ExpectRight(sequence, truth, form));
  for (int i = 0; i < 50; ++i) DecodeAndAttend(sequence, truth);
  ASSERT_TRUE(sequence.Park().ok());
  if (term.continues) Compress(sequence);
  const std::uint64_t now = Lane(Entries(sequence), 3, 1).entries();
  EXPECT_EQ(now, Lane(held, 3, 1).entries() + (term.continues ? 0 : 50));
  ExpectRight(sequence, truth, form);
}

const TokenTerm kTerms[] = {
    {"chunkkv", "chunkkv:budget=0.4,window=16"},
    {"semantickv", "semantickv:keep_total=0.4,sink=8,lambda=0.05"},
    {.name = "semanticache", .text = "semanticache:tau=0.05,sink=4,recent=16", .merges = true},
    {.name = "chunkkv_semanticache",
     .text = "chunkkv:budget=0.6,window=16+semanticache:tau=0.05,sink=4,recent=16",
     .merges = true},
    {.name = "lacache", .text = "lacache:budget=240,span=2,sink=4", .continues = true},
    {.name = "streaming", .text = "streaming:sink=4,recent=236", .continues = true},
    {.name = "h2o", .text = "h2o:heavy=120,recent=120", .continues = true},
    {"snapkv", "snapkv:budget=0.4,window=16"},
    {"pyramidkv", "pyramidkv:budget=0.4,window=16"},
    {.name = "tova", .text = "tova:budget=240", .continues = true},
};

const Form kForms[] = {
    {.name = "plain", .text = "", .tolerance = 1e-4, .packs = false},
    {.name = "quest",
     .text = "+quest:tokens=96,page=8,dense_layers=0",
     .tolerance = 1e-4,
     .packs = false,
     .selects = true},
    {.name = "mosaickv", .text = Concat(kPacked, 0, "+bf16"), .tolerance = 0.03},
    {.name = "int8", .text = Concat(kPacked, 0, "+int8"), .tolerance = 0.06},
    {.name = "fp8", .text = Concat(kPacked, 0, "+fp8"), .tolerance = 0.2},
    {.name = "selected",
     .text = Concat(kPacked, "0.25,floor=0+bf16"),
     .tolerance = 0.03,
     .selects = true},
    {.name = "selected_int8",
     .text = Concat(kPacked, "0.25,floor=0+int8"),
     .tolerance = 0.06,
     .selects = true},
};

INSTANTIATE_TEST_SUITE_P(Systems, Composition,
                         testing::Combine(testing::ValuesIn(kTerms), testing::ValuesIn(kForms)),
                         [](const auto& one) {
                           return Concat(std::get<0>(one.param).name, "_",
                                         std::get<1>(one.param).name);
                         });

class LikeKeys : public Tokens {
 protected:
  // A prompt for one layer with two kv heads of 64 channels. In the first head all keys are equal,
  // in the second none are similar. Observes and compresses it.
  void PromptOfLikeKeys(client::Sequence& sequence, SyntheticSequence& truth,
                        std::uint64_t tokens) {
    const std::uint64_t first = truth.tokens();
    truth.Grow(tokens);
    auto keys = truth.KeysOfAllLayers(first, tokens);
    for (std::uint64_t t = 0; t < tokens; ++t) {
      std::copy_n(truth.Key(0, 0, 1).begin(), 64, &keys[t * 128]);
    }
    const auto values = truth.ValuesOfAllLayers(first, tokens);
    ASSERT_TRUE(
        sequence.Append({.key = BytesOf(keys), .value = BytesOf(values), .tokens = tokens}).ok());
    Observe(sequence, truth, first, tokens);
    ASSERT_TRUE(sequence.ObserveTokens(first, std::vector<std::uint32_t>(tokens, 7)).ok());
    Compress(sequence);
  }
};

// Several prompts, each with its own decision. Lanes of the second head keep everything that the
// first policy leaves, and are final nonetheless.
TEST_F(LikeKeys, PromptAfterPromptIsChosenFromAndMerged) {
  Shape({.layers = 1, .query_heads = 2, .kv_heads = 2, .head_dim = 64});
  for (const char* form : {"", "+quest", "+mosaickv", "+mosaickv+int8", "+think:recent_size=8"}) {
    const std::string policy =
        Concat("chunkkv:budget=0.8,window=8+semanticache:tau=0.7,sink=2,recent=8", form);
    SCOPED_TRACE(policy);
    client::Sequence sequence = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    std::uint64_t held[2] = {0, 0};
    for (const std::uint64_t tokens : {60, 200, 200}) {
      const std::uint64_t first = truth.tokens();
      ASSERT_NO_FATAL_FAILURE(PromptOfLikeKeys(sequence, truth, tokens));
      const v1::DescribeResponse now = Entries(sequence);
      const std::uint64_t stay = tokens * 4 / 5;
      EXPECT_EQ(Lane(now, 0, 0).entries() - held[0], 2 * (first == 0) + 1 + 8);
      EXPECT_EQ(Lane(now, 0, 1).entries() - held[1], stay);
      for (std::uint32_t head = 0; head < 2; ++head) held[head] = Lane(now, 0, head).entries();
    }
  }
}

// A prompt so short that one head merges and the other keeps all tokens unchanged. Both are final,
// and the next prompt finds them equally long.
TEST_F(LikeKeys, ALaneThatKeepsAllIsDoneWithInEveryForm) {
  Shape({.layers = 1, .query_heads = 2, .kv_heads = 2, .head_dim = 64});
  for (const char* form : {"", "+quest", "+mosaickv", "+mosaickv+int8", "+think:recent_size=64"}) {
    const std::string policy = Concat("chunkkv:tokens=150+semanticache", form);
    SCOPED_TRACE(policy);
    client::Sequence sequence = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    for (const std::uint64_t tokens : {60, 300}) {
      ASSERT_NO_FATAL_FAILURE(PromptOfLikeKeys(sequence, truth, tokens));
    }
    const v1::DescribeResponse held = Entries(sequence);
    // 150 tokens of the second prompt remain, which form one chunk.
    EXPECT_EQ(Lane(held, 0, 0).entries(), 37u + 33u);
    EXPECT_EQ(Lane(held, 0, 1).entries(), 60u + 150u);
  }
}

// A prompt too short for a decision is decided together with the next one, for any form of rows.
// The same applies to a prompt whose share is below the window, which is refused.
TEST_F(Tokens, AShortPromptWaitsForTheNext) {
  Shape({.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  for (const char* policy : {"snapkv", "snapkv+quest", "chunkkv+quest", "snapkv+mosaickv",
                             "chunkkv+mosaickv+int8", "snapkv+semanticache+quest"}) {
    for (const std::uint64_t first : {30, 150}) {
      SCOPED_TRACE(Concat(policy, " of ", first));
      client::Sequence sequence = NewSequence(policy);
      SyntheticSequence truth(shape_, random_.Bits());
      for (const std::uint64_t tokens : {first, 170 - first}) {
        Append(sequence, truth, tokens);
        ASSERT_TRUE(
            sequence.ObserveTokens(truth.tokens() - tokens, std::vector<std::uint32_t>(tokens, 7))
                .ok());
        if (truth.tokens() == 150) {
          const auto whole = sequence.Compress();
          ASSERT_TRUE(whole.ok()) << whole.status();
          EXPECT_EQ(whole->outcomes[0].worst.reason, client::CompressionReason::kTooShort);
          EXPECT_EQ(whole->outcomes[0].worst.more_tokens, 10u);
          EXPECT_EQ(Entries(sequence).tokens_kept(), 1);
          continue;
        }
        Compress(sequence);
        // A fork inherits its parent's observations.
        auto fork = sequence.Fork();
        ASSERT_TRUE(fork.ok()) << fork.status();
        Compress(*fork);
        EXPECT_EQ(Entries(*fork).tokens_kept(), Entries(sequence).tokens_kept());
      }
      EXPECT_LE(Lane(Entries(sequence), 1).entries(), 34u);
    }
  }
}

TEST_F(Tokens, ThreeSystemsAndInt8Together) {
  Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
  client::Sequence sequence = NewSequence(
      "semanticache:budget=0.5,sink=0,recent=0+mosaickv:keep=0.25,loss_k=1,loss_v=1"
      "+int8");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 2000);
  const std::vector<std::uint32_t> ids(2000, 7);
  ASSERT_TRUE(sequence.ObserveTokens(0, ids).ok());
  Compress(sequence);
  const v1::DescribeResponse held = Entries(sequence);
  EXPECT_LE(held.tokens_kept(), 0.5);
  EXPECT_LE(held.elements_kept(), 0.5 * 0.25);
  EXPECT_LT(held.bytes_kept(), 0.25);
  for (const v1::LaneDescription& lane : held.lane()) {
    EXPECT_EQ(std::accumulate(lane.weight().begin(), lane.weight().end(), 0.0), 2000.0);
  }
}

}  // namespace
}  // namespace tessera
