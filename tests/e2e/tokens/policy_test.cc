// Sequences under a policy end to end: the daemon compresses in the background, and a worker that
// attends meanwhile reads the lanes' current rows, through either transport.

#include <gmock/gmock.h>

#include <functional>
#include <string>
#include <vector>

#include "client/api/worker_access.h"
#include "client/tools/admin.h"
#include "tessera/error.h"
#include "tests/e2e/packed_lanes.h"

namespace tessera {
namespace {

using testing::HasSubstr;

// Keeps all channels in rotated space: at any moment compressed rows differ only by rounding.
constexpr char kLossless[] =
    "mosaickv:keep=1,group=1,segment=256,min_segment=64,sinks=0,recent=0,select=0+bf16";
constexpr double kRounding = 0.03;

class Policies : public PackedLanes {
 protected:
  client::Sequence NewSequence(const std::string& policy) {
    auto sequence = mapped_->CreateSequence(model_, policy);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return *std::move(sequence);
  }
  v1::DescribeResponse Describe(const client::Sequence& sequence) {
    auto described = client::DescribeMessage(sequence, client::Detail::kLanes);
    EXPECT_TRUE(described.ok()) << described.status();
    return *std::move(described);
  }
  // Polls a bounded number of times, because the daemon works in the background. Each poll is a
  // call, so this needs no sleep.
  bool Becomes(const client::Sequence& sequence,
               const std::function<bool(const v1::DescribeResponse&)>& good) {
    for (int i = 0; i < 20000; ++i) {
      if (good(Describe(sequence))) return true;
    }
    return false;
  }
  // Entries of the first lane that are packed with their final strategy.
  static std::uint64_t Sealed(const v1::DescribeResponse& sequence) {
    std::uint64_t entries = 0;
    for (const v1::SegmentRun& run : sequence.lane(0).segment_run()) {
      if (run.kept_channels() != 0 && !run.provisional()) entries += run.entries();
    }
    return entries;
  }
  static std::uint64_t Provisional(const v1::DescribeResponse& sequence) {
    std::uint64_t entries = 0;
    for (const v1::SegmentRun& run : sequence.lane(0).segment_run()) {
      if (run.provisional()) entries += run.entries();
    }
    return entries;
  }
  void ExpectTrue(const client::Sequence& sequence, const SyntheticSequence& truth) {
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      const Output out = ByRpc(*mapped_, sequence, truth, layer, truth.tokens() - 1, std::nullopt);
      EXPECT_LT(truth.Error(layer, truth.tokens() - 1, out.output), kRounding) << layer;
    }
  }
};

TEST_F(Policies, APromptIsSealedAndDecodingGoesOnFromThere) {
  client::Sequence sequence = NewSequence(kLossless);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 300);
  const auto compressed = sequence.Compress();
  ASSERT_TRUE(compressed.ok()) << compressed.status();
  v1::DescribeResponse described = Describe(sequence);
  EXPECT_EQ(described.policy(), kLossless);
  // A segment of 256. The remaining 44 would be larger with separate rotations.
  EXPECT_EQ(Sealed(described), 256u);
  ExpectTrue(sequence, truth);
  // Every 32 tokens make a tile. Each step must be right, whatever the daemon does meanwhile.
  for (int i = 0; i < 200; ++i) {
    const std::vector<Output> out = Decode(*mapped_, sequence, truth, std::nullopt);
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      ASSERT_LT(truth.Error(layer, truth.tokens() - 1, out[layer].output), kRounding);
    }
  }
  EXPECT_TRUE(Becomes(sequence, [](const v1::DescribeResponse& now) {
    return Sealed(now) + Provisional(now) >= 480;
  })) << described.DebugString();
  described = Describe(sequence);
  EXPECT_EQ(described.tokens(), 500u);
  EXPECT_EQ(described.tokens_kept(), 1);
  ExpectTrue(sequence, truth);
}

TEST_F(Policies, TheEndOfAPromptIsSaidWithItsLastRows) {
  client::Sequence sequence = NewSequence(kLossless);
  SyntheticSequence truth(shape_, random_.Bits());
  truth.Grow(256);
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    const auto held = sequence.Append({.key = BytesOf(truth.Key(layer, 0, 256)),
                                       .value = BytesOf(truth.Value(layer, 0, 256)),
                                       .tokens = 256,
                                       .first_layer = layer,
                                       .layers = 1,
                                       .end_of_prompt = true});
    ASSERT_TRUE(held.ok()) << held.status();
  }
  EXPECT_TRUE(
      Becomes(sequence, [](const v1::DescribeResponse& now) { return Sealed(now) == 256; }));
  ExpectTrue(sequence, truth);
}

