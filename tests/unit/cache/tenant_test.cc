#include "daemon/cache/tenant/tenant.h"

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

using absl::StatusCode;
using Stamps = std::vector<std::uint64_t>;

// ---- Isolation

TEST(TenantIsolation, AnotherTenantsIdsAreUnknown) {
  World world(World::Options{.tenants = 2});
  Tenant& red = world.tenant(0);
  Tenant& blue = world.tenant(1);
  const auto red_session = world.OpenSession(0);
  const auto blue_session = world.OpenSession(1);
  const auto model = world.Register(SmallModel("m", 1, 1), 0);
  {
    const std::uint64_t blue_used = blue.account().used_bytes();  // by its session
    const auto sequence = world.NewSequence(*red_session, *model, 0);
    const Stamps stamps = NewStamps(40);
    ASSERT_TRUE(AppendAll(*sequence, 0, stamps).ok());

    EXPECT_EQ(blue.FindSequence(sequence->id()).status().code(), StatusCode::kNotFound);
    EXPECT_EQ(blue.FreeSequence(sequence->id()).code(), StatusCode::kNotFound);
    EXPECT_EQ(blue.Fork(*blue_session, sequence->id()).status().code(), StatusCode::kNotFound);
    EXPECT_EQ(blue.Handover(sequence->id(), *blue_session, blue_session->id()).code(),
              StatusCode::kNotFound);
    EXPECT_EQ(blue.OpenTails(*blue_session, {sequence->id()}).status().code(),
              StatusCode::kNotFound);
    EXPECT_EQ(blue.CloseTails(*blue_session, {sequence->id()}).status().code(),
              StatusCode::kNotFound);
    EXPECT_EQ(blue.FindModel(model->id()).status().code(), StatusCode::kNotFound);
    EXPECT_EQ(blue.CreateSequence(*blue_session, model->id()).status().code(),
              StatusCode::kNotFound);
    EXPECT_EQ(blue.FindSession(red_session->id(), red_session->options().secret).status().code(),
              StatusCode::kUnauthenticated);
    // Nor can a sequence be handed over to another tenant's session.
    EXPECT_EQ(red.Handover(sequence->id(), *red_session, blue_session->id()).code(),
              StatusCode::kNotFound);

    // The other tenant's memory and accounts are unaffected.
    EXPECT_EQ(blue.account().used_bytes(), blue_used);
    EXPECT_EQ(blue.sequence_count(), 0u);
    const SequenceView view = *ReadSequence(red, *sequence);
    EXPECT_EQ(Differs(view, *model, {stamps}), "");
  }
  red.EndSession(red_session->id());
  blue.EndSession(blue_session->id());
  world.ExpectBaseline();
}

TEST(TenantIsolation, AReaderOfOneDelaysNothingOfAnother) {
  World world(World::Options{.tenants = 2});
  const auto stuck = world.OpenSession(0);
  shm::Pin(stuck->control()->page().readers[0].word, world.tenant(0).epochs().epoch());
  const auto session = world.OpenSession(1);
  const auto model = world.Register(SmallModel("m", 1, 1), 1);
  {
    const auto sequence = world.NewSequence(*session, *model, 1);
    ASSERT_TRUE(AppendAll(*sequence, 0, NewStamps(40)).ok());
    ASSERT_TRUE(world.tenant(1).FreeSequence(sequence->id()).ok());
  }
  EXPECT_EQ(world.tenant(1).pool().used_bytes(), 0u);
  EXPECT_EQ(world.tenant(1).epochs().waiting_bytes(), 0u);
}

TEST(TenantIsolation, OneTenantsQuotaLeavesAnothersAlone) {
  World world(World::Options{.tenant_limit = 100 * 1024, .tenants = 2});
  const auto red = world.OpenSession(0);
  const auto blue = world.OpenSession(1);
  const auto red_model = world.Register(SmallModel("m", 1, 1), 0);
  const auto blue_model = world.Register(SmallModel("m", 1, 1), 1);
  const auto full = world.NewSequence(*red, *red_model, 0);
  std::uint64_t held = 0;
  absl::Status status;
  while ((status = AppendAll(*full, held, NewStamps(32)).status()).ok()) held += 32;
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.ToString().find("tenant-1"), std::string::npos) << status;
  const auto spared = AppendAll(*world.NewSequence(*blue, *blue_model, 1), 0, NewStamps(32));
  EXPECT_TRUE(spared.ok()) << spared.status();
}

