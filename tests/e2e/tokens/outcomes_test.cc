// Nothing is left dense in silence: what a call answers, what a worker is warned of.
#include <gmock/gmock.h>

#include <functional>
#include <string>
#include <vector>

#include "kernels/format/element.h"
#include "tests/e2e/packed_lanes.h"

namespace tessera {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class Outcomes : public PackedLanes {
 protected:
  void SetUp() override {
    PackedLanes::SetUp();
    auto attached = client::Worker::Attach(
        {.address = daemon_->address(),
         .on_warning = [this](std::string_view warning) { warnings_.emplace_back(warning); }});
    ASSERT_TRUE(attached.ok()) << attached.status();
    worker_ = *std::move(attached);
    client::ModelGeometry geometry;
    geometry.name = "outcomes";
    geometry.layers.assign(4, {.query_heads = 2, .kv_heads = 2, .head_dim = 64});
    model_of_four_ = *worker_->RegisterModel(geometry);
  }
  client::Sequence New(const std::string& policy) {
    auto sequence = worker_->CreateSequence(model_of_four_, policy);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return *std::move(sequence);
  }
  // White noise: no rotation makes it smaller.
  std::vector<std::uint16_t> Noise(std::uint64_t count) {
    std::vector<std::uint16_t> rows(count);
    for (std::uint16_t& value : rows) {
      float sum = 0;
      for (int i = 0; i < 12; ++i) sum += static_cast<float>(random_.Below(1000)) / 1000 - 0.5f;
      value = kernels::FloatToBf16(sum);
    }
    return rows;
  }
  // All layers at once, or one after another; `end` says of which layer the prompt ends.
  void AppendNoise(client::Sequence& sequence, std::uint64_t tokens,
                   bool (*end)(std::uint32_t layer)) {
    for (std::uint32_t layer = 0; layer < 4; ++layer) {
      const std::vector<std::uint16_t> key = Noise(tokens * 2 * 64), value = Noise(key.size());
      const auto held = sequence.Append({.key = std::as_bytes(std::span(key)),
                                         .value = std::as_bytes(std::span(value)),
                                         .tokens = tokens,
                                         .first_layer = layer,
                                         .layers = 1,
                                         .end_of_prompt = end(layer)});
      ASSERT_TRUE(held.ok()) << held.status();
    }
  }
  void Decode(client::Sequence& sequence, int tokens) {
    for (int i = 0; i < tokens; ++i) {
      client::Sequence* const batch[] = {&sequence};
      auto step = worker_->BeginStep(batch);
      ASSERT_TRUE(step.ok()) << step.status();
      for (std::uint32_t layer = 0; layer < 4; ++layer) {
        const std::vector<std::uint16_t> key = Noise(2 * 64), value = Noise(2 * 64);
        const absl::Status status =
            step->Append(layer, std::as_bytes(std::span(key)), std::as_bytes(std::span(value)));
        ASSERT_TRUE(status.ok()) << status;
      }
      const absl::Status status = step->End();
      if (absl::IsAborted(status)) --i;  // the daemon took the tail for a moment
      ASSERT_TRUE(status.ok() || absl::IsAborted(status)) << status;
    }
  }
  // The daemon works in the background: looks a bounded number of times, without sleeping.
  bool Becomes(const client::Sequence& sequence,
               const std::function<bool(const client::SequenceDescription&)>& good) {
    for (int i = 0; i < 20000; ++i) {
      const auto described = sequence.Describe(/*lanes=*/true);
      EXPECT_TRUE(described.ok()) << described.status();
      if (!described.ok() || good(*described)) return described.ok();
    }
    return false;
  }
  static std::uint32_t Lanes(const client::SequenceDescription& described,
                             client::LaneState state) {
    std::uint32_t lanes = 0;
    for (const client::OutcomeGroup& group : described.outcomes) {
      if (group.worst.state == state) lanes += group.lanes;
    }
    return lanes;
  }
  static bool All(std::uint32_t) { return true; }
  static bool None(std::uint32_t) { return false; }
  static bool Last(std::uint32_t layer) { return layer == 3; }

