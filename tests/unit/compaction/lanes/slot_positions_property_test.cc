// Random operations under policies that move positions (`pos=slot`), by calls and through tails,
// with jobs one at a time and memory that runs out: every key is rotated for its place in its lane,
// and the sequence can always continue.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/compaction/lanes/lane_rows.h"
#include "daemon/policies/grammar/parse.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compactor_fixture.h"

namespace tessera::compaction {
namespace {

constexpr int kSlotSteps = 300;
const char* const kSlotPolicies[] = {"streaming:sink=2,recent=40,pos=slot",
                                     "streaming:sink=0,recent=70,pos=slot",
                                     "lacache:budget=40,span=2,overlap=1,sink=2,pos=slot"};

// A sequence, and each token's position as its worker knew it.
struct Placed {
  Track track;  // stamps of the layer with the most tokens
  std::vector<std::uint64_t> positions;
};

class SlotPositionsProperty : public CompactorTest {
 protected:
  SlotPositionsProperty() : CompactorTest(0, 96 << 20) {
    cache::ModelSpec spec = cache::SmallModel("slots", 4, 2, kernels::ElementType::kFp32);
    spec.rope_theta = 10000;
    model_ = world_.Register(spec);
  }

  // ---- Operations. Each returns an error text, or an empty string.

  std::string Step() {
    const std::uint64_t dice = random_.Below(100);
    if (known_.empty() || dice < 4) return Create();
    Placed& known = random_.Pick(known_);
    if (dice < 16) return AppendTo(known, 0, model_->layers());
    if (dice < 22) return AppendTo(known, Layer(), 1);
    if (dice < 28) return Level(known, /*must=*/false);
    if (dice < 52) return Decode(known);
    if (dice < 64) return Compress(known, 0, model_->layers());
    if (dice < 70) return Compress(known, Layer(), 1);
    if (dice < 73) return ForkOne(known);
    if (dice < 75) return Cut(known);
    if (dice < 77) return SetPolicy(known);
    if (dice < 79) return Squeeze();
    if (dice < 81) return TakeTail(known);
    if (dice < 92) return RunOne();
    return RunAllNow();
  }

  std::uint32_t Layer() { return static_cast<std::uint32_t>(random_.Below(model_->layers())); }

  std::string Create() {
    if (known_.size() >= 3) return Free(known_.front());
    Say("create");
    const absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence =
        world_.tenant().CreateSequence(worker_->session(), model_->id());
    if (!sequence.ok()) return May(sequence.status(), {absl::StatusCode::kResourceExhausted});
    known_.push_back({{*sequence, {}, std::nullopt}, {}});
    return SetPolicy(known_.back());
  }
  std::string SetPolicy(Placed& known) {
    const char* const text = random_.Pick(kSlotPolicies);
    const absl::Status status =
        compactor_.SetPolicy(*known.track.sequence, *policies::ParsePolicy(text));
    Say(Concat("policy ", text, " for ", Name(known), ": ", status.ToString()));
    return May(status,
               {absl::StatusCode::kFailedPrecondition, absl::StatusCode::kResourceExhausted});
  }

