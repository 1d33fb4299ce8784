// A tenant's prefixes in a small world, with the operations of its workers.
#pragma once

#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/cache/prefix/prefix_store.h"
#include "gtest/gtest.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {

using Ids = std::vector<std::uint32_t>;
using Stamps = std::vector<std::uint64_t>;

inline Ids Count(std::uint32_t tokens, std::uint32_t from = 0) {
  Ids ids(tokens);
  std::iota(ids.begin(), ids.end(), from);
  return ids;
}

class PrefixFixture : public testing::Test {
 protected:
  explicit PrefixFixture(const World::Options& options = {}) : world_(options) {
    model_ = world_.Register(SmallModel("m", 2, 1));
  }

  Tenant& tenant() { return world_.tenant(); }
  PrefixStore& store() { return world_.tenant().prefixes(); }
  // As memory pressure does, without a tier. nullopt: every prefix is pinned or in use.
  std::optional<std::uint64_t> DropLeastRecentlyUsed() {
    for (const PrefixId id : store().ListUnused()) {
      if (const auto bytes = store().DropUnused(id)) return bytes;
    }
    return std::nullopt;
  }
  PrefixScope Scope(const std::string& policy = "dense", bool keeps_every_token = true) {
    return ScopeOf(tenant().name(), *model_, policy, keeps_every_token);
  }
  std::shared_ptr<SessionState> OpenRank(std::uint32_t rank, std::uint32_t size = 2,
                                         const std::string& group = "g") {
    absl::StatusOr<std::shared_ptr<SessionState>> session =
        tenant().OpenSession({.group = group, .rank = rank, .group_size = size});
    EXPECT_TRUE(session.ok()) << session.status();
    return *session;
  }

  // A sequence whose rows are a function of its token ids, as a model's would be.
  std::shared_ptr<Sequence> Compute(SessionState& session, const Ids& ids) {
    const std::shared_ptr<Sequence> sequence = world_.NewSequence(session, *model_);
    const absl::StatusOr<std::uint64_t> held = AppendAll(*sequence, 0, StampsOf(ids));
    EXPECT_TRUE(held.ok()) << held.status();
    return sequence;
  }
  static Stamps StampsOf(const Ids& ids) {
    Stamps stamps;
    for (const std::uint32_t id : ids) stamps.push_back(1 + id);
    return stamps;
  }
  std::string Differs(const Sequence& sequence, const Ids& ids) {
    const absl::StatusOr<SequenceView> view = ReadSequence(tenant(), sequence);
    if (!view.ok()) return std::string(view.status().message());
    return cache::Differs(*view, *model_, {StampsOf(ids), StampsOf(ids)});
  }

  struct Head {
    PrefixLife life;
    std::string policy = "dense";
    bool keeps_every_token = true;
  };
  absl::StatusOr<PrefixStore::Published> Publish(SessionState& session, Sequence& sequence,
                                                 const Ids& ids, const Head& head) {
    absl::StatusOr<PrefixChain> chain =
        store().ChainOf(session.id(), Scope(head.policy, head.keeps_every_token));
    if (!chain.ok()) return chain.status();
    absl::StatusOr<std::shared_ptr<Sequence>> frozen = tenant().ForkForPrefix(sequence);
    if (!frozen.ok()) return frozen.status();
    if (absl::Status cut = (*frozen)->Truncate(ids.size()); !cut.ok()) return cut;
    return store().Publish({.session = session.id(),
                            .chain = *chain,
                            .policy = head.policy,
                            .ids = ids,
                            .life = head.life,
                            .frozen = *std::move(frozen)});
  }
  absl::StatusOr<PrefixStore::Published> Publish(SessionState& session, Sequence& sequence,
                                                 const Ids& ids) {
    return Publish(session, sequence, ids, Head{});
  }
  // Computes and publishes a prefix, then frees the sequence.
  PrefixId PublishNew(SessionState& session, const Ids& ids, const Head& head) {
    const std::shared_ptr<Sequence> sequence = Compute(session, ids);
    const absl::StatusOr<PrefixStore::Published> published = Publish(session, *sequence, ids, head);
    EXPECT_TRUE(published.ok()) << published.status();
    EXPECT_TRUE(tenant().FreeSequence(sequence->id()).ok());
    return published.ok() ? published->prefix->id() : PrefixId();
  }
  PrefixId PublishNew(SessionState& session, const Ids& ids) {
    return PublishNew(session, ids, Head{});
  }

  struct Asked {
    std::uint64_t ticket = 0;
    std::shared_ptr<std::optional<absl::StatusOr<PrefixStore::Answer>>> told =
        std::make_shared<std::optional<absl::StatusOr<PrefixStore::Answer>>>();
    bool waits() const { return !told->has_value(); }
    const PrefixStore::Answer& answer() const { return ***told; }
    absl::Status status() const { return (*told)->status(); }
  };
  struct Ask {
    Clock::Duration wait{};
    bool will_compute = false;
    std::string policy = "dense";
    bool keeps_every_token = true;
  };
  Asked Match(SessionState& session, const Ids& ids, const Ask& ask) {
    Asked asked;
    asked.ticket = store().Match({.session = session.id(),
                                  .scope = Scope(ask.policy, ask.keeps_every_token),
                                  .ids = ids,
                                  .wait = ask.wait,
                                  .will_compute = ask.will_compute},
                                 [told = asked.told](absl::StatusOr<PrefixStore::Answer> answer) {
                                   EXPECT_FALSE(told->has_value()) << "told twice";
                                   *told = std::move(answer);
                                 });
    EXPECT_EQ(asked.ticket == 0, !asked.waits());
    return asked;
  }
  Asked Match(SessionState& session, const Ids& ids) { return Match(session, ids, Ask{}); }

  absl::StatusOr<std::shared_ptr<Sequence>> Fork(SessionState& session, PrefixId id,
                                                 std::uint64_t tokens) {
    absl::StatusOr<PrefixStore::ForFork> from = store().TakeForFork(id, session.id());
    if (!from.ok()) return from.status();
    EXPECT_TRUE(from->prefix->MayEndAt(tokens));
    absl::StatusOr<std::shared_ptr<Sequence>> child = tenant().ForkPrefix(session, *from);
    if (!child.ok()) return child;
    if (absl::Status cut = (*child)->Truncate(tokens); !cut.ok()) return cut;
    store().Forked(id, session.id());
    return child;
  }
  void Pass(Clock::Duration time) {
    world_.clock().Advance(time);
    (void)store().Sweep();
  }
  std::uint64_t TileBytes() { return tenant().account().used_bytes(pool::MemoryTag::kTiles); }
  std::uint64_t IndexBytes() {
    return tenant().account().used_bytes(pool::MemoryTag::kPrefixIndex);
  }
  // Ends all sessions and frees all prefixes: nothing may be left of either.
  void TearDown() override {
    for (std::size_t i = 0; i < tenants_; ++i) {
      Tenant& tenant = world_.tenant(i);
      for (const auto& session : tenant.Sessions()) tenant.EndSession(session->id());
      for (const PrefixStore::Description& prefix : tenant.prefixes().List()) {
        EXPECT_TRUE(tenant.prefixes().Free(prefix.prefix->id()));
      }
      EXPECT_EQ(tenant.prefixes().figures().waiting, 0u);
      EXPECT_EQ(tenant.prefixes().figures().computations, 0u);
    }
    world_.ExpectBaseline();
  }

  std::size_t tenants_ = 1;
  World world_;
  std::shared_ptr<const Model> model_;
};

}  // namespace tessera::cache
