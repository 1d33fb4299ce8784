// The same calls leave the same entries, in the same forms and with the same bits, whenever
// background jobs run, and on however many threads.

#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"
#include "gtest/gtest.h"
#include "kernels/dispatch/implementation.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

const std::string kPlanes = "planes:book_rows=256,recent=64";
const std::string kMosaic =
    "mosaickv:sinks=0,recent=0,keep=0.25,group=1,loss_k=1,loss_v=1,min_segment=32,segment=64,"
    "select=0";

// When jobs run: between all calls, only when a caller waits, at random, or on threads.
struct Schedule {
  enum class Kind { kAtOnce, kLate, kRandom, kThreads } kind;
  int threads = 0;
};

class Schedules : public CompactorTest, public testing::WithParamInterface<std::string> {
 protected:
  Schedules() : CompactorTest(0, 256 << 20) {
    cache::ModelSpec spec = cache::SmallModel("schedules", 2, 2);
    spec.rope_theta = 10000;
    model_ = world_.Register(spec);
  }
  void TearDown() override {
    world_.tenant().memory().books->Drop(model_->id());
    CompactorTest::TearDown();
  }

  // Runs jobs as the schedule says, until it is destroyed.
  class Jobs {
   public:
    Jobs(Schedules& test, Schedule schedule) : test_(test), schedule_(schedule) {
      for (int i = 0; i < schedule.threads; ++i) {
        threads_.emplace_back([this] {
          while (!done_.load()) {
            if (!test_.scheduler_.RunNext().has_value()) std::this_thread::yield();
          }
        });
      }
    }
    ~Jobs() {
      done_.store(true);
      for (std::thread& thread : threads_) thread.join();
    }
    // Between two calls.
    void Between() {
      if (schedule_.kind == Schedule::Kind::kAtOnce) test_.RunAll();
      if (schedule_.kind != Schedule::Kind::kRandom) return;
      for (std::uint64_t i = test_.random_.Below(4); i > 0; --i) test_.scheduler_.RunNext();
    }
    // Until the caller is answered and nothing is queued.
    void Finish(const Track& track, const std::atomic<int>& answered) {
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
      const auto busy = [&] {
        return answered.load() == 0 || !test_.scheduler_.Queued().empty() ||
               ManagedSequence::Of(*track.sequence)->Busy();
      };
      while (busy() && std::chrono::steady_clock::now() < deadline) {
        if (threads_.empty() && !test_.scheduler_.RunNext().has_value()) break;
        std::this_thread::yield();
      }
      EXPECT_EQ(answered.load(), 1);
      test_.Collect();
    }

   private:
    Schedules& test_;
    const Schedule schedule_;
    std::atomic<bool> done_{false};
    std::vector<std::thread> threads_;
  };