  // If others hold these tokens already, a layer gets the same ones.
  std::string AppendTo(Placed& known, std::uint32_t first, std::uint32_t layers) {
    const std::uint64_t held = Held(known, first);
    for (std::uint32_t layer = first; layer < first + layers; ++layer) {
      if (Held(known, layer) != held) return "";
    }
    const std::uint64_t ahead = known.track.stamps.size() - held;
    const std::uint64_t count =
        ahead > 0 && !random_.OneIn(4) ? ahead : random_.Between(1, random_.OneIn(4) ? 150 : 20);
    return AppendSome(known, first, layers, count, /*must=*/false);
  }
  // Appends the missing rows of layers that were left behind.
  std::string Level(Placed& known, bool must) {
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      const std::uint64_t missing = known.track.stamps.size() - Held(known, layer);
      if (missing == 0) continue;
      std::string wrong = AppendSome(known, layer, 1, missing, must);
      if (!wrong.empty()) return wrong;
    }
    return "";
  }
  std::string AppendSome(Placed& known, std::uint32_t first, std::uint32_t layers,
                         std::uint64_t count, bool must) {
    const std::uint64_t held = Held(known, first);
    // Uses the positions that the worker is told now.
    const std::uint64_t shift = known.track.sequence->position_shift();
    Stamps rows;
    for (std::uint64_t token = held; token < held + count; ++token) {
      const bool has = token < known.track.stamps.size();
      rows.push_back(has ? known.track.stamps[token] : DrawTokens(1, 1).front());
      if (has && known.positions[token] != token - shift) {
        return Concat("token ", token, " stood at ", known.positions[token], " for some layers of ",
                      Name(known), ", and would at ", token - shift, " for others");
      }
    }
    const Compactor::Rows span = {.first_layer = first,
                                  .layers = layers,
                                  .end_of_prompt = random_.OneIn(3),
                                  .first_token = held,
                                  .until = held + count};
    const absl::Status status =
        compactor_.Append(known.track.sequence, span, DrawnRows(model_->layout(), rows)).status();
    Say(Concat("append ", count, " to ", layers, " layers from ", first, " of ", Name(known), ": ",
               status.ToString()));
    if (!status.ok()) {
      if (must) return status.ToString();
      return May(status,
                 {absl::StatusCode::kFailedPrecondition, absl::StatusCode::kResourceExhausted});
    }
    known.track.tail.reset();
    for (std::uint64_t i = 0; i < count; ++i) {
      if (held + i == known.track.stamps.size()) Take(known, rows[i], held + i - shift);
    }
    return Check(known);
  }

  std::string Decode(Placed& known) {
    Track& track = known.track;
    // The checks of a client's step.
    if (track.tail.has_value() && worker_->Block(*track.sequence).tail_generation.load() !=
                                      track.tail->place.tail.generation) {
      track.tail.reset();
    }
    if (!track.tail.has_value()) {
      const auto tail = worker_->Open(*track.sequence);
      Say(Concat("open a tail of ", Name(known), ": ", tail.status().ToString()));
      if (!tail.ok()) {
        return May(tail.status(),
                   {absl::StatusCode::kFailedPrecondition, absl::StatusCode::kAborted,
                    absl::StatusCode::kResourceExhausted});
      }
      track.tail = *tail;
    }
    std::uint64_t count = random_.Between(1, 70);
    for (; count > 0; --count) {
      const std::uint64_t token = track.stamps.size();
      if (!worker_->HasRoom(*track.sequence, token)) break;
      WriteTail(track, DrawTokens(1, 2).front());
      known.positions.push_back(token - track.tail->place.tail.position_shift);
    }
    const auto moved = track.sequence->AbsorbFullTiles();
    Say(Concat("decode to ", track.stamps.size(), " tokens of ", Name(known), ": ",
               moved.status().ToString()));
    Collect();
    if (!moved.ok()) return May(moved.status(), {absl::StatusCode::kResourceExhausted});
    if (*moved > 0) compactor_.TailsMoved(track.sequence);
    return Check(known);
  }
  std::string TakeTail(Placed& known) {
    const absl::Status status = known.track.sequence->CloseTail();
    Say(Concat("close the tail of ", Name(known), ": ", status.ToString()));
    return May(status, {absl::StatusCode::kResourceExhausted});
  }

  std::string Compress(Placed& known, std::uint32_t first, std::uint32_t layers) {
    Say(Concat("compress ", layers, " layers from ", first, " of ", Name(known)));
    Queue(known, first, layers);
    return Check(known);
  }
  std::shared_ptr<std::optional<absl::Status>> Queue(Placed& known, std::uint32_t first,
                                                     std::uint32_t layers) {
    auto told = std::make_shared<std::optional<absl::Status>>();
    compactor_.Compress(known.track.sequence, {first, layers, true},
                        [told](absl::Status status) { *told = std::move(status); });
    told_.push_back(told);
    return told;
  }

