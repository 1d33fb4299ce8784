// Readers resolve and attend while a worker decodes and the daemon's threads encode, seal and swap.
// A reader sees one of the past states, byte for byte, and keeps seeing it while it attends. All
// threads use one mapping of each memory, so that ThreadSanitizer sees every access.

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/dispatch/attend.h"
#include "kernels/strategy/aligned_bytes.h"
#include "tests/unit/compaction/compaction_fixture.h"

namespace tessera::compaction {
namespace {

constexpr int kReaders = 2;
constexpr int kSequences = 3;

// Sequences that are sealed at once, or in pieces because they have many short segments. The latter
// are also cut, compressed and given other policies between two pieces.
struct Scene {
  std::uint64_t tokens;  // per sequence
  std::uint64_t prompt;  // maximum length
  bool pieces;
  std::uint64_t tokens_per_read;  // at least one read per so many tokens
};
constexpr Scene kWhole = {.tokens = 450, .prompt = 40, .pieces = false, .tokens_per_read = 10};
constexpr Scene kPieces = {.tokens = 2600, .prompt = 1300, .pieces = true, .tokens_per_read = 100};

policies::Policy PolicyOf(const Scene& scene, int sequence, double kept = 0.25) {
  if (!scene.pieces) return sequence == 2 ? Quest() : SmallMosaic();
  policies::Policy policy = SmallMosaic();
  policy.text = std::to_string(kept);
  policy.mosaic->strategy.kept = {kept};
  policy.mosaic->segments = {
      .tokens = 32, .min_tokens = 32, .sinks = 4, .recent = 0, .loss_window = 64};
  return policy;
}

class CompactionConcurrency : public testing::Test {
 protected:
  // A sequence and all the tokens that it will ever hold. It has held at least `tokens` of them.
  struct Story {
    std::shared_ptr<cache::Sequence> sequence;
    Stamps stamps;
    std::atomic<std::uint64_t> tokens{0};
  };

  void Append(Story& story, std::uint64_t tokens, bool end) {
    const std::uint64_t held = story.tokens.load();
    const Stamps stamps(story.stamps.begin() + static_cast<std::ptrdiff_t>(held),
                        story.stamps.begin() + static_cast<std::ptrdiff_t>(held + tokens));
    const std::uint32_t layers = model_->layers();
    ASSERT_TRUE(compactor_
                    ->Append(story.sequence,
                             {.layers = layers,
                              .end_of_prompt = end,
                              .first_token = held,
                              .until = held + tokens},
                             DrawnRows(model_->layout(), stamps))
                    .ok());
    story.tokens.store(held + tokens);
    compactor_->TailsMoved(story.sequence);
  }

  // One step of a reader: pins, resolves until lanes and version belong together, attends.
  std::string ReadOnce(TestRandom& random, shm::Word& slot) {
    Story& story = *stories_[random.Below(kSequences)];
    const std::uint64_t least = story.tokens.load();
    const std::uint64_t pin = shm::Pin(slot, world_.tenant().epochs().epoch());
    std::string wrong;
    const absl::StatusOr<cache::SequenceView> view =
        cache::ReadSequence(world_.tenant(), *story.sequence);
    if (!view.ok()) wrong = view.status().ToString();
    for (std::size_t i = 0; wrong.empty() && i < view->lanes.size(); ++i) {
      wrong = Judge(random, story, *view, view->lanes[i], least);
    }
    reads_.fetch_add(1, std::memory_order_relaxed);
    if (!shm::Unpin(slot, pin) && wrong.empty()) wrong = "revoked";
    return wrong;
  }

