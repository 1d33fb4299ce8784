#include "daemon/compaction/observation/observation.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/dispatch/implementation.h"
#include "tests/fakes/seed.h"
#include "tests/unit/cache/world.h"

namespace tessera::compaction {
namespace {

constexpr std::uint64_t kTokens = 100;
constexpr std::uint32_t kHeads = 4;
constexpr std::uint32_t kLanes = 2;
constexpr std::uint32_t kDim = 64;
constexpr policies::Needs kAll = {
    .last_queries = 8, .last_share = 0.1, .norm_share = 0.05, .attention_sums = true};

class ObservationTest : public testing::Test {
 protected:
  ObservationTest() {
    cache::ModelSpec spec = cache::SmallModel("shown", 2, kLanes, kernels::ElementType::kFp32);
    model_.emplace(*cache::Model::Create(ModelId(1), spec, 2));
    for (float& element : rows_) element = static_cast<float>(random_.Below(1 << 20)) / 65536 - 8;
    for (float& sum : sums_) sum = static_cast<float>(random_.Below(1 << 20)) / 65536;
  }
  ObservedLayer Last(std::uint64_t first, std::uint64_t count) {
    ObservedLayer shown = {.tokens = kTokens};
    shown.last = {first, count, Rows()};
    return shown;
  }
  ObservedLayer Norm(std::uint64_t count, const std::vector<std::uint64_t>& positions) {
    ObservedLayer shown = {.tokens = kTokens};
    shown.norm = {count, positions, Rows()};
    return shown;
  }
  ObservedLayer Sums(std::uint64_t first, std::uint64_t count) {
    ObservedLayer shown = {.tokens = kTokens};
    shown.sums = {first, count, sums_.data()};
    return shown;
  }
  absl::Status Take(const ObservedLayer& shown, const policies::Needs& needs = kAll) {
    return observation_.Take(shown, needs, *model_, operations_, budget_);
  }
  // Refused, without any effect.
  void ExpectRefused(const ObservedLayer& shown, const std::string& named,
                     const policies::Needs& needs = kAll,
                     absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
    const std::uint64_t bytes = observation_.bytes();
    const std::uint64_t charged = budget_.used_bytes();
    const absl::Status status = Take(shown, needs);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_NE(std::string(status.message()).find(named), std::string::npos) << status;
    EXPECT_EQ(observation_.bytes(), bytes);
    EXPECT_EQ(budget_.used_bytes(), charged);
  }
  // Reports the strongest queries and the tokens that they were selected from, like a worker.
  absl::Status TakeStrongest(std::uint64_t first, const std::vector<std::uint64_t>& of_each_head,
                             bool all = false) {
    std::vector<std::uint64_t> positions;
    for (std::uint32_t head = 0; head < kHeads; ++head) {
      positions.insert(positions.end(), of_each_head.begin(), of_each_head.end());
    }
    ObservedLayer shown = Norm(of_each_head.size(), positions);
    shown.norm.first_token = first;
    shown.norm.all = all;
    return Take(shown);
  }
  const std::byte* Rows() const { return reinterpret_cast<const std::byte*>(rows_.data()); }
  std::vector<std::uint64_t> PositionsOf(std::uint32_t head) const {
    const auto queries = observation_.queries();
    if (queries.empty()) return {};
    return {queries[head].positions.begin(), queries[head].positions.end()};
  }
  // Whether row `index` equals row `row` of `of`, each of kDim elements.
  bool IsRow(std::uint32_t head, std::size_t index, std::size_t row) const {
    return std::memcmp(observation_.queries()[head].rows + index * kDim * 4, &rows_[row * kDim],
                       kDim * 4) == 0;
  }

