// Values that must not enter a tile: the sequence that appends them fails, and nothing else
// changes.

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

using kernels::ElementType;
using Stamps = std::vector<std::uint64_t>;

struct BadValue {
  const char* name;
  ElementType type;
  std::uint32_t bits;
};

const BadValue kBadValues[] = {
    {"bf16_nan", ElementType::kBf16, 0x7fc0},
    {"bf16_other_nan", ElementType::kBf16, 0xff81},
    {"bf16_inf", ElementType::kBf16, 0x7f80},
    {"bf16_minus_inf", ElementType::kBf16, 0xff80},
    {"bf16_2_to_63", ElementType::kBf16, 0x5f00},
    {"bf16_huge", ElementType::kBf16, 0xff7f},
    {"fp16_nan", ElementType::kFp16, 0x7e01},
    {"fp16_inf", ElementType::kFp16, 0xfc00},
    {"fp32_nan", ElementType::kFp32, 0x7f800001},
    {"fp32_inf", ElementType::kFp32, 0x7f800000},
    {"fp32_2_to_63", ElementType::kFp32, 0xdf000000},
};

struct Place {
  RowPlace row;
  std::uint64_t token;  // index among the appended rows
  std::uint32_t channel;
};

void Spoil(std::byte* row, std::uint32_t channel, const BadValue& bad) {
  const std::size_t bytes = kernels::ElementBytes(bad.type);
  std::memcpy(row + channel * bytes, &bad.bits, bytes);
}

// Valid rows except for one element.
class SpoiltRows final : public MadeRows {
 public:
  SpoiltRows(const shm::LaneLayout& layout, Stamps stamps, const Place& place, const BadValue& bad)
      : MadeRows(layout), good_(layout, std::move(stamps)), place_(place), bad_(bad) {}
  void Make(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first, std::uint32_t count,
            std::byte* key, std::byte* value) const override {
    good_.Make(layer, kv_head, first, count, key, value);
    if (layer != place_.row.layer || kv_head != place_.row.kv_head || place_.token < first ||
        place_.token >= first + count) {
      return;
    }
    std::byte* rows = place_.row.kind == RowKind::kKey ? key : value;
    Spoil(rows + (place_.token - first) * layout_.tile(layer).row_bytes(), place_.channel, bad_);
  }

 private:
  const StampedRows good_;
  const Place place_;
  const BadValue bad_;
};

class SequenceFailure : public testing::TestWithParam<BadValue> {
 protected:
  SequenceFailure()
      : model_(world_.Register(MixedModel("mixed", GetParam().type))),
        worker_(std::in_place, world_.tenant(), world_.OpenSession()) {}

