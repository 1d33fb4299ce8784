#include "daemon/base/fair_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "daemon/base/strings.h"
#include "tests/fakes/seed.h"

namespace tessera {
namespace {

using testing::ElementsAre;

JobSpec Spec(std::string name, std::uint64_t tenant = 0, std::uint64_t owner = 0,
             JobPriority priority = JobPriority::kTails) {
  return {
      .name = std::move(name), .priority = priority, .tenant = TenantId(tenant), .owner = owner};
}

void Push(FairQueue& queue, JobSpec spec) {
  queue.Push(std::move(spec), [] {});
}

// The names of the remaining jobs, in order.
std::vector<std::string> PopAll(FairQueue& queue) {
  std::vector<std::string> names;
  while (auto entry = queue.Pop()) names.push_back(entry->spec.name);
  return names;
}

TEST(FairQueue, EmptyHasNothing) {
  FairQueue queue;
  EXPECT_FALSE(queue.Pop().has_value());
  Push(queue, Spec("a"));
  EXPECT_TRUE(queue.Pop().has_value());
  EXPECT_FALSE(queue.Pop().has_value());
}

TEST(FairQueue, LowerPrioritiesComeFirstAndOnlyThoseAskedFor) {
  FairQueue queue;
  Push(queue, Spec("pressure", 1, 1, JobPriority::kPressure));
  Push(queue, Spec("seal", 1, 1, JobPriority::kSeals));
  EXPECT_FALSE(queue.Pop(JobPriority::kTails).has_value());
  Push(queue, Spec("tail", 1, 1, JobPriority::kTails));
  EXPECT_EQ(queue.size(JobPriority::kSeals), 1u);
  EXPECT_THAT(PopAll(queue), ElementsAre("tail", "seal", "pressure"));
  EXPECT_EQ(queue.size(JobPriority::kSeals), 0u);
}

TEST(FairQueue, AFloodDelaysNobodyByMoreThanOneJob) {
  FairQueue queue;
  for (std::uint64_t i = 0; i < 1000; ++i) Push(queue, Spec("flood", 1, i));
  Push(queue, Spec("a", 2, 1));
  Push(queue, Spec("b", 2, 1));
  Push(queue, Spec("c", 3, 1));
  std::vector<std::string> names = PopAll(queue);
  names.resize(6);
  EXPECT_THAT(names, ElementsAre("flood", "a", "c", "flood", "b", "flood"));
}

TEST(FairQueue, WhatGoesOnComesBeforeItsTenantsOthersAndNobodyElses) {
  FairQueue queue;
  for (const char* name : {"x1", "x2"}) Push(queue, Spec(name, 1, 10));
  Push(queue, Spec("y1", 1, 20));
  Push(queue, Spec("z1", 2, 10));
  EXPECT_EQ(queue.Pop()->spec.name, "x1");
  JobSpec more = Spec("more of x1", 1, 10);
  more.is_continuation = true;
  Push(queue, more);
  EXPECT_THAT(PopAll(queue), ElementsAre("z1", "more of x1", "y1", "x2"));
}

TEST(FairQueue, OwnersOfATenantTakeTurns) {
  FairQueue queue;
  for (const char* name : {"x1", "x2", "x3"}) Push(queue, Spec(name, 1, 10));
  for (const char* name : {"y1", "y2"}) Push(queue, Spec(name, 1, 20));
  EXPECT_THAT(PopAll(queue), ElementsAre("x1", "y1", "x2", "y2", "x3"));
}

TEST(FairQueue, WhoCameBackIsBehindThoseWhoWait) {
  FairQueue queue;
  Push(queue, Spec("a1", 1));
  Push(queue, Spec("b1", 2));
  EXPECT_EQ(queue.Pop()->spec.name, "a1");
  Push(queue, Spec("a2", 1));
  EXPECT_THAT(PopAll(queue), ElementsAre("b1", "a2"));
}

TEST(FairQueue, TheSameOwnerOfAnotherTenantIsAnother) {
  FairQueue queue;
  for (const char* name : {"a1", "a2"}) Push(queue, Spec(name, 1, 7));
  Push(queue, Spec("b1", 2, 7));
  EXPECT_THAT(PopAll(queue), ElementsAre("a1", "b1", "a2"));
}

TEST(FairQueue, AJobGoesWithItsEntryAndTheRestWithTheQueue) {
  const auto held = std::make_shared<int>(0);
  {
    FairQueue queue;
    queue.Push(Spec("first"), [held] { ++*held; });
    queue.Push(Spec("second"), [held] { ++*held; });
    EXPECT_EQ(held.use_count(), 3);
    std::move(queue.Pop()->job)();
    EXPECT_EQ(held.use_count(), 2);
  }
  EXPECT_EQ(*held, 1);
  EXPECT_EQ(held.use_count(), 1);
}

// The rule without queues. A party waits since its first job arrived or since its last turn. The
// longest wait wins, first among tenants, then among the tenant's owners; then the oldest job runs.
class Oracle {
 public:
  void Push(const JobSpec& spec) {
    for (const Party& party : PartiesOf(spec)) {
      if (Waiting(party) == 0) since_[party] = now_;
    }
    jobs_.push_back(spec);
    ++now_;
  }

