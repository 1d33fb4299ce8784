// How Match is answered: from published prefixes, announced computations and group agreements.

#include <algorithm>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/cache/prefix/prefix_store.h"

namespace tessera::cache {

std::uint64_t PrefixStore::Match(Question question, Done done) {
  const auto tokens = std::make_shared<TokenList>(std::move(question.ids));
  TESSERA_CHECK(!tokens->ids.empty(), "the caller checked that there are ids");
  DeferredWork after(*this);
  MutexLock lock(mutex_);
  const auto answer = [&](absl::StatusOr<Answer> found) {
    after.answers.emplace_back(std::move(done), std::move(found));
    return std::uint64_t{0};
  };
  const absl::StatusOr<Place> place = PlaceOf(question.session);
  if (!place.ok()) return answer(place.status());
  const Clock::TimePoint now = options_.clock->Now();
  Waiting asked = {.ticket = next_ticket_++,
                   .session = question.session,
                   .asker = AskerOf(question.session, *place),
                   .scope = question.scope.text,
                   .rank = place->rank,
                   .chains = ChainsOf(question.scope, *place),
                   .tokens = tokens,
                   .will_compute = question.will_compute,
                   .deadline = now + question.wait,
                   .agreement = nullptr,
                   .done = nullptr};
  if (place->group_size > 1) {
    if (absl::Status status = JoinAgreement(asked, now, after); !status.ok()) {
      return answer(std::move(status));
    }
  }
  const bool may_wait = question.wait > Clock::Duration::zero() &&
                        waiting_.size() < kMaxQuestions && Remember(*tokens).ok();
  if (std::optional<Answer> found = TryAnswer(asked, may_wait, now, after)) {
    answer(*found);
    // Other ranks may be waiting for the answer that was just agreed on.
    if (asked.agreement != nullptr) Settle(now, after);
    return 0;
  }
  asked.done = options_.waits == nullptr ? std::move(done) : Timed(std::move(done), now);
  DueAt(asked.deadline, after);
  const std::uint64_t ticket = asked.ticket;
  waiting_.push_back(std::move(asked));
  return ticket;
}

PrefixStore::Done PrefixStore::Timed(Done done, Clock::TimePoint begun) const {
  return [done = std::move(done), begun, clock = options_.clock,
          waits = options_.waits](absl::StatusOr<Answer> answer) mutable {
    waits->Observe(clock->Now() - begun);
    std::move(done)(std::move(answer));
  };
}

absl::Status PrefixStore::Remember(TokenList& tokens) {
  if (tokens.charge.bytes() > 0) return absl::OkStatus();
  absl::StatusOr<pool::Charge> charge =
      options_.account->Reserve(pool::MemoryTag::kPrefixIndex, tokens.bytes());
  if (!charge.ok()) return charge.status();
  tokens.charge = *std::move(charge);
  return absl::OkStatus();
}

void PrefixStore::Cancel(std::uint64_t ticket) {
  DeferredWork after(*this);
  MutexLock lock(mutex_);
  Refuse([ticket](const Waiting& question) { return question.ticket == ticket; },
         absl::CancelledError("the caller cancelled the request"), after);
}

void PrefixStore::Refuse(const std::function<bool(const Waiting&)>& whom, const absl::Status& why,
                         DeferredWork& after) {
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (!whom(*it)) {
      ++it;
      continue;
    }
    const std::shared_ptr<Agreement> agreement = it->agreement;
    after.answers.emplace_back(std::move(it->done), why);
    it = waiting_.erase(it);
    // Without a waiting question, the agreement could never be completed.
    const bool waited_for =
        std::any_of(waiting_.begin(), waiting_.end(),
                    [&](const Waiting& question) { return question.agreement == agreement; });
    if (agreement == nullptr || agreement->found.has_value() || waited_for) continue;
    const auto held = std::find(agreements_.begin(), agreements_.end(), agreement);
    if (held != agreements_.end()) Forget(held, after);
  }
}