// Even with few objects in many extents, a tenant's memory is limited.
TEST(TenantIsolation, FragmentsOfOneTenantLeaveRoomForAnother) {
  constexpr std::uint64_t kMiB = 1024 * 1024;
  World world(World::Options{.node_limit = 12 * kMiB, .tenant_limit = 4 * kMiB, .tenants = 2});
  const auto red = world.OpenSession(0);
  const auto wide = world.Register(SmallModel("wide", 64, 128), 0);  // blocks of 64 KiB and more
  std::vector<SequenceId> ids;
  for (;;) {
    const auto sequence = world.tenant(0).CreateSequence(*red, wide->id());
    if (!sequence.ok()) break;
    ids.push_back((*sequence)->id());
  }
  for (SequenceId id : ids) ASSERT_TRUE(world.tenant(0).FreeSequence(id).ok());
  world.tenant(0).epochs().Collect();
  const auto red_model = world.Register(SmallModel("m", 1, 1), 0);
  const auto full = world.NewSequence(*red, *red_model, 0);
  std::uint64_t held = 0;
  while (AppendAll(*full, held, NewStamps(32)).ok()) held += 32;
  EXPECT_LE(world.node().used_bytes(), 7 * kMiB + 4 * kTestDirectoryExtent);
  const auto blue = world.OpenSession(1);
  const auto blue_model = world.Register(SmallModel("m", 1, 1), 1);
  const auto spared = AppendAll(*world.NewSequence(*blue, *blue_model, 1), 0, NewStamps(1000));
  EXPECT_TRUE(spared.ok()) << spared.status();
}

// ---- Models

class TenantTest : public testing::Test {
 protected:
  Tenant& tenant() { return world_.tenant(); }
  World world_{World::Options{.ring_tiles = 4, .max_models = 3, .max_sequences = 5}};
};

