// Acts of a Story with published prefixes and the host tier.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "daemon/base/strings.h"
#include "tests/fuzz/stories/story.h"

namespace tessera::fuzz {

namespace {

constexpr std::size_t kMostPublished = 24;  // that a story remembers

// Derives token ids from rows: equal lists have equal rows.
std::vector<std::uint32_t> IdsOf(const cli::SyntheticSequence& truth, std::uint64_t tokens) {
  std::vector<std::uint32_t> ids;
  for (std::uint64_t t = 0; t < tokens; ++t) {
    std::uint32_t id = 2166136261u;
    for (const std::uint16_t value : truth.Key(0, t, 1)) id = (id ^ value) * 16777619u;
    ids.push_back(id);
  }
  return ids;
}

absl::Status UnlessSomebodyIsAtIt(const absl::Status& status) {
  return absl::IsAborted(status) ? absl::OkStatus() : status;
}

}  // namespace

// ---- The host tier

absl::Status Story::Offload(Known& known) {
  const bool by_operator = options_.admin != nullptr && options_.random->OneIn(2);
  Say(Concat("offload ", known.number, by_operator ? " by an operator" : ""));
  if (!by_operator) return UnlessSomebodyIsAtIt(known.sequence.Offload().status());
  grpc::ClientContext context;
  v1::OffloadRequest request;
  v1::OffloadResponse response;
  request.set_sequence_id(known.sequence.id().value());
  return UnlessSomebodyIsAtIt(ToAbsl(options_.admin->Offload(&context, request, &response)));
}

absl::Status Story::Restore(Known& known) {
  const bool by_operator = options_.admin != nullptr && options_.random->OneIn(2);
  Say(Concat("restore ", known.number, by_operator ? " by an operator" : ""));
  if (!by_operator) return known.sequence.Restore();
  grpc::ClientContext context;
  v1::RestoreRequest request;
  v1::RestoreResponse response;
  request.set_sequence_id(known.sequence.id().value());
  return ToAbsl(options_.admin->Restore(&context, request, &response));
}

// ---- Prefixes

absl::Status Story::Publish(Known& known) {
  const std::uint64_t held = known.truth.tokens();
  if (held == 0) return Describe(known);
  if (options_.shelf->entries.size() >= kMostPublished) return Unpublish();
  const bool part = known.kind.any_head && options_.random->OneIn(2);
  const std::uint64_t tokens = part ? options_.random->Between(1, held) : held;
  const bool pinned = options_.pins && options_.random->OneIn(4);
  const std::chrono::milliseconds ttl(options_.random->OneIn(4) ? options_.random->Between(1, 300)
                                                                : 0);
  Say(Concat("publish ", known.number, ", ", tokens, " of ", held, pinned ? ", pinned" : "",
             ttl.count() > 0 ? Concat(", for ", ttl.count(), " ms") : std::string()));
  const std::vector<std::uint32_t> ids = IdsOf(known.truth, tokens);
  absl::StatusOr<client::PublishedPrefix> published = absl::UnknownError("not asked");
  Known* const all[] = {&known};
  const absl::Status status = RetryAfterObserving(all, [&] {
    published = known.sequence.Publish(ids, {.ttl = ttl, .pinned = pinned});
    return published.status();
  });
  const bool may_not = known.by_hand || known.repolicied || !known.kind.tolerance.has_value();
  if (absl::IsFailedPrecondition(status) && may_not) return absl::OkStatus();
  if (!status.ok()) return status;
  if (known.by_hand || published->tokens != tokens) {
    return absl::DataLossError(Concat("of sequence ", known.number, " ", published->tokens,
                                      " tokens were published; asked were ", tokens,
                                      known.by_hand ? ", of one that was packed by a call" : ""));
  }
  for (Shelf::Entry& entry : options_.shelf->entries) {
    if (entry.prefix != published->prefix) continue;
    entry.pinned |= pinned;
    return absl::OkStatus();
  }
  cli::SyntheticSequence truth = known.truth;
  truth.Truncate(tokens);
  options_.shelf->entries.push_back({published->prefix, std::move(truth), known.kind, pinned});
  return absl::OkStatus();
}

absl::Status Story::Reuse() {
  if (options_.shelf->entries.empty() || known_.size() >= options_.most_sequences) return Step();
  const Shelf::Entry& entry = options_.random->Pick(options_.shelf->entries);
  // Followed by tokens of another sequence, or shorter than the prefix.
  cli::SyntheticSequence wanted = entry.truth.Fork(options_.random->Bits());
  wanted.Grow(options_.random->Below(40));
  if (options_.random->OneIn(4)) wanted.Truncate(options_.random->Between(1, wanted.tokens()));
  const bool will_compute = options_.random->OneIn(3);
  // Another worker may be computing it, and may never finish.
  const std::chrono::milliseconds wait(options_.random->OneIn(4) ? options_.random->Below(10) : 0);
  const std::uint64_t number = ++created_;
  Say(Concat("reuse ", wanted.tokens(), " tokens of prefix ", entry.prefix.value(), " as ", number,
             " ", entry.kind.policy, will_compute ? ", computes the rest" : "", ", waits ",
             wait.count(), " ms"));
  const std::vector<std::uint32_t> ids = IdsOf(wanted, wanted.tokens());
  const absl::StatusOr<client::PrefixMatch> match = options_.worker->Match(
      model_,
      {.policy = entry.kind.policy, .tokens = ids, .wait = wait, .will_compute = will_compute});
  // A rank of the group has left, and the worker may retry.
  if (absl::IsAborted(match.status())) return absl::OkStatus();
  if (!match.ok()) return match.status();
  if (match->computation.valid() && options_.random->OneIn(2)) {
    const absl::Status status = options_.worker->Withdraw(match->computation);
    if (!status.ok()) return status;
  }
  std::uint64_t least = 0;
  if (entry.pinned) {
    const std::uint64_t shared = std::min(wanted.tokens(), entry.truth.tokens());
    least = shared == entry.truth.tokens() ? shared : entry.kind.any_head ? shared / 32 * 32 : 0;
  }
  if (match->tokens < least || match->tokens > wanted.tokens() ||
      match->found() != (match->tokens > 0)) {
    return absl::DataLossError(
        Concat(match->tokens, " tokens of ", wanted.tokens(), " match; pinned are ", least));
  }
  if (!match->found()) return absl::OkStatus();
  std::uint64_t tokens = match->tokens;
  if (entry.kind.any_head && tokens > 32 && options_.random->OneIn(3)) {
    tokens = 32 * options_.random->Between(1, tokens / 32);
  }
  absl::StatusOr<client::Sequence> child = ForkMatch(*match, tokens);
  if (!child.ok()) return child.status();
  if (child->tokens() != tokens) {
    return absl::DataLossError(
        Concat("a fork of ", tokens, " tokens of a prefix holds ", child->tokens()));
  }
  wanted.Truncate(tokens);
  known_.push_back({number, *std::move(child), std::move(wanted), entry.kind});
  return Attend(known_.back());
}

// A match can be forked, possibly after retries.
absl::StatusOr<client::Sequence> Story::ForkMatch(const client::PrefixMatch& match,
                                                  std::uint64_t tokens) {
  absl::StatusOr<client::Sequence> child = options_.worker->Fork(match, tokens);
  if (absl::IsResourceExhausted(child.status())) {
    Say("  refused, retried");
    child = options_.worker->Fork(match, tokens);
  }
  if (!absl::IsNotFound(child.status())) return child;
  return absl::DataLossError(Concat("the match is gone: ", AsStringView(child.status().message())));
}

absl::Status Story::Unpublish() {
  std::vector<Shelf::Entry>& entries = options_.shelf->entries;
  if (entries.empty()) return known_.empty() ? Create() : Describe(Any());
  const std::size_t index = options_.random->Below(entries.size());
  Say(Concat("unpublish ", entries[index].prefix.value()));
  const absl::Status status = options_.worker->Free(entries[index].prefix);
  if (status.ok()) entries.erase(entries.begin() + static_cast<std::ptrdiff_t>(index));
  return status;
}

absl::Status FreePrefixes(v1::TesseraAdmin::Stub& admin) {
  // Long enough for any machine, so that only a daemon that hangs exceeds it.
  constexpr std::chrono::seconds kPatience{60};
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kPatience);
  v1::ListPrefixesResponse list;
  grpc::Status status = admin.ListPrefixes(&context, {}, &list);
  for (const v1::PrefixInfo& prefix : list.prefixes()) {
    if (!status.ok()) break;
    grpc::ClientContext of_one;
    of_one.set_deadline(std::chrono::system_clock::now() + kPatience);
    v1::EvictRequest request;
    v1::EvictResponse response;
    request.set_sequence_id(prefix.prefix_id());
    status = admin.Evict(&of_one, request, &response);
    // A prefix whose removal waited for its last fork may be gone meanwhile.
    if (status.error_code() == grpc::StatusCode::NOT_FOUND) status = grpc::Status::OK;
  }
  if (status.ok()) return absl::OkStatus();
  return absl::DataLossError(Concat("prefixes cannot be freed: ", status.error_message()));
}

}  // namespace tessera::fuzz