  std::string Judge(TestRandom& random, const Story& story, const cache::SequenceView& view,
                    const cache::SequenceView::LaneOf& lane, std::uint64_t least) {
    const std::uint64_t shown = lane.resolved.entries;
    if (shown < least) {
      return "shows " + std::to_string(shown) + " tokens where there were " + std::to_string(least);
    }
    const Stamps stamps(story.stamps.begin(),
                        story.stamps.begin() + static_cast<std::ptrdiff_t>(shown));
    std::string wrong = LaneDiffers(view, lane, *model_, stamps);
    if (!wrong.empty() || shown == 0) return wrong;
    for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
      packed_.fetch_add(view.segments[lane.first_segment + s].shape.packed() ? 1 : 0,
                        std::memory_order_relaxed);
    }
    return Attends(random, view, lane);
  }

  // Attends twice: the view of a pinned reader must not change.
  std::string Attends(TestRandom& random, const cache::SequenceView& view,
                      const cache::SequenceView::LaneOf& lane) {
    const kernels::LayerGeometry geometry = model_->geometry(lane.layer);
    std::vector<std::uint16_t> query(geometry.query_heads * geometry.head_dim);
    for (std::uint16_t& element : query) {
      element = kernels::FloatToBf16(Drawn(random.Bits() >> 8));
    }
    const kernels::LaneView seen = {.segments = view.segments.data() + lane.first_segment,
                                    .segment_count = lane.resolved.segments};
    std::array<std::vector<float>, 2> outputs;
    for (std::vector<float>& output : outputs) {
      output.resize(query.size());
      const kernels::AttendItem item = {.lane = &seen,
                                        .kv_head = lane.kv_head,
                                        .first_query_position = lane.resolved.entries,
                                        .query = query.data(),
                                        .output = output.data()};
      const kernels::AttendBatch batch = {.geometry = geometry, .items = {&item, 1}};
      kernels::AlignedBytes workspace(kernels::AttendWorkspaceBytes(batch));
      kernels::InlineExecutor inline_executor;
      const kernels::AttendResult result =
          kernels::Attend(cache::ReferenceKernels(), batch, workspace, inline_executor);
      if (result.status != kernels::AttendStatus::kOk) return "a bad tile";
    }
    return outputs[0] == outputs[1] ? "" : "attention over the same view differs";
  }

  // Grows all sequences to their end while readers read and forks come and go.
  void Grow(const Scene& scene);

  void TearDown() override { std::fclose(log_); }

