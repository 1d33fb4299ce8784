// Readers resolve and read all the time, while a worker decodes, appends, truncates, forks and
// frees, and the daemon absorbs and collects. Every read must equal a state that the sequence has
// had, whatever form its segments have, and be no older than the state that was complete when the
// reader pinned.
//
// All threads use one mapping of each memory, so that ThreadSanitizer sees every access.

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

constexpr std::uint32_t kMaxEras = 4096;
constexpr std::uint64_t kMaxTokens = 260;
constexpr int kOperations = 2500;
constexpr std::uint64_t kReads = 6000;
constexpr int kReaders = 2;

// A row encodes its token, its era (the number of truncations before it was written) and its lane.
// Twelve bits of each 16-bit element are used, so that every element is finite.
struct Label {
  std::uint64_t token;
  std::uint64_t era;
  std::uint64_t lane;
};
std::uint64_t Encode(const Label& label) {
  const std::uint64_t bits = label.token | label.era << 24 | label.lane << 40;
  std::uint64_t word = 0;
  for (int i = 0; i < 4; ++i) word |= (bits >> (12 * i) & 0xfff) << (16 * i);
  return word;
}
Label Decode(std::uint64_t word) {
  std::uint64_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= (word >> (16 * i) & 0xfff) << (12 * i);
  return {bits & 0xffffff, bits >> 24 & 0xffff, bits >> 40};
}
void Fill(std::byte* row, std::size_t bytes, const Label& label) {
  const std::uint64_t word = Encode(label);
  for (std::size_t at = 0; at < bytes; at += 8) std::memcpy(row + at, &word, 8);
}
// nullopt if the row is torn.
std::optional<Label> Read(const std::byte* row, std::size_t bytes) {
  std::uint64_t first;
  std::memcpy(&first, row, 8);
  for (std::size_t at = 8; at < bytes; at += 8) {
    std::uint64_t word;
    std::memcpy(&word, row + at, 8);
    if (word != first) return std::nullopt;
  }
  return Decode(first);
}
std::uint64_t LaneLabel(std::uint32_t layer, RowKind kind) {
  return 2 * layer + (kind == RowKind::kValue ? 1 : 0) + 1;
}

class LabelledRows final : public MadeRows {
 public:
  LabelledRows(const shm::LaneLayout& layout, std::uint64_t first_token, std::uint64_t era)
      : MadeRows(layout), first_(first_token), era_(era) {}
  void Make(std::uint32_t layer, std::uint32_t, std::uint64_t first, std::uint32_t count,
            std::byte* key, std::byte* value) const override {
    for (std::uint32_t i = 0; i < count; ++i) {
      const std::uint64_t token = first_ + first + i;
      Fill(key + i * 128, 128, {token, era_, LaneLabel(layer, RowKind::kKey)});
      Fill(value + i * 128, 128, {token, era_, LaneLabel(layer, RowKind::kValue)});
    }
  }

 private:
  const std::uint64_t first_;
  const std::uint64_t era_;
};

// A sequence and its past states: era e began with a cut to cuts[e] tokens.
struct History {
  std::shared_ptr<Sequence> sequence;
  std::array<std::atomic<std::uint64_t>, kMaxEras> cuts{};
  std::atomic<std::uint64_t> eras{1};      // started eras
  std::atomic<std::uint64_t> complete{0};  // era << 32 | tokens after the last completed operation

  // The era of a token in the state whose newest era is `last`.
  std::uint64_t EraOf(std::uint64_t token, std::uint64_t last) const {
    std::uint64_t era = last;
    while (token < cuts[era].load(std::memory_order_relaxed)) --era;
    return era;
  }
};

class Concurrency : public testing::Test {
 protected:
  // ---- The worker

