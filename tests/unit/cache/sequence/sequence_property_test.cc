// Random operations on sequences, compared with an oracle of vectors. After every step each
// sequence and each pinned reader must show what the oracle holds, and all accounts must agree.
// Packing changes the form and offloading the place of rows, but never their values.

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"
#include "tests/unit/cache/packed.h"
#include "tests/unit/cache/sequence/sequence_oracle.h"

namespace tessera::cache {
namespace {

class SequenceProperty : public testing::TestWithParam<Setup> {
 protected:
  SequenceProperty()
      : world_({.tenant_limit = GetParam().tenant_limit, .ring_tiles = 3, .device = &device_}),
        models_{world_.Register(MixedModel("mixed", GetParam().type)),
                world_.Register(SmallModel("small", 1, 1, GetParam().type))} {
    for (int i = 0; i < 3; ++i) AddWorker();
  }

  // ---- Operations. Each returns an error text, or an empty string.
  std::string Step() {
    if (GetParam().packs && random_.OneIn(8)) return Pack();
    if (GetParam().offloads && random_.OneIn(8)) return Offload();
    const std::uint64_t dice = random_.Below(100);
    if (dice < 6) return Create();
    if (dice < 24) return Append();
    if (dice < 32) return AppendWrong();
    if (dice < 38) return OpenTail();
    if (dice < 62) return Decode();
    if (dice < 70) return Absorb();
    if (dice < 74) return CloseTail();
    if (dice < 79) return Fork();
    if (dice < 84) return Truncate();
    if (dice < 88) return Free();
    if (dice < 90) return Handover();
    if (dice < 96) return PinOrUnpin();
    if (dice < 99) return Wait();
    return random_.OneIn(8) ? EndSession() : "";
  }

  std::string Create() {
    if (known_.size() >= 12) return Free();
    const std::shared_ptr<const Model>& model = random_.Pick(models_);
    const std::size_t owner = random_.Below(workers_.size());
    Say("create by session " + std::to_string(owner));
    absl::StatusOr<std::shared_ptr<Sequence>> sequence =
        world_.tenant().CreateSequence(workers_[owner]->session(), model->id());
    if (!sequence.ok()) return Refused(sequence.status());
    known_[(*sequence)->id().value()] = {
        *sequence, std::vector<Stamps>(model->layers()), owner, std::nullopt, {}};
    return "";
  }

  std::string Append() {
    Known* known = Any();
    if (known == nullptr) return Create();
    const std::uint32_t layers = known->sequence->model().layers();
    std::uint32_t first = 0, count = layers;
    if (random_.OneIn(3)) {
      first = static_cast<std::uint32_t>(random_.Below(layers));
      count = static_cast<std::uint32_t>(random_.Between(1, layers - first));
    }
    const std::uint64_t held = known->layers[first].size();
    bool fits = true;
    for (std::uint32_t i = first; i < first + count; ++i) {
      fits = fits && known->layers[i].size() == held;
    }
    const Stamps stamps = NewStamps(AnyLength());
    Say("append " + std::to_string(stamps.size()) + " tokens to layers " + std::to_string(first) +
        "+" + std::to_string(count) + " of " + Name(*known));
    const absl::StatusOr<std::uint64_t> tokens =
        known->sequence->Append({first, count, held, stamps.size()},
                                StampedRows(known->sequence->model().layout(), stamps));
    SyncTail(*known);
    if (!fits) {
      return tokens.status().code() == absl::StatusCode::kOutOfRange || Exhausted(tokens.status())
                 ? ""
                 : "layers of different length took one append";
    }
    if (!tokens.ok()) return Refused(tokens.status());
    for (std::uint32_t i = first; i < first + count; ++i) {
      known->layers[i].insert(known->layers[i].end(), stamps.begin(), stamps.end());
    }
    return *tokens == known->Tokens() ? "" : "append answered another count";
  }

  std::string AppendWrong() {
    Known* known = Any();
    if (known == nullptr) return Create();
    const std::uint64_t held = known->layers[0].size();
    const std::uint64_t first = random_.OneIn(2) ? held + 1 + random_.Below(3) : random_.Border();
    if (first == held) return "";
    Say("append at " + std::to_string(first) + ", which is wrong, to " + Name(*known));
    const absl::StatusOr<std::uint64_t> tokens = known->sequence->Append(
        {0, 1, first, 3}, StampedRows(known->sequence->model().layout(), NewStamps(3)));
    SyncTail(*known);
    return tokens.status().code() == absl::StatusCode::kOutOfRange || Exhausted(tokens.status())
               ? ""
               : "an append at a wrong token was taken";
  }

