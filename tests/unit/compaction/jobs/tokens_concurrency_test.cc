// Readers resolve and attend all the time while a worker appends, cuts and forks, and the daemon's
// threads drop entries and gather the rest. A reader sees a state that a policy has produced, every
// row belongs to its position, and the state does not change while it attends.
//
// All threads use one mapping of each memory, so that ThreadSanitizer sees every access.

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/policies/grammar/parse.h"
#include "gtest/gtest.h"
#include "kernels/dispatch/attend.h"
#include "kernels/strategy/aligned_bytes.h"
#include "tests/unit/compaction/compaction_fixture.h"

namespace tessera::compaction {
namespace {

using kernels::kTileEntries;

constexpr int kTokenReaders = 2;
constexpr std::uint64_t kMost = 1200;  // tokens per sequence
constexpr std::uint64_t kSink = 3;
constexpr std::uint64_t kRecent = 70;

const char* const kPolicies[] = {
    "streaming:sink=3,recent=70",
    "streaming:sink=3,recent=70+quest",
    "streaming:sink=3,recent=70+mosaickv:sinks=0,recent=0,min_segment=32,segment=64,select=0",
    "lacache:budget=90,span=1,sink=3",
};
constexpr std::size_t kTokenSequences = std::size(kPolicies);

class TokensConcurrency : public testing::Test {
 protected:
  // A token always has the same rows, even after a cut.
  struct Story {
    std::shared_ptr<cache::Sequence> sequence;
    Stamps stamps;
    bool streams = false;
  };

  std::string ReadOnce(TestRandom& random, shm::Word& slot) {
    const Story& story = stories_[random.Below(kTokenSequences)];
    const std::uint64_t pin = shm::Pin(slot, world_.tenant().epochs().epoch());
    std::string wrong;
    const absl::StatusOr<cache::SequenceView> view =
        cache::ReadSequence(world_.tenant(), *story.sequence);
    if (!view.ok()) wrong = view.status().ToString();
    for (std::size_t i = 0; wrong.empty() && i < view->lanes.size(); ++i) {
      wrong = Judge(random, story, *view, view->lanes[i]);
    }
    reads_.fetch_add(1, std::memory_order_relaxed);
    if (!shm::Unpin(slot, pin) && wrong.empty()) wrong = "revoked";
    return wrong;
  }

  std::string Judge(TestRandom& random, const Story& story, const cache::SequenceView& view,
                    const cache::SequenceView::LaneOf& lane) {
    const kernels::DenseTile dense = model_->layout().tile(lane.layer);
    std::vector<std::uint64_t> positions;
    std::byte key[256], value[256];
    for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
      const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
      const kernels::TileLayout at = kernels::LayoutOf(segment.shape);
      for (std::uint32_t e = 0; e < segment.entries; ++e) {
        const std::byte* const tile = segment.arena + segment.tile_offsets[e / kTileEntries];
        const std::uint32_t row = e % kTileEntries;
        std::uint32_t behind = e;
        if (segment.shape.positions) std::memcpy(&behind, tile + at.positions + 4 * row, 4);
        const std::uint64_t position = segment.first_position + behind;
        if (!positions.empty() && position <= positions.back()) return "positions do not rise";
        positions.push_back(position);
        const std::uint64_t stamp = story.stamps[position];
        DrawRow(stamp, {lane.layer, lane.kv_head, cache::RowKind::kKey}, dense, key);
        DrawRow(stamp, {lane.layer, lane.kv_head, cache::RowKind::kValue}, dense, value);
        kernels::TileShape bare = segment.shape;
        bare.positions = false;
        const std::vector<std::byte> one = cache::TileEncoder(bare, segment.rotation, dense.type)
                                               .Tile(key, value, dense.row_bytes(), 1);
        const kernels::TileLayout made = kernels::LayoutOf(bare);
        const auto same = [&](std::uint32_t array, std::uint32_t from, std::uint32_t bytes) {
          return std::memcmp(tile + array + row * bytes, one.data() + from, bytes) == 0;
        };
        if (!same(at.key_bits, made.key_bits, at.key_row.bits) ||
            !same(at.key_data, made.key_data, at.key_row.data) ||
            !same(at.value_bits, made.value_bits, at.value_row.bits) ||
            !same(at.value_data, made.value_data, at.value_row.data)) {
          return "entry " + std::to_string(positions.size() - 1) + " is not token " +
                 std::to_string(position);
        }
      }
    }
    if (positions.size() != lane.resolved.entries) return "counts other entries";
    if (positions.empty()) return "";
    dropped_.fetch_add(positions.size() < lane.resolved.tail_start ? 1 : 0);
    for (std::uint64_t i = 0; i < std::min<std::uint64_t>(kSink, positions.size()); ++i) {
      if (positions[i] != i) return "a sink has gone";
    }
    return Attends(random, view, lane);
  }

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
                                        .first_query_position = lane.resolved.tail_start,
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

