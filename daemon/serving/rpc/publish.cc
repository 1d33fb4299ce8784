#include "daemon/serving/rpc/publish.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <span>
#include <utility>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "daemon/policies/token_policy.h"
#include "daemon/serving/rpc/compress.h"

namespace tessera::serving {

namespace {

constexpr std::uint64_t kMaxTtlMs = std::uint64_t{10} * 365 * 24 * 3600 * 1000;
// Attempts to make a sequence use the prefix's segments while its lanes are being compressed.
constexpr int kAttempts = 4;

class Publishing {
 public:
  Publishing(const Services& services, const Caller& caller, const v1::PublishRequest& request,
             std::shared_ptr<cache::Sequence> sequence)
      : services_(services),
        caller_(caller),
        sequence_(std::move(sequence)),
        policy_(compaction::Compactor::PolicyOf(*sequence_)),
        ids_(request.token_ids().data(), static_cast<std::size_t>(request.token_ids().size())) {}

  absl::Status Run(const cache::PrefixLife& life, v1::PublishResponse& response) {
    absl::StatusOr<std::uint64_t> held = Held();
    if (!held.ok()) return held.status();
    if (absl::Status status = CheckPublishable(*held); !status.ok()) return status;
    // Absorb the tail, so that its committed tokens are shared instead of copied.
    if (absl::Status status = sequence_->AbsorbTail(); !status.ok()) return status;
    cache::PrefixStore& store = caller_.tenant->prefixes();
    absl::StatusOr<cache::PrefixChain> chain =
        store.ChainOf(caller_.session->id(), ScopeOf(caller_, sequence_->model(), policy_));
    if (!chain.ok()) return chain.status();
    cache::PrefixStore::Publication publication = {.session = caller_.session->id(),
                                                   .chain = *std::move(chain),
                                                   .policy = policy_.text,
                                                   .ids = ids_,
                                                   .life = life,
                                                   .frozen = nullptr};
    bool shared = true;
    absl::StatusOr<cache::PrefixStore::Published> published = store.Publish(publication);
    if (published.ok() && published->prefix == nullptr) {
      absl::StatusOr<Frozen> frozen = Freeze(store, publication);
      if (!frozen.ok()) return frozen.status();
      shared = frozen->of_another;
      publication.frozen = std::move(frozen->sequence);
      published = store.Publish(publication);
    }
    if (!published.ok()) return published.status();
    response.set_prefix_id(published->prefix->id().value());
    response.set_tokens(ids_.size());
    response.set_deduplicated(shared || published->existed);
    response.set_rebased(response.deduplicated() && TakeOver(published->prefix->sequence()));
    response.set_position_shift(sequence_->position_shift());
    services_.logger->Log(LogLevel::kDebug, "prefix published",
                          {{"prefix", response.prefix_id()},
                           {"tenant", caller_.tenant->name()},
                           {"sequence", sequence_->id().value()},
                           {"tokens", response.tokens()},
                           {"deduplicated", response.deduplicated()}});
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<std::uint64_t> Held() const {
    std::uint64_t held = ~std::uint64_t{0};
    for (std::uint32_t layer = 0; layer < sequence_->model().layers(); ++layer) {
      const absl::StatusOr<std::uint64_t> tokens = sequence_->TokensOfLayer(layer);
      if (!tokens.ok()) return tokens.status();
      held = std::min(held, *tokens);
    }
    return held;
  }

  absl::Status CheckPublishable(std::uint64_t held) const {
    if (ids_.empty()) return absl::InvalidArgumentError("token_ids is empty; send at least one id");
    if (ids_.size() > held) {
      return absl::OutOfRangeError(Concat(ids_.size(), " token ids; ", sequence_->id().ToString(),
                                          " holds ", held, " tokens"));
    }
    if (sequence_->has_manual_changes() ||
        (!policy_.drops_entries() && !sequence_->KeepsEveryToken())) {
      return NotCompressedByPolicy();
    }
    if (ids_.size() < held && policy_.drops_entries()) {
      return absl::FailedPreconditionError(
          Concat(ids_.size(), " token ids; ", sequence_->id().ToString(), " holds ", held,
                 " tokens, and its token policy ", Quoted(policy_.text),
                 " allows publishing only all of them"));
    }
    return absl::OkStatus();
  }

  // A policy that needs the query of every token may have undecided tokens.
  bool IsDecided() const {
    if (!policies::Continues(policy_) || !policies::NeedsOf(policy_).decode_queries) return true;
    return std::ranges::all_of(compaction::Compactor::DecidedByLayer(*sequence_),
                               [&](std::uint64_t until) { return until >= ids_.size(); });
  }
  absl::Status NotDecided() const {
    return absl::FailedPreconditionError(
        Concat(sequence_->id().ToString(), " has tokens that policy ", Quoted(policy_.text),
               " has not decided about; observe their queries and compress first"));
  }

  absl::Status NotCompressedByPolicy() const {
    return absl::FailedPreconditionError(
        Concat("some entries of ", sequence_->id().ToString(),
               " were compressed by a call, under an earlier policy, further to save memory, "
               "or before a truncation, so it cannot be a prefix of policy ",
               Quoted(policy_.text), "; append the tokens to a new sequence and publish that"));
  }

  absl::Status GoOn() const {
    if (caller_.cancelled()) return absl::CancelledError("the caller has cancelled the call");
    if (services_.stopping.load())
      return WithCause(absl::UnavailableError("the daemon is stopping"), ErrorCause::kDraining);
    return absl::OkStatus();
  }

  absl::Status CompressAll() {
    v1::CompressResponse ignored;
    return CompressByPolicy(
        services_,
        {.sequence = sequence_, .all_or_nothing = true, .go_on = [this] { return GoOn(); }},
        v1::CompressRequest(), ignored);
  }

  struct Frozen {
    std::shared_ptr<cache::Sequence> sequence;
    bool of_another;  // taken from a longer prefix that has these tokens already
  };
  absl::StatusOr<Frozen> Freeze(const cache::PrefixStore& store,
                                const cache::PrefixStore::Publication& publication) {
    const std::shared_ptr<cache::Prefix> longer = store.Find(publication.chain, publication.ids);
    cache::Sequence& from = longer == nullptr ? *sequence_ : longer->sequence();
    if (longer == nullptr && !policy_.dense()) {
      if (absl::Status status = CompressAll(); !status.ok()) return status;
    }
    if (longer == nullptr && !IsDecided()) return NotDecided();
    // A prefix may be in the host tier.
    const absl::StatusOr<cache::Residence> resident = from.Restore();
    if (!resident.ok()) return resident.status();
    absl::StatusOr<std::shared_ptr<cache::Sequence>> frozen =
        services_.compactor->Fork(from, [&] { return caller_.tenant->ForkForPrefix(from); });
    if (!frozen.ok()) return frozen.status();
    // The worker may have decoded more tokens in the meantime.
    absl::Status cut = services_.compactor->Truncate(**frozen, ids_.size());
    if (!cut.ok()) return cut;
    // Memory pressure may have re-encoded entries since the check.
    if ((*frozen)->has_manual_changes()) return NotCompressedByPolicy();
    return Frozen{.sequence = *std::move(frozen), .of_another = longer != nullptr};
  }

  // Makes the sequence use the prefix's segments. If that fails (no memory to split a segment, or
  // to bring the prefix back from the host tier), there are two copies.
  bool TakeOver(cache::Sequence& prefix) {
    const absl::StatusOr<cache::Residence> resident = prefix.Restore();
    absl::Status status =
        resident.ok() ? services_.compactor->AdoptPrefix(*sequence_, prefix) : resident.status();
    // Retry if the sequence's lanes are still being compressed, or if its positions have not moved
    // yet as those of the prefix have. CompressAll waits for both.
    const auto worth_it = [&] {
      return absl::IsAborted(status) ||
             (absl::IsFailedPrecondition(status) && policies::MovesPositions(policy_));
    };
    for (int i = 1; worth_it() && i < kAttempts; ++i) {
      status = CompressAll();
      if (status.ok()) status = services_.compactor->AdoptPrefix(*sequence_, prefix);
    }
    if (!status.ok()) {
      services_.logger->Log(
          LogLevel::kDebug, "sequence keeps its own copy of a prefix",
          {{"sequence", sequence_->id().value()}, {"error", AsStringView(status.message())}});
    }
    return status.ok();
  }

  const Services& services_;
  const Caller& caller_;
  const std::shared_ptr<cache::Sequence> sequence_;
  const policies::Policy policy_;
  const std::span<const std::uint32_t> ids_;
};

}  // namespace

cache::PrefixScope ScopeOf(const Caller& caller, const cache::Model& model,
                           const policies::Policy& policy) {
  return cache::ScopeOf(caller.tenant->name(), model, policy.text,
                        /*keeps_every_token=*/!policy.drops_entries(),
                        caller.session->options().cache_salt);
}

absl::StatusOr<Clock::Duration> ToDuration(std::string_view field, std::uint64_t ms,
                                           std::uint64_t most_ms) {
  if (ms <= most_ms) return std::chrono::milliseconds(ms);
  return absl::InvalidArgumentError(Concat(field, " is ", ms, "; the limit is ", most_ms));
}

absl::Status Publish(const Services& services, const Caller& caller,
                     const v1::PublishRequest& request, v1::PublishResponse& response) {
  const absl::StatusOr<Clock::Duration> ttl = ToDuration("ttl_ms", request.ttl_ms(), kMaxTtlMs);
  if (!ttl.ok()) return ttl.status();
  absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence =
      caller.tenant->FindOwned(*caller.session, SequenceId(request.sequence_id()));
  if (!sequence.ok()) return sequence.status();
  const absl::StatusOr<cache::Residence> resident = (*sequence)->Restore();
  if (!resident.ok()) return resident.status();
  return Publishing(services, caller, request, *std::move(sequence))
      .Run({.ttl = *ttl, .pinned = request.pinned()}, response);
}

}  // namespace tessera::serving