  TestRandom random_;
  const kernels::Operations& operations_ = kernels::OperationsOf(kernels::BestImplementation());
  std::optional<cache::Model> model_;
  pool::Account budget_{"budget", 100'000};
  std::vector<float> rows_ = std::vector<float>(kTokens * kHeads * kDim);
  std::vector<float> sums_ = std::vector<float>(kTokens * kLanes);
  Observation observation_;
};

TEST_F(ObservationTest, TakesWhatThePolicyAsksForAndNotOneRowMore) {
  ASSERT_TRUE(Take(Last(90, 10)).ok());  // a tenth is more than 8
  EXPECT_EQ(PositionsOf(3), (std::vector<std::uint64_t>{90, 91, 92, 93, 94, 95, 96, 97, 98, 99}));
  EXPECT_TRUE(IsRow(3, 2, 2 * kHeads + 3));
  ExpectRefused(Last(89, 11), "11 last queries; the policy asks for 10");
  ExpectRefused(Last(91, 10), "up to position 101; the sequence holds 100");
  ExpectRefused(Last(0, 1), "asks for none", {.attention_sums = true});
  ExpectRefused(Sums(0, 100), "asks for none", {.last_queries = 8});
  ExpectRefused(Sums(1, 100), "up to position 101");
  // More than a twentieth is allowed, since another worker may continue, but not more than all.
  ExpectRefused(Norm(101, std::vector<std::uint64_t>(404)),
                "101 queries by norm; of 100 tokens the policy asks for 100 at most");
  // If every query counts, all are kept.
  EXPECT_TRUE(Take(Last(60, 40), {.decode_queries = true}).ok());
  ExpectRefused(Last(0, 101), "last queries", {.decode_queries = true});
}

// Uploading in pieces needs no more room than uploading at once.
TEST_F(ObservationTest, WhatComesInPiecesTakesNoMoreRoom) {
  constexpr std::uint64_t kPiece = 16;
  constexpr std::uint64_t kPieces = 64;
  const std::vector<float> rows(kPiece * kHeads * kDim, 0.5f);
  const std::uint64_t all =
      kPieces * kPiece * kHeads * (kDim * sizeof(float) + sizeof(std::uint64_t));
  pool::Account budget("budget", all);
  Observation observation;
  for (std::uint64_t i = 0; i < kPieces; ++i) {
    ObservedLayer shown = {.tokens = kPieces * kPiece};
    shown.last = {i * kPiece, kPiece, reinterpret_cast<const std::byte*>(rows.data())};
    const absl::Status status =
        observation.Take(shown, {.decode_queries = true}, *model_, operations_, budget);
    ASSERT_TRUE(status.ok()) << status << ", piece " << i;
    EXPECT_EQ(budget.used_bytes(), (i + 1) * (all / kPieces));
  }
  // A repetition holds nothing twice, and a copy is independent.
  const Observation copy = observation;
  pool::Account more("more", 2 * all);
  ObservedLayer again = {.tokens = kPieces * kPiece};
  again.last = {0, kPiece, reinterpret_cast<const std::byte*>(rows.data())};
  ASSERT_TRUE(observation.Take(again, {.decode_queries = true}, *model_, operations_, more).ok());
  EXPECT_EQ(more.used_bytes(), all);
  EXPECT_EQ(copy.bytes(), all);
  EXPECT_EQ(observation.bytes(), all);
}

TEST_F(ObservationTest, PositionsOfAHeadRise) {
  EXPECT_TRUE(Take(Norm(2, {0, 1, 98, 99, 0, 99, 5, 6})).ok());
  EXPECT_EQ(PositionsOf(1), (std::vector<std::uint64_t>{98, 99}));
  EXPECT_TRUE(IsRow(1, 1, 3));
  ExpectRefused(Norm(2, {0, 1, 98, 98, 0, 99, 5, 6}), "position 3 of the queries by norm is 98");
  ExpectRefused(Norm(2, {0, 1, 98, 99, 7, 6, 5, 6}), "position 5");
  ExpectRefused(Norm(2, {0, 1, 98, 100, 0, 99, 5, 6}), "below 100");
  ExpectRefused(Norm(2, {0, 1, 98, ~std::uint64_t{0}, 0, 99, 5, 6}), "below 100");
}

TEST_F(ObservationTest, ValuesThatAreNoneAreRefused) {
  const float bad[] = {std::numeric_limits<float>::quiet_NaN(),
                       std::numeric_limits<float>::infinity(), -0x1p64f};
  for (const float value : bad) {
    const std::size_t at = random_.Below(8 * kHeads * kDim);
    const float good = std::exchange(rows_[at], value);
    ExpectRefused(Last(92, 8), "element " + std::to_string(at) + " of the last queries");
    rows_[at] = good;
    const std::size_t sum = random_.Below(sums_.size());
    const float paid = std::exchange(sums_[sum], value);
    ExpectRefused(Sums(0, 100), "element " + std::to_string(sum) + " of the sums");
    sums_[sum] = paid;
  }
  sums_[7] = -0.5f;
  ExpectRefused(Sums(0, 100), "element 7 of the sums of attention is -0.5");
}

TEST_F(ObservationTest, ABudgetThatIsSpentIsChargedNothing) {
  pool::Charge rest = *budget_.Reserve(pool::MemoryTag::kRawCopies, 100'000 - 8 * kHeads * 264);
  ExpectRefused(Last(90, 9), "", kAll, absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Take(Last(92, 8)).ok());
  ExpectRefused(Sums(0, 1), "", kAll, absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(PositionsOf(0).size(), 8u);
  rest.Reset();
  EXPECT_TRUE(Take(Sums(0, 100)).ok());
  EXPECT_GE(budget_.used_bytes(pool::MemoryTag::kObservations), observation_.bytes());
  observation_.ForgetBefore(kTokens);
  EXPECT_EQ(observation_.bytes(), 0u);
  EXPECT_EQ(budget_.used_bytes(), 0u);
}

// After a failed call the worker uploads everything again.
TEST_F(ObservationTest, WhatIsShownAgainNeedsNoRoom) {
  pool::Charge rest = *budget_.Reserve(pool::MemoryTag::kRawCopies,
                                       100'000 - 8 * kHeads * 264 - kLanes * 100 * sizeof(float));
  for (int again = 0; again < 3; ++again) {
    EXPECT_TRUE(Take(Last(92, 8)).ok()) << again;
    EXPECT_TRUE(Take(Sums(0, 100)).ok()) << again;
  }
  ExpectRefused(Last(91, 8), "", kAll, absl::StatusCode::kResourceExhausted);
}

TEST_F(ObservationTest, LaterRowsTakeThePlaceOfEarlierOnes) {
  ASSERT_TRUE(Take(Last(80, 8)).ok());
  ObservedLayer again = Last(86, 4);
  again.last.rows = Rows() + 20 * kHeads * kDim * 4;
  ASSERT_TRUE(Take(again).ok());
  EXPECT_EQ(PositionsOf(2), (std::vector<std::uint64_t>{80, 81, 82, 83, 84, 85, 86, 87, 88, 89}));
  EXPECT_TRUE(IsRow(2, 5, 5 * kHeads + 2));
  EXPECT_TRUE(IsRow(2, 6, 20 * kHeads + 2));
  EXPECT_TRUE(IsRow(2, 9, 23 * kHeads + 2));
  // The same for rows by norm, between those.
  const std::uint64_t charged = budget_.used_bytes();
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(Take(again).ok());
  EXPECT_LE(budget_.used_bytes(), charged + 4 * kHeads * 264) << "charged again and again";
}

TEST_F(ObservationTest, ForgetsWhatWasDecidedAboutAndWhatWasCutOff) {
  ASSERT_TRUE(Take(Last(80, 10)).ok());
  ASSERT_TRUE(Take(Sums(10, 80)).ok());
  observation_.ForgetFrom(90);  // there is none
  EXPECT_EQ(observation_.SumsAt(1, std::vector<std::uint64_t>{10, 89}),
            (std::vector<float>{sums_[80], sums_[159]}));
  EXPECT_TRUE(observation_.SumsAt(1, std::vector<std::uint64_t>{9, 10}).empty());
  EXPECT_EQ(observation_.SumsAt(1, std::vector<std::uint64_t>{89, 90, 91}).size(), 1u)
      << "what is behind them is told from queries";
  observation_.ForgetFrom(87);
  EXPECT_TRUE(observation_.SumsAt(1, std::vector<std::uint64_t>{10}).empty());
  observation_.ForgetBefore(83);
  EXPECT_EQ(PositionsOf(0), (std::vector<std::uint64_t>{83, 84, 85, 86}));
  EXPECT_TRUE(IsRow(0, 0, 3 * kHeads));
  EXPECT_TRUE(IsRow(3, 3, 6 * kHeads + 3));
  observation_.ForgetFrom(0);
  EXPECT_EQ(observation_.bytes(), 0u);
  EXPECT_EQ(budget_.used_bytes(), 0u);
}

// Memory is shared and charged once until one of the two changes.
TEST_F(ObservationTest, AForkIsShownTheSame) {
  ASSERT_TRUE(Take(Last(80, 10)).ok());
  const std::uint64_t charged = budget_.used_bytes();
  std::vector<Observation> forks(100, observation_);
  EXPECT_EQ(budget_.used_bytes(), charged);
  forks[0].ForgetFrom(83);
  EXPECT_EQ(forks[0].queries()[1].positions.size(), 3u);
  EXPECT_EQ(budget_.used_bytes(), charged + charged * 3 / 10);
  EXPECT_EQ(PositionsOf(1).size(), 10u);
  EXPECT_TRUE(IsRow(1, 9, 9 * kHeads + 1));
  // No room for its remaining rows: they are dropped in that fork only.
  pool::Charge rest = *budget_.Reserve(pool::MemoryTag::kRawCopies, 100'000 - budget_.used_bytes());
  forks[1].ForgetBefore(85);
  EXPECT_EQ(forks[1].bytes(), 0u);
  EXPECT_EQ(forks[2].queries()[1].positions.size(), 10u);
  // Without sharing no room is needed.
  forks.erase(forks.begin() + 1, forks.end());
  observation_.ForgetBefore(85);
  EXPECT_EQ(PositionsOf(1), (std::vector<std::uint64_t>{85, 86, 87, 88, 89}));
  EXPECT_TRUE(IsRow(1, 4, 9 * kHeads + 1));
  rest.Reset();
  EXPECT_EQ(budget_.used_bytes(), charged / 2 + charged * 3 / 10);
  forks.clear();
  observation_.ForgetBefore(kTokens);
  EXPECT_EQ(budget_.used_bytes(), 0u);
}

// ---- How many of the strongest are known

constexpr std::uint64_t kEvery = ~std::uint64_t{0};

TEST_F(ObservationTest, AsManyAreKnownAsWereShownOfAnyTokens) {
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), kEvery) << "nobody has shown any";
  EXPECT_EQ(observation_.FirstTokenWithoutNorms(5, kTokens), 5u);
  ASSERT_TRUE(TakeStrongest(0, {3, 40, 70}).ok());
  EXPECT_EQ(observation_.FirstTokenWithoutNorms(5, kTokens), kTokens);
  ASSERT_TRUE(Take(Last(90, 10)).ok());
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), 3u) << "the newest need not be strong";
  // The same worker again, which has observed more.
  ASSERT_TRUE(TakeStrongest(0, {3, 40, 70, 71, 99}).ok());
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), 5u);
  // A worker that continues afterwards: it adds nothing to what is known of the first tokens,
  // whatever it reports of them.
  ASSERT_TRUE(TakeStrongest(72, {72, 73, 74, 75, 76, 77, 99}).ok());
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), 4u);
  EXPECT_EQ(observation_.KnownNormQueries(72, kTokens), 7u);
  ASSERT_TRUE(TakeStrongest(72, {72}, /*all=*/true).ok());
  EXPECT_EQ(observation_.KnownNormQueries(72, kTokens), kEvery);
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), 4u);
  // Observed again from the first token on.
  ASSERT_TRUE(TakeStrongest(0, {3, 40, 72, 99}, /*all=*/true).ok());
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), kEvery);
}

