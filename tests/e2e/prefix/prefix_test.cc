// Published prefixes end to end: a fork attends like the published sequence, there is one copy, and
// other tenants see nothing of it.

#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "client/tools/admin.h"
#include "tessera/tessera.h"
#include "tests/e2e/prefix/prefix_lanes.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using std::chrono::seconds;

// ---- Forks

struct Kind {
  const char* policy;
  bool every_boundary;
};

class OfPolicies : public Prefixes, public testing::WithParamInterface<Kind> {};

TEST_P(OfPolicies, AForkAttendsAsTheSequenceThatWasPublished) {
  client::Sequence published = NewSequence(GetParam().policy);
  SyntheticSequence truth(shape_, random_.Bits());
  Append(published, truth, 200);
  const Ids ids = Count(200);
  const PublishedPrefix prefix = Publish(published, ids);
  EXPECT_FALSE(prefix.deduplicated);
  EXPECT_EQ(prefix.tokens, 200u);

  Ids longer = Count(300);
  for (client::Worker* worker : {mapped_.get(), remote_.get()}) {
    const PrefixMatch match = Match(*worker, longer, GetParam().policy);
    EXPECT_EQ(match.prefix, prefix.prefix);
    EXPECT_EQ(match.tokens, 200u);
    const std::uint64_t tiles = TileBytes();
    client::Sequence fork = Fork(*worker, match);
    EXPECT_EQ(TileBytes(), tiles) << "KV was copied";
    EXPECT_EQ(fork.tokens(), 200u);
    EXPECT_EQ(fork.policy(), published.policy());
    EXPECT_EQ(fork.next_position(), published.next_position());
    for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
      EXPECT_EQ(AttendByRpc(*worker, fork, truth, layer),
                AttendByRpc(*mapped_, published, truth, layer));
    }
    // Both continue alike, from the same token.
    client::Sequence again =
        Fork(*mapped_, match.found() ? Match(*mapped_, longer, GetParam().policy) : match);
    SyntheticSequence ahead = truth;
    ahead.Grow(1);
    EXPECT_EQ(DecodeOne(*worker, fork, ahead), DecodeOne(*mapped_, again, ahead));
  }
  // At a boundary before its end, if every token is kept.
  const PrefixMatch part = Match(*remote_, Count(150), GetParam().policy);
  EXPECT_EQ(part.tokens, GetParam().every_boundary ? 128u : 0u);
  PrefixMatch cut = Match(*mapped_, ids, GetParam().policy);
  const auto early = mapped_->Fork(cut, 64);
  EXPECT_EQ(early.ok(), GetParam().every_boundary) << early.status();
  EXPECT_TRUE(absl::IsInvalidArgument(mapped_->Fork(cut, 65).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(mapped_->Fork(cut, 201).status()));
  if (!early.ok()) return;
  EXPECT_EQ(early->tokens(), 64u);
  truth.Truncate(64);
  published = NewSequence("");
  SyntheticSequence again = truth;
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    EXPECT_LT(truth.Error(layer, 63, AttendByRpc(*remote_, *early, truth, layer)), 0.05);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, OfPolicies,
    testing::Values(Kind{"dense", true},
                    Kind{"mosaickv:sinks=0,recent=0,keep=1,group=1,segment=128,min_segment=32,"
                         "loss_k=1,loss_v=1,select=0+bf16",
                         true},
                    Kind{"mosaickv:keep=1,group=1,segment=128,min_segment=32,loss_k=1,loss_v=1,"
                         "recent=32,floor=64+bf16",
                         true},
                    Kind{"quest:tokens=2048,page=16", true},
                    Kind{"streaming:sink=4,recent=100", false},
                    Kind{"snapkv:window=8,budget=0.5", false}),
    [](const auto& kind) {
      const std::string policy = kind.param.policy;
      return policy.substr(0, policy.find(':')) + std::to_string(kind.index);
    });

// ---- When publishing is allowed

// A policy that continues from an earlier decision needs every query.
TEST_F(Prefixes, APromptBehindAPrefixShowsAllOfItsQueries) {
  for (const std::string policy : {"tova:budget=80", "h2o:heavy=40,recent=40"}) {
    SCOPED_TRACE(policy);
    client::Sequence published = NewSequence(policy);
    SyntheticSequence truth(shape_, 6);
    Append(published, truth, 100);
    Publish(published, Count(100));
    client::Sequence fork = Fork(*mapped_, Match(*mapped_, Count(300), policy));
    Append(fork, truth, 60);
    Compress(fork);
    EXPECT_EQ(Lane(Entries(fork), 0).position_size(), 80);
    ExpectAttendsToWhatIsLeft(fork, truth, 0.02);
    DecodeAndAttend(fork, truth);
  }
}