// ---- matching

std::uint64_t PrefixStore::Longest(const Waiting& question, bool computed_too) const {
  const Ids ids = question.tokens->ids;
  std::uint64_t tokens = ids.size();
  // Each rank may have fewer tokens than the ranks before it, which are then checked again.
  std::size_t agreed = 0;
  for (std::size_t rank = 0; agreed < question.chains.size() && tokens > 0;
       rank = (rank + 1) % question.chains.size()) {
    const PrefixChain& chain = question.chains[rank];
    std::uint64_t here = set_.index().Longest(chain, ids, tokens).tokens;
    if (computed_too) {
      here = std::max(here, computations_.Longest(question.asker, chain, *question.tokens, tokens));
    }
    agreed = here == tokens ? agreed + 1 : 1;
    tokens = here;
  }
  return tokens;
}

std::optional<PrefixStore::Answer> PrefixStore::TryAnswer(Waiting& question, bool may_wait,
                                                          Clock::TimePoint now,
                                                          DeferredWork& after) {
  Agreement* const agreement = question.agreement.get();
  const std::uint64_t computed = Longest(question, /*computed_too=*/true);
  std::uint64_t found = 0;
  if (agreement != nullptr && agreement->found.has_value()) {
    found = *agreement->found;
  } else {
    found = Longest(question, /*computed_too=*/false);
    if (may_wait && computed > found) return std::nullopt;
    if (agreement != nullptr) Agree(*agreement, question, found, now, after);
  }
  Answer answer = {.tokens = found, .computing = computed > found ? computed : 0};
  if (agreement != nullptr) {
    if (std::shared_ptr<Prefix> owed = std::move(agreement->owed[question.rank])) {
      answer.prefix = owed->id();
      KeepFor(question.session, owed, now, after);
      LetGo(owed, after);
      after.gone.push_back(std::move(owed));
    }
    const auto held = std::find(agreements_.begin(), agreements_.end(), question.agreement);
    const bool all = std::find(agreement->asked.begin(), agreement->asked.end(), false) ==
                     agreement->asked.end();
    const bool owes = std::any_of(agreement->owed.begin(), agreement->owed.end(),
                                  [](const auto& prefix) { return prefix != nullptr; });
    if (held != agreements_.end() && all && !owes) agreements_.erase(held);
  } else if (found > 0) {
    answer.prefix = set_.index().Longest(question.chains[0], question.tokens->ids, found).prefix;
    KeepFor(question.session, set_.Find(answer.prefix)->prefix, now, after);
  }
  if (question.will_compute && found < question.tokens->ids.size() &&
      Remember(*question.tokens).ok()) {
    bool dropped = false;
    answer.computation = computations_.Add({.id = ComputationId(options_.next_id()),
                                            .session = question.session,
                                            .asker = question.asker,
                                            .chain = question.chains[question.rank],
                                            .tokens = question.tokens},
                                           dropped);
    if (dropped) DueAt(now, after);  // the next sweep answers callers that wait for the dropped one
  }
  Count(question, answer);
  return answer;
}

void PrefixStore::Count(const Waiting& question, const Answer& answer) {
  const std::uint64_t asked = question.tokens->ids.size();
  counted_.tokens_asked += asked;
  counted_.tokens_found += answer.tokens;
  ++(answer.tokens == asked ? counted_.matches_whole
     : answer.tokens > 0    ? counted_.matches_part
                            : counted_.matches_nothing);
}

void PrefixStore::Settle(Clock::TimePoint now, DeferredWork& after) {
  // An answer for one rank of a group may complete questions earlier in the list.
  for (bool again = true; again;) {
    again = false;
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      std::optional<Answer> answer = TryAnswer(*it, /*may_wait=*/now < it->deadline, now, after);
      if (!answer.has_value()) {
        ++it;
        continue;
      }
      again = again || it->agreement != nullptr;
      after.answers.emplace_back(std::move(it->done), *answer);
      it = waiting_.erase(it);
    }
  }
}

