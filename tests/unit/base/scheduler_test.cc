#include "daemon/base/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/base/heartbeat.h"
#include "daemon/base/strings.h"
#include "tests/fakes/fake_clock.h"
#include "tests/fakes/manual_scheduler.h"
#include "tests/fakes/seed.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Only a bug takes longer.
constexpr std::chrono::seconds kPatience{30};

// Counts arrivals. Waiting for them times out.
class Arrivals {
 public:
  void Arrive() {
    MutexLock lock(mutex_);
    ++count_;
    changed_.NotifyAll();
  }
  bool WaitFor(std::uint64_t count) {
    const Clock::TimePoint deadline = SystemClock().Now() + kPatience;
    MutexLock lock(mutex_);
    while (count_ < count) {
      if (!changed_.WaitUntil(mutex_, deadline)) return count_ >= count;
    }
    return true;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::uint64_t count_ TESSERA_GUARDED_BY(mutex_) = 0;
};

std::unique_ptr<ThreadScheduler> Threads(std::uint32_t threads,
                                         std::vector<std::uint32_t> cpus = {}) {
  auto scheduler = ThreadScheduler::Create({.threads = threads, .cpus = std::move(cpus)});
  EXPECT_TRUE(scheduler.ok()) << scheduler.status();
  return *std::move(scheduler);
}

JobSpec Spec(JobPriority priority, std::uint64_t tenant = 0, std::uint64_t owner = 0) {
  return {.name = "job", .priority = priority, .tenant = TenantId(tenant), .owner = owner};
}

std::uint64_t Sum(const Scheduler::Load::ByPriority& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

std::vector<std::uint32_t> AllowedCpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  EXPECT_EQ(::sched_getaffinity(0, sizeof(set), &set), 0);
  std::vector<std::uint32_t> cpus;
  for (std::uint32_t cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
  }
  return cpus;
}

// A single thread runs jobs in the order of the manual scheduler.
TEST(ThreadScheduler, TheOrderIsThatOfTheManualScheduler) {
  TestRandom random;
  ManualScheduler manual;
  Arrivals began;
  Arrivals open;
  Arrivals done;
  std::vector<int> by_hand;
  std::vector<int> by_thread;
  const std::unique_ptr<ThreadScheduler> threads = Threads(1);
  threads->Submit(Spec(JobPriority::kTails), [&began, &open] {
    began.Arrive();
    open.WaitFor(1);
  });
  ASSERT_TRUE(began.WaitFor(1));
  constexpr int kJobs = 500;
  for (int i = 0; i < kJobs; ++i) {
    const JobSpec spec = Spec(static_cast<JobPriority>(random.Below(kJobPriorities)),
                              random.Below(4), random.Below(4));
    // A job that submits others while some wait must keep their order, too.
    const auto job = [i, spec, &done](Scheduler& scheduler, std::vector<int>& ran) {
      return [&ran, &done, &scheduler, spec, i] {
        ran.push_back(i);
        if (i % 3 == 0) {
          scheduler.Submit(spec, [&ran, &done, i] {
            ran.push_back(kJobs + i);
            done.Arrive();
          });
        }
        done.Arrive();
      };
    };
    manual.Submit(spec, job(manual, by_hand));
    threads->Submit(spec, job(*threads, by_thread));
  }
  while (manual.RunNext().has_value()) {
  }
  open.Arrive();
  ASSERT_TRUE(done.WaitFor(2 * (kJobs + (kJobs + 2) / 3)));
  EXPECT_EQ(by_thread, by_hand);
}

TEST(ManualScheduler, AJobTakenByNameLeavesTheOthersTheirOrder) {
  ManualScheduler manual;
  const auto submit = [&manual](const char* name, std::uint64_t tenant, JobPriority priority) {
    manual.Submit({.name = name, .priority = priority, .tenant = TenantId(tenant)}, [] {});
  };
  submit("pressure", 1, JobPriority::kPressure);
  submit("a1", 1, JobPriority::kTails);
  submit("a2", 1, JobPriority::kTails);
  submit("b1", 2, JobPriority::kTails);
  submit("b2", 2, JobPriority::kTails);
  EXPECT_THAT(manual.Queued(), ElementsAre("a1", "b1", "a2", "b2", "pressure"));
  EXPECT_EQ(manual.RunNext(), "a1");
  EXPECT_THAT(manual.Queued(), ElementsAre("b1", "a2", "b2", "pressure"));
  EXPECT_TRUE(manual.RunFirst("pressure"));
  EXPECT_FALSE(manual.RunFirst("pressure"));
  EXPECT_TRUE(manual.RunFirst("a2"));
  EXPECT_THAT(manual.Queued(), ElementsAre("b1", "b2"));
  EXPECT_EQ(manual.load().queued[0], 2u);
  EXPECT_EQ(Sum(manual.load().done), 3u);
  EXPECT_EQ(Sum(manual.load().running), 0u);
}

// Long jobs occupy all threads that they may use; a tail job still runs beside them.
TEST(ThreadScheduler, OneThreadIsKeptFromLongJobs) {
  TestRandom random;
  for (std::uint32_t count = 2; count <= 5; ++count) {
    Arrivals began;
    Arrivals open;
    Arrivals tails;
    Arrivals ended;
    const std::unique_ptr<ThreadScheduler> threads = Threads(count);
    const std::uint64_t long_jobs = 2 * count;
    for (std::uint64_t i = 0; i < long_jobs; ++i) {
      threads->Submit(Spec(random.OneIn(2) ? JobPriority::kSeals : JobPriority::kPressure, i), [&] {
        began.Arrive();
        open.WaitFor(1);
        ended.Arrive();
      });
    }
    ASSERT_TRUE(began.WaitFor(count - 1));
    for (int i = 0; i < 10; ++i) {
      threads->Submit(Spec(JobPriority::kTails), [&tails] { tails.Arrive(); });
    }
    EXPECT_TRUE(tails.WaitFor(10)) << count << " threads";
    const Scheduler::Load load = threads->load();
    EXPECT_EQ(load.running[1] + load.running[2], count - 1);
    EXPECT_EQ(load.queued[1] + load.queued[2], long_jobs - (count - 1));
    open.Arrive();
    EXPECT_TRUE(ended.WaitFor(long_jobs));
  }
}

// In each round two of four long jobs wait for each other, then the other two do, with tail jobs in
// between. A thread that sleeps despite work that it may take would block all.
TEST(ThreadScheduler, NoThreadSleepsBesideWorkThatItMayTake) {
  constexpr std::uint64_t kRounds = 500;
  Arrivals began;
  Arrivals tails;
  Arrivals ended;
  const std::unique_ptr<ThreadScheduler> threads = Threads(3);
  for (std::uint64_t before = 0; before < 4 * kRounds; before += 4) {
    for (std::uint64_t i = 0; i < 4; ++i) {
      const std::uint64_t pair = before + (i < 2 ? 2 : 4);
      threads->Submit(Spec(JobPriority::kSeals), [&, pair, scheduler = threads.get()] {
        began.Arrive();
        began.WaitFor(pair);
        scheduler->Submit(Spec(JobPriority::kTails), [&tails] { tails.Arrive(); });
        ended.Arrive();
      });
    }
    ASSERT_TRUE(tails.WaitFor(before + 4));
    ASSERT_TRUE(ended.WaitFor(before + 4));
  }
}

TEST(ThreadScheduler, OneThreadRunsLongJobsToo) {
  Arrivals ran;
  const std::unique_ptr<ThreadScheduler> threads = Threads(1);
  threads->Submit(Spec(JobPriority::kSeals), [&ran] { ran.Arrive(); });
  threads->Submit(Spec(JobPriority::kPressure), [&ran] { ran.Arrive(); });
  EXPECT_TRUE(ran.WaitFor(2));
}

// Each job is queued, running or done. A finished job holds no resources.
TEST(ThreadScheduler, LoadCountsEveryJobOnce) {
  Arrivals open;
  Arrivals looked;
  Scheduler::Load inside;
  Scheduler::Load at_release;
  const std::unique_ptr<ThreadScheduler> threads = Threads(1);
  threads->Submit(Spec(JobPriority::kTails),
                  [&open, held = std::shared_ptr<void>(nullptr, [&](void*) {
                            at_release = threads->load();
                          })] { open.WaitFor(1); });
  threads->Submit(Spec(JobPriority::kSeals), [&] {
    inside = threads->load();
    looked.Arrive();
  });
  threads->Submit(Spec(JobPriority::kPressure), [] {});
  const Scheduler::Load before = threads->load();
  EXPECT_EQ(Sum(before.queued) + Sum(before.running), 3u);
  EXPECT_EQ(Sum(before.done), 0u);
  open.Arrive();
  ASSERT_TRUE(looked.WaitFor(1));
  EXPECT_THAT(at_release.queued, ElementsAre(0, 1, 1));
  EXPECT_THAT(at_release.running, ElementsAre(1, 0, 0));
  EXPECT_THAT(at_release.done, ElementsAre(0, 0, 0));
  EXPECT_THAT(inside.queued, ElementsAre(0, 0, 1));
  EXPECT_THAT(inside.running, ElementsAre(0, 1, 0));
  EXPECT_THAT(inside.done, ElementsAre(1, 0, 0));
}

// A running job is as old as a queued one, and both are forgotten once they are done.
TEST(ThreadScheduler, LoadTellsTheAgeOfTheOldestJob) {
  Arrivals began;
  Arrivals open;
  Arrivals done;
  const std::unique_ptr<ThreadScheduler> threads = Threads(1);
  const Clock::TimePoint before = SystemClock().Now();
  threads->Submit(Spec(JobPriority::kTails), [&] {
    began.Arrive();
    open.WaitFor(1);
  });
  threads->Submit(Spec(JobPriority::kPressure), [&] { done.Arrive(); });
  ASSERT_TRUE(began.WaitFor(1));
  const Scheduler::Load first = threads->load();
  const Scheduler::Load second = threads->load();
  EXPECT_GT(first.oldest[0], Clock::Duration::zero());
  EXPECT_GT(first.oldest[2], Clock::Duration::zero());
  EXPECT_GE(first.oldest[0], first.oldest[2]);
  EXPECT_EQ(first.oldest[1], Clock::Duration::zero());
  EXPECT_GE(second.oldest[0], first.oldest[0]);
  EXPECT_LE(second.oldest[0], SystemClock().Now() - before);
  open.Arrive();
  ASSERT_TRUE(done.WaitFor(1));
  // The last job may not yet count as done; one after it waits for that.
  Arrivals last;
  threads->Submit(Spec(JobPriority::kSeals), [&] { last.Arrive(); });
  ASSERT_TRUE(last.WaitFor(1));
  const Scheduler::Load after = threads->load();
  EXPECT_EQ(after.oldest[0], Clock::Duration::zero());
  EXPECT_EQ(after.oldest[2], Clock::Duration::zero());
}

TEST(ThreadScheduler, LoadAddsUpWhileThreadsSubmitAndRun) {
  constexpr std::uint64_t kEach = 2000;
  constexpr std::uint64_t kSubmitters = 3;
  constexpr std::uint32_t kThreads = 3;
  std::atomic<std::uint64_t> begun{0};
  std::atomic<std::uint64_t> submitted{0};
  const std::unique_ptr<ThreadScheduler> scheduler = Threads(kThreads);
  std::vector<std::thread> submitters;
  for (std::uint64_t s = 0; s < kSubmitters; ++s) {
    submitters.emplace_back([&, s] {
      for (std::uint64_t i = 0; i < kEach; ++i) {
        begun.fetch_add(1);
        scheduler->Submit(Spec(static_cast<JobPriority>(i % kJobPriorities), s, i % 7), [] {});
        submitted.fetch_add(1);
      }
    });
  }
  const Clock::TimePoint deadline = SystemClock().Now() + kPatience;
  for (std::uint64_t done = 0; done < kSubmitters * kEach && !HasFailure();) {
    EXPECT_LT(SystemClock().Now(), deadline);
    const std::uint64_t least = submitted.load();
    const Scheduler::Load load = scheduler->load();
    const std::uint64_t most = begun.load();
    const std::uint64_t all = Sum(load.queued) + Sum(load.running) + Sum(load.done);
    EXPECT_GE(all, least);
    EXPECT_LE(all, most);
    EXPECT_LE(Sum(load.running), kThreads);
    EXPECT_LE(load.running[1] + load.running[2], kThreads - 1);
    EXPECT_GE(Sum(load.done), done);
    done = Sum(load.done);
    std::this_thread::yield();
  }
  for (std::thread& submitter : submitters) submitter.join();
}

TEST(ThreadScheduler, ThreadsStayOnTheirCpus) {
  const std::vector<std::uint32_t> allowed = AllowedCpus();
  ASSERT_FALSE(allowed.empty());
  for (const std::vector<std::uint32_t>& cpus :
       {std::vector<std::uint32_t>{allowed.back()}, std::vector<std::uint32_t>{allowed.front()},
        allowed, std::vector<std::uint32_t>{}}) {
    constexpr std::uint32_t kThreads = 2;
    Arrivals seen;
    std::vector<std::vector<std::uint32_t>> masks(kThreads);
    const std::unique_ptr<ThreadScheduler> threads = Threads(kThreads, cpus);
    for (std::uint32_t i = 0; i < kThreads; ++i) {
      // Both run at the same time, so each has its own thread.
      threads->Submit(Spec(JobPriority::kTails), [&masks, &seen, i] {
        masks[i] = AllowedCpus();
        seen.Arrive();
        seen.WaitFor(kThreads);
      });
    }
    ASSERT_TRUE(seen.WaitFor(kThreads));
    for (const std::vector<std::uint32_t>& mask : masks) {
      EXPECT_EQ(mask, cpus.empty() ? allowed : cpus);
    }
    EXPECT_EQ(AllowedCpus(), allowed);  // the creating thread's affinity is unchanged
  }
}

TEST(ThreadScheduler, ACpuThatDoesNotExistIsRefusedByItsNumber) {
  for (const std::uint32_t absent : {4095u, 100'000u}) {
    const auto scheduler =
        ThreadScheduler::Create({.threads = 2, .cpus = {AllowedCpus().front(), absent}});
    ASSERT_FALSE(scheduler.ok());
    EXPECT_EQ(scheduler.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(scheduler.status().message()),
                HasSubstr(Concat("CPU ", absent, " does not exist")));
  }
  EXPECT_FALSE(ThreadScheduler::Create({.threads = 0}).ok());
}

// The running job sees the waiting ones dropped before it ends, and jobs that it submits then are
// dropped as well.
TEST(ThreadScheduler, TheEndDropsWhatWaitsAndWaitsForWhatRuns) {
  class SaysWhenItGoes {
   public:
    explicit SaysWhenItGoes(Arrivals& gone) : gone_(gone) {}
    ~SaysWhenItGoes() { gone_.Arrive(); }

   private:
    Arrivals& gone_;
  };
  Arrivals began;
  Arrivals gone;
  bool saw_them_go = false;
  bool saw_its_own_go = false;
  bool ended = false;
  std::atomic<int> ran{0};
  std::unique_ptr<ThreadScheduler> threads = Threads(1);
  threads->Submit(Spec(JobPriority::kTails), [&, scheduler = threads.get()] {
    began.Arrive();
    saw_them_go = gone.WaitFor(10);
    scheduler->Submit(Spec(JobPriority::kTails),
                      [&ran, held = std::make_unique<SaysWhenItGoes>(gone)] { ++ran; });
    saw_its_own_go = gone.WaitFor(11);
    ended = true;
  });
  ASSERT_TRUE(began.WaitFor(1));
  for (std::uint64_t i = 0; i < 10; ++i) {
    threads->Submit(Spec(static_cast<JobPriority>(i % kJobPriorities), i),
                    [&ran, held = std::make_unique<SaysWhenItGoes>(gone)] { ++ran; });
  }
  threads.reset();
  EXPECT_TRUE(ended);
  EXPECT_TRUE(saw_them_go);
  EXPECT_TRUE(saw_its_own_go);
  EXPECT_EQ(ran.load(), 0);
}

TEST(ThreadScheduler, FallsSilentOnlyWhileAllThreadsAreInTheirJobs) {
  FakeClock clock;
  Heartbeats heartbeats(clock);
  Heartbeats::Pulse& pulse = heartbeats.Add("background jobs");
  absl::StatusOr<std::unique_ptr<ThreadScheduler>> threads =
      ThreadScheduler::Create({.threads = 1, .pulse = &pulse});
  ASSERT_TRUE(threads.ok());
  Arrivals began;
  Arrivals released;
  Arrivals ended;
  (*threads)->Submit(Spec(JobPriority::kTails), [&] {
    began.Arrive();
    released.WaitFor(1);
  });
  ASSERT_TRUE(began.WaitFor(1));
  clock.Advance(kHeartbeatLimit + std::chrono::seconds(1));
  EXPECT_EQ(heartbeats.Hung(clock.Now()), "background jobs: no heartbeat for 11 s");
  released.Arrive();
  (*threads)->Submit(Spec(JobPriority::kTails), [&] { ended.Arrive(); });
  ASSERT_TRUE(ended.WaitFor(1));
  EXPECT_EQ(heartbeats.Hung(clock.Now()), std::nullopt);
  // An idle thread beats without a job.
  clock.Advance(kHeartbeatLimit + std::chrono::seconds(1));
  const Clock::TimePoint deadline = SystemClock().Now() + kPatience;
  while (heartbeats.Hung(clock.Now()).has_value()) ASSERT_LT(SystemClock().Now(), deadline);
  threads->reset();
  clock.Advance(2 * kHeartbeatLimit);
  EXPECT_EQ(heartbeats.Hung(clock.Now()), std::nullopt);
}

}  // namespace
}  // namespace tessera