// A worker that forks it could not provide the missing observations.
TEST_F(Prefixes, WhatWaitsForItsQueriesIsNotPublished) {
  for (const std::string policy : {"tova:budget=80", "h2o:heavy=40,recent=40"}) {
    SCOPED_TRACE(policy);
    client::Sequence sequence = NewSequence(policy);
    SyntheticSequence truth(shape_, random_.Bits());
    Append(sequence, truth, 100);
    Compress(sequence);
    Append(sequence, truth, 40, /*observe=*/false);
    EXPECT_THAT(sequence.Publish(Count(140)).status().ToString(), HasSubstr("from 100 to 139"));
    Observe(sequence, truth, 100, 40);
    for (int i = 0; i < 10; ++i) Decode(sequence, truth);
    EXPECT_THAT(sequence.Publish(Count(150)).status().ToString(), HasSubstr("from 140 to 149"));
    EXPECT_FALSE(Match(*remote_, Count(150), policy).found());
    Observe(sequence, truth, 140, 10);
    EXPECT_EQ(Publish(sequence, Count(150)).tokens, 150u);
    client::Sequence fork = Fork(*mapped_, Match(*mapped_, Count(150), policy));
    EXPECT_EQ(Lane(Entries(fork), 0).position_size(), 80);
    ExpectAttendsToWhatIsLeft(fork, truth, 0.02);
  }
}

TEST_F(Prefixes, PublishingInTheMiddleOfDecoding) {
  client::Sequence sequence = NewSequence("");
  SyntheticSequence truth(shape_, 9);
  Append(sequence, truth, 60);
  for (int i = 0; i < 10; ++i) Decode(sequence, truth);
  // All of it, including the tail; then a shorter prefix.
  EXPECT_EQ(Publish(sequence, Count(70)).tokens, 70u);
  EXPECT_EQ(Publish(sequence, Count(41)).tokens, 41u);
  for (int i = 0; i < 10; ++i) Decode(sequence, truth);
  EXPECT_EQ(sequence.tokens(), 80u);
  EXPECT_EQ(Match(*remote_, Count(80)).tokens, 70u);
  EXPECT_EQ(Match(*remote_, Count(50)).tokens, 41u);
  client::Sequence fork = Fork(*remote_, Match(*remote_, Count(80)));
  SyntheticSequence head = truth;
  head.Truncate(70);
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    EXPECT_LT(head.Error(layer, 69, AttendByRpc(*remote_, fork, head, layer)), 0.02);
    EXPECT_LT(truth.Error(layer, 79, AttendByRpc(*remote_, sequence, truth, layer)), 0.02);
  }
}

