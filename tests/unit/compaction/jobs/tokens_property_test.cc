// Random operations on sequences under token policies, with jobs one at a time, compared with an
// oracle that stores every entry of every lane. After a job a layer is either unchanged or equals
// what the policy's rules leave of the oracle's entries. Rows that are neither merged nor packed
// equal, byte for byte, the rows appended at their position.

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/policies/grammar/parse.h"
#include "gtest/gtest.h"
#include "tests/unit/compaction/compaction_fixture.h"
#include "tests/unit/compaction/jobs/token_oracle.h"

namespace tessera::compaction {
namespace {

constexpr int kSteps = 260;
constexpr std::uint64_t kQuery = std::uint64_t{1} << 57;  // marks a stamp of a query, not of a key

const char* const kPolicies[] = {
    "streaming:sink=3,recent=60",
    "streaming:sink=0,recent=1",
    "streaming:sink=4,recent=40+quest",
    "streaming:sink=4,recent=90+mosaickv:sinks=0,recent=0,min_segment=32,segment=64,select=0",
    "streaming:sink=4,recent=40,pos=slot",
    "lacache:budget=48,span=2,overlap=1,sink=2",
    "lacache:budget=64,span=2,sink=2,map=band,pass=uniform",
    "lacache:budget=40,span=2,overlap=1,sink=2,pos=slot",
    "h2o:heavy=20,recent=12",
    "tova:budget=30",
    "snapkv:budget=0.4,window=4,kernel=3",
    "snapkv:tokens=24,window=4,kernel=3+mosaickv:sinks=0,recent=0,min_segment=32,segment=64,select="
    "0",
    "chunkkv:chunk=4,window=4,budget=0.5,reuse=2",
    "semanticache:sink=2,recent=4,max_chunk=16",
    "semanticache:sink=2,recent=4,max_chunk=16,delimiters=0",
    "semanticache:tau=0.02,sink=2,recent=4,max_chunk=16,delimiters=0,key_space=pre",
    "snapkv:budget=0.6,window=4+semanticache:sink=2,recent=4,max_chunk=16,delimiters=0",
    "chunkkv:chunk=4,window=4,budget=0.7+semanticache:sink=2,recent=4,max_chunk=16",
    "dense",
};

struct Known {
  Track track;
  TokenOracle oracle;
  policies::Policy policy;
};

class TokensProperty : public CompactionFixture,
                       public testing::WithParamInterface<kernels::ElementType> {
 protected:
  TokensProperty() : CompactionFixture(64 << 20) {
    cache::ModelSpec spec = cache::SmallModel("tokens", 4, 2, GetParam());
    spec.rope_theta = 10000;
    spec.delimiter_token_ids = {7};
    model_ = world_.Register(spec);
  }

  // ---- Operations. Each returns an error text, or an empty string.

  std::string Step() {
    const std::uint64_t dice = random_.Below(100);
    if (known_.empty() || dice < 3) return Create();
    Known& known = random_.Pick(known_);
    if (dice < 17) return AppendAll(known);
    if (dice < 22) return AppendByLayer(known);
    if (dice < 40) return Decode(known);
    if (dice < 56) return Compress(known, /*some=*/false);
    if (dice < 60) return Compress(known, /*some=*/true);
    if (dice < 66) return ForkOne(known);
    if (dice < 74) return Cut(known);
    if (dice < 79) return SetPolicy(known);
    if (dice < 82) return Free(known);
    if (dice < 94) return RunOne();
    while (!scheduler_.Queued().empty()) {
      if (std::string wrong = RunOne(); !wrong.empty()) return wrong;
    }
    return "";
  }

  std::string Create() {
    if (known_.size() >= 4) return Free(known_.front());
    Say("create");
    known_.push_back({{world_.NewSequence(worker_->session(), *model_), {}, std::nullopt},
                      TokenOracle(*model_),
                      {}});
    return SetPolicy(known_.back());
  }

  std::string SetPolicy(Known& known) {
    const char* const text = random_.Pick(kPolicies);
    Say("policy " + std::string(text) + " for " + Name(known));
    const absl::StatusOr<policies::Policy> policy = policies::ParsePolicy(text);
    if (!policy.ok()) return policy.status().ToString();
    const absl::Status status = compactor_.SetPolicy(*known.track.sequence, *policy);
    if (!status.ok()) {
      return IsHalfMoved(known, status) ||
                     (NeedsRowsAsTheyCame(*policy) && absl::IsFailedPrecondition(status))
                 ? ""
                 : status.ToString();
    }
    known.policy = *policy;
    return "";
  }

  std::string AppendAll(Known& known) {
    return AppendTo(known, 0, model_->layers(), DrawTokens(random_.Between(1, 90), 1));
  }
  // The same layer by layer, like a prefill. Sometimes a layer is left behind.
  std::string AppendByLayer(Known& known) {
    const Stamps more = DrawTokens(random_.Between(1, 60), 2);
    const std::uint32_t layers =
        random_.OneIn(3) ? static_cast<std::uint32_t>(random_.Between(1, model_->layers()))
                         : model_->layers();
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
      if (std::string wrong = AppendTo(known, layer, 1, more); !wrong.empty()) return wrong;
      if (random_.OneIn(3)) {
        if (std::string wrong = RunOne(); !wrong.empty()) return wrong;
      }
    }
    return "";
  }
  std::string AppendTo(Known& known, std::uint32_t first, std::uint32_t layers, Stamps more) {
    const std::uint64_t held = *known.track.sequence->TokensOfLayer(first);
    for (std::uint32_t layer = first; layer < first + layers; ++layer) {
      if (*known.track.sequence->TokensOfLayer(layer) != held) return Level(known);
    }
    // If another layer has these tokens already, this one gets the same ones.
    std::size_t added = 0;
    for (std::size_t i = 0; i < more.size(); ++i) {
      if (held + i < known.track.stamps.size()) {
        more[i] = known.track.stamps[held + i];
      } else {
        known.track.stamps.push_back(more[i]);
        ++added;
      }
    }
    const std::size_t known_before = known.track.stamps.size() - added;
    const bool end = random_.OneIn(2);
    Say("append " + std::to_string(more.size()) + " to layers from " + std::to_string(first) +
        (layers == 1 ? " alone" : "") + (end ? ", the end, of " : " of ") + Name(known));
    const Compactor::Rows rows = {.first_layer = first,
                                  .layers = layers,
                                  .end_of_prompt = end,
                                  .first_token = held,
                                  .until = held + more.size()};
    const absl::StatusOr<std::uint64_t> tokens =
        compactor_.Append(known.track.sequence, rows, DrawnRows(model_->layout(), more));
    if (IsHalfMoved(known, tokens.status())) {
      known.track.stamps.resize(known_before);
      return RunAllNow();
    }
    if (!tokens.ok()) return tokens.status().ToString();
    known.track.tail.reset();
    return Check(known);
  }
  // Whether the policy needs the original rows: after evictions or packing it cannot use others.
  static bool NeedsRowsAsTheyCame(const policies::Policy& policy) {
    return policies::MovesPositions(policy) || policies::UsesUnrotatedKeys(policy) ||
           (ChoosesFromAll(policy) &&
            (policies::Merges(policy) ||
             policies::NeededLaneEquality(policy) != policies::LaneEquality::kNothing));
  }
  // Some layers have executed their choice, others not yet.
  static bool IsHalfMoved(const Known& known, const absl::Status& status) {
    return absl::IsFailedPrecondition(status) && policies::MovesPositions(known.policy);
  }
  std::string RunAllNow() {
    while (!scheduler_.Queued().empty()) {
      if (std::string wrong = RunOne(); !wrong.empty()) return wrong;
    }
    return "";
  }