  void Append(Story& story, std::uint64_t& held, std::uint64_t tokens) {
    const Stamps stamps(story.stamps.begin() + static_cast<std::ptrdiff_t>(held),
                        story.stamps.begin() + static_cast<std::ptrdiff_t>(held + tokens));
    const std::uint32_t layers = model_->layers();
    const auto now =
        story.sequence->Append({0, layers, held, tokens}, DrawnRows(model_->layout(), stamps));
    ASSERT_TRUE(now.ok()) << now.status();
    held += tokens;
    compactor_->TailsMoved(story.sequence);
  }
  void Compress(const std::shared_ptr<cache::Sequence>& sequence) {
    asked_.fetch_add(1);
    compactor_->Compress(sequence, {0, model_->layers(), true}, [this](absl::Status status) {
      // A fork may be freed before or during its choice.
      if (!status.ok() && !absl::IsAborted(status) && !absl::IsCancelled(status) &&
          !absl::IsNotFound(status)) {
        ADD_FAILURE() << status;
      }
      told_.fetch_add(1);
    });
  }
  void TearDown() override { std::fclose(log_); }

  std::FILE* log_ = std::tmpfile();
  Logger logger_{LogOptions{.stream = log_}};
  device::CpuDevice device_{cache::ReferenceKernels()};
  cache::World world_{cache::World::Options{.ring_tiles = 4, .device = &device_}};
  std::shared_ptr<const cache::Model> model_ = world_.Register(cache::SmallModel("m", 2, 2));
  std::unique_ptr<ThreadScheduler> scheduler_ = *ThreadScheduler::Create({.threads = 3});
  std::unique_ptr<Compactor> compactor_ = std::make_unique<Compactor>(
      Compactor::Options{.scheduler = scheduler_.get(),
                         .logger = &logger_,
                         .clock = &world_.clock(),
                         .operations = &kernels::OperationsOf(kernels::BestImplementation())});
  std::array<Story, kTokenSequences> stories_;
  std::atomic<std::uint64_t> reads_{0};
  std::atomic<std::uint64_t> dropped_{0};
  std::atomic<int> asked_{0};
  std::atomic<int> told_{0};
};

TEST_F(TokensConcurrency, EveryReadIsAStateThatAPolicyLeaves) {
  const std::uint64_t seed = TestSeed();
  TestRandom random(seed);
  const auto session = world_.OpenSession();
  std::array<std::uint64_t, kTokenSequences> held{};
  for (std::size_t i = 0; i < kTokenSequences; ++i) {
    stories_[i].sequence = world_.NewSequence(*session, *model_);
    stories_[i].stamps = DrawTokens(kMost, i + 1);
    stories_[i].streams = i < 3;
    const absl::Status set =
        compactor_->SetPolicy(*stories_[i].sequence, *policies::ParsePolicy(kPolicies[i]));
    ASSERT_TRUE(set.ok()) << set;
  }
  std::atomic<bool> stop{false};
  std::array<std::string, kTokenReaders> wrong;
  std::vector<std::thread> threads;
  for (int i = 0; i < kTokenReaders; ++i) {
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
  for (bool grew = true; grew && !stop.load();) {
    grew = false;
    for (std::size_t i = 0; i < kTokenSequences; ++i) {
      Story& story = stories_[i];
      if (held[i] == kMost) continue;
      grew = true;
      Append(story, held[i], std::min<std::uint64_t>(kMost - held[i], random.Between(1, 60)));
      if (random.OneIn(3)) Compress(story.sequence);
      if (random.OneIn(12)) {
        const std::uint64_t to = held[i] - std::min<std::uint64_t>(held[i], random.Below(80));
        ASSERT_TRUE(compactor_->Truncate(*story.sequence, to).ok());
        held[i] = to;
      }
      if (random.OneIn(10)) {
        const auto fork = compactor_->Fork(
            *story.sequence, [&] { return world_.tenant().Fork(*session, story.sequence->id()); });
        ASSERT_TRUE(fork.ok()) << fork.status();
        Compress(*fork);
        forks.push_back(*fork);
        if (forks.size() > 3) {
          ASSERT_TRUE(world_.tenant().FreeSequence(forks.front()->id()).ok());
          forks.erase(forks.begin());
        }
      }
      // Readers keep pace.
      while (!stop.load() && reads_.load() < held[i] / 20) std::this_thread::yield();
    }
  }
  for (Story& story : stories_) Compress(story.sequence);
  while (!stop.load() && (told_.load() < asked_.load() || dropped_.load() == 0)) {
    std::this_thread::yield();
  }
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
  scheduler_.reset();  // drops waiting jobs
  for (const std::string& each : wrong) EXPECT_EQ(each, "");
  EXPECT_EQ(told_.load(), asked_.load());
  std::printf("%llu reads, %llu of them after a drop; %d compressed\n",
              static_cast<unsigned long long>(reads_.load()),
              static_cast<unsigned long long>(dropped_.load()), asked_.load());
  for (Story& story : stories_) {
    for (const auto& lane : story.sequence->Describe(true).lanes) {
      if (story.streams) {
        EXPECT_EQ(lane.entries, kSink + kRecent);
      } else {
        EXPECT_LE(lane.entries, 92u);
      }
    }
    story.sequence.reset();
  }
  forks.clear();
  world_.tenant().EndSession(session->id());
  world_.ExpectBaseline();
}

}  // namespace
}  // namespace tessera::compaction
