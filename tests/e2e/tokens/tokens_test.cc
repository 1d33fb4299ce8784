// Token policies end to end: a worker appends, the daemon evicts and merges entries, and the rest
// is reported by position and attended through either transport.

#include <numeric>
#include <string>

#include "client/api/worker_access.h"
#include "daemon/base/strings.h"
#include "tests/e2e/tokens/token_lanes.h"

namespace tessera {
namespace {

// ---- LaCache: the published golden values

TEST_F(Tokens, LaddersOfFourLayers) {
  Shape({.layers = 4, .query_heads = 1, .kv_heads = 1, .head_dim = 64});
  for (const std::uint64_t overlap : {0u, 1u}) {
    SCOPED_TRACE(overlap);
    client::Sequence sequence =
        NewSequence(Concat("lacache:budget=16,span=2,overlap=", overlap, ",sink=2"));
    SyntheticSequence truth(shape_, random_.Bits());
    Append(sequence, truth, 16);
    Compress(sequence);
    EXPECT_THAT(Lane(Entries(sequence), 0).position(), ElementsAreArray(Range(0, 15)));
    Append(sequence, truth, 1);
    Compress(sequence);
    const v1::DescribeResponse held = Entries(sequence);
    for (std::uint32_t layer = 0; layer < 4; ++layer) {
      const std::uint64_t gone = layer % 2 == 1 ? 2 : 3 + overlap;
      EXPECT_THAT(Lane(held, layer).position(), ElementsAreArray(AllExcept(17, {gone}))) << layer;
    }
    ExpectAttendsToWhatIsLeft(sequence, truth, 1e-4);
  }
}

// The budget is smaller than a tail: tokens leave the ring one by one.
TEST_F(Tokens, LaddersWhileDecodingInsideATail) {
  Shape({.layers = 8, .query_heads = 1, .kv_heads = 1, .head_dim = 64});
  client::Sequence sequence = NewSequence("lacache:budget=24,span=2,overlap=0,sink=4");
  SyntheticSequence truth(shape_, random_.Bits());
  for (int i = 0; i < 26; ++i) Decode(sequence, truth);
  Compress(sequence);
  v1::DescribeResponse held = Entries(sequence);
  const std::vector<Positions> gone = {{5, 6, 7}, {4, 6, 7}, {4, 5, 7}, {4, 5, 6}};
  for (std::uint32_t layer = 0; layer < 8; ++layer) {
    EXPECT_THAT(Lane(held, layer).position(), ElementsAreArray(AllExcept(26, gone[layer % 4])));
    EXPECT_EQ(Lane(held, layer).tail_entries(), 0u);
    EXPECT_EQ(Lane(held, layer).tokens(), 26u);
  }
  while (truth.tokens() < 80) Decode(sequence, truth);
  Compress(sequence);
  held = Entries(sequence);
  Positions steady = {0, 1, 2, 3, 4, 20, 36, 52, 59, 63, 67};
  for (const std::uint64_t position : Range(68, 79)) steady.push_back(position);
  EXPECT_THAT(Lane(held, 0).position(), ElementsAreArray(steady));
  ExpectAttendsToWhatIsLeft(sequence, truth, 1e-4);
}

// Tokens decoded before the first prompt count as decoded, whenever the daemon looks.
TEST_F(Tokens, LaddersOfAPromptBehindWhatWasDecoded) {
  Shape({.layers = 2, .query_heads = 1, .kv_heads = 1, .head_dim = 64});
  for (const bool compressed_between : {false, true}) {
    client::Sequence sequence =
        NewSequence("lacache:budget=17,span=1,overlap=0,sink=7,pass=uniform");
    SyntheticSequence truth(shape_, random_.Bits());
    for (int i = 0; i < 18; ++i) Decode(sequence, truth);
    if (compressed_between) Compress(sequence);
    Append(sequence, truth, 34, /*observe=*/false);
    Compress(sequence);
    const Positions kept = {0, 1, 2, 3, 4, 5, 6, 7, 16, 24, 32, 36, 40, 44, 48, 50, 51};
    EXPECT_THAT(Lane(Entries(sequence), 0).position(), ElementsAreArray(kept));
  }
}

TEST_F(Tokens, LaddersOverThirtyTwoLayers) {
  Shape({.layers = 32, .query_heads = 1, .kv_heads = 1, .head_dim = 64});
  client::Sequence sequence = NewSequence("lacache:budget=256,span=8,overlap=4,sink=4");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 256);
  Compress(sequence);
  for (int i = 0; i < 3; ++i) Append(sequence, truth, 1);
  Compress(sequence);
  const v1::DescribeResponse held = Entries(sequence);
  const std::vector<Positions> gone = {{6, 7, 8, 9, 10}, {4, 7, 8, 9, 10}, {4, 5, 8, 9, 10},
                                       {4, 5, 6, 9, 10}, {4, 5, 6, 7, 10}, {4, 5, 6, 7, 8}};
  for (std::uint32_t layer = 0; layer < 32; ++layer) {
    EXPECT_THAT(Lane(held, layer).position(), ElementsAreArray(AllExcept(259, gone[layer % 6])))
        << layer;
  }
}

TEST_F(Tokens, StreamingKeepsTheFirstAndTheNewest) {
  Shape({.layers = 2, .query_heads = 2, .kv_heads = 2, .head_dim = 64});
  client::Sequence sequence = NewSequence("streaming:sink=4,recent=40");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 100);
  const client::CompressResult compressed = Compress(sequence);
  EXPECT_EQ(compressed.entries_dropped, 4u * 56);
  Positions left = Range(0, 3);
  for (const std::uint64_t position : Range(60, 99)) left.push_back(position);
  EXPECT_THAT(Lane(Entries(sequence), 1, 1).position(), ElementsAreArray(left));
  for (int i = 0; i < 50; ++i) Decode(sequence, truth);
  Compress(sequence);
  left = Range(0, 3);
  for (const std::uint64_t position : Range(110, 149)) left.push_back(position);
  EXPECT_THAT(Lane(Entries(sequence), 0, 1).position(), ElementsAreArray(left));
  ExpectAttendsToWhatIsLeft(sequence, truth, 1e-4);
}