// ---- groups

absl::Status PrefixStore::JoinAgreement(Waiting& question, Clock::TimePoint now,
                                        DeferredWork& after) {
  std::size_t held = 0;
  auto oldest = agreements_.end();
  for (auto it = agreements_.begin(); it != agreements_.end(); ++it) {
    Agreement& agreement = **it;
    if (agreement.asker != question.asker) continue;
    if (!agreement.asked[question.rank] && agreement.scope == question.scope &&
        agreement.tokens->ids == question.tokens->ids) {
      agreement.asked[question.rank] = true;
      question.agreement = *it;
      return absl::OkStatus();
    }
    ++held;
    if (oldest == agreements_.end() && agreement.found.has_value()) oldest = it;
  }
  if (absl::Status status = Remember(*question.tokens); !status.ok()) return status;
  if (held >= kMaxAgreementsPerGroup && oldest != agreements_.end()) Forget(oldest, after);
  const std::size_t ranks = question.chains.size();
  question.agreement = std::make_shared<Agreement>();
  question.agreement->asker = question.asker;
  question.agreement->scope = question.scope;
  question.agreement->tokens = question.tokens;
  question.agreement->asked.assign(ranks, false);
  question.agreement->asked[question.rank] = true;
  question.agreement->owed.resize(ranks);
  question.agreement->until = now;
  agreements_.push_back(question.agreement);
  return absl::OkStatus();
}

void PrefixStore::Agree(Agreement& agreement, const Waiting& question, std::uint64_t found,
                        Clock::TimePoint now, DeferredWork& after) {
  agreement.found = found;
  agreement.until = now + kAgreed;
  DueAt(agreement.until, after);
  for (std::size_t rank = 0; found > 0 && rank < question.chains.size(); ++rank) {
    const PrefixIndex::Match match =
        set_.index().Longest(question.chains[rank], question.tokens->ids, found);
    TESSERA_CHECK(match.tokens == found, "every rank has the agreed prefix");
    PrefixSet::Entry& entry = *set_.Find(match.prefix);
    ++entry.kept;
    agreement.owed[rank] = entry.prefix;
  }
}

void PrefixStore::Forget(std::list<std::shared_ptr<Agreement>>::iterator agreement,
                         DeferredWork& after) {
  for (std::shared_ptr<Prefix>& owed : (*agreement)->owed) {
    if (owed == nullptr) continue;
    LetGo(owed, after);
    after.gone.push_back(std::move(owed));
  }
  agreements_.erase(agreement);
}

// ---- found prefixes are kept

void PrefixStore::KeepFor(SessionId session, const std::shared_ptr<Prefix>& prefix,
                          Clock::TimePoint now, DeferredWork& after) {
  PrefixSet::Entry* const entry = set_.Find(prefix->id());
  if (entry != nullptr) set_.Touch(*entry, now);
  std::list<Kept>& found = kept_[session];
  if (Kept* const kept = FindKept(found, prefix->id())) {
    ++kept->times;
    kept->until = now + kKept;
    return;
  }
  if (found.size() >= kMaxKeptPerSession) {
    LetGo(found.front().prefix, after);
    found.pop_front();
  }
  if (entry != nullptr) ++entry->kept;
  found.push_back({.prefix = prefix, .times = 1, .until = now + kKept});
  DueAt(now + kKept, after);
}

// The caller still holds the pointer, so nothing is freed here.
void PrefixStore::LetGo(const std::shared_ptr<Prefix>& prefix, DeferredWork& after) {
  after.gone.push_back(prefix);
  PrefixSet::Entry* const entry = set_.Find(prefix->id());
  if (entry == nullptr || --entry->kept > 0 || !entry->expiry().has_value()) return;
  DueAt(*entry->expiry(), after);
}

}  // namespace tessera::cache
