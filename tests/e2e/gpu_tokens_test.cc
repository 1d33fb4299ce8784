// Token policies on a GPU, end to end, with a GPU that is emulated: rows are looked at, merged and
// gathered where the daemon cannot read them directly.

#include <gmock/gmock.h>

#include <string>

#include "tests/e2e/emulated_gpu.h"
#include "tests/e2e/token_lanes.h"

namespace tessera {
namespace {

// Before the workers, so that it outlives them.
struct WithEmulatedGpu {
  EmulatedGpu gpu{true};
};

class TokensOnGpu : protected WithEmulatedGpu, public Tokens {
 protected:
  TokensOnGpu() : Tokens(gpu.StartDaemon({"--device=cuda:0"}), &gpu.platform) {}
};

TEST_F(TokensOnGpu, WhatIsLeftIsAttendedTo) {
  Shape({.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  for (const std::string& policy :
       {std::string("snapkv:budget=0.3,window=16"), "snapkv:budget=0.3,window=16" + kAllChannels,
        std::string("streaming:sink=4,recent=60"), "streaming:sink=4,recent=60" + kAllChannels}) {
    SCOPED_TRACE(policy);
    client::Sequence sequence = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    Append(sequence, truth, 150);
    Compress(sequence);
    EXPECT_LT(Entries(sequence).tokens_kept(), 0.5);
    ExpectAttendsToWhatIsLeft(sequence, truth, 0.03);
    for (int i = 0; i < 70; ++i) Decode(sequence, truth);
    ASSERT_TRUE(sequence.Park().ok());
    ExpectAttendsToWhatIsLeft(sequence, truth, 0.03);
  }
}

TEST_F(TokensOnGpu, MergedEntriesCarryTheirWeights) {
  Shape({.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  client::Sequence sequence = NewSequence("semanticache:tau=0,sink=0,recent=0");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 96);
  const std::vector<std::uint32_t> ids(96, 7);
  ASSERT_TRUE(sequence.ObserveTokens(0, ids).ok());
  Compress(sequence);
  const v1::DescribeResponse held = Entries(sequence);
  EXPECT_LT(held.tokens_kept(), 0.7);
  // The device's words say what the daemon's lists say: all of the attention is somewhere.
  std::vector<float> output(shape_.query_row());
  std::vector<float> lse(shape_.query_heads);
  const std::vector<std::uint16_t> nothing(shape_.query_row());
  const client::AttendQuery asked[] = {{.sequence = &sequence,
                                        .query = BytesOf(nothing),
                                        .output = WritableBytesOf(output),
                                        .lse = lse}};
  ASSERT_TRUE(mapped_->AttendRpc(0, asked, {}).ok());
  // A query of zeros weighs entries by their weights alone, which sum to the tokens.
  for (const float value : lse) EXPECT_NEAR(value, std::log(96.0), 1e-3);
}

}  // namespace
}  // namespace tessera