TEST_F(ObservationTest, OfFewerTokensThoseOfThemAreKnown) {
  ASSERT_TRUE(TakeStrongest(0, {3, 40, 70, 71, 99}).ok());
  const Observation fork = observation_;
  observation_.ForgetFrom(71);
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), 3u);
  observation_.ForgetBefore(4);
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), 2u);
  EXPECT_EQ(observation_.KnownNormQueries(4, 70), 1u);
  observation_.ForgetBefore(71);
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), kEvery) << "all were decided about";
  EXPECT_EQ(observation_.FirstTokenWithoutNorms(0, kTokens), 0u);
  EXPECT_EQ(fork.KnownNormQueries(0, kTokens), 5u);
}

// A fork without room for its remaining rows does not mistake new ones for the strongest.
TEST_F(ObservationTest, RowsThatThereIsNoRoomForAreMissed) {
  ASSERT_TRUE(TakeStrongest(0, {3, 40, 70}, /*all=*/true).ok());
  Observation fork = observation_;
  pool::Charge rest = *budget_.Reserve(pool::MemoryTag::kRawCopies, 100'000 - budget_.used_bytes());
  fork.ForgetFrom(70);
  EXPECT_EQ(fork.bytes(), 0u);
  EXPECT_EQ(fork.KnownNormQueries(0, kTokens), 0u);
  rest.Reset();
  observation_ = fork;
  ASSERT_TRUE(TakeStrongest(70, {80}, /*all=*/true).ok());
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), 0u);
  ASSERT_TRUE(TakeStrongest(0, {80}).ok());
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), 1u);
}

