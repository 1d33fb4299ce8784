// Reads whose pin is revoked, and the life of a handle.

#include <gtest/gtest.h>

#include "client/error/error_info.h"
#include "tests/unit/client/decoder.h"

namespace tessera::client {
namespace {

ModelGeometry TwoLayers() {
  ModelGeometry model;
  model.name = "tiny";
  model.layers.assign(2, {.query_heads = 4, .kv_heads = 2, .head_dim = 64});
  return model;
}

ReadTensors QueriesOf(LayerRows& rows) {
  return {.queries_each = {},
          .first_query_positions = {},
          .query = rows.query,
          .output = std::as_writable_bytes(std::span(rows.output)),
          .lse = rows.lse,
          .selection = {}};
}

TEST(Read, ARevokedPinAbortsAndTheNextReadIsRight) {
  TestRandom random;
  Decoder decoder(random, TwoLayers());
  Track track = decoder.NewTrack();
  decoder.Prefill(track, 100);
  TESSERA_ASSERT_OK(decoder.RunStep(track));
  Sequence* const batch[] = {&track.sequence};
  for (const bool revoke : {true, false}) {
    absl::StatusOr<Read> read = decoder.worker->BeginRead(batch);
    TESSERA_ASSERT_OK(read.status());
    LayerRows rows(random, track.history.model(), 1, 1);
    TESSERA_ASSERT_OK(read->Attend(1, QueriesOf(rows)));
    if (revoke) {
      EXPECT_EQ(decoder.daemon->RevokePins(), 1u);
      const absl::Status ended = read->End();
      EXPECT_TRUE(absl::IsAborted(ended)) << ended;
      EXPECT_EQ(GetErrorInfo(ended).cause, ErrorCause::kPinRevoked);
      EXPECT_EQ(read->Attend(1, QueriesOf(rows)), ended);
      EXPECT_FALSE(read->open());
      continue;
    }
    TESSERA_ASSERT_OK(read->End());
    track.history.Check(1, 100, 1, /*causal=*/true, rows.query.data(), rows.output.data(),
                        rows.lse.data());
  }
  // The slot and the sequence are free again.
  TESSERA_ASSERT_OK(decoder.RunStep(track));
  EXPECT_EQ(decoder.daemon->RevokePins(), 0u);
}

TEST(Read, AnAbandonedReadUnpins) {
  TestRandom random;
  Decoder decoder(random, TwoLayers());
  Track track = decoder.NewTrack();
  decoder.Prefill(track, 40);
  Sequence* const batch[] = {&track.sequence};
  for (int i = 0; i < 200; ++i) {  // more than there are slots
    absl::StatusOr<Read> read = decoder.worker->BeginRead(batch);
    TESSERA_ASSERT_OK(read.status());
    Read moved = *std::move(read);
    if (i % 2 == 0) moved.Abandon();
    EXPECT_TRUE(absl::IsInvalidArgument(read->End()));
  }
  EXPECT_EQ(decoder.daemon->RevokePins(), 0u);
  Sequence* const none[] = {nullptr};
  EXPECT_TRUE(absl::IsInvalidArgument(decoder.worker->BeginRead(none).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(decoder.worker->BeginRead({}).status()));
}

}  // namespace
}  // namespace tessera::client