  std::optional<JobSpec> Pop(JobPriority last) {
    std::size_t best = jobs_.size();
    for (std::size_t i = 0; i < jobs_.size(); ++i) {
      if (jobs_[i].priority > last) continue;
      if (best == jobs_.size() || RankOf(jobs_[i]) < RankOf(jobs_[best])) best = i;
    }
    if (best == jobs_.size()) return std::nullopt;
    const JobSpec spec = jobs_[best];
    jobs_.erase(jobs_.begin() + static_cast<std::ptrdiff_t>(best));
    for (const Party& party : PartiesOf(spec)) since_[party] = now_;
    ++now_;
    return spec;
  }

  std::size_t size(JobPriority priority) const {
    return static_cast<std::size_t>(
        std::count_if(jobs_.begin(), jobs_.end(),
                      [priority](const JobSpec& job) { return job.priority == priority; }));
  }

 private:
  // A tenant, or one of its owners, within one priority.
  using Party = std::tuple<JobPriority, TenantId, std::optional<std::uint64_t>>;
  static std::vector<Party> PartiesOf(const JobSpec& spec) {
    return {{spec.priority, spec.tenant, std::nullopt}, {spec.priority, spec.tenant, spec.owner}};
  }
  std::size_t Waiting(const Party& party) const {
    std::size_t waiting = 0;
    for (const JobSpec& job : jobs_) {
      for (const Party& other : PartiesOf(job)) waiting += other == party ? 1 : 0;
    }
    return waiting;
  }
  std::tuple<JobPriority, std::uint64_t, std::uint64_t> RankOf(const JobSpec& spec) const {
    const std::vector<Party> parties = PartiesOf(spec);
    return {spec.priority, since_.at(parties[0]), since_.at(parties[1])};
  }

  std::vector<JobSpec> jobs_;  // oldest first
  std::map<Party, std::uint64_t> since_;
  std::uint64_t now_ = 0;
};

TEST(FairQueue, IsTheOracleOverRandomOperations) {
  TestRandom random;
  for (int round = 0; round < 40; ++round) {
    FairQueue queue;
    Oracle oracle;
    const std::uint64_t tenants = random.Between(1, 5);
    const std::uint64_t owners = random.Between(1, 5);
    const std::uint64_t pushes = random.Between(1, 9);  // out of ten operations
    for (int i = 0; i < 300; ++i) {
      if (random.Below(10) < pushes) {
        const JobSpec spec = Spec(Concat(i), random.Below(tenants), random.Below(owners),
                                  static_cast<JobPriority>(random.Below(kJobPriorities)));
        oracle.Push(spec);
        Push(queue, spec);
      } else {
        const auto last = static_cast<JobPriority>(random.Below(kJobPriorities));
        const std::optional<JobSpec> expected = oracle.Pop(last);
        const std::optional<FairQueue::Entry> entry = queue.Pop(last);
        ASSERT_EQ(entry.has_value(), expected.has_value()) << "operation " << i;
        if (!entry.has_value()) continue;
        ASSERT_EQ(entry->spec.name, expected->name) << "operation " << i;
      }
      for (std::size_t priority = 0; priority < kJobPriorities; ++priority) {
        ASSERT_EQ(queue.size(static_cast<JobPriority>(priority)),
                  oracle.size(static_cast<JobPriority>(priority)));
      }
    }
  }
}

// The promise of fairness, independent of the rule: between two turns of a waiting party, and
// before its first, every other party has at most one turn.
class TurnWatch {
 public:
  void Pushed(std::uint64_t who) {
    if (waiting_[who]++ == 0) since_[who].clear();
  }
  void Popped(std::uint64_t who) {
    for (auto& [other, turns] : since_) {
      if (other == who || waiting_[other] == 0) continue;
      EXPECT_LE(++turns[who], 1) << who << " ran twice while " << other << " waited";
    }
    --waiting_[who];
    since_[who].clear();
  }

 private:
  std::map<std::uint64_t, int> waiting_;
  std::map<std::uint64_t, std::map<std::uint64_t, int>> since_;
};

TEST(FairQueue, NobodyHasTwoTurnsWhileAnotherWaits) {
  TestRandom random;
  for (int round = 0; round < 50; ++round) {
    FairQueue queue;
    TurnWatch tenants;
    std::map<std::uint64_t, TurnWatch> owners;
    const std::uint64_t parties = random.Between(2, 8);
    for (int i = 0; i < 1000 && !testing::Test::HasFailure(); ++i) {
      if (random.Below(5) < 3) {
        // Most jobs belong to one tenant and one owner.
        const std::uint64_t tenant = random.OneIn(4) ? random.Below(parties) : 0;
        const std::uint64_t owner = random.OneIn(4) ? random.Below(parties) : 0;
        Push(queue, Spec("", tenant, owner));
        tenants.Pushed(tenant);
        owners[tenant].Pushed(owner);
      } else if (const std::optional<FairQueue::Entry> entry = queue.Pop()) {
        tenants.Popped(entry->spec.tenant.value());
        owners[entry->spec.tenant.value()].Popped(entry->spec.owner);
      }
    }
  }
}

}  // namespace
}  // namespace tessera
