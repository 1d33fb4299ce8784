// Offloads and restores sequences all the time, while a worker appends, cuts and forks, and readers
// read. Every read must equal what was appended, and nothing is lost.
//
// All threads use one mapping of each memory, so that ThreadSanitizer sees every access.

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

using Stamps = std::vector<std::uint64_t>;
constexpr int kSequences = 3;
constexpr std::uint64_t kTokens = 1200;
constexpr int kReaders = 2;

class OffloadConcurrency : public testing::Test {
 protected:
  struct Known {
    std::shared_ptr<Sequence> sequence;
    Stamps stamps = NewStamps(kTokens);      // of every token it will ever hold
    std::atomic<std::uint64_t> complete{0};  // tokens appended and not cut again
  };

  // Returns an empty string if every lane has a prefix of the stamps of at least `least` tokens.
  // Lanes may differ in length: an append publishes them one after another, and the version last.
  std::string Look(Known& known, std::uint64_t least) {
    const auto stays = known.sequence->Restore();
    if (!stays.ok()) return stays.status().ToString();
    const Tenant::Reader pinned(world_.tenant());
    const shm::SequenceBlock& block = *reinterpret_cast<const shm::SequenceBlock*>(
        world_.tenant().directory().mapped().base + known.sequence->directory_offset());
    for (;;) {
      const std::uint64_t version = block.version.load();
      const absl::StatusOr<SequenceView> view = ReadSequence(world_.tenant(), *known.sequence);
      if (!view.ok()) return view.status().ToString();
      if (block.version.load() != version) continue;
      std::vector<Stamps> shown(model_->layers());
      for (const SequenceView::LaneOf& lane : view->lanes) {
        const std::uint64_t tokens = lane.resolved.tail_start;
        if (tokens < least) return "tokens are missing";
        if (tokens > known.stamps.size()) return "there are too many tokens";
        shown[lane.layer].assign(known.stamps.begin(),
                                 known.stamps.begin() + static_cast<std::ptrdiff_t>(tokens));
      }
      return Differs(*view, *model_, shown);
    }
  }

  World world_{World::Options{.ring_tiles = 2}};
  std::shared_ptr<SessionState> session_ = world_.OpenSession();
  std::shared_ptr<const Model> model_ = world_.Register(SmallModel("small", 2, 1));
  std::array<Known, kSequences> known_;
};

TEST_F(OffloadConcurrency, NothingIsLostOnTheWay) {
  for (Known& known : known_) known.sequence = world_.NewSequence(*session_, *model_);
  TestRandom random;
  std::atomic<bool> over{false};
  std::atomic<std::uint64_t> reads{0}, gone{0};
  std::vector<std::string> wrong(kReaders + 3);
  std::vector<std::thread> threads;
  for (int r = 0; r < kReaders; ++r) {
    threads.emplace_back([&, r, seed = random.Bits()] {
      TestRandom mine(seed);
      while (!over.load() && wrong[r].empty()) {
        Known& known = known_[mine.Below(kSequences)];
        wrong[r] = Look(known, known.complete.load());
        reads.fetch_add(1);
      }
    });
  }
  threads.emplace_back([&] {
    while (!over.load()) {
      for (Known& known : known_) {
        const absl::StatusOr<std::uint64_t> bytes = known.sequence->Offload({});
        if (!bytes.ok() && !absl::IsAborted(bytes.status())) {
          wrong[kReaders] = bytes.status().ToString();
        }
        gone.fetch_add(bytes.ok() && *bytes > 0);
      }
      world_.tenant().epochs().Collect();
      std::this_thread::yield();
    }
  });
  // Forks, which share the tiles and are freed again.
  threads.emplace_back([&, seed = random.Bits()] {
    TestRandom mine(seed);
    while (!over.load() && wrong[kReaders + 1].empty()) {
      Known& known = known_[mine.Below(kSequences)];
      const auto stays = known.sequence->Restore();
      const auto child = world_.tenant().Fork(*session_, known.sequence->id());
      if (!child.ok()) wrong[kReaders + 1] = child.status().ToString();
      if (child.ok()) (void)world_.tenant().FreeSequence((*child)->id());
      std::this_thread::yield();
    }
  });

  std::string& mine = wrong[kReaders + 2];
  for (bool more = true; more && mine.empty();) {
    more = false;
    for (Known& known : known_) {
      const std::uint64_t held = known.complete.load();
      const std::uint64_t count = std::min<std::uint64_t>(random.Between(1, 20), kTokens - held);
      if (count == 0) continue;
      more = true;
      const auto stays = known.sequence->Restore();
      ASSERT_TRUE(stays.ok()) << stays.status();
      const Stamps some(known.stamps.begin() + static_cast<std::ptrdiff_t>(held),
                        known.stamps.begin() + static_cast<std::ptrdiff_t>(held + count));
      const auto tokens = AppendAll(*known.sequence, held, some);
      if (!tokens.ok()) mine = tokens.status().ToString();
      known.complete.store(held + count);
    }
    std::this_thread::yield();
  }
  while (mine.empty() && (reads.load() < 200 || gone.load() < 20)) std::this_thread::yield();
  over.store(true);
  for (std::thread& thread : threads) thread.join();
  for (const std::string& what : wrong) EXPECT_EQ(what, "");
  for (Known& known : known_) EXPECT_EQ(Look(known, kTokens), "");
  std::printf("%llu reads, %llu times to the tier\n", static_cast<unsigned long long>(reads.load()),
              static_cast<unsigned long long>(gone.load()));
  for (Known& known : known_) known.sequence = nullptr;
  world_.tenant().EndSession(session_->id());
  session_ = nullptr;
  world_.ExpectBaseline();
}

}  // namespace
}  // namespace tessera::cache