TEST_F(Prefixes, WhatCannotBePublishedIsRefusedWithTheReason) {
  const auto refusal = [](const absl::StatusOr<PublishedPrefix>& published) {
    return published.status().ToString();
  };
  client::Sequence sequence = NewSequence("");
  SyntheticSequence truth(shape_, 3);
  Append(sequence, truth, 64);
  EXPECT_THAT(refusal(sequence.Publish({})), HasSubstr("token_ids is empty"));
  EXPECT_THAT(refusal(sequence.Publish(Count(65))), HasSubstr("65 token ids"));
  EXPECT_THAT(refusal(sequence.Publish(Count(64), {.ttl = std::chrono::hours(24 * 365 * 11)})),
              HasSubstr("ttl_ms is"));
  ASSERT_TRUE(sequence.Compress({.kept_channels = 16}).ok());
  EXPECT_THAT(refusal(sequence.Publish(Count(64))), HasSubstr("compressed by a call"));
  auto fork = sequence.Fork();
  ASSERT_TRUE(fork.ok());
  EXPECT_THAT(refusal(fork->Publish(Count(64))), HasSubstr("compressed by a call"));

  client::Sequence chosen = NewSequence("streaming:sink=4,recent=40");
  SyntheticSequence other(shape_, 4);
  Append(chosen, other, 128);
  EXPECT_THAT(refusal(chosen.Publish(Count(64))), HasSubstr("allows publishing only all of them"));
  Compress(chosen);
  auto admin = cli::Admin::At({.address = daemon_->address(), .tls = std::nullopt});
  ASSERT_TRUE(admin.ok()) << admin.status();
  ASSERT_TRUE(admin->SetPolicy(chosen.id().value(), "dense").ok());
  EXPECT_THAT(refusal(chosen.Publish(Count(128))), HasSubstr("earlier policy"));
  // From another session.
  v1::PublishRequest request;
  fakes::RawWorker raw(daemon_->Connect());
  ASSERT_TRUE(raw.Attach().ok());
  *request.mutable_session() = raw.key();
  request.set_sequence_id(chosen.id().value());
  request.add_token_ids(1);
  grpc::ClientContext context;
  v1::PublishResponse response;
  const grpc::Status status = raw.stub().Publish(&context, request, &response);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("is owned by"));
  EXPECT_EQ(TenantStats().prefixes(), 0u);
  // Invalid requests.
  EXPECT_TRUE(absl::IsInvalidArgument(mapped_->Match(model_, {}).status()));
  const Ids one = {4294967295u};
  EXPECT_TRUE(absl::IsInvalidArgument(
      mapped_->Match(model_, {.policy = "mosaikkv", .tokens = one}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      mapped_->Match(model_, {.tokens = one, .wait = std::chrono::hours(2)}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(mapped_->Fork(Match(*mapped_, one)).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      mapped_
          ->Fork({.model = model_, .prefix = client::PrefixId(chosen.id().value()), .tokens = 32})
          .status()));
}

// ---- Visibility

class TwoTenants : public Prefixes {
 protected:
  TwoTenants()
      : Prefixes(DaemonProcess::Start(
            {.config_json =
                 R"({"tenants": [{"name": "default"}, {"name": "other", "token": "sesame"}]})"})) {}
};

TEST_F(TwoTenants, SeeNothingOfEachOther) {
  client::Sequence sequence = NewSequence("");
  SyntheticSequence truth(shape_, 5);
  Append(sequence, truth, 64);
  const PublishedPrefix published = Publish(sequence, Count(64));
  ASSERT_TRUE(mapped_->Match(model_, {.tokens = Count(128), .will_compute = true}).ok());
  auto other = client::Worker::Attach({.address = daemon_->address(), .tenant_token = "sesame"});
  ASSERT_TRUE(other.ok());
  const auto model = (*other)->RegisterModel(shape_.Geometry());
  ASSERT_TRUE(model.ok());
  const auto match =
      (*other)->Match(*model, {.tokens = Count(128), .wait = seconds(30), .will_compute = true});
  ASSERT_TRUE(match.ok()) << match.status();
  EXPECT_FALSE(match->found());
  EXPECT_EQ(match->computing, 0u);
  EXPECT_TRUE(absl::IsNotFound(
      (*other)->Fork({.model = *model, .prefix = published.prefix, .tokens = 64}).status()));
  ASSERT_TRUE((*other)->Free(published.prefix).ok());
  EXPECT_TRUE(Match(*remote_, Count(64)).found());
}

TEST_F(Prefixes, ThePrefixStaysWhenItsWorkerGoes) {
  Ids ids = Count(64);
  ids[3] = 4294967295u;
  {
    auto giver = client::Worker::Attach({.address = daemon_->address()});
    ASSERT_TRUE(giver.ok());
    const auto model = (*giver)->RegisterModel(shape_.Geometry());
    auto sequence = (*giver)->CreateSequence(*model);
    ASSERT_TRUE(sequence.ok());
    SyntheticSequence truth(shape_, 5);
    Append(*sequence, truth, 64);
    EXPECT_EQ(Publish(*sequence, ids, {.pinned = true}).tokens, 64u);
  }
  ASSERT_TRUE(Becomes([&] { return TenantStats().sessions() == 2; }));
  const PrefixMatch match = Match(*mapped_, ids);
  ASSERT_TRUE(match.found());
  client::Sequence fork = Fork(*mapped_, match);
  // An operator lists it and frees it; the fork stays usable.
  auto admin = cli::Admin::At({.address = daemon_->address(), .tls = std::nullopt});
  ASSERT_TRUE(admin.ok()) << admin.status();
  const auto list = admin->Prefixes(10);
  ASSERT_TRUE(list.ok()) << list.status();
  ASSERT_EQ(list->prefixes_size(), 1);
  const v1::PrefixInfo& info = list->prefixes(0);
  EXPECT_EQ(info.prefix_id(), match.prefix.value());
  EXPECT_EQ(info.tenant(), "default");
  EXPECT_EQ(info.policy(), "dense");
  EXPECT_EQ(info.tokens(), 64u);
  EXPECT_EQ(info.tile_bytes(), 4u * 2 * 8192);
  EXPECT_EQ(info.shared_tile_bytes(), info.tile_bytes());
  EXPECT_EQ(info.references(), 1u);
  EXPECT_EQ(info.group_size(), 1u);
  EXPECT_TRUE(info.pinned());
  ASSERT_TRUE(admin->Evict(match.prefix.value()).ok());
  EXPECT_TRUE(absl::IsNotFound(admin->Evict(match.prefix.value())));
  EXPECT_FALSE(Match(*mapped_, ids).found());
  SyntheticSequence truth(shape_, 5);
  truth.Grow(64);
  EXPECT_LT(truth.Error(1, 63, AttendByRpc(*remote_, fork, truth, 1)), 0.02);
}

// ---- Agreements at attachment

class Seeded : public Prefixes {
 protected:
  Seeded() : Prefixes(DaemonProcess::Start({.flags = {"--prefix-hash-seed=4660"}})) {}
};

TEST_F(Seeded, HashAndSeedAreExchanged) {
  EXPECT_EQ(mapped_->daemon().prefix_hash, "xxh3-128/32");
  EXPECT_EQ(mapped_->daemon().prefix_hash_seed, 4660u);
  EXPECT_TRUE(
      client::Worker::Attach(
          {.address = daemon_->address(), .prefix_hash = "xxh3-128/32", .prefix_hash_seed = 4660})
          .ok());
  const auto refused =
      client::Worker::Attach({.address = daemon_->address(), .prefix_hash_seed = 0});
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status()));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("from seed 0, this daemon"));
}

