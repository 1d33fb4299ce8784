// Random operations on sequences with random policies, with one job or all jobs in between, with
// and without memory. An oracle knows every token: at any time each lane shows exactly its tokens,
// in order, and each tile equals the encoding of their raw rows in its segment's form, byte for
// byte.

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/compaction/compaction_fixture.h"

namespace tessera::compaction {
namespace {

constexpr std::uint64_t kBudget = 2 << 20;
constexpr std::uint64_t kLimit = 160 << 20;

struct Story {
  kernels::ElementType type;
  int steps;
  std::uint64_t longest_prompt;
  std::uint64_t most_segment_tiles;
};
// Many short segments: seals run in pieces.
constexpr Story Pieces(kernels::ElementType type) { return {type, 100, 1400, 3}; }
constexpr Story Whole(kernels::ElementType type) { return {type, 300, 400, 10}; }

struct Known {
  Track track;
  policies::Policy policy;
};

struct Told {
  int times = 0;
  bool may_fail = false;  // memory was short or the sequence was freed while the call waited
  SequenceId sequence;
  absl::Status status;
};

// A reader that stays pinned and must always see the same rows.
struct Pinned {
  std::unique_ptr<cache::Tenant::Reader> reader;
  std::shared_ptr<const cache::Model> model;
  cache::SequenceView view;
  Stamps stamps;
};

class CompactionProperty : public CompactionFixture, public testing::WithParamInterface<Story> {
 protected:
  CompactionProperty() : CompactionFixture(kBudget, kLimit) {
    const std::string type = kernels::ElementName(GetParam().type);
    models_ = {world_.Register(cache::SmallModel("small " + type, 2, 1, GetParam().type)),
               world_.Register(cache::MixedModel("mixed " + type, GetParam().type))};
  }

  // ---- Operations. Each returns an error text, or an empty string.

  std::string Step() {
    if (Short() && random_.OneIn(10)) {
      Say("there is room again");
      squeezed_.reset();
      raw_squeezed_.reset();
    }
    const std::uint64_t dice = random_.Below(100);
    if (dice < 5) return Create();
    if (dice < 18) return Append();
    if (dice < 44) return Decode();
    if (dice < 49) return Fork();
    if (dice < 55) return Truncate();
    if (dice < 58) return Free();
    if (dice < 62) return Compress();
    if (dice < 64) return ChangePolicy();
    if (dice < 66) return Pack();
    if (dice < 70) return Squeeze();
    if (dice < 73) return PinOrUnpin();
    if (dice < 75) {
      Say("time goes by");
      world_.clock().Advance(std::chrono::seconds(1));
      compactor_.Resume();
      return "";
    }
    if (dice < 94) {
      Say("run a job");
      scheduler_.RunNext();
      if (random_.OneIn(2)) Collect();
      return "";
    }
    Say("run all jobs");
    constexpr int kNoEnd = 5000;
    int jobs = 0;
    while (jobs < kNoEnd && scheduler_.RunNext().has_value()) ++jobs;
    if (jobs == kNoEnd) return "no end of jobs";
    Collect();
    return "";
  }

  policies::Policy AnyPolicy() {
    if (random_.OneIn(5)) return Quest();
    policies::Policy policy = SmallMosaic();
    if (random_.OneIn(8)) return policies::Policy();
    policies::MosaicPolicy& mosaic = *policy.mosaic;
    kernels::StrategyOptions& strategy = mosaic.strategy;
    if (random_.OneIn(2)) strategy.kept = {0.125, 0.25, 0.5};
    if (random_.OneIn(3)) strategy.groups = {1, 2, 4};
    if (random_.OneIn(3)) strategy.truncated = 0.25;
    if (random_.OneIn(3)) strategy.rotation_type = kernels::ElementType::kFp32;
    strategy.reorder = random_.OneIn(2);
    strategy.summary = static_cast<kernels::Summary>(random_.Below(3));
    if (strategy.summary == kernels::Summary::kNone) strategy.blocks.clear();
    strategy.values = static_cast<kernels::ValueType>(random_.Between(1, 4));
    mosaic.segments.tokens = 32 * random_.Between(1, GetParam().most_segment_tiles);
    mosaic.segments.min_tokens = 32 * random_.Between(1, mosaic.segments.tokens / 32);
    if (random_.OneIn(3)) mosaic.segments.sinks = random_.Between(1, 70);
    if (random_.OneIn(4)) mosaic.segments.recent = random_.Between(1, 100);
    mosaic.segments.loss_window = random_.Between(1, 256);
    policy.text = "mosaic " + std::to_string(++policies_drawn_);  // makes policies distinguishable
    const absl::Status status = policies::Validate(policy);
    EXPECT_TRUE(status.ok()) << status;
    return policy;
  }
  Stamps AnyTokens(std::uint64_t count) {
    Stamps stamps = DrawTokens(count, random_.Below(4));
    if (random_.OneIn(8)) random_.Pick(stamps) |= kHuge;
    return stamps;
  }