// Both transports, with a policy's selection and an explicit one, and forks.
TEST_F(Policies, BothTransportsUseThePolicysSelection) {
  for (const char* const policy : {"mosaickv:keep=1,group=1,segment=64,min_segment=32,sinks=0,"
                                   "recent=0,select=0.25,floor=0+bf16",
                                   "mosaickv:keep=1,group=1,segment=64,min_segment=32,"
                                   "recent=40,select=0.01,floor=96+bf16",
                                   "quest:tokens=96,page=4,dense_layers=0",
                                   "quest:tokens=64,page=4,heads=each,dense_layers=1"}) {
    SCOPED_TRACE(policy);
    client::Sequence parent = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    Append(parent, truth, 640);
    ASSERT_TRUE(parent.Compress().ok());
    auto forked = parent.Fork();
    ASSERT_TRUE(forked.ok()) << forked.status();
    client::Sequence& sequence = *forked;
    EXPECT_EQ(Describe(sequence).policy(), Describe(parent).policy());
    const v1::Selection& selection = Describe(sequence).selection().selection();
    const SelectionRule named = {.rate = selection.entries() == 0 ? selection.rate() : 1.0,
                                 .entries = selection.entries(),
                                 .floor = selection.floor(),
                                 .judge = static_cast<SelectionRule::Judge>(selection.judge()),
                                 .first_block = selection.first_block(),
                                 .counts_tail = selection.counts_tail(),
                                 .each_head = selection.each_head()};
    const std::uint32_t dense_layers = Describe(sequence).selection().dense_layers();
    bool differs = false;
    for (int i = 0; i < 8; ++i) {
      const std::vector<Output> by_step = Decode(*mapped_, sequence, truth, std::nullopt);
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const std::uint64_t at = truth.tokens() - 1;
        EXPECT_TRUE(by_step[layer] == ByRpc(*mapped_, sequence, truth, layer, at, std::nullopt));
        if (layer >= dense_layers) {
          EXPECT_TRUE(by_step[layer] == ByRpc(*mapped_, sequence, truth, layer, at, named));
        }
        const Output all = ByRpc(*mapped_, sequence, truth, layer, at, SelectionRule{.rate = 1});
        EXPECT_LT(truth.Error(layer, at, all.output), kRounding);
        differs |= !(all == by_step[layer]);
      }
    }
    EXPECT_EQ(differs, shape_.layers > dense_layers)
        << "nothing was left out, or from dense layers";
  }
}

TEST_F(Policies, AnOperatorLooksAndChanges) {
  client::Sequence sequence = NewSequence("");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 256);
  auto admin = cli::Admin::At({.address = daemon_->address(), .tls = std::nullopt});
  ASSERT_TRUE(admin.ok()) << admin.status();
  const std::uint64_t id = sequence.id().value();
  EXPECT_EQ(admin->Describe(id)->policy(), "dense");
  const auto changed = admin->SetPolicy(id, kLossless);
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_EQ(changed->policy(), kLossless);
  ASSERT_TRUE(admin->Compress(id).ok());
  const auto described = admin->Describe(id);
  ASSERT_TRUE(described.ok());
  EXPECT_EQ(described->policy(), kLossless);
  EXPECT_EQ(Sealed(*described), 256u);
  EXPECT_GT(admin->Stats()->compaction().segments_sealed(), 0u);
  ExpectTrue(sequence, truth);
  const absl::Status unknown = admin->SetPolicy(id, "mosaikkv").status();
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("mosaikkv"));
  const absl::Status nobody = admin->SetPolicy(id + 1, kLossless).status();
  EXPECT_TRUE(absl::IsNotFound(nobody)) << nobody;
}

TEST_F(Policies, WhatCannotBeIsRefusedWithTheReason) {
  const auto refusal = [&](const std::string& policy) {
    const absl::Status status = mapped_->CreateSequence(model_, policy).status();
    EXPECT_EQ(client::GetErrorInfo(status).cause, client::ErrorCause::kPolicy) << status;
    return std::string(status.message());
  };
  if (shape_.head_dim < 256) {  // of 256 it is one channel, which is allowed
    EXPECT_THAT(refusal("think:ratio=0.004"), HasSubstr("less than one channel"));
  }
  EXPECT_THAT(refusal("think+quest"), HasSubstr("quest"));
  EXPECT_THAT(refusal("mosaickv:keep=2"), HasSubstr("keep"));
  EXPECT_THAT(refusal("dense+int8"), HasSubstr("with other terms"));
  client::Sequence sequence = NewSequence(kLossless);
  const auto packed = sequence.Compress({.kept_channels = 16});
  EXPECT_TRUE(absl::IsFailedPrecondition(packed.status())) << packed.status();
}

}  // namespace
}  // namespace tessera