  std::string ForkOne(Placed& known) {
    if (known_.size() >= 3) return Free(known);
    const auto child = compactor_.Fork(*known.track.sequence, [&] {
      return world_.tenant().Fork(worker_->session(), known.track.sequence->id());
    });
    Say(Concat("fork ", Name(known), ": ", child.status().ToString()));
    if (!child.ok()) {
      return May(child.status(),
                 {absl::StatusCode::kFailedPrecondition, absl::StatusCode::kResourceExhausted});
    }
    known_.push_back({{*child, known.track.stamps, std::nullopt}, known.positions});
    CutBooks(known_.back());
    return Check(known_.back());
  }
  std::string Cut(Placed& known) {
    const std::uint64_t held = known.track.sequence->Describe(false).tokens;
    const std::uint64_t tokens = random_.OneIn(5) ? 0 : held - std::min(held, random_.Below(20));
    const absl::Status status = compactor_.Truncate(*known.track.sequence, tokens);
    Say(Concat("cut ", Name(known), " to ", tokens, ": ", status.ToString()));
    if (!status.ok()) {
      return May(status,
                 {absl::StatusCode::kFailedPrecondition, absl::StatusCode::kResourceExhausted});
    }
    known.track.tail.reset();
    CutBooks(known);
    return Check(known);
  }
  std::string Free(Placed& known) {
    Say("free " + Name(known));
    const SequenceId id = known.track.sequence->id();
    std::swap(known, known_.back());
    known_.pop_back();
    return world_.tenant().FreeSequence(id).ok() ? "" : "not freed";
  }

  // Leaves hardly any memory for a while, or enough again.
  std::string Squeeze() {
    if (squeezed_.has_value()) {
      squeezed_.reset();
      Say("memory");
      return "";
    }
    Collect();
    auto& account = const_cast<pool::Account&>(world_.tenant().account());
    const std::uint64_t free = account.limit_bytes() - account.used_bytes();
    const std::uint64_t room = random_.Below(400'000);
    if (free <= room) return "";
    auto rest = account.Reserve(pool::MemoryTag::kPoolExtents, free - room);
    if (rest.ok()) squeezed_ = *std::move(rest);
    Say(Concat("no memory but for ", room, " bytes"));
    return "";
  }

  std::string RunOne() {
    const std::optional<std::string> ran = scheduler_.RunNext();
    if (!ran.has_value()) return "";
    Say("run " + *ran);
    Collect();
    for (Placed& known : known_) {
      if (std::string wrong = Check(known); !wrong.empty()) return wrong;
    }
    return "";
  }
  std::string RunAllNow() {
    while (!scheduler_.Queued().empty()) {
      if (std::string wrong = RunOne(); !wrong.empty()) return wrong;
    }
    return "";
  }

  // ---- Invariants

  // After any history, missing rows can be appended and everything compressed.
  std::string GoesOn(Placed& known) {
    Say("whether there is a way on from " + Name(known));
    if (known.track.stamps.empty()) return "";
    if (std::string wrong = Level(known, /*must=*/true); !wrong.empty()) return wrong;
    const auto told = Queue(known, 0, model_->layers());
    if (std::string wrong = RunAllNow(); !wrong.empty()) return wrong;
    if (!told->has_value() || !(*told)->ok()) return "not compressed: " + (*told)->ToString();
    return AppendSome(known, 0, model_->layers(), 1, /*must=*/true);
  }

  std::string Check(Placed& known) {
    const cache::Sequence& sequence = *known.track.sequence;
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      const auto runs = sequence.LookAt(layer, /*whole=*/true);
      if (!runs.ok()) return runs.status().ToString();
      for (std::uint32_t head = 0; head < runs->size(); ++head) {
        std::string wrong = CheckLane(known, layer, head, (*runs)[head]);
        if (!wrong.empty()) return Name(known) + ", " + wrong;
      }
    }
    const bool decodes = sequence.decoding();
    if (decodes && !sequence.CheckPositionsAgree().ok())
      return "a tail is open while lanes stand apart";
    return "";
  }
  std::string CheckLane(const Placed& known, std::uint32_t layer, std::uint32_t head,
                        const cache::OpenRun& run) {
    const kernels::DenseTile tile = model_->layout().tile(layer);
    const absl::StatusOr<HostLaneRows> rows =
        HostLaneRows::Of(known.track.sequence->memory(), tile, run);
    if (!rows.ok()) return rows.status().ToString();
    const RopeShift turner(model_->spec().rope(), tile);
    std::vector<float> expected(tile.head_dim);
    for (std::uint64_t i = 0; i < rows->count(); ++i) {
      const std::uint64_t token = rows->positions()[i];
      auto* const key = reinterpret_cast<std::byte*>(expected.data());
      DrawRow(known.track.stamps[token], {layer, head, cache::RowKind::kKey}, tile, key);
      turner.Turn(key,
                  static_cast<std::int64_t>(i) - static_cast<std::int64_t>(known.positions[token]));
      const std::byte* const held = rows->host(i, 1).keys;
      for (std::uint32_t d = 0; d < tile.head_dim; ++d) {
        float element = 0;
        std::memcpy(&element, held + d * sizeof element, sizeof element);
        if (std::abs(element - expected[d]) < 1e-4f) continue;
        return Concat("layer ", layer, ", head ", head, ": token ", token, ", computed for ",
                      known.positions[token], ", does not stand at its place, ", i);
      }
    }
    return "";
  }