  std::string Create() {
    if (known_.size() >= 8) return Free();
    model_ = random_.Pick(models_);
    Say("create");
    const absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence =
        world_.tenant().CreateSequence(worker_->session(), model_->id());
    if (!sequence.ok()) return Refused(sequence.status());
    const policies::Policy policy = AnyPolicy();
    if (absl::Status status = compactor_.SetPolicy(**sequence, policy); !status.ok()) {
      EXPECT_TRUE(world_.tenant().FreeSequence((*sequence)->id()).ok());
      return Refused(status);
    }
    known_.push_back({{*sequence, {}, std::nullopt}, policy});
    return "";
  }

  std::string Append() {
    Known* known = Any();
    if (known == nullptr) return Create();
    Track& track = known->track;
    const Stamps stamps =
        AnyTokens(random_.Between(1, random_.OneIn(4) ? GetParam().longest_prompt : 60));
    const bool end = random_.OneIn(3);
    Say("append " + std::to_string(stamps.size()) + (end ? ", the end" : "") + " to " +
        Name(*known));
    const cache::Model& model = track.sequence->model();
    const absl::StatusOr<std::uint64_t> tokens = track.sequence->Append(
        {0, model.layers(), track.stamps.size(), stamps.size()}, DrawnRows(model.layout(), stamps));
    if (!track.sequence->decoding()) track.tail.reset();
    if (!tokens.ok()) return Refused(tokens.status());
    track.stamps.insert(track.stamps.end(), stamps.begin(), stamps.end());
    compactor_.Appended(track.sequence, {.layers = model.layers(),
                                         .end_of_prompt = end,
                                         .first_token = track.stamps.size() - stamps.size(),
                                         .until = track.stamps.size()});
    return "";
  }

  std::string Decode() {
    Known* known = Any();
    if (known == nullptr) return Create();
    Track& track = known->track;
    model_ = ModelOf(track);
    if (!track.tail.has_value()) {
      const absl::StatusOr<cache::TestWorker::OpenTail> tail = worker_->Open(*track.sequence);
      if (!tail.ok()) return Refused(tail.status());
      track.tail = *tail;
    }
    std::uint64_t wrote = 0;
    for (const std::uint64_t stamp : AnyTokens(random_.Between(1, 70))) {
      if (!worker_->HasRoom(*track.sequence, track.stamps.size())) break;
      WriteTail(track, stamp);
      ++wrote;
    }
    Say("decode " + std::to_string(wrote) + " tokens of " + Name(*known));
    const absl::StatusOr<std::uint64_t> moved = track.sequence->AbsorbFullTiles();
    if (!moved.ok()) return Refused(moved.status());
    if (*moved > 0) compactor_.TailsMoved(track.sequence);
    return "";
  }

  std::string Fork() {
    Known* parent = Any();
    if (parent == nullptr) return Create();
    if (known_.size() >= 8) return Free();
    Say("fork " + Name(*parent));
    const absl::StatusOr<std::shared_ptr<cache::Sequence>> child = compactor_.Fork(
        *parent->track.sequence,
        [&] { return world_.tenant().Fork(worker_->session(), parent->track.sequence->id()); });
    if (!child.ok()) return Refused(child.status());
    known_.push_back({{*child, parent->track.stamps, std::nullopt}, parent->policy});
    return "";
  }

  std::string Truncate() {
    Known* known = Any();
    if (known == nullptr) return Create();
    Track& track = known->track;
    std::uint64_t tokens = random_.Between(0, track.stamps.size());
    if (random_.OneIn(2))
      tokens =
          track.stamps.size() - std::min<std::uint64_t>(track.stamps.size(), random_.Below(70));
    Say("truncate " + Name(*known) + " to " + std::to_string(tokens));
    const absl::Status status = compactor_.Truncate(*track.sequence, tokens);
    if (!track.sequence->decoding()) track.tail.reset();
    if (!status.ok()) return Refused(status);
    track.stamps.resize(tokens);
    return "";
  }

  std::string Free() {
    if (known_.empty()) return Create();
    std::swap(random_.Pick(known_), known_.back());
    const SequenceId id = known_.back().track.sequence->id();
    Say("free " + Name(known_.back()));
    for (const auto& told : told_) told->may_fail |= told->sequence == id;
    known_.pop_back();
    const absl::Status status = world_.tenant().FreeSequence(id);
    return status.ok() ? "" : status.ToString();
  }

