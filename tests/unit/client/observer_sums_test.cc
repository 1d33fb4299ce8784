// Attention sums that a worker reports when tokens were decoded between the observed ones.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "tests/unit/client/decoder.h"

namespace tessera::client {
namespace {

class ObservingSums : public testing::Test {
 protected:
  ObservingSums()
      : decoder_(random_, Geometry(),
                 {.staging_bytes = 256 << 10,
                  .max_message_bytes = 1 << 20,
                  .has_staging = false,
                  .needs = Needs()},
                 /*map_memory=*/true),
        track_(decoder_.NewTrack()) {}

  static ModelGeometry Geometry() {
    ModelGeometry model;
    model.name = "observed";
    model.type = ElementType::kBf16;
    model.layers.assign(2, {.query_heads = 4, .kv_heads = 2, .head_dim = 64});
    return model;
  }
  static v1::PolicyNeeds Needs() {
    v1::PolicyNeeds needs;
    needs.set_attention_sums(true);
    needs.set_decode_queries(true);
    return needs;
  }
  const BoundModel& model() const { return track_.history.model(); }

  void See(std::uint64_t first, std::uint64_t tokens) {
    for (std::uint32_t layer = 0; layer < model().layers(); ++layer) {
      LayerRows rows(random_, model(), layer, tokens);
      TESSERA_ASSERT_OK(track_.sequence.Observe(
          {.layer = layer, .first_token = first, .query = rows.query, .key = rows.key}));
    }
  }
  void Step() {
    Sequence* const batch[] = {&track_.sequence};
    absl::StatusOr<tessera::client::Step> step = decoder_.worker->BeginStep(batch);
    TESSERA_ASSERT_OK(step.status());
    for (std::uint32_t layer = 0; layer < model().layers(); ++layer) {
      LayerRows rows(random_, model(), layer, 1);
      TESSERA_ASSERT_OK(step->AppendAndAttend(layer, rows.tensors()));
      track_.history.Append(layer, rows.key, rows.value);
    }
    TESSERA_ASSERT_OK(step->End());
  }

  TestRandom random_;
  Decoder decoder_;
  Track track_;
};

// Decoded tokens provide no keys, so sums restart after them and cover no missing keys.
TEST_F(ObservingSums, BeginAnewBehindWhatWasDecoded) {
  constexpr std::uint64_t kSteps = 5, kPrompt = 77;
  Step();
  See(0, 1);  // decoded tokens may be observed like a prompt
  for (std::uint64_t i = 0; i < kSteps; ++i) Step();
  decoder_.Prefill(track_, kPrompt);
  See(1 + kSteps, kPrompt);
  TESSERA_ASSERT_OK(track_.sequence.Compress().status());
  const std::vector<v1::ObserveRequest> shown = decoder_.daemon->TakeObserved();
  ASSERT_EQ(shown.size(), model().layers());
  for (const v1::ObserveRequest& request : shown) {
    EXPECT_EQ(request.first_sum_position(), 1 + kSteps);
    ASSERT_THAT(request.attention_sums().shape(), testing::ElementsAre(2, kPrompt));
    const std::string& bytes = request.attention_sums().inline_();
    std::vector<float> sums(2 * kPrompt);
    ASSERT_EQ(bytes.size(), sums.size() * sizeof(float));
    std::memcpy(sums.data(), bytes.data(), bytes.size());
    for (const auto head : {sums.begin(), sums.begin() + kPrompt}) {
      // Each query pays 1 in total.
      EXPECT_NEAR(std::accumulate(head, head + kPrompt, 0.0), kPrompt, 0.01);
    }
  }
}

// A NaN query would spoil all later sums: its step refuses it before the token counts, and the step
// can be repeated with another.
TEST_F(ObservingSums, AQueryThatIsNoneIsRefusedByItsStep) {
  for (int i = 0; i < 3; ++i) Step();
  for (const bool is_bad : {true, false}) {
    Sequence* const batch[] = {&track_.sequence};
    absl::StatusOr<tessera::client::Step> step = decoder_.worker->BeginStep(batch);
    TESSERA_ASSERT_OK(step.status());
    for (std::uint32_t layer = 0; layer < model().layers(); ++layer) {
      LayerRows rows(random_, model(), layer, 1);
      const bool refused = is_bad && layer == 0;
      constexpr std::uint16_t kNan = 0x7fc0;
      if (refused) std::memcpy(rows.query.data() + (2 * 64 + 5) * 2, &kNan, 2);
      const absl::Status status = step->AppendAndAttend(layer, rows.tensors());
      EXPECT_EQ(absl::IsInvalidArgument(status), refused) << status;
      EXPECT_EQ(status.ok(), !refused) << status;
      EXPECT_THAT(std::string(status.message()),
                  testing::HasSubstr(
                      refused ? "layer 0: the query of head 2 of token 3 is not finite" : ""));
      if (!is_bad) track_.history.Append(layer, rows.key, rows.value);
    }
    const absl::Status ended = step->End();
    EXPECT_EQ(absl::IsFailedPrecondition(ended), is_bad) << ended;
    EXPECT_EQ(ended.ok(), !is_bad) << ended;
    step->Abandon();
  }
  Step();
  TESSERA_ASSERT_OK(track_.sequence.Compress().status());
  for (const v1::ObserveRequest& request : decoder_.daemon->TakeObserved()) {
    EXPECT_EQ(request.first_query_position(), 0u);
    EXPECT_THAT(request.last_queries().shape(), testing::ElementsAre(5, 4, 64));
  }
}

}  // namespace
}  // namespace tessera::client