// ---- One-shot selections

class OneShot : public Tokens, public testing::WithParamInterface<const char*> {};

TEST_P(OneShot, WhatIsLeftIsAttendedTo) {
  Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
  client::Sequence sequence = NewSequence(GetParam());
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 150);
  Append(sequence, truth, 50);
  Compress(sequence);
  const v1::DescribeResponse held = Entries(sequence);
  EXPECT_EQ(held.tokens(), 200u);
  EXPECT_LT(held.tokens_kept(), 0.6);
  EXPECT_GT(held.tokens_kept(), 0.1);
  for (const v1::LaneDescription& lane : held.lane()) {
    EXPECT_EQ(lane.tokens(), 200u);
    EXPECT_LT(lane.entries(), 200u);
    EXPECT_EQ(lane.entries(), static_cast<std::uint64_t>(lane.position_size()));
    EXPECT_TRUE(std::is_sorted(lane.position().begin(), lane.position().end()));
    EXPECT_EQ(lane.position(lane.position_size() - 1), 199u);
  }
  ExpectAttendsToWhatIsLeft(sequence, truth, 1e-4);
  // It continues: decoded tokens are kept and attended.
  for (int i = 0; i < 70; ++i) Decode(sequence, truth);
  ASSERT_TRUE(sequence.Park().ok());
  EXPECT_EQ(Entries(sequence).tokens(), 270u);
  EXPECT_EQ(Lane(Entries(sequence), 1).entries(), Lane(held, 1).entries() + 70);
  ExpectAttendsToWhatIsLeft(sequence, truth, 1e-4);
  // The memory of the observations is released.
  const auto stats = client::StatsMessage(*mapped_);
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->tenants(0).observation_bytes(), 0u);
  EXPECT_GT(stats->tenants(0).entries_dropped(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Systems, OneShot,
                         testing::Values("chunkkv:budget=0.3,chunk=10,window=16",
                                         "chunkkv:budget=0.3,chunk=10,window=16,scope=head",
                                         "chunkkv:budget=0.3,chunk=10,window=16,reuse=2",
                                         "semantickv:keep_total=0.3,sink=8,lambda=0.05",
                                         "snapkv:budget=0.3,window=16",
                                         "pyramidkv:budget=0.3,window=16"));

// ---- Observations larger than a message

class SmallMessages : public Tokens {
 protected:
  SmallMessages()
      : Tokens(DaemonProcess::Start({.flags = {"--max-message-bytes=64KiB"}}), nullptr) {}
};

TEST_F(SmallMessages, QueriesGoThroughTheStagingArena) {
  Shape({.layers = 2, .query_heads = 8, .kv_heads = 2, .head_dim = 128});
  // 64 rows of 8 heads are 131,072 bytes.
  const std::string policy = "snapkv:budget=0.5,window=64";
  client::Sequence sequence = NewSequence(policy);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 300);
  Compress(sequence);
  EXPECT_EQ(Lane(Entries(sequence), 1).entries(), 150u);
  ExpectAttendsToWhatIsLeft(sequence, truth, 1e-4);
  // A worker without a mapping gets an error about the size.
  auto remote = remote_->CreateSequence(*remote_->RegisterModel(shape_.Geometry()), policy);
  ASSERT_TRUE(remote.ok()) << remote.status();
  SyntheticSequence same(shape_, random_.Bits());
  Append(*remote, same, 300);
  const absl::Status refused = remote->Compress().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("131072 bytes"));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("max_message_bytes"));
}