  // The worker's rings, through the daemon's own mapping.
  std::byte* Writable(const Sequence& sequence) {
    const TailRegion& region = sequence.tail()->region();
    std::byte* base = region.data() - region.offset();
    EXPECT_EQ(::mprotect(base, region.extent_bytes(), PROT_READ | PROT_WRITE), 0);
    return region.data();
  }
  void Open() {
    const auto places = world_.tenant().OpenTails(*session_, {now_->sequence->id()});
    ASSERT_TRUE(places.ok()) << places.status();
    tail_ = places->front();
    region_ = Writable(*now_->sequence);
  }
  void Decode(std::uint64_t tokens) {
    const auto* block = reinterpret_cast<const shm::SequenceBlock*>(
        world_.tenant().directory().mapped().base + now_->sequence->directory_offset());
    for (; tokens > 0; --tokens) {
      // Waits for ring space like a worker; the other threads free it.
      while (tokens_ >= block->ring_start.load() + model_->layout().ring_capacity()) {
        std::this_thread::yield();
      }
      for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
        const shm::TailRing ring = model_->layout().ring(region_, layer, 0);
        Fill(ring.Key(tokens_), 128, {tokens_, era(), LaneLabel(layer, RowKind::kKey)});
        Fill(ring.Value(tokens_), 128, {tokens_, era(), LaneLabel(layer, RowKind::kValue)});
      }
      ++tokens_;
      session_->control()->page().commits[tail_->tail.commit_slot].store(
          shm::CommitWord::Pack(tail_->tail.generation, tokens_), std::memory_order_release);
    }
  }
  void Append(std::uint64_t tokens) {
    ASSERT_TRUE(now_->sequence
                    ->Append({0, model_->layers(), tokens_, tokens},
                             LabelledRows(model_->layout(), tokens_, era()))
                    .ok());
    tokens_ += tokens;
    tail_.reset();
  }
  void Truncate(std::uint64_t tokens) {
    const std::uint64_t next = era() + 1;
    now_->cuts[next].store(tokens);
    now_->eras.store(next + 1);
    ASSERT_TRUE(now_->sequence->Truncate(tokens).ok());
    tokens_ = tokens;
    tail_.reset();
  }
  void ForkAndLook() {
    const auto child = world_.tenant().Fork(*session_, now_->sequence->id());
    ASSERT_TRUE(child.ok()) << child.status();
    const Tenant::Reader pinned(world_.tenant());
    const SequenceView view = *ReadSequence(world_.tenant(), **child);
    for (const SequenceView::LaneOf& lane : view.lanes) {
      std::uint64_t tokens = 0;
      ASSERT_EQ(Judge(*now_, view, lane, &tokens), "");
      ASSERT_EQ(tokens, tokens_);
    }
    ASSERT_TRUE(world_.tenant().FreeSequence((*child)->id()).ok());
  }
  void Replace() {
    auto history = std::make_shared<History>();
    history->sequence = world_.NewSequence(*session_, *model_);
    std::shared_ptr<History> old;
    {
      MutexLock lock(mutex_);
      old = std::exchange(shown_, history);
    }
    now_ = history;
    tokens_ = 0;
    tail_.reset();
    if (old == nullptr) return;
    EXPECT_TRUE(world_.tenant().FreeSequence(old->sequence->id()).ok());
  }
  std::uint64_t era() const { return now_->eras.load() - 1; }
  void Done() { now_->complete.store(era() << 32 | tokens_); }

  void Work(TestRandom& random) {
    if (now_ == nullptr || era() + 2 >= kMaxEras || random.OneIn(200)) {
      Replace();
    } else if (tokens_ > kMaxTokens) {
      Truncate(random.Below(tokens_));
    } else {
      switch (random.Below(12)) {
        case 0:
        case 1:
          Append(random.Between(1, 40));
          break;
        case 2:
          Truncate(random.Between(0, tokens_));
          break;
        case 3:
          ForkAndLook();
          break;
        case 4:
          ASSERT_TRUE(world_.tenant().CloseTails(*session_, {now_->sequence->id()}).ok());
          tail_.reset();
          break;
        default:
          if (!tail_.has_value()) Open();
          Decode(random.Between(1, 50));
      }
    }
    Done();
  }

  // ---- Readers

  // Returns an empty string if the lane equals one of the sequence's states.
  static std::string Judge(const History& history, const SequenceView& view,
                           const SequenceView::LaneOf& lane, std::uint64_t* tokens) {
    std::vector<Label> labels;
    const auto take = [&](const std::byte* key, const std::byte* value) {
      const std::optional<Label> k = cache::Read(key, 128);
      const std::optional<Label> v = cache::Read(value, 128);
      if (!k.has_value() || !v.has_value()) return false;
      labels.push_back(*k);
      return k->lane == LaneLabel(lane.layer, RowKind::kKey) &&
             v->lane == LaneLabel(lane.layer, RowKind::kValue) && k->token == v->token &&
             k->era == v->era && k->token == labels.size() - 1;
    };
    for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
      const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
      for (std::uint32_t e = 0; e < segment.entries; ++e) {
        const std::byte* at = segment.arena + segment.tile_offsets[e / kernels::kTileEntries];
        const std::uint32_t row = e % kernels::kTileEntries;
        // Packed rows that keep every channel have the same bytes as dense ones, at another place.
        const kernels::TileLayout rows = kernels::LayoutOf(segment.shape);
        if (!take(at + rows.key_data + row * rows.key_row.data,
                  at + rows.value_data + row * rows.value_row.data)) {
          return "a row of a segment is torn or another's";
        }
      }
    }
    if (labels.size() != lane.resolved.tail_start) return "tail_start is wrong";
    if (view.tail != nullptr && view.committed > labels.size()) {
      const shm::TailRing ring =
          history.sequence->model().layout().ring(view.tail->region().data(), lane.layer, 0);
      if (view.committed - labels.size() > ring.capacity()) return "the tail is too long";
      while (labels.size() < view.committed) {
        const std::uint64_t token = labels.size();
        if (!take(ring.Key(token), ring.Value(token))) return "a row of the tail is another's";
      }
    }
    *tokens = labels.size();
    if (labels.empty()) return "";
    const std::uint64_t last = labels.back().era;
    for (std::uint64_t token = 0; token < labels.size(); ++token) {
      if (labels[token].era != history.EraOf(token, last)) {
        return "token " + std::to_string(token) + " is of era " +
               std::to_string(labels[token].era) + " in a state of era " + std::to_string(last);
      }
    }
    return "";
  }

  // One read. The version shows whether tail and lanes belong together.
  std::string ReadOnce(shm::Word& slot) {
    std::shared_ptr<History> history;
    {
      MutexLock lock(mutex_);
      history = shown_;
    }
    if (history == nullptr) return "";
    const std::uint64_t complete = history->complete.load();
    const std::uint64_t pin = shm::Pin(slot, world_.tenant().epochs().epoch());
    std::string wrong;
    const auto* block = reinterpret_cast<const shm::SequenceBlock*>(
        world_.tenant().directory().mapped().base + history->sequence->directory_offset());
    for (;;) {
      const std::uint64_t version = block->version.load();
      const absl::StatusOr<SequenceView> view =
          ReadSequence(world_.tenant(), *history->sequence, [] { std::this_thread::yield(); });
      if (!view.ok()) {
        if (view.status().code() != absl::StatusCode::kNotFound) wrong = view.status().ToString();
        break;
      }
      if (block->version.load() != version) {
        retries_.fetch_add(1, std::memory_order_relaxed);
        continue;
      }
      for (const SequenceView::LaneOf& lane : view->lanes) {
        std::uint64_t tokens = 0;
        if (wrong.empty()) wrong = Judge(*history, *view, lane, &tokens);
        const bool cut_since = history->eras.load() - 1 != complete >> 32;
        if (wrong.empty() && !cut_since && tokens < (complete & 0xffffffff) &&
            block->sequence_id.load() != 0) {
          wrong = "shows " + std::to_string(tokens) + " tokens where " +
                  std::to_string(complete & 0xffffffff) + " were complete before";
        }
      }
      reads_.fetch_add(1, std::memory_order_relaxed);
      break;
    }
    if (!shm::Unpin(slot, pin)) wrong = "revoked";
    return wrong;
  }

  // Packs into a form with equal rows, with or without a bitmap.
  void PackOnce(bool dense) {
    std::shared_ptr<History> history;
    {
      MutexLock lock(mutex_);
      history = shown_;
    }
    if (history == nullptr) return;
    kernels::TileShape shape = kernels::DenseShape(64, kernels::ElementType::kBf16);
    if (!dense) shape.format = kernels::TileFormat::kPackedBf16;
    shape.summary = kernels::Summary::kMinMax;
    shape.block = 8;
    const absl::StatusOr<PackOutcome> outcome =
        history->sequence->Pack({.shapes = {shape, shape}}, [] { return absl::OkStatus(); });
    if (outcome.ok()) packed_.fetch_add(outcome->entries_packed);
    EXPECT_TRUE(outcome.ok() || outcome.status().code() == absl::StatusCode::kNotFound)
        << outcome.status();
  }

  World world_{World::Options{.ring_tiles = 4}};
  std::shared_ptr<const Model> model_ = world_.Register(SmallModel("m", 2, 1));
  std::shared_ptr<SessionState> session_ = world_.OpenSession();
  std::shared_ptr<History> now_;
  std::uint64_t tokens_ = 0;
  std::optional<Tenant::TailPlace> tail_;
  std::byte* region_ = nullptr;
  std::atomic<std::uint64_t> reads_{0};
  std::atomic<std::uint64_t> retries_{0};
  std::atomic<std::uint64_t> packed_{0};
  std::atomic<int> wrong_{0};
  Mutex mutex_;
  std::shared_ptr<History> shown_ TESSERA_GUARDED_BY(mutex_);
};