class FewSequences : public Prefixes {
 protected:
  FewSequences() : Prefixes(DaemonProcess::Start({.flags = {"--max-sequences-per-tenant=2"}})) {}
};

TEST_F(FewSequences, WhatWasFoundIsThereStillWhenAForkWasRefused) {
  client::Sequence one = NewSequence("");
  SyntheticSequence truth(shape_, 5);
  Append(one, truth, 64);
  const PublishedPrefix prefix = Publish(one, Count(64));
  client::Sequence two = NewSequence("");
  const PrefixMatch match = Match(*remote_, Count(64));
  ASSERT_EQ(match.prefix, prefix.prefix);
  EXPECT_TRUE(absl::IsResourceExhausted(remote_->Fork(match).status()));
  ASSERT_TRUE(mapped_->Free(prefix.prefix).ok());
  ASSERT_TRUE(two.Free().ok());
  client::Sequence fork = Fork(*remote_, match);
  EXPECT_EQ(AttendByRpc(*remote_, fork, truth, 1), AttendByRpc(*mapped_, one, truth, 1));
  fork = client::Sequence();
  EXPECT_TRUE(absl::IsNotFound(remote_->Fork(match).status())) << "it was found once";
}

TEST_F(Prefixes, WhatWasFoundIsThereStillWhenAForksPolicyWasRefused) {
  client::Sequence one = NewSequence("");
  SyntheticSequence truth(shape_, 5);
  Append(one, truth, 64);
  const PublishedPrefix prefix = Publish(one, Count(64));
  fakes::RawWorker worker(daemon_->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  v1::MatchRequest match;
  *match.mutable_session() = worker.key();
  match.set_model_id(model_.id().value());
  for (const std::uint32_t id : Count(64)) match.add_token_ids(id);
  grpc::ClientContext context;
  v1::MatchResponse found;
  ASSERT_TRUE(worker.stub().Match(&context, match, &found).ok());
  ASSERT_EQ(found.prefix_id(), prefix.prefix.value());
  ASSERT_TRUE(mapped_->Free(prefix.prefix).ok());

  v1::ForkRequest fork;
  fork.set_parent_id(found.prefix_id());
  fork.set_policy("mosaickv:keep=0.25,truncate=128");  // of 64 channels
  v1::ForkResponse forked;
  EXPECT_EQ(worker.Fork(fork, &forked).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(TenantStats().sequences(), 1) << "the refused fork has gone";
  fork.set_policy("mosaickv:keep=0.25");
  fork.set_tokens(32);
  ASSERT_TRUE(worker.Fork(fork, &forked).ok());
  EXPECT_EQ(forked.tokens(), 32);
  EXPECT_EQ(worker.Fork(fork, &forked).error_code(), grpc::StatusCode::NOT_FOUND)
      << "it was found once";
}

class Few : public Prefixes {
 protected:
  Few() : Prefixes(DaemonProcess::Start({.flags = {"--max-prefixes-per-tenant=2"}})) {}
};

TEST_F(Few, TheLeastRecentlyUsedMakesRoomAndTimePasses) {
  const auto publish = [&](std::uint32_t from, const client::PublishOptions& options) {
    client::Sequence sequence = NewSequence("");
    SyntheticSequence truth(shape_, from);
    Append(sequence, truth, 32);
    return sequence.Publish(Count(32, from), options);
  };
  ASSERT_TRUE(publish(1000, {}).ok());
  ASSERT_TRUE(publish(2000, {.pinned = true}).ok());
  ASSERT_TRUE(publish(3000, {.pinned = true}).ok());
  EXPECT_FALSE(Match(*mapped_, Count(32, 1000)).found());
  const auto refused = publish(4000, {});
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status()));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("the limit is 2"));
  const PrefixMatch match = Match(*mapped_, Count(32, 3000));
  ASSERT_TRUE(match.found());
  ASSERT_TRUE(mapped_->Free(match.prefix).ok());
  ASSERT_TRUE(publish(4000, {.ttl = std::chrono::milliseconds(20)}).ok());
  // The daemon publishes it in the background; each poll is a call.
  EXPECT_TRUE(Becomes([&] { return TenantStats().prefixes() == 1; }));
}