  void CompressAndWait(Track& track, Jobs& jobs) {
    std::atomic<int> answered{0};
    absl::Status told;
    compactor_.Compress(track.sequence, {0, model_->layers(), true}, [&](absl::Status status) {
      told = std::move(status);
      ++answered;
    });
    jobs.Finish(track, answered);
    EXPECT_TRUE(told.ok()) << told;
  }
  // The queries of tokens [first, first + count): longer copies of their own keys.
  void ShowQueries(const Track& track, std::uint64_t first, std::uint64_t count) {
    const policies::Policy policy = Compactor::PolicyOf(*track.sequence);
    const policies::Needs needs = policies::NeedsOf(policy);
    if (needs == policies::Needs()) return;
    if (!needs.decode_queries && count > needs.last_queries) {
      first += count - needs.last_queries;
      count = needs.last_queries;
    }
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      if (policies::DecidesFor(policy, layer) != layer) continue;
      const kernels::LayerGeometry geometry = model_->geometry(layer);
      const kernels::DenseTile tile = model_->layout().tile(layer);
      std::vector<std::byte> rows(count * geometry.query_heads * tile.row_bytes());
      for (std::uint64_t i = 0; i < count * geometry.query_heads; ++i) {
        const auto head = static_cast<std::uint32_t>(i % geometry.query_heads);
        DrawRow(track.stamps[first + i / geometry.query_heads],
                {layer, head / geometry.group(), cache::RowKind::kKey}, tile,
                rows.data() + i * tile.row_bytes());
      }
      std::vector<float> paid(std::size_t{geometry.kv_heads} * track.stamps.size());
      for (std::size_t i = 0; i < paid.size(); ++i) paid[i] = static_cast<float>(i * 7919 % 1000);
      ObservedLayer shown = {.layer = layer, .tokens = track.stamps.size()};
      shown.last = {first, count, rows.data()};
      if (needs.attention_sums) shown.sums = {0, track.stamps.size(), paid.data()};
      const absl::Status status = compactor_.Observe(*track.sequence, shown);
      ASSERT_TRUE(status.ok()) << status;
    }
  }
  void AppendPrompt(Track& track, const Stamps& stamps, Jobs& jobs) {
    AppendStamps(track, stamps);
    jobs.Between();
    ShowQueries(track, track.stamps.size() - stamps.size(), stamps.size());
    jobs.Between();
    const absl::Status ended = compactor_.EndPrompt(track.sequence, 0, model_->layers());
    ASSERT_TRUE(ended.ok()) << ended;
    jobs.Between();
  }
  void DecodeSome(Track& track, const Stamps& stamps, Jobs& jobs) {
    for (std::size_t at = 0; at < stamps.size(); at += 5) {
      const std::size_t end = std::min(stamps.size(), at + 5);
      DecodeStamps(track, Stamps(stamps.begin() + static_cast<std::ptrdiff_t>(at),
                                 stamps.begin() + static_cast<std::ptrdiff_t>(end)));
      const policies::Policy policy = Compactor::PolicyOf(*track.sequence);
      if (policies::NeedsOf(policy).decode_queries) {
        ShowQueries(track, track.stamps.size() - (end - at), end - at);
      }
      jobs.Between();
    }
  }

  // What the lanes hold: per segment its form, its entries' positions and their decoded rows.
  std::string ContentsOf(const Track& track) {
    const kernels::Operations& operations = kernels::OperationsOf(cache::ReferenceKernels());
    const auto described = track.sequence->Describe(cache::Sequence::Detail::kEntries);
    const cache::SequenceView view = View(track);
    std::string contents;
    for (std::size_t index = 0; index < view.lanes.size(); ++index) {
      const cache::SequenceView::LaneOf& lane = view.lanes[index];
      tessera::Append(contents, "\nlane ", index, ": ", lane.resolved.tail_start,
                      " tokens, positions");
      std::uint64_t next = ~std::uint64_t{0};
      for (const std::uint64_t position : described.lanes[index].positions) {
        if (position != next) tessera::Append(contents, " ", position);
        next = position + 1;
      }
      for (std::uint32_t i = 0; i < lane.resolved.segments; ++i) {
        const kernels::SegmentView& segment = view.segments[lane.first_segment + i];
        tessera::Append(contents, "\n  ", FormOf(segment),
                        segment.shape.positions ? " with positions " : " ",
                        HashOf(operations, segment));
      }
    }
    return contents;
  }
  static std::uint64_t HashOf(const kernels::Operations& operations,
                              const kernels::SegmentView& segment) {
    const std::uint32_t channels = kernels::PaddedChannels(segment.shape);
    std::uint64_t hash = 0xcbf29ce484222325;
    for (std::uint32_t tile = 0; tile * 32 < segment.entries; ++tile) {
      const std::uint32_t rows = std::min(32u, segment.entries - tile * 32);
      std::vector<float> keys(32 * channels), values(32 * channels);
      operations.decode({.tile = segment.arena + segment.tile_offsets[tile],
                         .shape = segment.shape,
                         .layout = kernels::LayoutOf(segment.shape),
                         .rows = rows,
                         .padded_channels = channels,
                         .keys = keys.data(),
                         .values = values.data()});
      for (const std::vector<float>* side : {&keys, &values}) {
        for (std::size_t i = 0; i < std::size_t{rows} * channels; ++i) {
          std::uint32_t bits = 0;
          std::memcpy(&bits, side->data() + i, sizeof bits);
          hash = (hash ^ bits) * 0x100000001b3;
        }
      }
    }
    return hash;
  }

  // A life, and what the lanes hold each time a caller has waited.
  std::vector<std::string> Live(const std::string& policy, const std::vector<Stamps>& parts,
                                Schedule schedule) {
    // The book of an earlier life would be used at once.
    world_.tenant().memory().books->Drop(model_->id());
    Jobs jobs(*this, schedule);
    Track track = NewTrack(*policies::ParsePolicy(policy));
    std::vector<std::string> seen;
    const auto look = [&] {
      CompressAndWait(track, jobs);
      seen.push_back(ContentsOf(track));
    };
    AppendPrompt(track, parts[0], jobs);
    DecodeSome(track, parts[1], jobs);
    look();
    DecodeSome(track, parts[2], jobs);
    AppendPrompt(track, parts[3], jobs);
    DecodeSome(track, parts[4], jobs);
    look();
    EXPECT_TRUE(world_.tenant().FreeSequence(track.sequence->id()).ok());
    return seen;
  }
};