  std::string OpenTail() {
    Known* known = Any();
    if (known == nullptr) return Create();
    Say("open the tail of " + Name(*known));
    const absl::StatusOr<TestWorker::OpenTail> tail =
        workers_[known->owner]->Open(*known->sequence);
    SyncTail(*known);
    if (!known->Even()) {
      return tail.status().code() == absl::StatusCode::kFailedPrecondition ||
                     Exhausted(tail.status())
                 ? ""
                 : "a tail was opened on layers of different length";
    }
    if (!tail.ok()) return Refused(tail.status());
    known->tail = *tail;
    known->written.clear();
    if (tail->place.tail.tokens != known->Tokens()) return "the tail starts at another token";
    if (workers_[known->owner]->HasRoom(
            *known->sequence,
            known->Tokens() + known->sequence->model().layout().ring_capacity())) {
      return "a fresh ring has more room than it has tiles";
    }
    return "";
  }

  // Writes some tokens and commits some of the written ones.
  std::string Decode() {
    Known* known = AnyDecoding();
    if (known == nullptr) return OpenTail();
    TestWorker& worker = *workers_[known->owner];
    std::uint64_t wrote = 0;
    for (std::uint64_t i = random_.Between(1, 40); i > 0; --i) {
      const std::uint64_t token = known->Tokens() + known->written.size();
      if (!worker.HasRoom(*known->sequence, token)) break;
      known->written.push_back(NewStamps(1)[0]);
      worker.Write(*known->sequence, *known->tail, token, known->written.back());
      ++wrote;
    }
    const std::uint64_t commit =
        random_.OneIn(4) ? random_.Between(0, known->written.size()) : known->written.size();
    Say("write " + std::to_string(wrote) + ", commit " + std::to_string(commit) + " of " +
        Name(*known));
    for (Stamps& layer : known->layers) {
      layer.insert(layer.end(), known->written.begin(),
                   known->written.begin() + static_cast<std::ptrdiff_t>(commit));
    }
    known->written.erase(known->written.begin(),
                         known->written.begin() + static_cast<std::ptrdiff_t>(commit));
    if (commit > 0) worker.Commit(*known->tail, known->Tokens());
    // Uncommitted tokens may be discarded and written again.
    if (random_.OneIn(3)) known->written.clear();
    return "";
  }

  std::string Absorb() {
    Known* known = AnyDecoding();
    if (known == nullptr) return Decode();
    Say("absorb " + Name(*known));
    const absl::Status status = known->sequence->AbsorbFullTiles().status();
    if (!status.ok()) return Refused(status);
    const absl::StatusOr<SequenceView> view = ReadSequence(world_.tenant(), *known->sequence);
    if (!view.ok()) return view.status().ToString();
    const std::uint64_t past = view->lanes.front().resolved.tail_start + kernels::kTileEntries;
    return known->Tokens() < past ? "" : "a tile was left";
  }

  std::string CloseTail() {
    Known* known = AnyDecoding();
    if (known == nullptr) return OpenTail();
    Say("close the tail of " + Name(*known));
    TestWorker& worker = *workers_[known->owner];
    const absl::StatusOr<std::vector<std::uint64_t>> tokens =
        world_.tenant().CloseTails(worker.session(), {known->sequence->id()});
    if (!tokens.ok()) return Refused(tokens.status());
    known->tail.reset();
    known->written.clear();
    if (random_.OneIn(2)) worker.Unmap(worker.session().tails().ReleaseIdle());
    if (known->sequence->decoding()) return "the tail stayed";
    return tokens->front() == known->Tokens() ? "" : "closing answered another count";
  }

  std::string Fork() {
    Known* parent = Any();
    if (parent == nullptr) return Create();
    if (known_.size() >= 12) return Free();
    const std::size_t owner = random_.Below(workers_.size());
    Say("fork " + Name(*parent) + " by session " + std::to_string(owner));
    const absl::StatusOr<std::shared_ptr<Sequence>> child =
        world_.tenant().Fork(workers_[owner]->session(), parent->sequence->id());
    if (!child.ok()) return Refused(child.status());
    Known forked = {*child, parent->layers, owner, std::nullopt, {}};
    for (Stamps& layer : forked.layers) layer.resize(parent->Tokens());
    known_[(*child)->id().value()] = std::move(forked);
    return "";
  }