  std::vector<std::string> warnings_;
  std::unique_ptr<client::Worker> worker_;
  client::Model model_of_four_;
};

TEST_F(Outcomes, APromptThatIsLeftDenseSaysWhy) {
  client::Sequence sequence = New("mosaickv:keep=0.25,sinks=0,recent=0");
  AppendNoise(sequence, 1000, All);
  const auto compressed = sequence.Compress();
  ASSERT_TRUE(compressed.ok()) << compressed.status();
  EXPECT_EQ(compressed->tile_bytes_before, compressed->tile_bytes_after);
  ASSERT_EQ(compressed->outcomes.size(), 1u);
  const client::OutcomeGroup& group = compressed->outcomes[0];
  EXPECT_EQ(group.lanes, 8u);
  EXPECT_EQ(group.worst.state, client::LaneState::kDense);
  EXPECT_EQ(group.worst.reason, client::CompressionReason::kLossAboveLimit);
  EXPECT_GT(group.worst.loss, group.worst.loss_limit);
  EXPECT_EQ(group.worst.more_tokens, 3096u);
  EXPECT_THAT(group.worst.text,
              AllOf(HasSubstr("left dense: loss of "), HasSubstr("is above loss_"),
                    HasSubstr("(segment of 1000 tokens, shorter than min_segment 4096)")));
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr(group.worst.text)));
  // Lane by lane, too.
  const auto described = sequence.Describe(/*lanes=*/true);
  ASSERT_TRUE(described.ok());
  for (const client::LaneDescription& lane : described->lanes) {
    EXPECT_EQ(lane.outcome.reason, client::CompressionReason::kLossAboveLimit);
    EXPECT_EQ(lane.outcome.dense_entries, 1000u);
  }
  // Once for each sequence.
  ASSERT_TRUE(sequence.Compress().ok());
  EXPECT_EQ(warnings_.size(), 1u);
}

TEST_F(Outcomes, WhoeverDecodesHearsOfItToo) {
  client::Sequence sequence = New("mosaickv:keep=0.25");
  AppendNoise(sequence, 300, All);
  ASSERT_TRUE(Becomes(sequence, [](const client::SequenceDescription& now) {
    return now.outcomes.size() == 1 &&
           now.outcomes[0].worst.reason == client::CompressionReason::kLossAboveLimit;
  }));
  Decode(sequence, 40);
  EXPECT_THAT(warnings_, ElementsAre(AllOf(HasSubstr("has compressed nothing of the prompt of"),
                                           HasSubstr("loss of "))));
}

