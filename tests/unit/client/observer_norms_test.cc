// Which rows a worker reports as the strongest queries after it has dropped others.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <span>
#include <vector>

#include "kernels/format/element.h"
#include "tests/unit/client/decoder.h"

namespace tessera::client {
namespace {

// One layer and one head, with queries of any length.
class OneHead : public testing::Test {
 protected:
  OneHead()
      : one_(random_, OneLayer(), {.has_staging = true, .needs = Few()}, /*map_memory=*/true),
        with_(one_.NewTrack()) {}
  static ModelGeometry OneLayer() {
    ModelGeometry model;
    model.name = "observed";
    model.type = ElementType::kFp16;
    model.layers.assign(1, {.query_heads = 1, .kv_heads = 1, .head_dim = 64});
    return model;
  }
  static v1::PolicyNeeds Few() {
    v1::PolicyNeeds needs;
    needs.set_last_queries(1);
    needs.set_norm_share(0.001);
    return needs;
  }
  void Come(std::uint64_t count, float norm) {
    const std::uint64_t first = with_.history.tokens();
    one_.Prefill(with_, count);
    std::vector<std::uint16_t> rows(64 * count);
    for (std::size_t i = 0; i < rows.size(); i += 64) rows[i] = kernels::FloatToFp16(norm);
    TESSERA_ASSERT_OK(with_.sequence.Observe({.layer = 0,
                                              .first_token = first,
                                              .query = std::as_bytes(std::span(rows)),
                                              .prompt_tokens = count}));
  }
  void TruncateTo(std::uint64_t tokens) {
    TESSERA_ASSERT_OK(with_.sequence.Truncate(tokens));
    with_.history.Truncate(tokens);
  }
  void Draft(float norm) {
    const std::uint64_t tokens = with_.history.tokens();
    Come(1, norm);
    TruncateTo(tokens);
  }

  TestRandom random_;
  Decoder one_;
  Track with_;
};

// The strongest may have been dropped long ago, and replaced by drafts since.
TEST_F(OneHead, WhatWasLetGoIsKnownBehindACutAndASettling) {
  Come(5, 100);  // the limit
  Come(1, 50);   // settled later
  Come(194, 1);
  Come(1, 40);  // token 200, the strongest unknown one
  Come(99, 1);
  Draft(90);
  Draft(200);
  Come(1, 2);
  Come(101, 1);
  one_.daemon->TakeObserved();
  one_.daemon->SetNormsFrom(100);
  TESSERA_ASSERT_OK(with_.sequence.Compress().status());
  const std::vector<v1::ObserveRequest> shown = one_.daemon->TakeObserved();
  ASSERT_EQ(shown.size(), 2u);
  EXPECT_EQ(shown.back().first_norm_token(), 100u);
  for (const std::uint64_t position : shown.back().norm_positions()) EXPECT_EQ(position, 200u);
}

// Of equal queries the first ones are the strongest: others do not replace the dropped ones.
TEST_F(OneHead, OfEqualOnesTheFirstCount) {
  Come(5, 1);
  Come(20, 1);
  one_.daemon->TakeObserved();
  Come(5, 3);
  TruncateTo(25);
  Come(3, 1);
  TESSERA_ASSERT_OK(with_.sequence.Compress().status());
  const std::vector<v1::ObserveRequest> requests = one_.daemon->TakeObserved();
  ASSERT_EQ(requests.size(), 1u);
  EXPECT_EQ(requests[0].norm_positions_size(), 0) << "0 to 4 were let go";
  EXPECT_TRUE(requests[0].has_first_norm_token());
}

}  // namespace
}  // namespace tessera::client