  std::string Truncate() {
    Known* known = Any();
    if (known == nullptr) return Create();
    const std::uint64_t held = known->Tokens();
    const std::uint64_t tokens =
        random_.OneIn(6) ? held + 1 + random_.Below(10) : random_.Between(0, held);
    Say("truncate " + Name(*known) + " to " + std::to_string(tokens));
    const absl::Status status = known->sequence->Truncate(tokens);
    SyncTail(*known);
    if (tokens > held) {
      return status.code() == absl::StatusCode::kOutOfRange ? "" : "truncated to more";
    }
    if (!status.ok()) return Refused(status);
    for (Stamps& layer : known->layers) layer.resize(std::min<std::uint64_t>(layer.size(), tokens));
    return known->sequence->decoding() ? "truncating left the tail open" : "";
  }

  // Any operation may run during the encoding, also on the same sequence.
  std::string Pack() {
    Known* known = Any();
    if (known == nullptr) return Create();
    const std::shared_ptr<Sequence> sequence = known->sequence;
    const std::uint64_t id = sequence->id().value();
    const std::uint32_t layers = sequence->model().layers();
    const std::uint32_t first = random_.OneIn(2) ? 0 : layers / 2;
    const TestPacking packing = RandomPacking(random_, sequence->model(), first, layers - first);
    Say("pack " + Name(*known));
    const bool busy = !packing_.insert(id).second;
    const bool unwanted = random_.OneIn(6);
    std::string wrong;
    const auto go_on = [&]() -> absl::Status {
      for (std::uint64_t i = random_.Below(5); i > 0 && wrong.empty() && packing_.size() < 3; --i) {
        wrong = Step();
        if (wrong.empty()) wrong = Check(/*everything=*/true);
      }
      return unwanted ? absl::CancelledError("nobody wants it") : absl::OkStatus();
    };
    const absl::Status status = sequence->Pack(packing.spec, go_on).status();
    if (!busy) packing_.erase(id);
    Say("packed sequence " + std::to_string(id) + ": " + status.ToString());
    if (!wrong.empty() || Exhausted(status)) return wrong;
    absl::StatusCode wanted = absl::StatusCode::kOk;
    if (!known_.contains(id)) wanted = absl::StatusCode::kNotFound;
    if (unwanted) wanted = absl::StatusCode::kCancelled;
    if (busy) wanted = absl::StatusCode::kAborted;
    return status.code() == wanted ? "" : "it ended otherwise";
  }

  // The next use restores the sequence, unless the pool is full.
  std::string Offload() {
    Known* known = Any(/*resident=*/false);
    if (known == nullptr) return Create();
    Say("offload " + Name(*known));
    const absl::StatusOr<std::uint64_t> bytes = known->sequence->Offload({});
    SyncTail(*known);
    if (packing_.contains(known->sequence->id().value())) {
      return absl::IsAborted(bytes.status()) ? "" : "offloaded while it is packed";
    }
    if (!bytes.ok()) return Refused(bytes.status());
    offloads_ += *bytes > 0;
    if (!known->sequence->offloaded()) return *bytes > 0 ? "bytes went, and it is live" : "";
    const absl::Status refused = known->sequence->Truncate(0);
    return absl::IsAborted(refused) ? "" : "cut while it was offloaded: " + refused.ToString();
  }

  std::string Free() {
    Known* known = Any(/*resident=*/false);
    if (known == nullptr) return Create();
    Say("free " + Name(*known));
    const SequenceId id = known->sequence->id();
    const std::shared_ptr<Sequence> held = known->sequence;
    known_.erase(id.value());
    const absl::Status status = world_.tenant().FreeSequence(id);
    if (!status.ok()) return "free failed: " + status.ToString();
    if (world_.tenant().FreeSequence(id).code() != absl::StatusCode::kNotFound) {
      return "freed twice";
    }
    if (ReadSequence(world_.tenant(), *held).ok()) return "readers still see it";
    if (held->Truncate(0).code() != absl::StatusCode::kNotFound) return "it still serves";
    return "";
  }

  std::string Handover() {
    Known* known = Any();
    if (known == nullptr) return Create();
    const std::size_t to = random_.Below(workers_.size());
    Say("hand " + Name(*known) + " to session " + std::to_string(to));
    const absl::Status status = world_.tenant().Handover(
        known->sequence->id(), workers_[known->owner]->session(), workers_[to]->session().id());
    SyncTail(*known);
    if (!status.ok()) return Refused(status);
    known->owner = to;
    return known->sequence->decoding() ? "the tail went along" : "";
  }