TEST_F(Outcomes, ASecondCallSaysThatThereIsNothingNew) {
  client::Sequence sequence =
      New("mosaickv:keep=0.25,loss_k=1,loss_v=1,min_segment=64,segment=256,sinks=0,recent=0");
  AppendNoise(sequence, 128, None);
  const auto first = sequence.Compress();
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_EQ(first->outcomes.size(), 1u);
  EXPECT_EQ(first->outcomes[0].worst.state, client::LaneState::kCompressed);
  EXPECT_EQ(first->outcomes[0].worst.reason, client::CompressionReason::kNone);
  const auto second = sequence.Compress();
  ASSERT_TRUE(second.ok()) << second.status();
  ASSERT_EQ(second->outcomes.size(), 1u);
  EXPECT_EQ(second->outcomes[0].worst.reason, client::CompressionReason::kNothingNew);
  EXPECT_EQ(second->outcomes[0].worst.text, "nothing new since the last compression");
  EXPECT_EQ(second->tile_bytes_after, first->tile_bytes_after);
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(Outcomes, APromptThatIsTooShortForItsPolicyIsNoError) {
  client::Sequence sequence = New("streaming:sink=4,recent=512");
  AppendNoise(sequence, 100, None);
  const auto streaming = sequence.Compress();
  ASSERT_TRUE(streaming.ok()) << streaming.status();
  EXPECT_EQ(streaming->outcomes[0].worst.reason, client::CompressionReason::kTooShort);
  EXPECT_EQ(streaming->outcomes[0].worst.more_tokens, 417u);

  client::Sequence share = New("snapkv:budget=0.2,window=32");
  AppendNoise(share, 100, None);
  const auto observed = [&](std::uint64_t first, std::uint64_t count) {
    for (std::uint32_t layer = 0; layer < 4; ++layer) {
      const std::vector<std::uint16_t> query = Noise(count * 2 * 64);
      ASSERT_TRUE(
          share
              .Observe(
                  {.layer = layer, .first_token = first, .query = std::as_bytes(std::span(query))})
              .ok());
    }
  };
  observed(0, 100);
  const auto short_one = share.Compress();
  ASSERT_TRUE(short_one.ok()) << short_one.status();
  EXPECT_EQ(short_one->outcomes[0].worst.reason, client::CompressionReason::kTooShort);
  EXPECT_EQ(short_one->outcomes[0].worst.more_tokens, 60u);
  EXPECT_EQ(short_one->decided_tokens[0], 0u);
  // With so many it is decided about.
  AppendNoise(share, 60, None);
  observed(100, 60);
  const auto enough = share.Compress();
  ASSERT_TRUE(enough.ok()) << enough.status();
  EXPECT_EQ(enough->outcomes[0].worst.state, client::LaneState::kCompressed);
  EXPECT_EQ(enough->outcomes[0].worst.text, "keeps 32 entries of 160 tokens");
}

TEST_F(Outcomes, APromptOfNewestTokensAloneSaysSo) {
  client::Sequence sequence = New("mosaickv");
  AppendNoise(sequence, 100, None);
  const auto compressed = sequence.Compress();
  ASSERT_TRUE(compressed.ok()) << compressed.status();
  EXPECT_EQ(compressed->outcomes[0].worst.reason, client::CompressionReason::kNewest)
      << compressed->outcomes[0].worst.text;
  EXPECT_THAT(warnings_, IsEmpty()) << "it is what the policy says";
}

TEST_F(Outcomes, APolicyThatActsWhileDecodingIsNotWarnedOf) {
  client::Sequence sequence = New("streaming:sink=4,recent=512");
  AppendNoise(sequence, 300, None);
  ASSERT_TRUE(sequence.EndPrompt().ok());
  Decode(sequence, 40);
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(Outcomes, SinksAreDenseByPolicy) {
  client::Sequence sequence = New("mosaickv:keep=0.25,loss_k=1,loss_v=1,recent=0,select=0");
  AppendNoise(sequence, 400, None);
  const auto compressed = sequence.Compress();
  ASSERT_TRUE(compressed.ok()) << compressed.status();
  const client::LaneOutcome& worst = compressed->outcomes[0].worst;
  EXPECT_EQ(worst.state, client::LaneState::kPartly);
  EXPECT_EQ(worst.reason, client::CompressionReason::kNewest) << worst.text;
  EXPECT_EQ(worst.dense_entries, 32u);
  EXPECT_EQ(worst.more_tokens, 0u);
}

TEST_F(Outcomes, PublishWarnsToo) {
  client::Sequence sequence = New("snapkv:budget=1,window=32");
  AppendNoise(sequence, 300, None);
  for (std::uint32_t layer = 0; layer < 4; ++layer) {
    const std::vector<std::uint16_t> query = Noise(300 * 2 * 64);
    ASSERT_TRUE(sequence.Observe({.layer = layer, .query = std::as_bytes(std::span(query))}).ok());
  }
  ASSERT_TRUE(sequence.Publish(std::vector<std::uint32_t>(300, 7)).ok());
  EXPECT_THAT(warnings_, ElementsAre(HasSubstr("compressed nothing")));
}

// ---- the end of a prompt

constexpr char kPacksAnything[] = "mosaickv:keep=0.25,loss_k=1,loss_v=1,sinks=0,recent=0,select=0";

TEST_F(Outcomes, EndingThePromptOfTheLastLayerAloneIsWarnedOf) {
  client::Sequence sequence = New(kPacksAnything);
  AppendNoise(sequence, 300, Last);
  EXPECT_TRUE(Becomes(sequence, [](const client::SequenceDescription& now) {
    return Lanes(now, client::LaneState::kCompressed) == 2;
  }));
  Decode(sequence, 3);
  EXPECT_THAT(warnings_, ElementsAre(AllOf(HasSubstr("3 of its 4 layers has not ended"),
                                           HasSubstr("EndPrompt"))));
}

TEST_F(Outcomes, EndPromptIsOfAllLayers) {
  client::Sequence sequence = New(kPacksAnything);
  AppendNoise(sequence, 300, None);
  ASSERT_TRUE(sequence.EndPrompt().ok());
  EXPECT_TRUE(Becomes(sequence, [](const client::SequenceDescription& now) {
    return Lanes(now, client::LaneState::kCompressed) == 8;
  }));
  Decode(sequence, 40);
  EXPECT_THAT(warnings_, IsEmpty());
}

TEST_F(Outcomes, EndPromptIncludesTheTail) {
  client::Sequence sequence = New(kPacksAnything);
  AppendNoise(sequence, 300, None);
  Decode(sequence, 10);
  ASSERT_TRUE(sequence.EndPrompt().ok());
  EXPECT_TRUE(Becomes(sequence, [](const client::SequenceDescription& now) {
    return Lanes(now, client::LaneState::kCompressed) == 8 && now.lanes[0].tail_entries == 0 &&
           now.lanes[0].entries == 310;
  }));
}

TEST_F(Outcomes, EndPromptShowsWhatWasObserved) {
  client::Sequence sequence = New("snapkv:tokens=64,window=32");
  AppendNoise(sequence, 300, None);
  for (std::uint32_t layer = 0; layer < 4; ++layer) {
    const std::vector<std::uint16_t> query = Noise(300 * 2 * 64);
    ASSERT_TRUE(sequence.Observe({.layer = layer, .query = std::as_bytes(std::span(query))}).ok());
  }
  ASSERT_TRUE(sequence.EndPrompt().ok());
  EXPECT_TRUE(Becomes(sequence, [](const client::SequenceDescription& now) {
    return Lanes(now, client::LaneState::kCompressed) == 8 && now.lanes[0].entries == 64;
  }));
}

}  // namespace
}  // namespace tessera