// A worker that knows none of them says so. After rows are dropped it is still known that some were
// observed.
TEST_F(ObservationTest, ThatNoneIsKnownIsKnown) {
  ObservedLayer shown = Norm(0, {});
  shown.norm.first_token = 10;
  shown.norm.none = true;
  ASSERT_TRUE(Take(shown).ok());
  EXPECT_EQ(observation_.KnownNormQueries(0, 10), kEvery);
  EXPECT_EQ(observation_.FirstTokenWithoutNorms(0, kTokens), 0u);
  EXPECT_EQ(observation_.FirstTokenWithoutNorms(10, kTokens), kTokens) << "that is known";
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), 0u);
  ASSERT_TRUE(TakeStrongest(0, {3, 40}, /*all=*/true).ok());
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), kEvery);
  observation_.ForgetRows();
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), 0u);
  EXPECT_EQ(observation_.bytes(), 0u);
  EXPECT_EQ(budget_.used_bytes(), 0u);
}

// Tokens without observed queries are not skipped.
TEST_F(ObservationTest, MissingQueriesAreReported) {
  const std::vector<std::uint64_t> positions = {3, 5, 3, 5, 3, 5, 3, 5};
  ObservedLayer shown = Norm(2, positions);
  shown.norm.end = 20;
  ASSERT_TRUE(Take(shown).ok());
  EXPECT_EQ(observation_.FirstTokenWithoutNorms(0, kTokens), 20u);
  EXPECT_EQ(observation_.FirstTokenWithoutNorms(0, 15), 15u);
  ASSERT_TRUE(TakeStrongest(30, {70}).ok());
  EXPECT_EQ(observation_.FirstTokenWithoutNorms(0, kTokens), 20u);
  EXPECT_EQ(observation_.FirstTokenWithoutNorms(25, kTokens), 25u);
  EXPECT_EQ(observation_.FirstTokenWithoutNorms(30, kTokens), kTokens);
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), 1u);
  shown.norm.first_token = 4;
  ExpectRefused(shown,
                "has position 3, which is not among the reported tokens from 4 to before 20");
  shown.norm.first_token = 21;
  ExpectRefused(shown, "from 21 to before 20");
}