TEST_F(Concurrency, EveryReadIsAStateThatWas) {
  TestRandom random;
  std::atomic<bool> stop{false};
  std::array<std::string, kReaders> wrong;
  std::vector<std::thread> threads;
  const auto reading_session = world_.OpenSession();
  for (int i = 0; i < kReaders; ++i) {
    threads.emplace_back([&, i] {
      shm::Word& slot = reading_session->control()->page().readers[i].word;
      while (!stop.load() && wrong[i].empty()) {
        wrong[i] = ReadOnce(slot);
        if (!wrong[i].empty()) wrong_.fetch_add(1);
        std::this_thread::yield();
      }
    });
  }
  threads.emplace_back([&] {  // absorbs and collects like the daemon's threads
    while (!stop.load()) {
      for (const std::shared_ptr<Sequence>& sequence : session_->Decoding()) {
        EXPECT_TRUE(sequence->AbsorbFullTiles().ok());
      }
      world_.tenant().epochs().Collect();
      std::this_thread::yield();
    }
  });
  threads.emplace_back([&] {
    for (bool dense = false; !stop.load(); dense = !dense) {
      PackOnce(dense);
      std::this_thread::yield();
    }
  });
  const auto all_right = [&] {
    return !HasFatalFailure() && wrong_.load(std::memory_order_relaxed) == 0;
  };
  for (int i = 0; all_right() && (i < kOperations || reads_.load() < kReads); ++i) {
    Work(random);
    std::this_thread::yield();
  }
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
  for (const std::string& each : wrong) EXPECT_EQ(each, "");
  std::printf("%llu reads, %llu retries, %llu entries packed\n",
              static_cast<unsigned long long>(reads_.load()),
              static_cast<unsigned long long>(retries_.load()),
              static_cast<unsigned long long>(packed_.load()));
  EXPECT_GT(packed_.load(), 0u);
  {
    MutexLock lock(mutex_);
    shown_.reset();
  }
  now_.reset();
  tail_.reset();
  world_.tenant().EndSession(session_->id());
  world_.tenant().EndSession(reading_session->id());
  session_.reset();
  world_.ExpectBaseline();
}

