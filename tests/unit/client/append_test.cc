// Bulk append: split into pieces, staged or inline, all or nothing.

#include <gtest/gtest.h>

#include <thread>

#include "client/sequence/bulk_append.h"
#include "tests/unit/client/decoder.h"

namespace tessera::client {
namespace {

TEST(ShapePieces, NeverExceedsTheLimitAndWastesLessThanHalf) {
  TestRandom random;
  for (int i = 0; i < 10000; ++i) {
    const auto layers = static_cast<std::uint32_t>(random.Between(1, 100));
    const std::uint64_t tokens = random.Between(1, 5000);
    const std::uint64_t token_bytes = random.Between(1, 5000);
    const std::uint64_t most = random.Between(0, 1 << 20);
    const PieceShape shape = ShapePieces(layers, tokens, token_bytes, most);
    if (shape.tokens == 0) {
      ASSERT_LT(most, 2 * token_bytes);
      continue;
    }
    ASSERT_LE(2 * shape.layers * shape.tokens * token_bytes, most);
    ASSERT_LE(shape.tokens, tokens);
    ASSERT_TRUE(shape.layers == layers || shape.layers == 1);
    if (shape.tokens < tokens) {
      ASSERT_GT(2 * shape.layers * (shape.tokens + 1) * token_bytes, most);
    }
  }
}

struct Case {
  const char* name;
  bool map_memory;
  bool has_staging;
  bool staged;  // the expected transport
};

class BulkAppend : public testing::TestWithParam<Case> {
 protected:
  static ModelGeometry Uniform() {
    ModelGeometry model;
    model.name = "uniform";
    model.type = ElementType::kFp16;
    model.layers.assign(5, {.query_heads = 2, .kv_heads = 2, .head_dim = 64});
    return model;
  }
  // All layers at once, [layers][tokens][kv_heads][head_dim].
  static void AppendAll(TestRandom& random, Track& track, std::uint64_t tokens) {
    const BoundModel& bound = track.history.model();
    const std::size_t layer_bytes = tokens * bound.token_bytes(0);
    const std::size_t elements = bound.layers() * tokens * LayerRows::KvElements(bound, 0);
    const std::vector<std::byte> key = RandomRows(random, elements, bound.type());
    const std::vector<std::byte> value = RandomRows(random, elements, bound.type());
    absl::StatusOr<std::uint64_t> held =
        track.sequence.Append({.key = key, .value = value, .tokens = tokens});
    TESSERA_ASSERT_OK(held.status());
    for (std::uint32_t i = 0; i < bound.layers(); ++i) {
      track.history.Append(i, std::span(key).subspan(i * layer_bytes, layer_bytes),
                           std::span(value).subspan(i * layer_bytes, layer_bytes));
    }
    ASSERT_EQ(*held, track.history.tokens());
  }
};

TEST_P(BulkAppend, EveryRowArrivesWhereItBelongs) {
  TestRandom random;
  Decoder decoder(random, Uniform(),
                  {.staging_bytes = 16 << 10,
                   .max_message_bytes = 24 << 10,
                   .has_staging = GetParam().has_staging},
                  GetParam().map_memory);
  Track track = decoder.NewTrack();
  for (std::uint64_t tokens : {std::uint64_t{1}, random.Between(2, 40), random.Between(50, 400)}) {
    AppendAll(random, track, tokens);
    decoder.Prefill(track, random.Between(1, 60));
  }
  for (std::uint32_t layer = 0; layer < 5; ++layer) {
    for (std::uint32_t head = 0; head < 2; ++head) {
      ASSERT_EQ(decoder.daemon->KeysOf(track.sequence.id().value(), layer, head),
                track.history.KeysOf(layer, head));
    }
  }
  EXPECT_GT(decoder.daemon->appends(), 20u);
  EXPECT_EQ(decoder.daemon->staged_appends(), GetParam().staged ? decoder.daemon->appends() : 0u);
}

TEST_P(BulkAppend, AFailureInTheMiddleChangesNothing) {
  TestRandom random;
  Decoder decoder(random, Uniform(),
                  {.staging_bytes = 16 << 10,
                   .max_message_bytes = 24 << 10,
                   .has_staging = GetParam().has_staging},
                  GetParam().map_memory);
  Track track = decoder.NewTrack();
  AppendAll(random, track, 20);
  const std::size_t elements = 5 * 200 * LayerRows::KvElements(track.history.model(), 0);
  const std::vector<std::byte> rows = RandomRows(random, elements, kernels::ElementType::kFp16);
  decoder.daemon->FailNextAppend(absl::ResourceExhaustedError("the pool is full"), 3);
  const absl::Status status =
      track.sequence.Append({.key = rows, .value = rows, .tokens = 200}).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(track.sequence.tokens(), 20u);
  EXPECT_EQ(decoder.daemon->TokensOf(track.sequence.id().value()), 20u);
  // After a call with an unknown outcome, the next append asks for the outcome first.
  decoder.daemon->FailNextAppend(absl::DeadlineExceededError("slow"), 1);
  EXPECT_FALSE(track.sequence.Append({.key = rows, .value = rows, .tokens = 200}).ok());
  const std::uint64_t held = *decoder.daemon->TokensOf(track.sequence.id().value());
  EXPECT_GT(held, 20u);
  const std::size_t one = 5 * LayerRows::KvElements(track.history.model(), 0) * 2;
  absl::StatusOr<std::uint64_t> next = track.sequence.Append(
      {.key = std::span(rows).first(one), .value = std::span(rows).first(one), .tokens = 1});
  TESSERA_ASSERT_OK(next.status());
  EXPECT_EQ(*next, held + 1);
}

TEST_P(BulkAppend, NamesWhatDoesNotFit) {
  TestRandom random;
  ModelGeometry geometry = Uniform();
  geometry.layers[3].kv_heads = 1;
  Decoder decoder(random, geometry, {.has_staging = GetParam().has_staging}, GetParam().map_memory);
  Track track = decoder.NewTrack();
  const std::vector<std::byte> rows(5 * 2 * 64 * 2);
  const auto message = [&](const AppendTensors& tensors) {
    const absl::Status status = track.sequence.Append(tensors).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return status.ToString();
  };
  EXPECT_NE(message({.key = rows, .value = rows, .tokens = 1}).find("layers 0 and 3 differ"),
            std::string::npos);
  EXPECT_NE(message({.key = rows, .value = rows, .tokens = 1, .first_layer = 5})
                .find("first_layer is 5; the model has 5"),
            std::string::npos);
  EXPECT_NE(
      message({.key = rows, .value = rows, .tokens = 1, .layers = 1}).find("key has 1280 bytes"),
      std::string::npos);
  EXPECT_NE(message({.key = rows, .value = rows, .tokens = 0}).find("tokens is 0"),
            std::string::npos);
  EXPECT_NE(message({.key = rows, .value = rows, .tokens = ~std::uint64_t{0}, .layers = 1})
                .find("key has"),
            std::string::npos);
  EXPECT_EQ(decoder.daemon->appends(), 0u);
}

INSTANTIATE_TEST_SUITE_P(Ways, BulkAppend,
                         testing::Values(Case{"Staged", true, true, true},
                                         Case{"MappedWithoutStaging", true, false, false},
                                         Case{"Remote", false, true, false}),
                         [](const auto& way) { return way.param.name; });

TEST(BulkAppendThreads, ShareOneStagingArena) {
  TestRandom random;
  ModelGeometry geometry;
  geometry.name = "uniform";
  geometry.layers.assign(3, {.query_heads = 2, .kv_heads = 2, .head_dim = 64});
  Decoder decoder(random, geometry, {.staging_bytes = 8 << 10});
  std::vector<Track> tracks;
  for (int i = 0; i < 4; ++i) tracks.push_back(decoder.NewTrack());
  std::vector<std::thread> threads;
  for (Track& track : tracks) {
    threads.emplace_back([&track, seed = random.Bits()] {
      TestRandom own(seed);
      const BoundModel& bound = track.history.model();
      for (int i = 0; i < 30; ++i) {
        const std::uint64_t tokens = own.Between(1, 30);
        for (std::uint32_t layer = 0; layer < 3; ++layer) {
          const std::size_t elements = tokens * LayerRows::KvElements(bound, layer);
          const std::vector<std::byte> rows = RandomRows(own, elements, bound.type());
          const absl::Status status = track.sequence
                                          .Append({.key = rows,
                                                   .value = rows,
                                                   .tokens = tokens,
                                                   .first_layer = layer,
                                                   .layers = 1})
                                          .status();
          ASSERT_TRUE(status.ok()) << status;
          track.history.Append(layer, rows, rows);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Track& track : tracks) {
    for (std::uint32_t layer = 0; layer < 3; ++layer) {
      ASSERT_EQ(decoder.daemon->KeysOf(track.sequence.id().value(), layer, 1),
                track.history.KeysOf(layer, 1));
    }
  }
}

TEST(AttendRpc, AttendsOverCommittedTokensByEitherTransport) {
  TestRandom random;
  for (bool map_memory : {true, false}) {
    ModelGeometry geometry;
    geometry.name = "small";
    geometry.layers.assign(2, {.query_heads = 6, .kv_heads = 2, .head_dim = 128});
    // Small messages, so that the batch needs several.
    Decoder decoder(random, geometry, {.max_message_bytes = 20 << 10}, map_memory);
    std::vector<Track> tracks;
    std::vector<LayerRows> rows;
    std::vector<AttendQuery> queries;
    for (std::uint32_t i = 0; i < 5; ++i) {
      tracks.push_back(decoder.NewTrack());
      decoder.Prefill(tracks.back(), random.Between(5, 90));
      rows.emplace_back(random, tracks[0].history.model(), 1, i + 1);
    }
    for (std::uint32_t i = 0; i < 5; ++i) {
      queries.push_back({.sequence = &tracks[i].sequence,
                         .queries = i + 1,
                         .query = rows[i].query,
                         .output = std::as_writable_bytes(std::span(rows[i].output)),
                         .lse = rows[i].lse});
    }
    TESSERA_ASSERT_OK(decoder.worker->AttendRpc(1, queries));
    for (std::uint32_t i = 0; i < 5; ++i) {
      tracks[i].history.Check(1, tracks[i].history.tokens() - (i + 1), i + 1, true,
                              rows[i].query.data(), rows[i].output.data(), rows[i].lse.data());
    }
    queries[2].query = queries[2].query.first(10);
    EXPECT_TRUE(absl::IsInvalidArgument(decoder.worker->AttendRpc(1, queries)));
    EXPECT_TRUE(absl::IsInvalidArgument(decoder.worker->AttendRpc(2, queries)));
  }
}

}  // namespace
}  // namespace tessera::client