  std::string Compress() {
    Known* known = Any();
    if (known == nullptr) return Create();
    Say("compress " + Name(*known));
    auto told =
        std::make_shared<Told>(Told{.may_fail = Short(), .sequence = known->track.sequence->id()});
    told_.push_back(told);
    compactor_.Compress(known->track.sequence, {0, known->track.sequence->model().layers(), true},
                        [told](absl::Status status) {
                          ++told->times;
                          told->status = std::move(status);
                        });
    return "";
  }

  std::string ChangePolicy() {
    Known* known = Any();
    if (known == nullptr) return Create();
    Say("change the policy of " + Name(*known));
    policies::Policy policy = AnyPolicy();
    for (const auto& told : told_) told->may_fail |= told->sequence == known->track.sequence->id();
    const absl::Status status = compactor_.SetPolicy(*known->track.sequence, policy);
    if (!status.ok()) return Refused(status);
    known->policy = std::move(policy);
    return "";
  }

  // Packs by a worker's call, in another form.
  std::string Pack() {
    Known* known = Any();
    if (known == nullptr || !known->policy.dense()) return Compress();
    const cache::Model& model = known->track.sequence->model();
    cache::TestPacking packing = cache::RandomPacking(random_, model, 0, model.layers());
    Say("pack " + Name(*known));
    const absl::Status status = known->track.sequence->Pack(packing.spec, cache::Proceed).status();
    // The form may not be able to hold the rows.
    return status.ok() || absl::IsInvalidArgument(status) ? "" : Refused(status);
  }