TEST_F(Tokens, AnUnobservedPromptIsRefusedAndUnchanged) {
  Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
  client::Sequence sequence = NewSequence("chunkkv:budget=0.3,window=16");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 200, /*observe=*/false);
  const auto refused = sequence.Compress();
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("Observe"));
  EXPECT_EQ(Entries(sequence).tokens_kept(), 1);
  ExpectAttendsToWhatIsLeft(sequence, truth, 1e-4);
}

TEST_F(Tokens, AForkTakesAnotherPolicyAndItsParentKeepsEverything) {
  Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
  client::Sequence parent = NewSequence("");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(parent, truth, 200);
  auto child = parent.Fork("streaming:sink=4,recent=60");
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_EQ(child->policy(), "streaming:recent=60");
  Compress(*child);
  EXPECT_EQ(Lane(Entries(*child), 0).entries(), 64u);
  EXPECT_EQ(Lane(Entries(parent), 0).entries(), 200u);
  ExpectAttendsToWhatIsLeft(*child, truth, 1e-4);
  ExpectAttendsToWhatIsLeft(parent, truth, 1e-4);
  const auto refused = parent.Fork("streaming:recent=0.5");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument) << refused.status();
}

TEST_F(Tokens, ACutGoesByPosition) {
  Shape({.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  client::Sequence sequence = NewSequence("streaming:sink=4,recent=60");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 200);
  Compress(sequence);
  Append(sequence, truth, 10);
  ASSERT_TRUE(sequence.Truncate(180).ok());
  truth.Truncate(180);
  Positions left = Range(0, 3);
  for (const std::uint64_t position : Range(140, 179)) left.push_back(position);
  EXPECT_THAT(Lane(Entries(sequence), 0).position(), ElementsAreArray(left));
  EXPECT_EQ(sequence.tokens(), 180u);
  ExpectAttendsToWhatIsLeft(sequence, truth, 1e-4);
  Append(sequence, truth, 20);
  ExpectAttendsToWhatIsLeft(sequence, truth, 1e-4);
  ASSERT_TRUE(sequence.Truncate(0).ok());
  EXPECT_EQ(Entries(sequence).tokens(), 0u);
}

TEST_F(Tokens, SinksAreTheFirstTokensOfTheSequenceAlone) {
  Shape({.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  client::Sequence sequence =
      NewSequence("semantickv:keep_total=0.2,sink=64,lambda=0.05,recent_ratio=0.02,mask=none");
  SyntheticSequence truth(shape_, random_.Bits());
  for (int prompt = 0; prompt < 2; ++prompt) {
    Append(sequence, truth, 400);
    Compress(sequence);
  }
  const v1::DescribeResponse held = Entries(sequence);
  const auto& positions = Lane(held, 0).position();
  const Positions sinks = Range(0, 63);
  EXPECT_TRUE(std::ranges::includes(positions, sinks));
  const auto of_second = std::ranges::count_if(
      positions, [](std::uint64_t position) { return position >= 400 && position < 464; });
  EXPECT_LT(of_second, 60) << "80 of 400 stay, and no place is favoured";
  EXPECT_EQ(positions.size(), 160);
}

// ---- Merging

TEST_F(Tokens, MergedEntriesStandForAllTheirTokens) {
  Shape({.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  const std::vector<std::uint32_t> ids(120, 7);
  // Random keys are not similar: no pair reaches such a cosine, and no entry merges.
  for (const char* policy : {"semanticache:tau=1", "semanticache:tau=0.9,sink=0,recent=0"}) {
    client::Sequence sequence = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    Append(sequence, truth, 120);
    ASSERT_TRUE(sequence.ObserveTokens(0, ids).ok());
    Compress(sequence);
    EXPECT_EQ(Entries(sequence).tokens_kept(), 1);
    ExpectAttendsToWhatIsLeft(sequence, truth, 1e-4);
  }

  client::Sequence merged = NewSequence("semanticache:tau=0,sink=0,recent=0");
  SyntheticSequence other(shape_, random_.Bits());
  Append(merged, other, 120);
  ASSERT_TRUE(merged.ObserveTokens(0, ids).ok());
  Compress(merged);
  const v1::DescribeResponse held = Entries(merged);
  EXPECT_LT(held.tokens_kept(), 0.6);
  for (const v1::LaneDescription& lane : held.lane()) {
    EXPECT_EQ(std::accumulate(lane.weight().begin(), lane.weight().end(), 0.0), 120.0);
  }
  // A cut inside merged tokens is refused.
  const absl::Status cut = merged.Truncate(60);
  EXPECT_EQ(cut.code(), absl::StatusCode::kFailedPrecondition) << cut;
  EXPECT_THAT(std::string(cut.message()), HasSubstr("merged"));
}

// Several prompts, with decoded tokens in between.
TEST_F(Tokens, WeightsAddUpHoweverOftenEntriesAreMerged) {
  Shape({.layers = 2, .query_heads = 2, .kv_heads = 2, .head_dim = 64});
  client::Sequence sequence = NewSequence("semanticache:tau=0.05,sink=1,recent=0,max_chunk=24");
  SyntheticSequence truth(shape_, random_.Bits());
  double kept = 1;
  for (int pass = 0; pass < 6; ++pass) {
    if (pass != 0 && random_.OneIn(2)) {
      for (std::uint64_t i = random_.Between(1, 70); i > 0; --i) Decode(sequence, truth);
      ASSERT_TRUE(sequence.Park().ok());
    }
    Append(sequence, truth, random_.Between(1, 90));
    std::vector<std::uint32_t> ids(truth.tokens());
    for (std::uint32_t& id : ids) id = random_.OneIn(15) ? 1 : 7;  // 1 is a delimiter
    ASSERT_TRUE(sequence.ObserveTokens(0, ids).ok());
    Compress(sequence);
    const v1::DescribeResponse held = Entries(sequence);
    for (const v1::LaneDescription& lane : held.lane()) {
      // Before the first merge entries have no weights: each is one token.
      EXPECT_EQ(lane.weight().empty()
                    ? static_cast<double>(lane.position_size())
                    : std::accumulate(lane.weight().begin(), lane.weight().end(), 0.0),
                static_cast<double>(truth.tokens()));
    }
    kept = held.tokens_kept();
  }
  EXPECT_LT(kept, 0.9);
}

// Chunks of text need the model's delimiters and the id of every token.
TEST_F(Tokens, TextThatNobodyNamesIsNotCut) {
  Shape({.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  client::ModelGeometry geometry = shape_.Geometry();
  geometry.name = "without delimiters";
  geometry.delimiter_token_ids.clear();
  const auto plain = mapped_->RegisterModel(geometry);
  ASSERT_TRUE(plain.ok()) << plain.status();
  const absl::Status refused = mapped_->CreateSequence(*plain, "semanticache").status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("delimiters=0"));
  EXPECT_TRUE(mapped_->CreateSequence(*plain, "semanticache:delimiters=0").ok());

  client::Sequence sequence = NewSequence("semanticache:tau=0,sink=0,recent=0");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 90);
  std::vector<std::uint32_t> ids(90, 7);
  ids[29] = ids[59] = SyntheticShape::kDelimiter;
  ASSERT_TRUE(sequence.ObserveTokens(0, std::span(ids).first(50)).ok());
  const absl::Status gap = sequence.ObserveTokens(60, std::span(ids).last(30));
  EXPECT_EQ(gap.code(), absl::StatusCode::kOutOfRange) << gap;
  const absl::Status missing = sequence.Compress().status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition) << missing;
  EXPECT_THAT(std::string(missing.message()),
              HasSubstr("the id of token 50 has not been observed"));
  EXPECT_EQ(Entries(sequence).tokens_kept(), 1);

  ASSERT_TRUE(sequence.ObserveTokens(50, std::span(ids).last(40)).ok());
  Compress(sequence);
  // Delimiters are not merged, and no cluster crosses one.
  const v1::DescribeResponse held = Entries(sequence);
  for (const v1::LaneDescription& lane : held.lane()) {
    EXPECT_EQ(std::accumulate(lane.weight().begin(), lane.weight().end(), 0.0), 90.0);
    for (const std::uint64_t stays : {0, 29, 30, 59, 60}) {
      EXPECT_THAT(lane.position(), testing::Contains(stays));
    }
    for (int i = 0; i < lane.position_size(); ++i) {
      const bool delimiter = lane.position(i) == 29 || lane.position(i) == 59;
      EXPECT_TRUE(!delimiter || lane.weight(i) == 1);
    }
    EXPECT_LT(lane.entries(), 80u);
  }
}

// Ids remain known once observed, whichever call provided them.
TEST_F(Tokens, IdsGoOnWithTheSequence) {
  Shape({.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  const std::vector<std::uint32_t> ids(300, 7);
  const auto part = [&](std::size_t count) { return std::span(ids).first(count); };
  client::Sequence sequence = NewSequence("semanticache:tau=0,sink=0,recent=0");
  SyntheticSequence truth(shape_, random_.Bits());
  ASSERT_TRUE(sequence.ObserveTokens(0, part(128)).ok());  // before the rows of some tokens
  Append(sequence, truth, 64);
  Compress(sequence);
  Append(sequence, truth, 64);
  Compress(sequence);
  for (int i = 0; i < 32; ++i) Decode(sequence, truth);
  EXPECT_TRUE(absl::IsFailedPrecondition(sequence.Compress().status()));
  const auto published = sequence.Publish(part(160));  // provides the ids of decoded tokens
  ASSERT_TRUE(published.ok()) << published.status();
  absl::StatusOr<client::Sequence> child = sequence.Fork("semanticache:tau=0.5,sink=0,recent=0");
  ASSERT_TRUE(child.ok()) << child.status();
  Append(*child, truth, 40);
  ASSERT_TRUE(child->ObserveTokens(160, part(40)).ok());
  Compress(*child);
  EXPECT_EQ(Entries(*child).tokens(), 200u);

  // Ids of truncated tokens do not apply to the tokens that replace them.
  client::Sequence cut = NewSequence("semanticache:tau=0,sink=0,recent=0");
  SyntheticSequence other(shape_, random_.Bits());
  Append(cut, other, 90);
  ASSERT_TRUE(cut.ObserveTokens(0, part(90)).ok());
  ASSERT_TRUE(cut.Truncate(40).ok());
  other.Truncate(40);
  EXPECT_TRUE(absl::IsOutOfRange(cut.ObserveTokens(70, part(20))));
  Append(cut, other, 50);
  const absl::Status missing = cut.Compress().status();
  EXPECT_THAT(std::string(missing.message()),
              HasSubstr("the id of token 40 has not been observed"));
  ASSERT_TRUE(cut.ObserveTokens(40, part(50)).ok());
  Compress(cut);
}

// Chunks of fixed length need no token ids.
TEST_F(Tokens, FixedChunksAskForNothing) {
  Shape({.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  client::Sequence sequence =
      NewSequence("semanticache:tau=0,sink=0,recent=0,delimiters=0,max_chunk=40");
  EXPECT_FALSE(sequence.needs().token_ids);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 120);
  Compress(sequence);
  const v1::DescribeResponse held = Entries(sequence);
  EXPECT_LT(held.tokens_kept(), 0.6);
  for (const v1::LaneDescription& lane : held.lane()) {
    EXPECT_EQ(std::accumulate(lane.weight().begin(), lane.weight().end(), 0.0), 120.0);
    // The first entry of each chunk is the seed of a cluster.
    for (const std::uint64_t first : {0, 40, 80}) {
      EXPECT_THAT(lane.position(), testing::Contains(first));
    }
  }
}

// Identical tokens become one entry without a change in attention.
TEST_F(Tokens, IdenticalTokensMergeWithoutLoss) {
  Shape({.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  client::Sequence sequence = NewSequence("semanticache:tau=0.9,sink=0,recent=0");
  SyntheticSequence truth(shape_, random_.Bits());
  truth.Grow(8);
  constexpr std::uint64_t kTokens = 96;
  std::vector<std::uint16_t> key;
  std::vector<std::uint16_t> value;
  for (std::uint64_t t = 0; t < kTokens; ++t) {
    const auto k = truth.Key(0, t % 8, 1);
    const auto v = truth.Value(0, t % 8, 1);
    key.insert(key.end(), k.begin(), k.end());
    value.insert(value.end(), v.begin(), v.end());
  }
  ASSERT_TRUE(
      sequence.Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = kTokens}).ok());
  const auto attend = [&] {
    std::vector<float> output(shape_.query_row());
    const auto query = truth.Query(0, 3);
    const client::AttendQuery asked[] = {
        {.sequence = &sequence, .query = BytesOf(query), .output = WritableBytesOf(output)}};
    EXPECT_TRUE(mapped_->AttendRpc(0, asked, {}).ok());
    return output;
  };
  const std::vector<float> before = attend();
  const std::vector<std::uint32_t> ids(kTokens, 7);
  ASSERT_TRUE(sequence.ObserveTokens(0, ids).ok());
  Compress(sequence);
  EXPECT_EQ(Lane(Entries(sequence), 0).entries(), 8u);
  const std::vector<float> after = attend();
  for (std::size_t i = 0; i < before.size(); ++i) EXPECT_NEAR(after[i], before[i], 1e-4);
}

}  // namespace
}  // namespace tessera