TEST_F(TenantTest, AModelIsRegisteredOncePerName) {
  const auto first = world_.Register(SmallModel("a", 2, 1));
  EXPECT_EQ(world_.Register(SmallModel("a", 2, 1))->id(), first->id());
  ModelSpec spelled = SmallModel("a", 2, 1);
  for (LayerSpec& layer : spelled.layers) layer.scale = 0.125f;  // spells out the default
  EXPECT_EQ(world_.Register(spelled)->id(), first->id());
  const absl::Status other = tenant().RegisterModel(SmallModel("a", 3, 1), SessionId()).status();
  EXPECT_EQ(other.code(), StatusCode::kAlreadyExists);
  EXPECT_NE(other.ToString().find("\"a\""), std::string::npos) << other;
  world_.Register(SmallModel("b", 2, 1));
  world_.Register(SmallModel("c", 2, 1));
  const absl::Status full = tenant().RegisterModel(SmallModel("d", 2, 1), SessionId()).status();
  EXPECT_EQ(full.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(full.ToString().find("3"), std::string::npos) << full;
  EXPECT_EQ(world_.Register(SmallModel("a", 2, 1))->id(), first->id());  // known, so no new slot
}

TEST_F(TenantTest, OtherWeightsUnderOneNameAreAnotherModel) {
  ModelSpec spec = SmallModel("a", 2, 1);
  const auto unknown = world_.Register(spec);
  spec.weights_id = "sha256:1";
  const auto first = world_.Register(spec);
  spec.adapter_id = "lora";
  const auto adapted = world_.Register(spec);
  EXPECT_NE(unknown->id(), first->id());
  EXPECT_NE(first->id(), adapted->id());
  EXPECT_EQ(world_.Register(spec)->id(), adapted->id());
  spec.layers.pop_back();
  EXPECT_EQ(tenant().RegisterModel(spec, SessionId()).status().code(), StatusCode::kAlreadyExists);
}

TEST_F(TenantTest, AModelThatNobodyUsesGivesItsPlaceAndItsName) {
  const auto worker = world_.OpenSession();
  const auto other = world_.OpenSession();
  const auto register_for = [&](const SessionState& session, ModelSpec spec) {
    return tenant().RegisterModel(std::move(spec), session.id());
  };
  const ModelId kept = (*register_for(*worker, SmallModel("a", 1, 1)))->id();
  ASSERT_TRUE(register_for(*worker, SmallModel("b", 1, 1)).ok());
  ASSERT_TRUE(register_for(*other, SmallModel("c", 1, 1)).ok());
  const auto held = tenant().CreateSequence(*other, kept);
  ASSERT_TRUE(held.ok());
  EXPECT_FALSE(register_for(*other, SmallModel("d", 1, 1)).ok());
  tenant().EndSession(worker->id());
  EXPECT_FALSE(register_for(*other, SmallModel("a", 2, 1)).ok());  // a sequence uses it
  EXPECT_TRUE(register_for(*other, SmallModel("b", 2, 1)).ok());   // the name is free again
  EXPECT_TRUE(tenant().FindModel(kept).ok());
  ASSERT_TRUE(tenant().FreeSequence((*held)->id()).ok());
}

TEST_F(TenantTest, AModelIsChargedUntilItsLastUserHasEnded) {
  const auto charged = [&] { return tenant().account().used_bytes(pool::MemoryTag::kModels); };
  const auto worker = world_.OpenSession();
  const auto other = world_.OpenSession();
  ModelSpec spec = SmallModel("large", 1, 1);
  spec.delimiter_token_ids.assign(65536, 1);
  const ModelId id = (*tenant().RegisterModel(spec, worker->id()))->id();
  EXPECT_GE(charged(), 65536u * 4);
  EXPECT_LE(charged(), 65536u * 4 + 4096);
  const std::uint64_t once = charged();
  EXPECT_EQ((*tenant().RegisterModel(spec, other->id()))->id(), id);
  EXPECT_EQ(charged(), once);
  world_.Validate();

  const SequenceId sequence = (*tenant().CreateSequence(*other, id))->id();
  tenant().EndSession(worker->id());
  EXPECT_EQ(charged(), once);
  EXPECT_TRUE(tenant().Handover(sequence, *other, world_.OpenSession()->id()).ok());
  tenant().EndSession(other->id());
  EXPECT_EQ(charged(), once) << "the sequence lives";
  EXPECT_TRUE(tenant().FindModel(id).ok());
  ASSERT_TRUE(tenant().FreeSequence(sequence).ok());
  EXPECT_EQ(charged(), 0u);
  EXPECT_EQ(tenant().FindModel(id).status().code(), StatusCode::kNotFound);
}

TEST_F(TenantTest, AModelOfAnEndedSessionIsRefused) {
  const auto worker = world_.OpenSession();
  tenant().EndSession(worker->id());
  EXPECT_EQ(tenant().RegisterModel(SmallModel("m", 1, 1), worker->id()).status().code(),
            StatusCode::kUnauthenticated);
}

TEST(Tenants, ModelsCountAgainstTheLimit) {
  World world({.tenant_limit = 1 << 20, .max_models = 100});
  const auto worker = world.OpenSession();
  absl::Status status;
  int models = 0;
  while (status.ok() && models < 100) {
    ModelSpec spec = SmallModel("m" + std::to_string(++models), 1, 1);
    spec.delimiter_token_ids.assign(65536, 1);
    status = world.tenant().RegisterModel(spec, worker->id()).status();
  }
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(status.ToString().find("for models"), std::string::npos) << status;
  EXPECT_EQ(models, 4);  // of 256 KiB and a bit
}

// ---- Sequences and sessions

TEST_F(TenantTest, SequencesAreLimitedAndARefusalLeavesNothing) {
  const auto session = world_.OpenSession();
  const auto model = world_.Register(SmallModel("m", 1, 1));
  std::vector<SequenceId> ids;
  for (int i = 0; i < 5; ++i) ids.push_back(world_.NewSequence(*session, *model)->id());
  const std::uint64_t used = tenant().account().used_bytes();
  const absl::Status create = tenant().CreateSequence(*session, model->id()).status();
  EXPECT_EQ(create.code(), StatusCode::kResourceExhausted);
  EXPECT_NE(create.ToString().find("5"), std::string::npos) << create;
  EXPECT_EQ(tenant().Fork(*session, ids[0]).status().code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(tenant().account().used_bytes(), used);
  ASSERT_TRUE(tenant().FreeSequence(ids[2]).ok());
  EXPECT_TRUE(tenant().CreateSequence(*session, model->id()).ok());
  tenant().EndSession(session->id());
  world_.ExpectBaseline();
}

TEST_F(TenantTest, IdsAreNeverUsedAgain) {
  const auto session = world_.OpenSession();
  const auto model = world_.Register(SmallModel("m", 1, 1));
  std::set<std::uint64_t> seen = {session->id().value(), model->id().value()};
  for (int i = 0; i < 500; ++i) {
    const SequenceId id = world_.NewSequence(*session, *model)->id();
    ASSERT_TRUE(seen.insert(id.value()).second);
    ASSERT_EQ(id.value() >> 48, 1u);  // the tenant's number
    ASSERT_TRUE(tenant().FreeSequence(id).ok());
  }
}

TEST_F(TenantTest, ASessionIsFoundByIdAndSecret) {
  const auto session = world_.OpenSession();
  const auto other = world_.OpenSession();
  EXPECT_EQ(*tenant().FindSession(session->id(), session->options().secret), session);
  for (std::uint64_t wrong : {std::uint64_t{0}, session->options().secret + 1,
                              other->options().secret, session->options().nonce}) {
    EXPECT_EQ(tenant().FindSession(session->id(), wrong).status().code(),
              StatusCode::kUnauthenticated);
  }
  tenant().EndSession(session->id());
  EXPECT_EQ(tenant().FindSession(session->id(), session->options().secret).status().code(),
            StatusCode::kUnauthenticated);
}

TEST_F(TenantTest, ASessionThatHasEndedGetsNothingMore) {
  const auto session = world_.OpenSession();
  const auto other = world_.OpenSession();
  const auto model = world_.Register(SmallModel("m", 1, 1));
  const SequenceId theirs = world_.NewSequence(*other, *model)->id();
  tenant().EndSession(session->id());
  // A call that was running when the session ended.
  EXPECT_EQ(tenant().CreateSequence(*session, model->id()).status().code(),
            StatusCode::kUnauthenticated);
  EXPECT_EQ(tenant().Fork(*session, theirs).status().code(), StatusCode::kUnauthenticated);
  EXPECT_EQ(tenant().Handover(theirs, *other, session->id()).code(), StatusCode::kNotFound);
  EXPECT_EQ(tenant().sequence_count(), 1u);
  tenant().EndSession(other->id());
  world_.ExpectBaseline();
}

// The session is pinned and decoding, with tokens in the ring, layers of different lengths, a fork
// in another session and staging in use. Everything but the other session's fork is released with
// it.
TEST_F(TenantTest, ASessionThatEndsInTheMiddleOfEverythingLeavesNothing) {
  auto survivor = world_.OpenSession();
  const auto model = world_.Register(MixedModel("mixed", kernels::ElementType::kBf16));
  std::shared_ptr<Sequence> kept;
  Stamps stamps = NewStamps(60);
  {
    TestWorker worker(tenant(), world_.OpenSession());
    ASSERT_TRUE(worker.session().CreateStaging().ok());
    const auto decoding = world_.NewSequence(worker.session(), *model);
    ASSERT_TRUE(AppendAll(*decoding, 0, stamps).ok());
    const TestWorker::OpenTail tail = *worker.Open(*decoding);
    for (int i = 0; i < 40; ++i) {
      stamps.push_back(NewStamps(1)[0]);
      worker.Write(*decoding, tail, stamps.size() - 1, stamps.back());
    }
    worker.Commit(tail, stamps.size());
    const auto uneven = world_.NewSequence(worker.session(), *model);
    ASSERT_TRUE(uneven->Append({1, 1, 0, 9}, StampedRows(model->layout(), NewStamps(9))).ok());
    for (std::uint32_t slot = 0; slot < shm::kReaderSlots; ++slot) {
      shm::Pin(worker.session().control()->page().readers[slot].word, tenant().epochs().epoch());
    }
    kept = *tenant().Fork(*survivor, decoding->id());
    ASSERT_TRUE(tenant().FreeSequence(uneven->id()).ok());
    EXPECT_GT(tenant().epochs().waiting_bytes(), 0u);
    tenant().EndSession(worker.session().id());
    // At once: pins of an ended session do not count.
    EXPECT_EQ(tenant().epochs().waiting_bytes(), 0u);
    EXPECT_EQ(tenant().sequence_count(), 1u);
    EXPECT_EQ(tenant().FindSequence(decoding->id()).status().code(), StatusCode::kNotFound);
    // A running call that still holds the sequence.
    EXPECT_EQ(AppendAll(*decoding, stamps.size(), NewStamps(1)).status().code(),
              StatusCode::kNotFound);
    EXPECT_EQ(*decoding->AbsorbFullTiles(), 0u);
    EXPECT_TRUE(worker.session().Decoding().empty());
  }
  world_.Validate();
  EXPECT_EQ(tenant().account().used_bytes(pool::MemoryTag::kTails), 0u);
  EXPECT_EQ(tenant().account().used_bytes(pool::MemoryTag::kStaging), 0u);
  const SequenceView view = *ReadSequence(tenant(), *kept);
  EXPECT_EQ(Differs(view, *model, std::vector<Stamps>(3, stamps)), "");
  kept.reset();
  tenant().EndSession(survivor->id());
  world_.ExpectBaseline();
}

// ---- Handover

TEST_F(TenantTest, AHandedOverSequenceIsTheReceiversAlone) {
  TestWorker prefill(tenant(), world_.OpenSession());
  TestWorker decode(tenant(), world_.OpenSession());
  const auto model = world_.Register(SmallModel("m", 1, 1));
  const auto sequence = world_.NewSequence(prefill.session(), *model);
  Stamps stamps = NewStamps(40);
  ASSERT_TRUE(AppendAll(*sequence, 0, stamps).ok());
  const TestWorker::OpenTail tail = *prefill.Open(*sequence);
  stamps.push_back(NewStamps(1)[0]);
  prefill.Write(*sequence, tail, 40, stamps.back());
  prefill.Commit(tail, 41);

  EXPECT_EQ(decode.Open(*sequence).status().code(), StatusCode::kFailedPrecondition);
  EXPECT_EQ(tenant().Handover(sequence->id(), decode.session(), decode.session().id()).code(),
            StatusCode::kFailedPrecondition);  // only the owner may hand over
  EXPECT_EQ(tenant().Handover(sequence->id(), prefill.session(), SessionId(12345)).code(),
            StatusCode::kNotFound);
  EXPECT_EQ(sequence->owner(), prefill.session().id());
  ASSERT_TRUE(tenant().Handover(sequence->id(), prefill.session(), decode.session().id()).ok());
  EXPECT_EQ(sequence->owner(), decode.session().id());
  const absl::Status refused = prefill.Open(*sequence).status();
  EXPECT_EQ(refused.code(), StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.ToString().find("hand it over or fork it"), std::string::npos) << refused;
  tenant().EndSession(prefill.session().id());  // the sequence does not end with it
  ASSERT_TRUE(decode.Open(*sequence).ok());
  const SequenceView view = *ReadSequence(tenant(), *sequence);
  EXPECT_EQ(Differs(view, *model, {stamps}), "");
  tenant().EndSession(decode.session().id());
  EXPECT_EQ(tenant().sequence_count(), 0u);
}

// After a handover that races with the end of the session, exactly one of the two sessions owns the
// sequence.
TEST_F(TenantTest, AHandoverDuringTheEndOfASessionLosesNothing) {
  const auto model = world_.Register(SmallModel("m", 1, 1));
  for (int round = 0; round < 300; ++round) {
    const auto from = world_.OpenSession();
    const auto to = world_.OpenSession();
    const SequenceId id = world_.NewSequence(*from, *model)->id();
    absl::Status handed;
    std::thread ending([&] { tenant().EndSession(from->id()); });
    handed = tenant().Handover(id, *from, to->id());
    ending.join();
    ASSERT_EQ(tenant().FindSequence(id).ok(), handed.ok()) << handed;
    ASSERT_EQ(to->Owned().size(), handed.ok() ? 1u : 0u);
    tenant().EndSession(to->id());
    ASSERT_EQ(tenant().sequence_count(), 0u);
  }
}

// ---- Batches of tails

TEST_F(TenantTest, TailsOpenAllOrNone) {
  TestWorker worker(tenant(), world_.OpenSession());
  const auto other = world_.OpenSession();
  const auto model = world_.Register(SmallModel("m", 2, 1));
  const auto a = world_.NewSequence(worker.session(), *model);
  const auto b = world_.NewSequence(worker.session(), *model);
  const auto uneven = world_.NewSequence(worker.session(), *model);
  const auto theirs = world_.NewSequence(*other, *model);
  ASSERT_TRUE(uneven->Append({0, 1, 0, 3}, StampedRows(model->layout(), NewStamps(3))).ok());
  const auto open = [&](const std::vector<SequenceId>& ids) {
    return tenant().OpenTails(worker.session(), ids).status().code();
  };
  EXPECT_EQ(open({a->id(), b->id(), uneven->id()}), StatusCode::kFailedPrecondition);
  EXPECT_EQ(open({a->id(), b->id(), theirs->id()}), StatusCode::kFailedPrecondition);
  EXPECT_EQ(open({a->id(), SequenceId(77), b->id()}), StatusCode::kNotFound);
  EXPECT_FALSE(a->decoding() || b->decoding() || uneven->decoding() || theirs->decoding());
  EXPECT_TRUE(worker.session().Decoding().empty());
  EXPECT_EQ(open({a->id(), b->id()}), StatusCode::kOk);
  EXPECT_EQ(open({}), StatusCode::kOk);
  EXPECT_EQ(worker.session().Decoding().size(), 2u);
  // Named twice: the second place counts.
  const auto places = *tenant().OpenTails(worker.session(), {a->id(), a->id()});
  EXPECT_EQ(places[1].tail.generation, places[0].tail.generation + 1);
  EXPECT_EQ(worker.Block(*a).tail_generation.load(), places[1].tail.generation);
  EXPECT_EQ(*tenant().CloseTails(worker.session(), {a->id(), b->id(), a->id()}),
            (std::vector<std::uint64_t>{0, 0, 0}));
  EXPECT_TRUE(worker.session().Decoding().empty());
}

// ---- The daemon's own readers

TEST_F(TenantTest, TheDaemonsOwnReadersHoldWhatTheySeeForAsLongAsItTakes) {
  const auto session = world_.OpenSession();
  const auto model = world_.Register(SmallModel("m", 1, 1));
  const auto sequence = world_.NewSequence(*session, *model);
  const Stamps stamps = NewStamps(100);
  ASSERT_TRUE(AppendAll(*sequence, 0, stamps).ok());
  {
    std::vector<std::unique_ptr<Tenant::Reader>> readers;
    for (int i = 0; i < 200; ++i) readers.push_back(std::make_unique<Tenant::Reader>(tenant()));
    const SequenceView view = *ReadSequence(tenant(), *sequence);
    ASSERT_TRUE(tenant().FreeSequence(sequence->id()).ok());
    world_.clock().Advance(100 * kTestPinLimit);
    EXPECT_NE(tenant().epochs().Collect(), std::nullopt);
    EXPECT_EQ(Differs(view, *model, {stamps}), "");
    readers.resize(1);
    tenant().epochs().Collect();
    EXPECT_EQ(Differs(view, *model, {stamps}), "");
  }
  tenant().epochs().Collect();
  EXPECT_EQ(tenant().pool().used_bytes(), 0u);
}

}  // namespace
}  // namespace tessera::cache