  // Appends the missing rows of layers that were left behind.
  std::string Level(Known& known) {
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      const std::uint64_t held = *known.track.sequence->TokensOfLayer(layer);
      const Stamps missing(known.track.stamps.begin() + static_cast<std::ptrdiff_t>(held),
                           known.track.stamps.end());
      if (missing.empty()) continue;
      if (std::string wrong = AppendTo(known, layer, 1, missing); !wrong.empty()) return wrong;
    }
    return "";
  }

  std::string Decode(Known& known) {
    if (std::string wrong = Level(known); !wrong.empty()) return wrong;
    Track& track = known.track;
    if (!track.tail.has_value()) {
      auto tail = worker_->Open(*track.sequence);
      if (absl::IsAborted(tail.status())) {  // its tokens move, or would have under another policy
        if (std::string wrong = RunAllNow(); !wrong.empty()) return wrong;
        tail = worker_->Open(*track.sequence);
      }
      if (IsHalfMoved(known, tail.status())) return RunAllNow();
      if (!tail.ok()) return tail.status().ToString();
      track.tail = *tail;
    }
    const std::uint64_t first = track.stamps.size();
    for (const std::uint64_t stamp : DrawTokens(random_.Between(1, 70), 3)) {
      if (!worker_->HasRoom(*track.sequence, track.stamps.size())) break;
      WriteTail(track, stamp);
    }
    Say("decode " + std::to_string(track.stamps.size() - first) + " of " + Name(known));
    const auto moved = track.sequence->AbsorbFullTiles();
    if (!moved.ok()) return moved.status().ToString();
    Collect();
    if (*moved > 0) compactor_.TailsMoved(track.sequence);
    return Check(known);
  }