  std::string PinOrUnpin() {
    if (!pinned_.empty() && (pinned_.size() >= 6 || random_.OneIn(2))) {
      std::swap(random_.Pick(pinned_), pinned_.back());
      Pinned reader = std::move(pinned_.back());
      pinned_.pop_back();
      Say("a reader unpins");
      const std::string wrong = Wrong(reader);
      const bool held =
          shm::Unpin(reader.session->control()->page().readers[reader.slot].word, reader.word);
      if (!held && world_.clock().Now() - reader.since < kTestPinLimit) return "revoked too early";
      return wrong;
    }
    Known* known = Any();
    if (known == nullptr) return Create();
    const std::shared_ptr<SessionState>& session = random_.Pick(workers_)->shared_session();
    for (std::uint32_t slot = 0; slot < shm::kReaderSlots; ++slot) {
      shm::Word& word = session->control()->page().readers[slot].word;
      if (word.load() != shm::kPinFree) continue;
      Say("a reader pins and reads " + Name(*known));
      const std::uint64_t pin = shm::Pin(word, world_.tenant().epochs().epoch());
      absl::StatusOr<SequenceView> view = ReadSequence(world_.tenant(), *known->sequence);
      if (!view.ok()) return view.status().ToString();
      pinned_.push_back({session, slot, pin, world_.clock().Now(),
                         std::shared_ptr<const Model>(known->sequence, &known->sequence->model()),
                         *std::move(view), known->layers});
      return "";
    }
    return "";
  }