TEST_P(Schedules, ChangeNeitherEntriesNorForms) {
  const std::vector<Stamps> parts = {
      DrawTokens(random_.Between(400, 500), 1), DrawTokens(random_.Between(60, 130), 1),
      DrawTokens(random_.Between(1, 100), 1), DrawTokens(random_.Between(60, 200), 1),
      DrawTokens(random_.Between(1, 100), 1)};
  using Kind = Schedule::Kind;
  const std::vector<std::string> expected = Live(GetParam(), parts, {Kind::kAtOnce});
  for (const Schedule schedule :
       {Schedule{Kind::kLate}, Schedule{Kind::kRandom}, Schedule{Kind::kRandom},
        Schedule{Kind::kThreads, 1}, Schedule{Kind::kThreads, 2}, Schedule{Kind::kThreads, 4}}) {
    const std::vector<std::string> seen = Live(GetParam(), parts, schedule);
    ASSERT_EQ(seen.size(), expected.size());
    for (std::size_t i = 0; i < seen.size(); ++i) {
      EXPECT_EQ(seen[i], expected[i]) << "schedule " << static_cast<int>(schedule.kind) << ", "
                                      << schedule.threads << " threads, at the call " << i;
    }
    if (HasFailure()) return;
  }
}

std::vector<std::string> Policies() {
  std::vector<std::string> all = {
      kPlanes,
      kPlanes + "+signs",
      "chunkkv:tokens=200,window=8+" + kPlanes,
      "chunkkv:tokens=200,window=8,reuse=2+" + kPlanes,
      "snapkv:tokens=150,window=8+" + kPlanes + "+signs",
      "semanticache:delimiters=0,tau=0.3,sink=2,recent=4,max_chunk=16+" + kPlanes};
  for (const char* continuing : {"streaming:sink=4,recent=300", "tova:budget=300",
                                 "h2o:heavy=200,recent=100", "lacache:budget=300,span=1,sink=2"}) {
    for (const std::string& packing : {kPlanes, kPlanes + "+signs", kMosaic}) {
      all.push_back(std::string(continuing) + "+" + packing);
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Policies, Schedules, testing::ValuesIn(Policies()), [](const auto& given) {
  std::string name = given.param.substr(0, given.param.find(':'));
  if (given.param.find("reuse") != std::string::npos) name += "_reuse";
  for (const char* packing : {"planes", "signs", "mosaickv"}) {
    if (given.param.find(packing) != std::string::npos && name != packing) {
      name += std::string("_") + packing;
    }
  }
  return name;
});

}  // namespace
}  // namespace tessera::compaction