  // Observes what the policy needs.
  void ShowNow(Known& known) {
    const policies::Needs needs = policies::NeedsOf(known.policy);
    const std::uint64_t tokens = known.track.stamps.size();
    if (tokens == 0) return;
    if (needs.token_ids) {
      std::vector<std::uint32_t> ids(tokens);
      for (auto& id : ids) id = static_cast<std::uint32_t>(random_.Between(1, 12));
      EXPECT_TRUE(compactor_.ObserveTokens(*known.track.sequence, 0, ids).ok());
    }
    for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
      if (policies::DecidesFor(known.policy, layer) != layer) continue;
      const std::uint64_t held = *known.track.sequence->TokensOfLayer(layer);
      const std::uint64_t most =
          needs.decode_queries ? model_->layout().ring_capacity() : needs.last_queries;
      const std::uint64_t count = std::min(held, most);
      const std::vector<std::byte> rows = Queries(known.track, layer, held - count, count);
      ObservedLayer shown = {.layer = layer, .tokens = held};
      if (count > 0) shown.last = {held - count, count, rows.data()};
      std::vector<float> sums(held * 2);
      for (float& sum : sums) sum = static_cast<float>(random_.Below(1000)) / 64;
      if (needs.attention_sums) shown.sums = {0, held, sums.data()};
      if (count == 0 && !needs.attention_sums) continue;
      const absl::Status status = compactor_.Observe(*known.track.sequence, shown);
      EXPECT_TRUE(status.ok()) << status;
    }
  }
  std::vector<std::byte> Queries(const Track& track, std::uint32_t layer, std::uint64_t first,
                                 std::uint64_t count) {
    const kernels::DenseTile tile = model_->layout().tile(layer);
    const std::uint32_t heads = model_->geometry(layer).query_heads;
    std::vector<std::byte> rows(count * heads * tile.row_bytes());
    for (std::uint64_t i = 0; i < count * heads; ++i) {
      DrawRow(track.stamps[first + i / heads] ^ kQuery ^ i % heads,
              {layer, 0, cache::RowKind::kKey}, tile, rows.data() + i * tile.row_bytes());
    }
    return rows;
  }

  std::string Compress(Known& known, bool some) {
    std::uint32_t first = 0;
    std::uint32_t layers = model_->layers();
    if (some) {
      first = static_cast<std::uint32_t>(random_.Below(layers));
      layers = static_cast<std::uint32_t>(random_.Between(1, layers - first));
    }
    const bool shows = known.policy.drops_entries() && !random_.OneIn(6);
    Say("compress " + std::to_string(layers) + " layers from " + std::to_string(first) + " of " +
        Name(known) + (shows ? ", shown" : ""));
    if (shows) ShowNow(known);
    auto told = std::make_shared<std::optional<absl::Status>>();
    compactor_.Compress(known.track.sequence, {first, layers, true},
                        [told](absl::Status status) { *told = std::move(status); });
    told_.push_back(told);
    if (policies::MovesPositions(known.policy)) known.track.tail.reset();
    return Check(known);
  }

  std::string ForkOne(Known& known) {
    if (known_.size() >= 4) return Free(known);
    Say("fork " + Name(known));
    const auto child = compactor_.Fork(*known.track.sequence, [&] {
      return world_.tenant().Fork(worker_->session(), known.track.sequence->id());
    });
    if (!child.ok()) {
      return absl::IsFailedPrecondition(child.status()) ? "" : child.status().ToString();
    }
    known_.push_back({{*child, known.track.stamps, std::nullopt}, known.oracle, known.policy});
    Known& fork = known_.back();
    fork.track.stamps.resize(fork.track.sequence->Describe(false).tokens);
    fork.oracle.Sync(fork.track);
    fork.oracle.Cut(fork.track.stamps.size());
    return Check(fork);
  }

  std::string Cut(Known& known) {
    const std::uint64_t held = known.track.sequence->Describe(false).tokens;
    const std::uint64_t tokens =
        random_.OneIn(5) ? 0 : held - std::min(held, random_.Below(random_.OneIn(3) ? 200 : 20));
    Say("cut " + Name(known) + " to " + std::to_string(tokens));
    known.oracle.Sync(known.track);
    const absl::Status status = compactor_.Truncate(*known.track.sequence, tokens);
    if (!status.ok()) {  // between tokens that were merged or moved
      return absl::IsFailedPrecondition(status) ? Check(known) : status.ToString();
    }
    known.track.tail.reset();
    known.oracle.Sync(known.track);
    known.oracle.Cut(tokens);
    known.track.stamps.resize(tokens);
    return Check(known);
  }

  std::string Free(Known& known) {
    Say("free " + Name(known));
    const SequenceId id = known.track.sequence->id();
    std::swap(known, known_.back());
    known_.pop_back();
    return world_.tenant().FreeSequence(id).ok() ? "" : "not freed";
  }

  // Runs the next job: its sequence's layers must be unchanged, or equal what the policy leaves of
  // them.
  std::string RunOne() {
    const std::vector<JobSpec> queued = scheduler_.QueuedSpecs();
    if (queued.empty()) return "";
    const auto of = std::find_if(known_.begin(), known_.end(), [&](const Known& known) {
      return known.track.sequence->id().value() == queued.front().owner;
    });
    TokenOracle::Outcomes expected(model_->layers());
    if (of != known_.end()) {
      of->oracle.Sync(of->track);
      if (of->policy.drops_entries()) expected = of->oracle.Expected(of->track, of->policy);
    }
    Say("run " + *scheduler_.RunNext());
    Collect();
    if (of == known_.end()) return "";
    of->oracle.Adopt(of->track, of->policy, std::move(expected));
    return Check(*of);
  }

  std::string Check(Known& known) {
    known.oracle.Sync(known.track);
    const bool turned =
        policies::MovesPositions(known.policy) || known.track.sequence->position_shift() != 0;
    const cache::SequenceView view = View(known.track);
    const std::string wrong = known.oracle.Differs(view, known.track, turned);
    if (!wrong.empty()) return Name(known) + ", " + wrong;
    if (turned) known.oracle.TakeKeys(view);
    const shm::SequenceBlock& block = worker_->Block(*known.track.sequence);
    const std::uint64_t held = known.oracle.tokens();
    const std::uint64_t shift = known.track.sequence->position_shift();
    if (block.next_position.load() != held - std::min(held, shift)) {
      return Name(known) + ", the next position is " + std::to_string(block.next_position.load());
    }
    return "";
  }

  static std::string Name(const Known& known) {
    return "sequence " + std::to_string(known.track.sequence->id().value() & 0xffffffff) + " of " +
           std::to_string(known.track.stamps.size());
  }
  void Say(const std::string& line) { story_ += line + "\n"; }

  std::vector<Known> known_;
  std::vector<std::shared_ptr<std::optional<absl::Status>>> told_;
  std::string story_;
};