  Place AnyPlace(std::uint64_t tokens) {
    Place place;
    place.row.layer = static_cast<std::uint32_t>(random_.Below(model_->layers()));
    place.row.kv_head =
        static_cast<std::uint32_t>(random_.Below(model_->layout().kv_heads(place.row.layer)));
    place.row.kind = random_.OneIn(2) ? RowKind::kKey : RowKind::kValue;
    place.token = random_.Below(tokens);
    place.channel =
        static_cast<std::uint32_t>(random_.Below(model_->layout().tile(place.row.layer).head_dim));
    return place;
  }
  static std::string Named(const Place& place, std::uint64_t first_token) {
    return std::string(place.row.kind == RowKind::kKey ? "K" : "V") + " of layer " +
           std::to_string(place.row.layer) + ", kv head " + std::to_string(place.row.kv_head) +
           ", token " + std::to_string(first_token + place.token) + ", channel " +
           std::to_string(place.channel);
  }
  std::string Shown(const Sequence& sequence, const Stamps& stamps) {
    const absl::StatusOr<SequenceView> view = ReadSequence(world_.tenant(), sequence);
    if (!view.ok()) return view.status().ToString();
    return Differs(*view, *model_, std::vector<Stamps>(model_->layers(), stamps));
  }
  void ExpectFailed(Sequence& sequence, const absl::Status& status, const std::string& named) {
    ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_NE(status.ToString().find(named), std::string::npos) << status << " lacks " << named;
    EXPECT_TRUE(sequence.failed());
    EXPECT_FALSE(sequence.decoding());
    const Sequence::Description described = sequence.Describe(false);
    EXPECT_TRUE(described.failed);
    EXPECT_NE(described.failure.find(named), std::string::npos) << described.failure;
    const shm::SequenceBlock& block = worker_->Block(sequence);
    EXPECT_EQ(block.state.load(), shm::kSequenceFailed);
    EXPECT_EQ(block.tail_generation.load(), 0u);
    // A failed sequence refuses every call, with the reason.
    const absl::Status refused = AppendAll(sequence, described.tokens, NewStamps(1)).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_NE(refused.ToString().find(named), std::string::npos) << refused;
    EXPECT_EQ(sequence.Truncate(0).code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(sequence.Fork(SequenceId(99), SessionId(1)).status().code(),
              absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(worker_->Open(sequence).status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(*sequence.AbsorbFullTiles(), 0u);
  }
  // Runs after the body, whose sequences are gone then.
  void TearDown() override {
    world_.tenant().EndSession(worker_->session().id());
    worker_.reset();
    world_.ExpectBaseline();
  }

  TestRandom random_;
  World world_{World::Options{.ring_tiles = 4}};
  std::shared_ptr<const Model> model_;
  std::optional<TestWorker> worker_;
};

TEST_P(SequenceFailure, OfAnAppendLeavesEverythingElseAlone) {
  for (std::uint64_t held : {0u, 20u, 256u}) {
    const std::shared_ptr<Sequence> sequence = world_.NewSequence(worker_->session(), *model_);
    const std::shared_ptr<Sequence> neighbour = world_.NewSequence(worker_->session(), *model_);
    const Stamps stamps = NewStamps(held);
    const Stamps other = NewStamps(50);
    ASSERT_TRUE(AppendAll(*sequence, 0, stamps).ok());
    ASSERT_TRUE(AppendAll(*neighbour, 0, other).ok());
    const std::shared_ptr<Sequence> fork =
        *world_.tenant().Fork(worker_->session(), sequence->id());
    // A few more tokens, so that this sequence alone owns its open segment.
    const Stamps more = NewStamps(held);
    ASSERT_TRUE(AppendAll(*sequence, held, more).ok());
    Stamps all = stamps;
    all.insert(all.end(), more.begin(), more.end());

    shm::Word& slot = worker_->session().control()->page().readers[0].word;
    const std::uint64_t pin = shm::Pin(slot, world_.tenant().epochs().epoch());
    const SequenceView before = *ReadSequence(world_.tenant(), *sequence);
    const std::uint64_t used = world_.tenant().account().used_bytes();

    constexpr std::uint64_t kTokens = 300;  // the tile table must grow
    const Place place = AnyPlace(kTokens);
    const absl::StatusOr<std::uint64_t> appended =
        sequence->Append({0, model_->layers(), all.size(), kTokens},
                         SpoiltRows(model_->layout(), NewStamps(kTokens), place, GetParam()));
    ExpectFailed(*sequence, appended.status(), Named(place, all.size()));

    // Its reservation was released, and published data is unchanged for the pinned reader and for
    // new ones. Overwrites all free memory to check that.
    EXPECT_EQ(world_.tenant().account().used_bytes(), used);
    std::vector<pool::Block> scribbles;
    for (std::uint64_t bytes : {64u, 128u, 256u, 512u}) {
      for (int i = 0; i < 200; ++i) {
        scribbles.push_back(
            *world_.tenant().pool().Allocate(bytes, pool::Fit::kExact, pool::MemoryTag::kTables));
        std::memset(scribbles.back().data(), 0xff, bytes);
      }
    }
    EXPECT_EQ(Differs(before, *model_, std::vector<Stamps>(model_->layers(), all)), "");
    EXPECT_EQ(Shown(*sequence, all), "");
    EXPECT_EQ(Shown(*fork, stamps), "");
    EXPECT_EQ(Shown(*neighbour, other), "");
    EXPECT_TRUE(shm::Unpin(slot, pin));
    ASSERT_TRUE(AppendAll(*fork, held, NewStamps(5)).ok());
    ASSERT_TRUE(AppendAll(*neighbour, 50, NewStamps(5)).ok());
    ASSERT_TRUE(world_.tenant().FreeSequence(sequence->id()).ok());
    scribbles.clear();
    world_.Validate();
  }
}

// The operation in which the daemon reads what a worker wrote into its ring.
enum class Meeting { kAbsorb, kClose, kFork, kAppend, kTruncate };

TEST_P(SequenceFailure, OfATailNamesTheTokenHoweverItIsMet) {
  for (Meeting meeting :
       {Meeting::kAbsorb, Meeting::kClose, Meeting::kFork, Meeting::kAppend, Meeting::kTruncate}) {
    const std::uint64_t held = random_.Below(100);
    const std::shared_ptr<Sequence> sequence = world_.NewSequence(worker_->session(), *model_);
    const std::shared_ptr<Sequence> neighbour = world_.NewSequence(worker_->session(), *model_);
    const Stamps stamps = NewStamps(held);
    ASSERT_TRUE(AppendAll(*sequence, 0, stamps).ok());
    ASSERT_TRUE(AppendAll(*neighbour, 0, stamps).ok());
    const std::shared_ptr<Sequence> fork =
        *world_.tenant().Fork(worker_->session(), sequence->id());
    const TestWorker::OpenTail tail = *worker_->Open(*sequence);
    constexpr std::uint64_t kTokens = 64;
    const Place place = AnyPlace(kTokens);
    for (std::uint64_t i = 0; i < kTokens; ++i) {
      worker_->Write(*sequence, tail, held + i, NewStamps(1)[0]);
    }
    const shm::TailRing ring =
        model_->layout().ring(tail.region, place.row.layer, place.row.kv_head);
    Spoil(place.row.kind == RowKind::kKey ? ring.Key(held + place.token)
                                          : ring.Value(held + place.token),
          place.channel, GetParam());
    worker_->Commit(tail, held + kTokens);

    absl::Status status;
    switch (meeting) {
      case Meeting::kAbsorb:
        status = sequence->AbsorbFullTiles().status();
        break;
      case Meeting::kClose:
        status = world_.tenant().CloseTails(worker_->session(), {sequence->id()}).status();
        break;
      case Meeting::kFork:
        status = world_.tenant().Fork(worker_->session(), sequence->id()).status();
        break;
      case Meeting::kAppend:
        status = AppendAll(*sequence, held + kTokens, NewStamps(3)).status();
        break;
      case Meeting::kTruncate:
        status = sequence->Truncate(0);
        break;
    }
    ExpectFailed(*sequence, status, Named(place, held));
    EXPECT_EQ(Shown(*sequence, stamps), "");
    EXPECT_EQ(Shown(*fork, stamps), "");
    EXPECT_EQ(Shown(*neighbour, stamps), "");
    ASSERT_TRUE(world_.tenant().FreeSequence(sequence->id()).ok());
    world_.Validate();
  }
}

// The largest valid values are accepted.
TEST_P(SequenceFailure, StartsNoEarlierThanItMust) {
  BadValue fine = GetParam();
  fine.bits = fine.type == ElementType::kFp16   ? 0x7bff  // 65504
              : fine.type == ElementType::kBf16 ? 0x5eff  // the bf16 below 2^63
                                                : 0x5effffff;
  const std::shared_ptr<Sequence> sequence = world_.NewSequence(worker_->session(), *model_);
  const Place place = AnyPlace(40);
  EXPECT_TRUE(sequence
                  ->Append({0, model_->layers(), 0, 40},
                           SpoiltRows(model_->layout(), NewStamps(40), place, fine))
                  .ok());
  EXPECT_FALSE(sequence->failed());
}

INSTANTIATE_TEST_SUITE_P(Values, SequenceFailure, testing::ValuesIn(kBadValues),
                         [](const auto& value) { return value.param.name; });

}  // namespace
}  // namespace tessera::cache