  // Squeezes memory for a while.
  std::string Squeeze() {
    if (Short()) return "";
    pool::Account& budget = world_.raw_copies();
    auto& account = const_cast<pool::Account&>(world_.tenant().account());
    const auto leave = [&](pool::Account& of, std::uint64_t most) -> std::optional<pool::Charge> {
      const std::uint64_t room = random_.Below(most);
      const std::uint64_t free = of.limit_bytes() - of.used_bytes();
      if (free <= room) return std::nullopt;
      return *of.Reserve(pool::MemoryTag::kPoolExtents, free - room);
    };
    if (random_.OneIn(2)) {
      Say("the pool is short");
      squeezed_ = leave(account, 100'000);
    } else {
      Say("the budget is short");
      raw_squeezed_ = leave(budget, 100'000);
    }
    if (Short()) {
      for (const auto& told : told_) told->may_fail = true;
    }
    return "";
  }

  std::string PinOrUnpin() {
    if (!pinned_.empty() && (pinned_.size() >= 3 || random_.OneIn(2))) {
      Say("a reader unpins");
      pinned_.erase(pinned_.begin());
      return "";
    }
    Known* known = Any();
    if (known == nullptr) return Create();
    Say("a reader pins and reads " + Name(*known));
    auto reader = std::make_unique<cache::Tenant::Reader>(world_.tenant());
    pinned_.push_back(
        {std::move(reader), ModelOf(known->track), View(known->track), known->track.stamps});
    return "";
  }

  // ---- Oracle

  std::string Check(bool everything) {
    for (const Known& known : known_) {
      if (!everything && !random_.OneIn(8)) continue;
      const std::string wrong =
          Differs(View(known.track), known.track.sequence->model(), known.track.stamps);
      if (!wrong.empty()) return Name(known) + ", " + wrong;
    }
    for (const Pinned& reader : pinned_) {
      if (!everything && !random_.OneIn(8)) continue;
      const std::string wrong = Differs(reader.view, *reader.model, reader.stamps);
      if (!wrong.empty()) return "under a pin, " + wrong;
    }
    for (const auto& told : told_) {
      if (told->times > 1) return "told twice";
      if (told->times == 1 && !told->status.ok() && !told->may_fail) {
        return "told " + told->status.ToString();
      }
    }
    return "";
  }

  // So many tokens are enough for a segment, together with those that stay dense.
  static std::uint64_t MostWaiting(const policies::MosaicPolicy& mosaic) {
    const policies::SegmentOptions& segments = mosaic.segments;
    const std::uint64_t sinks = FullTiles(segments.sinks + kernels::kTileEntries - 1);
    const std::uint64_t newest = segments.recent == 0 ? 0 : segments.recent + kernels::kTileEntries;
    return segments.min_tokens + sinks + newest;
  }

  // With memory and all jobs done, nothing waits without need.
  std::string CheckAllCompressed() {
    squeezed_.reset();
    raw_squeezed_.reset();
    RunAll();
    for (Known& known : known_) {
      Compress();
      const Track& track = known.track;
      auto told = std::make_shared<Told>();
      compactor_.Compress(track.sequence, {0, track.sequence->model().layers(), true},
                          [told](absl::Status status) {
                            ++told->times;
                            told->status = std::move(status);
                          });
      RunAll();
      if (told->times != 1 || !told->status.ok()) return "not told, or " + told->status.ToString();
      const std::uint64_t most = known.policy.mosaic.has_value() ? MostWaiting(*known.policy.mosaic)
                                 : known.policy.summaries.has_value() ? kernels::kTileEntries
                                                                      : track.stamps.size() + 1;
      for (std::uint32_t lane = 0; lane < track.sequence->model().lanes(); ++lane) {
        if (known.policy.summaries.has_value()) continue;  // raw rows of an earlier policy wait
        if (track.sequence->OpenEntries(lane) >= most) return Name(known) + " waits";
      }
    }
    for (const auto& told : told_) {
      if (told->times != 1) return "somebody was never told";
    }
    return Check(/*everything=*/true);
  }

  // The tile bytes of all segments in all lanes, each counted once.
  std::uint64_t TileBytesHeld() const {
    std::set<const cache::Segment*> seen;
    std::uint64_t bytes = 0;
    for (const Known& known : known_) {
      for (std::uint32_t layer = 0; layer < known.track.sequence->model().layers(); ++layer) {
        const auto runs = known.track.sequence->LookAt(layer, true);
        EXPECT_TRUE(runs.ok()) << runs.status();
        for (const cache::OpenRun& run : *runs) {
          for (const auto* list : {&run.settled, &run.provisional, &run.plain}) {
            for (const cache::HeldSegment& held : *list) {
              if (seen.insert(held.segment.get()).second) bytes += held.segment->tile_bytes();
            }
          }
        }
      }
    }
    return bytes;
  }

  bool Short() const { return squeezed_.has_value() || raw_squeezed_.has_value(); }
  std::string Refused(const absl::Status& status) {
    ++refusals_;
    return absl::IsResourceExhausted(status) && squeezed_.has_value() ? "" : status.ToString();
  }
  const std::shared_ptr<const cache::Model>& ModelOf(const Track& track) const {
    return models_[0].get() == &track.sequence->model() ? models_[0] : models_[1];
  }
  Known* Any() { return known_.empty() ? nullptr : &random_.Pick(known_); }
  static std::string Name(const Known& known) {
    return "sequence " + std::to_string(known.track.sequence->id().value() & 0xffffffff) + " of " +
           std::to_string(known.track.stamps.size());
  }
  void Say(const std::string& line) { story_ += line + "\n"; }

  std::vector<std::shared_ptr<const cache::Model>> models_;
  std::vector<Known> known_;
  std::vector<std::shared_ptr<Told>> told_;
  std::vector<Pinned> pinned_;
  std::optional<pool::Charge> squeezed_;
  std::optional<pool::Charge> raw_squeezed_;
  std::string story_;
  int policies_drawn_ = 0;
  int refusals_ = 0;
};

TEST_P(CompactionProperty, LanesShowWhatTheOracleHolds) {
  for (int step = 0; step < GetParam().steps; ++step) {
    std::string wrong = Step();
    if (wrong.empty()) wrong = Check(step % 32 == 0);
    ASSERT_EQ(wrong, "") << "after\n" << story_;
    ASSERT_NO_FATAL_FAILURE(world_.Validate()) << "after\n" << story_;
  }
  ASSERT_EQ(CheckAllCompressed(), "") << "after\n" << story_;
  pinned_.clear();
  Collect();
  EXPECT_EQ(TileBytesHeld(), Used(pool::MemoryTag::kTiles)) << "after\n" << story_;
  const CodingCounters& counters = compactor_.counters();
  std::printf(
      "%d refused; %llu tiles encoded, %llu segments sealed, %llu strategies, %llu left "
      "plain, %llu raw rows dropped\n",
      refusals_, static_cast<unsigned long long>(counters.tiles_encoded),
      static_cast<unsigned long long>(counters.segments_sealed),
      static_cast<unsigned long long>(counters.strategies_made),
      static_cast<unsigned long long>(counters.left_plain),
      static_cast<unsigned long long>(counters.raw_rows_dropped));
  EXPECT_GT(counters.segments_sealed + counters.left_plain, 0u);
  pinned_.clear();
  while (!known_.empty()) ASSERT_EQ(Free(), "") << story_;
}

using enum kernels::ElementType;
INSTANTIATE_TEST_SUITE_P(Stories, CompactionProperty,
                         testing::Values(Whole(kBf16), Whole(kFp32), Pieces(kBf16), Pieces(kFp32)),
                         [](const auto& story) {
                           return std::string(kernels::ElementName(story.param.type)) +
                                  (story.param.longest_prompt > 400 ? "_pieces" : "");
                         });

}  // namespace
}  // namespace tessera::compaction