  std::FILE* log_ = std::tmpfile();
  Logger logger_{LogOptions{.stream = log_}};
  device::CpuDevice device_{cache::ReferenceKernels()};
  cache::World world_{
      cache::World::Options{.ring_tiles = 4, .device = &device_, .raw_copy_bytes = 600'000}};
  std::shared_ptr<const cache::Model> model_ = world_.Register(cache::SmallModel("m", 1, 2));
  std::unique_ptr<ThreadScheduler> scheduler_ = *ThreadScheduler::Create({.threads = 3});
  std::unique_ptr<Compactor> compactor_ = std::make_unique<Compactor>(
      Compactor::Options{.scheduler = scheduler_.get(),
                         .logger = &logger_,
                         .clock = &world_.clock(),
                         .operations = &kernels::OperationsOf(kernels::BestImplementation())});
  std::array<std::unique_ptr<Story>, kSequences> stories_;
  std::atomic<std::uint64_t> reads_{0};
  std::atomic<std::uint64_t> packed_{0};
};

void CompactionConcurrency::Grow(const Scene& scene) {
  const std::uint64_t seed = TestSeed();
  TestRandom random(seed);
  const auto session = world_.OpenSession();
  for (int i = 0; i < kSequences; ++i) {
    stories_[i] = std::make_unique<Story>();
    stories_[i]->sequence = world_.NewSequence(*session, *model_);
    for (std::uint64_t subspace = 1; stories_[i]->stamps.size() < scene.tokens; ++subspace) {
      const Stamps more = DrawTokens(150, subspace);
      stories_[i]->stamps.insert(stories_[i]->stamps.end(), more.begin(), more.end());
    }
    ASSERT_TRUE(compactor_->SetPolicy(*stories_[i]->sequence, PolicyOf(scene, i)).ok());
  }
  std::atomic<bool> stop{false};
  std::array<std::string, kReaders> wrong;
  std::vector<std::thread> threads;
  for (int i = 0; i < kReaders; ++i) {
    threads.emplace_back([&, i] {
      TestRandom mine(seed + 1 + static_cast<std::uint64_t>(i));
      shm::Word& slot = session->control()->page().readers[i].word;
      while (!stop.load() && wrong[i].empty()) {
        wrong[i] = ReadOnce(mine, slot);
        world_.tenant().epochs().Collect();
        std::this_thread::yield();
      }
      if (!wrong[i].empty()) stop.store(true);
    });
  }
  std::vector<std::shared_ptr<cache::Sequence>> forks;
  std::atomic<int> told{0};
  int asked = 0;
  for (bool grew = true; grew && !stop.load();) {
    grew = false;
    for (const std::unique_ptr<Story>& story : stories_) {
      const std::uint64_t room = story->stamps.size() - story->tokens.load();
      if (room == 0) continue;
      const bool prompt = random.OneIn(3);
      const std::uint64_t more = random.Between(1, prompt ? scene.prompt : 40);
      Append(*story, std::min(room, more), random.OneIn(scene.pieces ? 3 : 12));
      grew = true;
      if (scene.pieces && random.OneIn(8)) {
        const policies::Policy other = PolicyOf(scene, 0, random.OneIn(2) ? 0.25 : 0.5);
        ASSERT_TRUE(compactor_->SetPolicy(*story->sequence, other).ok());
      }
      if (scene.pieces && !forks.empty() && random.OneIn(2)) {
        const auto& fork = random.Pick(forks);
        const std::uint64_t tokens = *fork->TokensOfLayer(0);
        if (random.OneIn(2)) {
          const absl::Status cut = compactor_->Truncate(*fork, random.Between(tokens / 2, tokens));
          EXPECT_TRUE(cut.ok() || absl::IsAborted(cut)) << cut;
        } else {
          compactor_->Compress(fork, {0, 1, true}, [&](absl::Status) { told.fetch_add(1); });
          ++asked;
        }
      }
      if (random.OneIn(10)) {
        const auto fork = compactor_->Fork(*story->sequence, [&] {
          return world_.tenant().Fork(*session, story->sequence->id());
        });
        ASSERT_TRUE(fork.ok()) << fork.status();
        compactor_->Compress(*fork, {0, 1, true}, [&](absl::Status) { told.fetch_add(1); });
        ++asked;
        forks.push_back(*fork);
        if (forks.size() > 3) {
          ASSERT_TRUE(world_.tenant().FreeSequence(forks.front()->id()).ok());
          forks.erase(forks.begin());
        }
      }
      // Readers keep pace.
      while (!stop.load() && reads_.load() < story->tokens.load() / scene.tokens_per_read) {
        std::this_thread::yield();
      }
    }
  }
  // On any machine, everything is sealed and read in the end.
  for (const std::unique_ptr<Story>& story : stories_) {
    compactor_->Compress(story->sequence, {0, 1, true}, [&](absl::Status) { told.fetch_add(1); });
    ++asked;
  }
  while (!stop.load() && (told.load() < asked || packed_.load() == 0)) std::this_thread::yield();
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
  scheduler_.reset();  // drops waiting jobs
  for (const std::string& each : wrong) EXPECT_EQ(each, "");
  EXPECT_EQ(told.load(), asked);
  EXPECT_GT(packed_.load(), 0u);
  std::printf("%llu reads, %llu packed segments, %d forks\n",
              static_cast<unsigned long long>(reads_.load()),
              static_cast<unsigned long long>(packed_.load()), asked);
  for (const std::unique_ptr<Story>& story : stories_) {
    const absl::StatusOr<cache::SequenceView> view =
        cache::ReadSequence(world_.tenant(), *story->sequence);
    ASSERT_TRUE(view.ok());
    EXPECT_EQ(Differs(*view, *model_, story->stamps), "");
  }
  for (std::unique_ptr<Story>& story : stories_) story.reset();
  forks.clear();
  world_.tenant().EndSession(session->id());
  world_.ExpectBaseline();
}

TEST_F(CompactionConcurrency, EveryReadIsAStateThatWas) { Grow(kWhole); }
TEST_F(CompactionConcurrency, EveryReadIsAStateThatWasWhileSealsGoOn) { Grow(kPieces); }

// A sequence is sealed while readers attend over it all the time: by a Compress call, at a prompt's
// end, or while decoding. In every other round it has a sealed segment, tiles encoded with its
// strategy, and dense rows after them, all of which are swapped at once.
class Swap : public CompactionConcurrency {
 protected:
  // What triggers the seal.
  enum class Cause { kAsked, kAskedBehindASegment, kPromptsEnd, kDecoding };
  static constexpr int kCauses = 4;
  // What a reader resolved: different segments mean a different state.
  using State = std::vector<const std::uint64_t*>;
  using Floats = std::vector<float>;
  struct Round {
    std::shared_ptr<cache::Sequence> sequence;
    std::vector<std::uint16_t> query;
    std::vector<State> before_state;  // per lane
    std::vector<Floats> before;       // the attention over it
    // Per lane, the different results of a reader, in order.
    std::array<std::vector<std::vector<Floats>>, kReaders> seen;
  };
  // Reads by the state of the lane at their start and at their end.
  struct Counts {
    std::atomic<std::uint64_t> before{0};
    std::atomic<std::uint64_t> across{0};
    std::atomic<std::uint64_t> after{0};
  };

  static State StateOf(const cache::SequenceView& view, const cache::SequenceView::LaneOf& lane) {
    State state;
    for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
      state.push_back(view.segments[lane.first_segment + s].tile_offsets);
    }
    return state;
  }
  Floats Output(const cache::SequenceView& view, const cache::SequenceView::LaneOf& lane,
                const std::vector<std::uint16_t>& query) {
    const kernels::LaneView seen = {.segments = view.segments.data() + lane.first_segment,
                                    .segment_count = lane.resolved.segments};
    Floats output(query.size());
    const kernels::AttendItem item = {.lane = &seen,
                                      .kv_head = lane.kv_head,
                                      .first_query_position = lane.resolved.entries,
                                      .query = query.data(),
                                      .output = output.data()};
    const kernels::AttendBatch batch = {.geometry = model_->geometry(lane.layer),
                                        .items = {&item, 1}};
    kernels::AlignedBytes workspace(kernels::AttendWorkspaceBytes(batch));
    kernels::InlineExecutor executor;
    const kernels::AttendResult result =
        kernels::Attend(cache::ReferenceKernels(), batch, workspace, executor);
    EXPECT_EQ(result.status, kernels::AttendStatus::kOk);
    return output;
  }

  std::string ReadLane(Round& round, int reader, shm::Word& slot, std::size_t index) {
    const std::uint64_t pin = shm::Pin(slot, world_.tenant().epochs().epoch());
    const auto view = cache::ReadSequence(world_.tenant(), *round.sequence);
    if (!view.ok()) return view.status().ToString();
    const bool old = StateOf(*view, view->lanes[index]) == round.before_state[index];
    Floats output = Output(*view, view->lanes[index], round.query);
    const auto now = cache::ReadSequence(world_.tenant(), *round.sequence);
    if (!now.ok()) return now.status().ToString();
    const bool still_old = StateOf(*now, now->lanes[index]) == round.before_state[index];
    if (!shm::Unpin(slot, pin)) return "revoked";
    (!old ? counts_.after : still_old ? counts_.before : counts_.across).fetch_add(1);
    reads_.fetch_add(1);
    std::vector<Floats>& seen = round.seen[reader][index];
    if (old && output != round.before[index]) return "the old segments give something else";
    if (seen.empty() || seen.back() != output) seen.push_back(std::move(output));
    return seen.size() <= 2 ? "" : "a third state: a mixture";
  }

  // Appends a prompt. In every other round, after its seal, appends tokens that its strategy does
  // not fit: they are encoded with it provisionally until they get their own.
  void Grow(Round& round, TestRandom& random, Cause cause) {
    const bool behind_a_segment =
        cause == Cause::kAskedBehindASegment || cause == Cause::kPromptsEnd;
    policies::Policy policy = SmallMosaic();
    if (cause != Cause::kDecoding) policy.mosaic->segments.min_tokens = 256;
    ASSERT_TRUE(compactor_->SetPolicy(*round.sequence, policy).ok());
    std::uint64_t held = 0;
    const auto append = [&](std::uint64_t tokens) {
      ++subspace_;
      const Stamps stamps = DrawTokens(tokens, subspace_);
      const auto appended = round.sequence->Append({0, model_->layers(), held, tokens},
                                                   DrawnRows(model_->layout(), stamps));
      ASSERT_TRUE(appended.ok()) << appended.status();
      held += tokens;
    };
    if (behind_a_segment) {
      ASSERT_NO_FATAL_FAILURE(append(random.Between(150, 250)));
      CompressAndWait(round);
      ASSERT_TRUE(round.sequence->Form().front().shape.packed()) << "there is no strategy";
    }
    ASSERT_NO_FATAL_FAILURE(append(random.Between(100, 200)));
    if (!behind_a_segment) return;
    compactor_->TailsMoved(round.sequence);
    const auto waiting = [&] {
      std::uint64_t entries = 0;
      for (const cache::SegmentRun& run : round.sequence->Form()) {
        if (run.provisional) entries += run.entries;
      }
      return entries;
    };
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(5);
    while (waiting() < model_->lanes() * 96) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "no tile was encoded as before";
      std::this_thread::yield();
    }
    WaitUntilIdle();
  }
  void WaitUntilIdle() {
    const auto busy = [&] {
      const Scheduler::Load load = scheduler_->load();
      const auto sum = [](const Scheduler::Load::ByPriority& jobs) {
        return std::accumulate(jobs.begin(), jobs.end(), std::uint64_t{0});
      };
      return sum(load.queued) + sum(load.running) != 0;
    };
    while (busy()) std::this_thread::yield();
  }
  void Seal(Round& round, Cause cause) {
    if (cause == Cause::kPromptsEnd) {
      compactor_->Appended(round.sequence, {.layers = model_->layers(),
                                            .end_of_prompt = true,
                                            .until = *round.sequence->TokensOfLayer(0)});
      WaitUntilIdle();
    } else if (cause == Cause::kDecoding) {
      // As if the last tile had just arrived. Without a previous strategy it stays dense until
      // then.
      compactor_->TailsMoved(round.sequence);
      WaitUntilIdle();
    } else {
      CompressAndWait(round);
    }
  }
  void CompressAndWait(Round& round) {
    std::atomic<bool> done{false};
    compactor_->Compress(round.sequence, {0, model_->layers(), true}, [&](absl::Status status) {
      EXPECT_TRUE(status.ok()) << status;
      done.store(true);
    });
    while (!done.load()) std::this_thread::yield();
  }