TEST_F(ObservationTest, TheStrongestAreOfTheTokensThatTheyAreSaidToBeOf) {
  const std::vector<std::uint64_t> positions = {10, 11, 10, 11, 9, 11, 10, 11};
  ObservedLayer shown = Norm(2, positions);
  shown.norm.first_token = 10;
  ExpectRefused(shown, "position 9, which is not among the reported tokens from 10 to before 100");
  EXPECT_EQ(observation_.KnownNormQueries(0, kTokens), kEvery);
}

// Several workers in turn, each reporting some of the strongest of its tokens; some tokens are
// truncated or decided about. The known ones are always the strongest of all.
TEST_F(ObservationTest, WhatIsKnownIsTheStrongestOfAll) {
  pool::Account budget("budget", 1 << 20);
  std::uint64_t partly = 0;
  for (int round = 0; round < 300; ++round) {
    Observation observation;
    std::vector<double> norms;  // by token; equal for all heads
    std::uint64_t first = 0, own = 0;
    for (int turn = 0; turn < 8; ++turn) {
      const std::uint64_t grown = std::min(kTokens, norms.size() + random_.Between(1, 30));
      while (norms.size() < grown) norms.push_back(static_cast<double>(random_.Below(1 << 30)));
      std::vector<std::uint64_t> strongest;
      for (std::uint64_t token = std::max(own, first); token < norms.size(); ++token) {
        strongest.push_back(token);
      }
      std::ranges::sort(strongest, std::greater<>(), [&](auto token) { return norms[token]; });
      const std::uint64_t seen = strongest.size();
      strongest.resize(std::min<std::uint64_t>(seen, random_.Between(1, 25)));
      std::ranges::sort(strongest);
      if (seen > 0) {
        ObservedLayer shown = Norm(strongest.size(), {});
        std::vector<std::uint64_t> positions;
        for (std::uint32_t head = 0; head < kHeads; ++head) {
          positions.insert(positions.end(), strongest.begin(), strongest.end());
        }
        shown.tokens = norms.size();
        shown.norm.positions = positions;
        shown.norm.first_token = std::max(own, first);
        shown.norm.all = strongest.size() == seen;
        ASSERT_TRUE(observation.Take(shown, kAll, *model_, operations_, budget).ok());
      }
      if (random_.OneIn(3)) {
        norms.resize(random_.Between(first, norms.size()));
        observation.ForgetFrom(norms.size());
        own = std::min<std::uint64_t>(own, norms.size());
      }
      if (random_.OneIn(4)) {
        first = random_.Between(first, norms.size());
        observation.ForgetBefore(first);
      }
      if (random_.OneIn(3)) own = norms.size();  // another worker continues
      const std::uint64_t known = observation.KnownNormQueries(first, norms.size());
      std::vector<std::uint64_t> all;
      for (std::uint64_t token = first; token < norms.size(); ++token) all.push_back(token);
      std::ranges::sort(all, std::greater<>(), [&](auto token) { return norms[token]; });
      all.resize(std::min<std::uint64_t>(all.size(), known));
      partly += known > 0 && known < norms.size() - first ? 1 : 0;
      const auto queries = observation.queries();
      for (const std::uint64_t token : all) {
        ASSERT_TRUE(!queries.empty() && std::ranges::binary_search(queries.back().positions, token))
            << "round " << round << ", turn " << turn << ": " << token << " of " << known;
      }
    }
  }
  EXPECT_GT(partly, 300u);
}

TEST(TokenIds, DelimitersAreThoseOfTheModel) {
  cache::ModelSpec spec = cache::SmallModel("text", 1, 1);
  spec.delimiter_token_ids = {13, 7};
  const cache::Model model = *cache::Model::Create(ModelId(1), spec, 2);
  using enum policies::TextMark;
  std::vector<policies::TextMark> text;
  TakeTokenIds(2, std::vector<std::uint32_t>{7, 8, 13}, model, text);
  EXPECT_EQ(text, (std::vector{kNotShown, kNotShown, kDelimiter, kInside, kDelimiter}));
  TakeTokenIds(1, std::vector<std::uint32_t>{13, 1}, model, text);
  EXPECT_EQ(text, (std::vector{kNotShown, kDelimiter, kInside, kInside, kDelimiter}));
}

}  // namespace
}  // namespace tessera::compaction