  std::string Wait() {
    Say("time passes");
    world_.clock().Advance(Clock::Duration(random_.Below(3'000'000'000)));
    world_.tenant().epochs().Collect();
    return "";
  }

  std::string EndSession() {
    const std::size_t index = random_.Below(workers_.size());
    Say("session " + std::to_string(index) + " ends");
    const std::shared_ptr<SessionState> session = workers_[index]->shared_session();
    std::erase_if(pinned_, [&](const Pinned& reader) { return reader.session == session; });
    world_.tenant().EndSession(session->id());
    world_.tenant().EndSession(session->id());
    std::erase_if(known_, [&](const auto& entry) { return entry.second.owner == index; });
    workers_[index] = std::make_unique<TestWorker>(world_.tenant(), world_.OpenSession());
    return "";
  }

  // ---- Oracle

  // Returns an empty string if everything is as expected.
  std::string Check(bool everything) {
    for (const auto& [id, known] : known_) {
      if (!everything && !random_.OneIn(4)) continue;
      const absl::StatusOr<SequenceView> view = ReadSequence(world_.tenant(), *known.sequence);
      if (!view.ok()) return view.status().ToString();
      std::string wrong = known.sequence->offloaded()
                              ? (view->segments.empty() ? "" : "readers see what was offloaded")
                              : Wrong(*view, known.sequence->model(), known.layers);
      if (!wrong.empty()) return Name(known) + ", " + wrong;
      if (known.sequence->decoding() != known.tail.has_value()) return "decoding is wrong";
      wrong = CheckDescription(known);
      if (!wrong.empty()) return Name(known) + ", " + wrong;
    }
    for (const Pinned& reader : pinned_) {
      if (!everything && !random_.OneIn(4)) continue;
      const std::string wrong = Wrong(reader);
      if (!wrong.empty()) return "under a pin, " + wrong;
    }
    return "";
  }

  std::string CheckDescription(const Known& known) {
    const Sequence::Description described = known.sequence->Describe(/*lanes=*/true);
    if (described.failed) return "failed: " + described.failure;
    if (described.tokens != known.Tokens()) return "describes another count of tokens";
    if (described.lanes.size() != known.sequence->model().lanes()) return "describes other lanes";
    for (const Sequence::LaneDescription& lane : described.lanes) {
      if (lane.entries + lane.tail_entries != known.layers[lane.layer].size()) {
        return "describes another length of a lane";
      }
    }
    const shm::SequenceBlock& block = workers_[known.owner]->Block(*known.sequence);
    if ((block.tail_generation.load() != 0) != known.tail.has_value()) {
      return "shows another tail generation";
    }
    const std::uint32_t state =
        known.sequence->offloaded() ? shm::kSequenceOffloaded : shm::kSequenceLive;
    if (block.state.load() != state) return "has another state";
    if (described.offloaded != known.sequence->offloaded()) return "describes another place";
    return "";
  }

  static std::string Wrong(const SequenceView& view, const Model& model,
                           const std::vector<Stamps>& stamps) {
    return GetParam().packs ? PackedDiffers(view, model, stamps) : Differs(view, model, stamps);
  }
  // A reader with a revoked pin may see anything.
  static std::string Wrong(const Pinned& reader) {
    const shm::Word& word = reader.session->control()->page().readers[reader.slot].word;
    return word.load() != reader.word ? "" : Wrong(reader.view, *reader.model, reader.stamps);
  }
  static bool Exhausted(const absl::Status& status) {
    return status.code() == absl::StatusCode::kResourceExhausted && GetParam().tenant_limit != 0;
  }
  // The operation may fail only for lack of memory.
  std::string Refused(const absl::Status& status) {
    ++refusals_;
    return Exhausted(status) ? "" : status.ToString();
  }
  // A call that closes the tail may be refused after it has done so.
  void SyncTail(Known& known) {
    if (known.sequence->decoding()) return;
    known.tail.reset();
    known.written.clear();
  }

  Known* Any(bool resident = true) {
    if (known_.empty()) return nullptr;
    Known* const known =
        &std::next(known_.begin(), static_cast<std::ptrdiff_t>(random_.Below(known_.size())))
             ->second;
    if (!resident || !known->sequence->offloaded()) return known;
    Say("restore " + Name(*known));
    const absl::Status status = known->sequence->Restore().status();
    EXPECT_TRUE(status.ok() || Exhausted(status)) << status;
    refusals_ += !status.ok();
    return status.ok() ? known : nullptr;
  }
  Known* AnyDecoding() {
    std::vector<Known*> decoding;
    for (auto& [id, known] : known_) {
      if (known.tail.has_value()) decoding.push_back(&known);
    }
    return decoding.empty() ? nullptr : random_.Pick(decoding);
  }
  std::uint64_t AnyLength() {
    return random_.OneIn(3) ? random_.Between(1, 5) : random_.Between(1, 100);
  }
  static std::string Name(const Known& known) {
    return "sequence " + std::to_string(known.sequence->id().value() & 0xffffffff);
  }
  void Say(const std::string& line) { story_ += line + "\n"; }
  void AddWorker() {
    workers_.push_back(std::make_unique<TestWorker>(world_.tenant(), world_.OpenSession()));
  }

  TestRandom random_;
  device::CpuDevice device_{ReferenceKernels()};
  World world_;
  std::vector<std::shared_ptr<const Model>> models_;
  std::vector<std::unique_ptr<TestWorker>> workers_;
  std::map<std::uint64_t, Known> known_;
  std::vector<Pinned> pinned_;
  std::set<std::uint64_t> packing_;
  std::string story_;
  int refusals_ = 0;
  int offloads_ = 0;
};

TEST_P(SequenceProperty, ReadersSeeWhatTheOracleHolds) {
  for (int step = 0; step < GetParam().steps; ++step) {
    std::string wrong = Step();
    if (wrong.empty()) wrong = Check(step % 16 == 0);
    ASSERT_EQ(wrong, "") << "after\n" << story_;
    ASSERT_NO_FATAL_FAILURE(world_.Validate()) << "after\n" << story_;
  }
  ASSERT_EQ(Check(/*everything=*/true), "") << "after\n" << story_;
  std::printf("%d operations refused for want of memory\n", refusals_);
  if (GetParam().offloads) {
    const TenantCounters& counters = world_.tenant().counters();
    EXPECT_GT(offloads_, 0);
    EXPECT_GT(counters.restores.load(), 0u);
    EXPECT_EQ(counters.offloads.load(), static_cast<std::uint64_t>(offloads_));
  }
  while (!pinned_.empty()) ASSERT_EQ(PinOrUnpin(), "") << story_;
  while (!known_.empty()) ASSERT_EQ(Free(), "") << story_;
  for (const std::unique_ptr<TestWorker>& worker : workers_) {
    world_.tenant().EndSession(worker->session().id());
  }
  workers_.clear();
  world_.ExpectBaseline();
}

using enum kernels::ElementType;
INSTANTIATE_TEST_SUITE_P(
    Types, SequenceProperty,
    testing::Values(Setup{"bf16", kBf16, 0, 6000}, Setup{"fp16", kFp16, 0, 3000},
                    Setup{"fp32", kFp32, 0, 3000}, Setup{"packed", kBf16, 0, 800, true},
                    Setup{"bf16_short_of_memory", kBf16, 1'500'000, 6000},
                    Setup{"packed_fp32_short_of_memory", kFp32, 1'500'000, 1500, true},
                    Setup{"offloaded", kBf16, 0, 4000, false, true},
                    Setup{"offloaded_packed", kBf16, 0, 800, true, true},
                    Setup{"offloaded_short_of_memory", kFp16, 1'500'000, 4000, false, true}),
    [](const auto& setup) { return setup.param.name; });

}  // namespace
}  // namespace tessera::cache