  // Runs readers from before the swap until after it.
  void SwapWhileReading(Round& round, Cause cause, shm::ControlPage& page) {
    std::atomic<bool> stop{false};
    std::atomic<bool> failed{false};
    std::array<std::string, kReaders> wrong;
    std::vector<std::thread> threads;
    for (int i = 0; i < kReaders; ++i) {
      threads.emplace_back([&, i] {
        for (std::size_t index = 0; !stop.load() && wrong[i].empty(); ++index) {
          wrong[i] = ReadLane(round, i, page.readers[i].word, index % model_->lanes());
        }
        if (!wrong[i].empty()) failed.store(true);
      });
    }
    const auto wait_for_reads = [&](std::uint64_t more) {
      const std::uint64_t enough = reads_.load() + more;
      while (reads_.load() < enough && !failed.load()) std::this_thread::yield();
    };
    wait_for_reads(4);
    Seal(round, cause);
    wait_for_reads(4);
    stop.store(true);
    for (std::thread& thread : threads) thread.join();
    for (const std::string& each : wrong) EXPECT_EQ(each, "");
  }

  // Every observed state is the old or the new one, and no reader sees the old one again after the
  // new one.
  void Check(const Round& round) {
    const auto view = cache::ReadSequence(world_.tenant(), *round.sequence);
    ASSERT_TRUE(view.ok());
    for (std::size_t lane = 0; lane < view->lanes.size(); ++lane) {
      const Floats after = Output(*view, view->lanes[lane], round.query);
      EXPECT_NE(StateOf(*view, view->lanes[lane]), round.before_state[lane]) << "nothing happened";
      EXPECT_NE(after, round.before[lane]) << "the two states cannot be told apart";
      for (const auto& reader : round.seen) {
        const std::vector<Floats>& seen = reader[lane];
        if (seen.empty()) continue;
        EXPECT_TRUE(seen.front() == round.before[lane] || seen.front() == after) << "a mixture";
        if (seen.size() > 1) {
          EXPECT_EQ(seen.front(), round.before[lane]);
          EXPECT_EQ(seen.back(), after);
        }
      }
    }
  }

