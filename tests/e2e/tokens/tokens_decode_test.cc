// Token policies that continue while decoding, end to end.

#include <cmath>
#include <string>

#include "client/api/worker_access.h"
#include "daemon/base/strings.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tessera/v1/tessera.grpc.pb.h"
#include "tests/e2e/tokens/token_lanes.h"

namespace tessera {
namespace {

// The keys of a token must have the same position in all layers.
TEST_F(Tokens, APromptThatComesLayerByLayerHasOnePlace) {
  shape_ = {.layers = 4, .query_heads = 1, .kv_heads = 1, .head_dim = 64};
  client::ModelGeometry geometry = shape_.Geometry();
  geometry.rope.theta = 10000;
  model_ = *mapped_->RegisterModel(geometry);
  for (const char* policy : {"streaming:sink=2,recent=40,pos=slot",
                             "lacache:budget=40,span=2,overlap=1,sink=2,pos=slot"}) {
    SCOPED_TRACE(policy);
    client::Sequence sequence = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    for (int prompt = 0; prompt < 3; ++prompt) {
      const std::uint64_t first = truth.tokens();
      truth.Grow(100);
      const std::uint64_t before = sequence.next_position();
      EXPECT_LE(before, 42u);
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        EXPECT_EQ(sequence.next_position(), before) << "prompt " << prompt << ", layer " << layer;
        const auto held = sequence.Append({.key = std::as_bytes(truth.Key(layer, first, 100)),
                                           .value = std::as_bytes(truth.Value(layer, first, 100)),
                                           .tokens = 100,
                                           .first_layer = layer,
                                           .layers = 1,
                                           .end_of_prompt = true});
        ASSERT_TRUE(held.ok()) << held.status();
      }
    }
  }
}

// The keys' next position and the needed observations must not change without the worker's
// knowledge.
TEST_F(Tokens, AnOperatorDoesNothingThatAWorkerWouldHaveToKnow) {
  shape_ = {.layers = 1, .query_heads = 1, .kv_heads = 1, .head_dim = 64};
  client::ModelGeometry geometry = shape_.Geometry();
  geometry.rope.theta = 10000;
  model_ = *mapped_->RegisterModel(geometry);
  const auto admin = v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin());
  client::Sequence moved = NewSequence("dense");
  client::Sequence shown = NewSequence("h2o:heavy=8,recent=8");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(moved, truth, 64, false);
  const auto set = [&](const client::Sequence& sequence, const char* policy) {
    grpc::ClientContext context;
    v1::SetPolicyRequest request;
    v1::SetPolicyResponse response;
    request.set_sequence_id(sequence.id().value());
    request.set_policy(policy);
    return admin->SetPolicy(&context, request, &response);
  };
  for (const char* policy : {"dense", "tova:budget=16", "mosaickv"}) {
    const grpc::Status status = set(shown, policy);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << policy;
    EXPECT_THAT(status.error_message(), HasSubstr(Concat("\"", policy)));
    EXPECT_THAT(status.error_message(), HasSubstr(shown.id().ToString()));
  }
  EXPECT_EQ(set(moved, "snapkv").error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_TRUE(set(shown, "h2o:heavy=4,recent=4").ok());
  EXPECT_TRUE(set(moved, "streaming:sink=4,recent=28").ok());
  EXPECT_TRUE(set(moved, "streaming:sink=4,recent=28,pos=slot").ok());
  grpc::ClientContext context;
  v1::CompressRequest request;
  v1::CompressResponse response;
  request.set_sequence_id(moved.id().value());
  const grpc::Status compressed = admin->Compress(&context, request, &response);
  EXPECT_EQ(compressed.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(compressed.error_message(), HasSubstr("moves positions"));
  EXPECT_EQ(moved.next_position(), 64u);
  ASSERT_TRUE(moved.Compress().ok());
  EXPECT_EQ(moved.next_position(), 32u);
}

TEST_F(Tokens, PositionsThatCannotBeMovedAreRefused) {
  Shape({.layers = 4, .query_heads = 1, .kv_heads = 1, .head_dim = 64});
  const auto without = mapped_->CreateSequence(model_, "streaming:pos=slot");
  EXPECT_THAT(std::string(without.status().message()), HasSubstr("no rotary positions"));
  client::ModelGeometry geometry = shape_.Geometry();
  geometry.name = "dynamic";
  geometry.rope = {.theta = 10000, .interleaved = false, .scaling = "dynamic", .scaling_factor = 2};
  const auto dynamic =
      mapped_->CreateSequence(*mapped_->RegisterModel(geometry), "streaming:pos=slot");
  EXPECT_THAT(std::string(dynamic.status().message()), HasSubstr("dynamic"));
}

// ---- Between two prompts

// A short prompt, an answer, and another short prompt: the newest queries are those of all three.
TEST_F(Tokens, TheWindowReachesBackOverWhatWasDecoded) {
  Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
  for (const char* policy :
       {"snapkv:budget=0.6,window=32", "chunkkv:budget=0.6,chunk=4,window=32", "think:window=32"}) {
    SCOPED_TRACE(policy);
    const std::uint64_t seed = random_.Bits();
    client::Sequence turns = NewSequence(policy);
    SyntheticSequence truth(shape_, seed);
    Append(turns, truth, 20);
    Compress(turns);
    for (int i = 0; i < 100; ++i) DecodeAndAttend(turns, truth);
    Append(turns, truth, 10);
    Compress(turns);
    // As if it had been a single prompt.
    client::Sequence whole = NewSequence(policy);
    SyntheticSequence same(shape_, seed);
    Append(whole, same, 130);
    Compress(whole);
    const v1::DescribeResponse left = Entries(turns);
    const v1::DescribeResponse expected = Entries(whole);
    ASSERT_EQ(left.lane_size(), expected.lane_size());
    EXPECT_EQ(left.tile_bytes(), expected.tile_bytes());
    for (int lane = 0; lane < left.lane_size(); ++lane) {
      EXPECT_THAT(left.lane(lane).position(), ElementsAreArray(expected.lane(lane).position()));
    }
  }
}

// A call failed after some layers were decided. The worker was told and continues its prompt; what
// it observes again counts as observed after the decision.
TEST_F(Tokens, APromptGoesOnBehindACompressThatFailedInALayer) {
  Shape({.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  for (const char* policy : {"h2o:heavy=10,recent=10", "tova:budget=20"}) {
    SCOPED_TRACE(policy);
    client::Sequence sequence = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    const auto see = [&](std::uint32_t layer, std::uint64_t first, std::uint64_t count) {
      std::vector<std::uint16_t> queries;
      for (std::uint64_t t = first; t < first + count; ++t) {
        const auto row = truth.Query(layer, t);
        queries.insert(queries.end(), row.begin(), row.end());
      }
      const auto keys = truth.Key(layer, first, count);
      EXPECT_TRUE(sequence
                      .Observe({.layer = layer,
                                .first_token = first,
                                .query = BytesOf(queries),
                                .key = std::as_bytes(keys)})
                      .ok());
    };
    Append(sequence, truth, 60, /*observe=*/false);
    see(0, 0, 60);
    EXPECT_TRUE(absl::IsFailedPrecondition(sequence.Compress().status())) << "layer 1 is unseen";
    Append(sequence, truth, 40, /*observe=*/false);
    see(0, 60, 40);
    see(1, 0, 100);
    const absl::Status refused = sequence.Compress().status();
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("the queries of the tokens from 60"));
    see(0, 60, 40);
    Compress(sequence);
    const v1::DescribeResponse left = Entries(sequence);
    for (const v1::LaneDescription& lane : left.lane()) EXPECT_EQ(lane.position_size(), 20);
  }
}

// ---- While decoding, on packed rows

// A short prompt is decided together with the next one, by the strongest queries of both: more than
// the short one alone would need.
TEST_F(Tokens, OfAShortPromptTheStrongestQueriesAreKept) {
  Shape({.layers = 2, .query_heads = 8, .kv_heads = 2, .head_dim = 64});
  const std::string policy = "semantickv:keep_total=0.4,sink=64,lambda=0.2,mask=none";
  client::Sequence whole = NewSequence(policy);
  client::Sequence parts = NewSequence(policy);
  SyntheticSequence truth(shape_, 11);
  SyntheticSequence same(shape_, 11);
  Append(whole, truth, 400);
  Append(parts, same, 40);
  EXPECT_THAT(Compress(parts).decided_tokens, testing::ElementsAre(0, 0));
  Append(parts, same, 20);
  EXPECT_THAT(Compress(parts).decided_tokens, testing::ElementsAre(0, 0));
  auto fork = parts.Fork();
  ASSERT_TRUE(fork.ok()) << fork.status();
  SyntheticSequence forks(shape_, 11);
  forks.Grow(60);
  Append(parts, same, 340);
  Append(*fork, forks, 340);
  EXPECT_THAT(Compress(whole).decided_tokens, testing::ElementsAre(400, 400));
  for (client::Sequence* each : {&parts, &*fork}) {
    EXPECT_THAT(Compress(*each).decided_tokens, testing::ElementsAre(400, 400));
    const v1::DescribeResponse held = Entries(*each);
    const v1::DescribeResponse alike = Entries(whole);
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      for (std::uint32_t head = 0; head < 2; ++head) {
        EXPECT_THAT(Lane(held, layer, head).position(),
                    ElementsAreArray(Lane(alike, layer, head).position()));
      }
    }
  }
}

// A prompt is decided by the strongest of its own queries, however much of an answer before it is
// packed and final.
TEST_F(Tokens, BehindALongAnswerAPromptDecidesByItsOwnQueries) {
  Shape({.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  client::Sequence sequence = NewSequence(
      "semantickv:sink=8+mosaickv:keep=1,group=1,loss_k=1,loss_v=1,select=0,min_segment=32,"
      "segment=512,sinks=0,recent=0");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 300);
  Compress(sequence);
  for (const std::uint64_t turn : {1u, 2u}) {
    for (int i = 0; i < 1500; ++i) DecodeAndAttend(sequence, truth);
    Append(sequence, truth, 100);
    EXPECT_EQ(Compress(sequence).decided_tokens.at(0), truth.tokens());
    const auto left = static_cast<std::uint64_t>(Lane(Entries(sequence), 0).position_size());
    EXPECT_GE(left, 60 + turn * 980) << "what was packed while decoding stays";
    EXPECT_LT(left, 60 + turn * 1600) << "and the prompts were chosen from";
  }
  ExpectAttendsToWhatIsLeft(sequence, truth, 1e-2);
}

// Rejected drafts have evicted nothing, through either transport.
TEST_F(Tokens, DraftsThatAreTakenBackHaveCostNothing) {
  Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
  for (client::Worker* worker : {mapped_.get(), remote_.get()}) {
    const auto model = worker->RegisterModel(shape_.Geometry());
    ASSERT_TRUE(model.ok()) << model.status();
    auto sequence = worker->CreateSequence(*model, "streaming:sink=0,recent=32");
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    SyntheticSequence truth(shape_, random_.Bits());
    truth.Grow(71);
    client::Sequence* const batch[] = {&*sequence};
    for (std::uint64_t at = 0; at < 63; ++at) {
      // The last step accepts the first of its drafts, some of which are in the next tile.
      const std::uint32_t drafts = at == 62 ? 8 : 1;
      auto step = worker->BeginStep(batch, {.new_tokens = drafts});
      ASSERT_TRUE(step.ok()) << step.status();
      for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
        const absl::Status appended =
            step->Append(layer, std::as_bytes(truth.Key(layer, at, drafts)),
                         std::as_bytes(truth.Value(layer, at, drafts)));
        ASSERT_TRUE(appended.ok()) << appended;
      }
      // Describe sees the drafts now; an operator's call waits until the step has ended.
      if (at == 62) {
        v1::CompressRequest request;
        v1::CompressResponse response;
        request.set_sequence_id(sequence->id().value());
        grpc::ClientContext context;
        const auto admin = v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin());
        const grpc::Status status = admin->Compress(&context, request, &response);
        ASSERT_TRUE(status.ok()) << status.error_message();
      }
      const std::uint32_t accepted[] = {1};
      const absl::Status ended = step->End(accepted);
      ASSERT_TRUE(ended.ok()) << ended;
    }
    const auto compressed = sequence->Compress();
    ASSERT_TRUE(compressed.ok()) << compressed.status();
    EXPECT_THAT(Lane(Entries(*sequence), 1, 1).position(), ElementsAreArray(Range(31, 62)));
  }
}

TEST_F(Tokens, EntriesGoWithoutEncodingTheOthersAnew) {
  Shape({.layers = 4, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  for (const char* tokens : {"streaming:sink=4,recent=600", "lacache:budget=600,span=2,overlap=1",
                             "h2o:heavy=300,recent=300", "tova:budget=600"}) {
    const std::string policy = tokens + kAllChannels;
    SCOPED_TRACE(policy);
    client::Sequence sequence = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    Append(sequence, truth, 1000);
    Compress(sequence);
    EXPECT_THAT(Lane(Entries(sequence), 0).segment_run(0).format(), HasSubstr("packed"));
    for (int i = 0; i < 200; ++i) DecodeAndAttend(sequence, truth);
    Compress(sequence);
    const v1::DescribeResponse held = Entries(sequence);
    EXPECT_EQ(held.tokens(), 1200u);
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      EXPECT_LE(Lane(held, layer).entries(), 610u);
      std::uint64_t packed = 0;
      for (const v1::SegmentRun& run : Lane(held, layer).segment_run()) {
        if (run.kept_channels() != 0) packed += run.entries();
      }
      EXPECT_GE(packed, 560u) << held.DebugString();
    }
    ExpectAttendsToWhatIsLeft(sequence, truth, 0.03);
  }
}

// H2O and TOVA keep the same entries as a direct computation over all queries.
TEST_F(Tokens, ScoresWhileDecodingAreThoseOfAllQueries) {
  Shape({.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  client::Sequence sequence = NewSequence("h2o:heavy=20,recent=12");
  SyntheticSequence truth(shape_, random_.Bits());
  for (int i = 0; i < 100; ++i) DecodeAndAttend(sequence, truth);
  Compress(sequence);
  // By definition: every token adds attention to the remaining entries, then the weakest is
  // evicted.
  std::vector<std::uint64_t> kept;
  std::vector<double> scores;
  for (std::uint64_t t = 0; t < 100; ++t) {
    kept.push_back(t);
    scores.push_back(0);
    const auto query = truth.Query(0, t);
    for (std::uint32_t head = 0; head < 2; ++head) {
      std::vector<double> shares;
      double sum = 0;
      for (const std::uint64_t position : kept) {
        const auto key = truth.Key(0, position, 1);
        double dot = 0;
        for (std::uint32_t d = 0; d < 64; ++d) {
          dot += static_cast<double>(kernels::Bf16ToFloat(key[d])) *
                 kernels::Bf16ToFloat(query[head * 64 + d]);
        }
        shares.push_back(std::exp(dot / 8));
        sum += shares.back();
      }
      for (std::size_t i = 0; i < kept.size(); ++i) scores[i] += shares[i] / sum / 2;
    }
    if (kept.size() <= 32) continue;
    const auto weakest = std::min_element(scores.begin(), scores.end() - 12);
    kept.erase(kept.begin() + (weakest - scores.begin()));
    scores.erase(weakest);
  }
  EXPECT_THAT(Lane(Entries(sequence), 0).position(), ElementsAreArray(kept));
}

// A worker that computes attention elsewhere and does not observe its queries.
TEST_F(Tokens, TokensWhoseQueriesAreMissingAreNotPassedOver) {
  Shape({.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  const auto admin = v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin());
  for (const char* policy : {"h2o:heavy=20,recent=20", "tova:budget=40"}) {
    SCOPED_TRACE(policy);
    client::Sequence sequence = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    Append(sequence, truth, 100);
    Compress(sequence);
    for (int i = 0; i < 10; ++i) Decode(sequence, truth);
    const absl::Status missing = sequence.Compress().status();
    EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(missing.message()), HasSubstr("layer 0"));
    EXPECT_THAT(std::string(missing.message()), HasSubstr("from 100 to 109"));
    // An operator cannot provide observations, so its call succeeds and changes nothing.
    grpc::ClientContext context;
    v1::CompressRequest request;
    v1::CompressResponse response;
    request.set_sequence_id(sequence.id().value());
    EXPECT_TRUE(admin->Compress(&context, request, &response).ok());
    EXPECT_EQ(Lane(Entries(sequence), 0).entries(), 50u);
    Observe(sequence, truth, 100, 10);
    Compress(sequence);
    EXPECT_EQ(Lane(Entries(sequence), 0).entries(), 40u);
    // The client asks whenever a tail fills, and reports the same error.
    for (int i = 0; i < 32; ++i) Decode(sequence, truth);
    client::Sequence* const batch[] = {&sequence};
    EXPECT_EQ(mapped_->BeginStep(batch).status().code(), absl::StatusCode::kFailedPrecondition);
  }
}

// A tenant whose observation limit is too small for all layers together.
class InLittleRoom : public Tokens {
 protected:
  InLittleRoom() : Tokens(DaemonProcess::Start({.flags = {"--raw-copy-bytes=1048576"}}), nullptr) {}
};

TEST_F(InLittleRoom, LayersAreDecidedAboutInParts) {
  Shape({.layers = 6, .query_heads = 8, .kv_heads = 2, .head_dim = 64});
  for (const char* policy : {"h2o:heavy=40,recent=40", "tova:budget=80"}) {
    SCOPED_TRACE(policy);
    client::Sequence sequence = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    Append(sequence, truth, 40);
    Compress(sequence);
    // A later prompt needs every query: 400 KiB per layer.
    Append(sequence, truth, 400);
    const absl::StatusOr<client::CompressResult> compressed = sequence.Compress();
    ASSERT_TRUE(compressed.ok()) << compressed.status();
    EXPECT_EQ(compressed->entries_dropped, 6 * 2 * (440 - 80u));
    const v1::DescribeResponse held = Entries(sequence);
    for (const v1::LaneDescription& lane : held.lane()) EXPECT_EQ(lane.entries(), 80u);
    ExpectAttendsToWhatIsLeft(sequence, truth, 1e-4);
  }
}

class SmallArena : public Tokens {
 protected:
  SmallArena() : Tokens(DaemonProcess::Start({.flags = {"--staging-bytes=2MiB"}}), nullptr) {}
};

// Uploads observations in pieces; each uses the arena after the previous one.
TEST_F(SmallArena, MoreIsShownThanFitsIntoIt) {
  Shape({.layers = 1, .query_heads = 8, .kv_heads = 2, .head_dim = 64});
  client::Sequence sequence = NewSequence("tova:budget=80");
  SyntheticSequence truth(shape_, random_.Bits());
  Append(sequence, truth, 40);
  Compress(sequence);
  Append(sequence, truth, 4000);  // 1 KiB each
  Compress(sequence);
  EXPECT_EQ(Lane(Entries(sequence), 0).entries(), 80u);
}

// The same policy as a message.
TEST_F(Tokens, APolicyAsAMessage) {
  const auto channel = daemon_->Connect();
  Shape({.layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
  auto stub = v1::Tessera::NewStub(channel);
  v1::CreateSequenceRequest request;
  request.set_model_id(model_.id().value());
  *request.mutable_session() = client::WelcomeMessage(*mapped_).session();
  v1::PolicyTermSpec& chunks = *request.mutable_policy_spec()->add_terms();
  chunks.set_name("chunkkv");
  (*chunks.mutable_options())["budget"] = "0.3";
  (*chunks.mutable_options())["window"] = "16";
  request.mutable_policy_spec()->add_terms()->set_name("mosaickv");
  request.mutable_policy_spec()->add_terms()->set_name("fp8");
  v1::CreateSequenceResponse response;
  {
    grpc::ClientContext context;
    const grpc::Status status = stub->CreateSequence(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  EXPECT_EQ(response.policy(), "chunkkv:window=16,budget=0.3+mosaickv+fp8");
  EXPECT_EQ(response.needs().last_queries(), 16u);
  request.set_policy("dense");
  grpc::ClientContext context;
  const grpc::Status both = stub->CreateSequence(&context, request, &response);
  EXPECT_EQ(both.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

// ---- Chunks of text while decoding

// Through either transport: the growing chunk is left alone, complete ones are clustered, and after
// another prompt so is the last one.
TEST_F(Tokens, AChunkThatIsDecodedIsLeftAloneUntilItEnds) {
  Shape({.layers = 2, .query_heads = 2, .kv_heads = 2, .head_dim = 64});
  for (client::Worker* worker : {mapped_.get(), remote_.get()}) {
    SCOPED_TRACE(worker == mapped_.get() ? "mapped" : "rpc");
    auto created = worker->CreateSequence(
        model_, "semanticache:tau=0.02,delimiters=0,max_chunk=64,sink=0,recent=0");
    ASSERT_TRUE(created.ok()) << created.status();
    client::Sequence& sequence = *created;
    SyntheticSequence truth(shape_, random_.Bits());
    const auto alone = [&](std::uint64_t first, std::uint64_t end) {
      const v1::DescribeResponse held = Entries(sequence);
      std::uint64_t count = 0;
      for (int i = 0; i < Lane(held, 1).position_size(); ++i) {
        const std::uint64_t position = Lane(held, 1).position(i);
        count += position >= first && position < end && Lane(held, 1).weight(i) == 1;
      }
      return count;
    };
    Append(sequence, truth, 100, /*observe=*/false);
    Compress(sequence);
    EXPECT_LT(alone(0, 64), 40u);
    EXPECT_LT(alone(64, 100), 30u) << "a prompt's last chunk is clustered";
    // The tokens left of the prompt's last chunk plus these fill the chunk's 64 entries.
    const v1::DescribeResponse left = Entries(sequence);
    const std::uint64_t end =
        100 + 64 -
        static_cast<std::uint64_t>(std::ranges::count_if(
            Lane(left, 1).position(), [](auto position) { return position >= 64; }));
    for (int i = 0; i < 75; ++i) ASSERT_NO_FATAL_FAILURE(Decode(sequence, truth, worker));
    ASSERT_TRUE(sequence.Park().ok());
    Compress(sequence);
    EXPECT_EQ(alone(end, 175), 175 - end) << "it goes on";
    EXPECT_LT(alone(64, end), 50u) << "it has ended";
    Append(sequence, truth, 20, /*observe=*/false);
    Compress(sequence);
    EXPECT_LT(alone(end, 195), 195 - end) << "a prompt has ended";
  }
}

}  // namespace
}  // namespace tessera