// ---- The C interface

TEST_F(Prefixes, TheCInterfacePublishesMatchesAndForks) {
  tessera_attach_options attach = TESSERA_ATTACH_OPTIONS_INIT;
  attach.address = nullptr;
  const std::string address = daemon_->address();
  attach.address = address.c_str();
  tessera_worker* worker = nullptr;
  tessera_error error;
  ASSERT_EQ(tessera_attach(&attach, &worker, &error), TESSERA_OK) << error.message;
  tessera_layer layer = TESSERA_LAYER_INIT;
  layer.query_heads = 2;
  layer.kv_heads = 1;
  layer.head_dim = 64;
  tessera_model_options geometry = TESSERA_MODEL_OPTIONS_INIT;
  geometry.name = "c";
  geometry.type = TESSERA_BF16;
  geometry.layers = &layer;
  geometry.layer_count = 1;
  tessera_model* model = nullptr;
  ASSERT_EQ(tessera_register_model(worker, &geometry, &model, &error), TESSERA_OK);
  tessera_sequence* sequence = nullptr;
  ASSERT_EQ(tessera_sequence_create(worker, model, nullptr, &sequence, &error), TESSERA_OK);
  const std::vector<std::uint16_t> rows(64 * 64, 0x3f80);
  tessera_append append = TESSERA_APPEND_INIT;
  append.key = append.value = rows.data();
  append.bytes = rows.size() * 2;
  append.tokens = 64;
  ASSERT_EQ(tessera_sequence_append(sequence, &append, nullptr, &error), TESSERA_OK);
  const Ids ids = Count(100);
  uint64_t prefix = 0;
  int deduplicated = 7;
  ASSERT_EQ(
      tessera_sequence_publish(sequence, ids.data(), 64, nullptr, &prefix, &deduplicated, &error),
      TESSERA_OK)
      << error.message;
  EXPECT_NE(prefix, 0u);
  EXPECT_EQ(deduplicated, 0);
  tessera_match_options asked = TESSERA_MATCH_OPTIONS_INIT;
  asked.token_ids = ids.data();
  asked.token_count = ids.size();
  asked.will_compute = 1;
  tessera_prefix_match match = TESSERA_PREFIX_MATCH_INIT;
  ASSERT_EQ(tessera_match(worker, model, &asked, &match, &error), TESSERA_OK) << error.message;
  EXPECT_EQ(match.prefix_id, prefix);
  EXPECT_EQ(match.tokens, 64u);
  EXPECT_NE(match.computation_id, 0u);
  tessera_sequence* fork = nullptr;
  ASSERT_EQ(tessera_fork_prefix(worker, model, &match, 32, &fork, &error), TESSERA_OK)
      << error.message;
  EXPECT_EQ(tessera_sequence_tokens(fork), 32u);
  EXPECT_EQ(tessera_free_id(worker, match.computation_id, &error), TESSERA_OK);
  EXPECT_EQ(tessera_free_id(worker, prefix, &error), TESSERA_OK);
  ASSERT_EQ(tessera_match(worker, model, &asked, &match, &error), TESSERA_OK);
  EXPECT_EQ(match.prefix_id, 0u);
  tessera_sequence_destroy(fork);
  tessera_sequence_destroy(sequence);
  tessera_model_destroy(model);
  tessera_detach(worker);
}

}  // namespace
}  // namespace tessera