TEST_P(TokensProperty, LanesHoldWhatThePolicyLeaves) {
  for (int step = 0; step < kSteps; ++step) {
    ASSERT_EQ(Step(), "") << "after\n" << story_;
    ASSERT_NO_FATAL_FAILURE(world_.Validate()) << "after\n" << story_;
  }
  while (!scheduler_.Queued().empty()) ASSERT_EQ(RunOne(), "") << "after\n" << story_;
  int ok = 0;
  for (const auto& told : told_) {
    ASSERT_TRUE(told->has_value()) << "somebody was never told";
    ok += (**told).ok();
    // Missing observations, missing rows, a freed sequence, or a replaced policy.
    if (!(**told).ok()) {
      EXPECT_TRUE(absl::IsFailedPrecondition(**told) || absl::IsCancelled(**told) ||
                  absl::IsAborted(**told) || absl::IsInvalidArgument(**told))
          << **told;
    }
  }
  std::printf("%zu compressed, %d of them in full; %llu choices\n", told_.size(), ok,
              static_cast<unsigned long long>(compactor_.counters().decisions_made.load()));
  EXPECT_GT(ok, 0);
  while (!known_.empty()) ASSERT_EQ(Free(known_.back()), "") << story_;
}

INSTANTIATE_TEST_SUITE_P(Types, TokensProperty,
                         testing::Values(kernels::ElementType::kBf16, kernels::ElementType::kFp32),
                         [](const auto& instance) {
                           return std::string(kernels::ElementName(instance.param));
                         });

}  // namespace
}  // namespace tessera::compaction