// Many workers at once, each with its own sequences and forks of the others', while sessions come
// and go. They do not disturb each other, and nothing is left at the end.
TEST_F(Concurrency, SessionsComeAndGoBesideEachOther) {
  const std::uint64_t seed = TestSeed();
  const auto common = world_.NewSequence(*session_, *model_);
  const std::vector<std::uint64_t> stamps = NewStamps(100);
  ASSERT_TRUE(AppendAll(*common, 0, stamps).ok());
  std::vector<std::thread> threads;
  std::array<std::string, 3> wrong;
  for (std::uint64_t t = 0; t < wrong.size(); ++t) {
    threads.emplace_back([&, t] {
      TestRandom random(seed + t);
      for (int round = 0; round < 60 && wrong[t].empty(); ++round) {
        TestWorker worker(world_.tenant(), world_.OpenSession());
        const auto fork = world_.tenant().Fork(worker.session(), common->id());
        if (!fork.ok()) {
          wrong[t] = fork.status().ToString();
          break;
        }
        std::vector<std::uint64_t> mine = stamps;
        const absl::StatusOr<TestWorker::OpenTail> tail = worker.Open(**fork);
        for (std::uint64_t stamp : NewStamps(random.Between(1, 100))) {
          worker.Write(**fork, *tail, mine.size(), stamp);
          mine.push_back(stamp);
        }
        worker.Commit(*tail, mine.size());
        (void)(*fork)->AbsorbFullTiles();
        {
          const Tenant::Reader pinned(world_.tenant());
          const absl::StatusOr<SequenceView> view = ReadSequence(world_.tenant(), **fork);
          wrong[t] = view.ok() ? Differs(*view, *model_, {mine, mine}) : view.status().ToString();
        }
        if (random.OneIn(2)) (void)world_.tenant().FreeSequence((*fork)->id());
        world_.tenant().epochs().Collect();
        world_.tenant().EndSession(worker.session().id());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& each : wrong) EXPECT_EQ(each, "");
  EXPECT_EQ(world_.tenant().sequence_count(), 1u);
  world_.Validate();
}

}  // namespace
}  // namespace tessera::cache