  Counts counts_;
  std::uint64_t subspace_ = 0;
};

TEST_F(Swap, EveryReadFallsBeforeItOrAfterItOrAcross) {
  constexpr int kMinRounds = 16;
  constexpr int kMaxRounds = 1000;
  TestRandom random;
  const auto session = world_.OpenSession();
  int rounds = 0;
  const auto all_kinds = [&] {
    return counts_.before.load() > 0 && counts_.across.load() > 0 && counts_.after.load() > 0;
  };
  for (; rounds < kMaxRounds && (rounds < kMinRounds || !all_kinds()); ++rounds) {
    Round round = {.sequence = world_.NewSequence(*session, *model_)};
    const auto cause = static_cast<Cause>(rounds % kCauses);
    ASSERT_NO_FATAL_FAILURE(Grow(round, random, cause));
    round.query.resize(model_->geometry(0).query_heads * model_->geometry(0).head_dim);
    for (std::uint16_t& element : round.query) {
      element = kernels::FloatToBf16(Drawn(random.Bits() >> 8));
    }
    {
      const auto view = cache::ReadSequence(world_.tenant(), *round.sequence);
      ASSERT_TRUE(view.ok());
      for (const auto& lane : view->lanes) {
        round.before_state.push_back(StateOf(*view, lane));
        round.before.push_back(Output(*view, lane, round.query));
      }
    }
    for (auto& seen : round.seen) seen.resize(model_->lanes());
    ASSERT_NO_FATAL_FAILURE(SwapWhileReading(round, cause, session->control()->page()));
    ASSERT_NO_FATAL_FAILURE(Check(round));
    ASSERT_FALSE(HasFailure());
    ASSERT_TRUE(world_.tenant().FreeSequence(round.sequence->id()).ok());
    world_.tenant().epochs().Collect();  // and the raw copies of what was replaced
  }
  scheduler_.reset();
  std::printf("%d swaps of %u lanes: reads before %llu, across %llu, after %llu\n", rounds,
              model_->lanes(), static_cast<unsigned long long>(counts_.before.load()),
              static_cast<unsigned long long>(counts_.across.load()),
              static_cast<unsigned long long>(counts_.after.load()));
  EXPECT_TRUE(all_kinds());
  world_.tenant().EndSession(session->id());
  world_.ExpectBaseline();
}

}  // namespace
}  // namespace tessera::compaction