  std::string May(const absl::Status& status, std::vector<absl::StatusCode> codes) {
    if (status.ok() || std::find(codes.begin(), codes.end(), status.code()) != codes.end()) {
      return "";
    }
    return status.ToString();
  }

  std::uint64_t Held(const Placed& known, std::uint32_t layer) {
    return *known.track.sequence->TokensOfLayer(layer);
  }
  static void Take(Placed& known, std::uint64_t stamp, std::uint64_t position) {
    known.track.stamps.push_back(stamp);
    known.positions.push_back(position);
  }
  void CutBooks(Placed& known) {
    std::uint64_t most = 0;
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      most = std::max(most, Held(known, layer));
    }
    known.track.stamps.resize(most);
    known.positions.resize(most);
  }
  static std::string Name(const Placed& known) {
    return Concat("sequence ", known.track.sequence->id().value() & 0xffffffff, " of ",
                  known.track.stamps.size());
  }
  void Say(const std::string& line) { story_ += line + "\n"; }

  std::vector<Placed> known_;
  std::vector<std::shared_ptr<std::optional<absl::Status>>> told_;
  std::optional<pool::Charge> squeezed_;
  std::string story_;
};

TEST_F(SlotPositionsProperty, WhatALaneHoldsStandsAtItsPlace) {
  for (int step = 0; step < kSlotSteps; ++step) {
    ASSERT_EQ(Step(), "") << "after\n" << story_;
    ASSERT_NO_FATAL_FAILURE(world_.Validate()) << story_;
  }
  squeezed_.reset();
  ASSERT_EQ(RunAllNow(), "") << "after\n" << story_;
  Collect();
  int whole = 0;
  for (const auto& told : told_) {
    ASSERT_TRUE(told->has_value()) << "somebody was never told";
    whole += (*told)->ok();
  }
  std::printf("%zu compressed, %d of them in full; %llu entries dropped\n", told_.size(), whole,
              static_cast<unsigned long long>(world_.tenant().counters().entries_dropped.load()));
  EXPECT_GT(whole, 0);
  for (Placed& known : known_) ASSERT_EQ(GoesOn(known), "") << "after\n" << story_;
  while (!known_.empty()) ASSERT_EQ(Free(known_.back()), "") << story_;
}

}  // namespace
}  // namespace tessera::compaction
