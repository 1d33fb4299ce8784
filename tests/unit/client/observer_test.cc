// What a worker reports of its observations: the newest queries and the strongest, in a prompt or
// in steps.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/tokens/counts.h"
#include "tests/unit/client/decoder.h"

namespace tessera::client {
namespace {

constexpr std::uint32_t kLastQueries = 24;
constexpr double kNormShare = 0.1;

struct Way {
  const char* name;
  bool map_memory;
  bool has_staging;
};

class Observing : public testing::TestWithParam<Way> {
 protected:
  Observing()
      : decoder_(random_, Geometry(),
                 {.staging_bytes = 256 << 10,
                  .max_message_bytes = 1 << 20,
                  .has_staging = GetParam().has_staging,
                  .needs = Needs()},
                 GetParam().map_memory),
        track_(decoder_.NewTrack()),
        seen_(Geometry().layers.size()) {}

  static ModelGeometry Geometry() {
    ModelGeometry model;
    model.name = "observed";
    model.type = ElementType::kFp16;
    model.layers.assign(2, {.query_heads = 4, .kv_heads = 2, .head_dim = 64});
    return model;
  }
  static v1::PolicyNeeds Needs() {
    v1::PolicyNeeds needs;
    needs.set_last_queries(kLastQueries);
    needs.set_norm_share(kNormShare);
    return needs;
  }

  // What one layer has observed since its last compression, in a prompt or in steps: rows from
  // `first` on.
  struct Seen {
    std::uint64_t first = 0;
    std::vector<std::byte> rows;
  };

  const BoundModel& model() const { return track_.history.model(); }
  std::size_t row_bytes() const { return model().row_bytes(0); }
  std::size_t token_bytes() const { return model().geometry(0).query_heads * row_bytes(); }

  void Prompt(std::uint64_t tokens, std::uint64_t in_all) {
    const std::uint64_t first = track_.history.tokens();
    decoder_.Prefill(track_, tokens);
    for (std::uint32_t layer = 0; layer < model().layers(); ++layer) {
      const auto rows =
          RandomRows(random_, tokens * LayerRows::QueryElements(model(), layer), model().type());
      TESSERA_ASSERT_OK(track_.sequence.Observe(
          {.layer = layer, .first_token = first, .query = rows, .prompt_tokens = in_all}));
      Seen& seen = seen_[layer];
      if (seen.rows.empty()) seen.first = first;
      seen.rows.insert(seen.rows.end(), rows.begin(), rows.end());
    }
  }

  void Step() {
    Sequence* const batch[] = {&track_.sequence};
    absl::StatusOr<tessera::client::Step> step = decoder_.worker->BeginStep(batch);
    TESSERA_ASSERT_OK(step.status());
    const std::uint64_t at = track_.history.tokens();
    for (std::uint32_t layer = 0; layer < model().layers(); ++layer) {
      LayerRows rows(random_, model(), layer, 1);
      TESSERA_ASSERT_OK(step->AppendAndAttend(layer, rows.tensors()));
      track_.history.Append(layer, rows.key, rows.value);
      Seen& seen = seen_[layer];
      if (seen.rows.empty()) seen.first = at;
      seen.rows.insert(seen.rows.end(), rows.query.begin(), rows.query.end());
    }
    TESSERA_ASSERT_OK(step->End());
  }

  void CompressAndCheck() {
    TESSERA_ASSERT_OK(track_.sequence.Compress().status());
    const std::vector<v1::ObserveRequest> shown = decoder_.daemon->TakeObserved();
    std::span<const v1::ObserveRequest> rest = shown;
    for (std::uint32_t layer = 0; layer < model().layers(); ++layer) {
      ASSERT_FALSE(rest.empty());
      ASSERT_EQ(rest.front().layer(), layer);
      CheckLast(rest.front(), seen_[layer]);
      // A prompt after decoded tokens starts alone; together they have all tokens.
      std::uint64_t next = seen_[layer].first;
      for (; !rest.empty() && rest.front().layer() == layer; rest = rest.subspan(1)) {
        ASSERT_EQ(rest.front().first_norm_token(), next);
        CheckNorms(rest.front(), seen_[layer], track_.history.tokens());
        next = rest.front().norm_token_end();
      }
      EXPECT_EQ(next, track_.history.tokens());
      seen_[layer] = {};
    }
    EXPECT_TRUE(rest.empty());
  }

  void CheckLast(const v1::ObserveRequest& shown, const Seen& seen) const {
    const std::uint64_t rows = seen.rows.size() / token_bytes();
    const std::uint64_t count = std::min<std::uint64_t>(rows, kLastQueries);
    EXPECT_EQ(shown.first_query_position(), seen.first + rows - count);
    EXPECT_THAT(shown.last_queries().shape(), testing::ElementsAre(count, 4, 64));
    ASSERT_EQ(shown.last_queries().inline_().size(), count * token_bytes());
    EXPECT_EQ(std::memcmp(shown.last_queries().inline_().data(),
                          seen.rows.data() + (rows - count) * token_bytes(), count * token_bytes()),
              0);
  }

  double Norm(const Seen& seen, std::uint64_t position, std::uint32_t head) const {
    const std::byte* const row = RowOf(seen, position, head);
    double sum = 0;
    for (std::uint32_t i = 0; i < 64; ++i) {
      std::uint16_t bits;
      std::memcpy(&bits, row + 2 * i, sizeof bits);
      sum += std::pow(static_cast<double>(kernels::Fp16ToFloat(bits)), 2);
    }
    return sum;
  }
  const std::byte* RowOf(const Seen& seen, std::uint64_t position, std::uint32_t head) const {
    return seen.rows.data() + (position - seen.first) * token_bytes() + head * row_bytes();
  }

  // The number required for this many tokens.
  void CheckNorms(const v1::ObserveRequest& shown, const Seen& seen, std::uint64_t tokens) const {
    std::vector<std::uint64_t> candidates;
    const std::uint64_t end = seen.first + seen.rows.size() / token_bytes();
    for (std::uint64_t i = std::max(seen.first, shown.first_norm_token());
         i < std::min(end, shown.norm_token_end()); ++i) {
      candidates.push_back(i);
    }
    const std::uint64_t count = std::min<std::uint64_t>(
        candidates.size(), kernels::CountUp(kNormShare * static_cast<double>(tokens)));
    ASSERT_EQ(shown.norm_positions_size(), static_cast<int>(4 * count));
    for (std::uint32_t head = 0; head < 4; ++head) {
      std::vector<std::uint64_t> best = candidates;
      std::stable_sort(best.begin(), best.end(), [&](std::uint64_t a, std::uint64_t b) {
        return Norm(seen, a, head) > Norm(seen, b, head);
      });
      best.resize(count);
      std::sort(best.begin(), best.end());
      for (std::uint64_t i = 0; i < count; ++i) {
        const std::uint64_t index = head * count + i;
        EXPECT_EQ(shown.norm_positions(static_cast<int>(index)), best[i]);
        EXPECT_EQ(std::memcmp(shown.norm_queries().inline_().data() + index * row_bytes(),
                              RowOf(seen, best[i], head), row_bytes()),
                  0);
      }
    }
  }

  TestRandom random_;
  Decoder decoder_;
  Track track_;
  std::vector<Seen> seen_;
};

TEST_P(Observing, ShowsTheNewestAndTheStrongest) {
  for (int turn = 0; turn < 6; ++turn) {
    const std::uint64_t first = random_.Between(1, 120);
    const std::uint64_t second = random_.Between(1, 60);
    const std::uint64_t steps = random_.Between(0, 70);
    // If the length of a prompt is announced, fewer rows are kept.
    ASSERT_NO_FATAL_FAILURE(Prompt(first, random_.OneIn(2) ? first : 0));
    for (std::uint64_t i = 0; i < steps; ++i) ASSERT_NO_FATAL_FAILURE(Step());
    ASSERT_NO_FATAL_FAILURE(Prompt(second, random_.OneIn(2) ? second : 0));
    ASSERT_NO_FATAL_FAILURE(CompressAndCheck());
  }
  EXPECT_EQ(decoder_.daemon->staged_tensors() > 0, GetParam().map_memory && GetParam().has_staging);
}

// Far more tokens are decoded than rows are kept.
TEST_P(Observing, AmongManyDecodedTokensTheStrongestAreFound) {
  ASSERT_NO_FATAL_FAILURE(Prompt(20, 20));
  for (int i = 0; i < 1500; ++i) {
    ASSERT_NO_FATAL_FAILURE(Step());
    if (i % 32 == 0) decoder_.daemon->Absorb();
  }
  ASSERT_NO_FATAL_FAILURE(Prompt(30, 30));
  ASSERT_NO_FATAL_FAILURE(CompressAndCheck());
}

// As with rejected drafts.
TEST_P(Observing, WhatIsTakenBackLeavesTheNewestWhole) {
  ASSERT_NO_FATAL_FAILURE(Prompt(40, 40));
  ASSERT_NO_FATAL_FAILURE(CompressAndCheck());
  for (int turn = 0; turn < 12; ++turn) {
    for (int i = 0; i < 5; ++i) ASSERT_NO_FATAL_FAILURE(Step());
    const std::uint64_t tokens = track_.history.tokens() - random_.Between(0, 4);
    TESSERA_ASSERT_OK(track_.sequence.Truncate(tokens));
    track_.history.Truncate(tokens);
    for (Seen& seen : seen_) seen.rows.resize((tokens - seen.first) * token_bytes());
    if (turn % 4 == 3) decoder_.daemon->Absorb();
  }
  ASSERT_NO_FATAL_FAILURE(CompressAndCheck());
}

// Drafts that no step accepted, and abandoned steps: unobserved tokens in their place must not be
// decided by their queries.
TEST_P(Observing, QueriesOfWhatDoesNotCountAreOfNoToken) {
  ASSERT_NO_FATAL_FAILURE(Prompt(40, 40));
  const auto drafts = [&](std::uint32_t accepted, bool ends) {
    Sequence* const batch[] = {&track_.sequence};
    absl::StatusOr<tessera::client::Step> step =
        decoder_.worker->BeginStep(batch, {.new_tokens = 8});
    TESSERA_ASSERT_OK(step.status());
    for (std::uint32_t layer = 0; layer < model().layers(); ++layer) {
      LayerRows rows(random_, model(), layer, 8);
      TESSERA_ASSERT_OK(step->AppendAndAttend(layer, rows.tensors()));
      const std::size_t kept = ends ? accepted : 0;
      const std::size_t kv_bytes = rows.key.size() / 8;
      track_.history.Append(layer, std::span(rows.key).first(kept * kv_bytes),
                            std::span(rows.value).first(kept * kv_bytes));
      Seen& seen = seen_[layer];
      seen.rows.insert(seen.rows.end(), rows.query.begin(),
                       rows.query.begin() + static_cast<std::ptrdiff_t>(kept * token_bytes()));
    }
    if (!ends) return step->Abandon();
    const std::uint32_t count[] = {accepted};
    TESSERA_ASSERT_OK(step->End(count));
  };
  ASSERT_NO_FATAL_FAILURE(drafts(3, true));
  ASSERT_NO_FATAL_FAILURE(drafts(0, false));
  ASSERT_NO_FATAL_FAILURE(drafts(0, true));
  decoder_.Prefill(track_, 8);  // others in their place, not observed
  TESSERA_ASSERT_OK(track_.sequence.Compress().status());
  for (const v1::ObserveRequest& shown : decoder_.daemon->TakeObserved()) {
    if (shown.has_last_queries()) CheckLast(shown, seen_[shown.layer()]);
    for (const std::uint64_t position : shown.norm_positions()) EXPECT_LT(position, 43u);
    EXPECT_LE(shown.norm_token_end(), 43u);
  }
}

// Rows were dropped for stronger ones, which are then truncated. The worker cannot know whether a
// dropped row is among the strongest again, and reports no other in its place.
TEST_P(Observing, APromptThatGoesOnOtherwiseIsSeenFromItsBeginning) {
  constexpr std::uint64_t kTokens = 1000, kStays = 400;
  const auto see = [&](std::uint64_t first, std::uint64_t layer, float ending) {
    auto rows = RandomRows(random_, (kTokens - first) * LayerRows::QueryElements(model(), layer),
                           model().type());
    auto* const numbers = reinterpret_cast<std::uint16_t*>(rows.data());
    for (std::size_t i = 0; i < rows.size() / 2; ++i) {
      if (first + i / (token_bytes() / 2) < kStays) continue;
      numbers[i] = kernels::FloatToFp16(ending * kernels::Fp16ToFloat(numbers[i]));
    }
    TESSERA_ASSERT_OK(track_.sequence.Observe({.layer = static_cast<std::uint32_t>(layer),
                                               .first_token = first,
                                               .query = rows,
                                               .prompt_tokens = kTokens - first}));
    Seen& seen = seen_[layer];
    seen.rows.resize(first * token_bytes());
    seen.rows.insert(seen.rows.end(), rows.begin(), rows.end());
  };
  decoder_.Prefill(track_, kTokens);
  for (std::uint32_t layer = 0; layer < model().layers(); ++layer) see(0, layer, 8);
  TESSERA_ASSERT_OK(track_.sequence.Truncate(kStays));
  track_.history.Truncate(kStays);
  decoder_.Prefill(track_, kTokens - kStays);
  for (std::uint32_t layer = 0; layer < model().layers(); ++layer) see(kStays, layer, 0.01f);
  TESSERA_ASSERT_OK(track_.sequence.Compress().status());
  const std::vector<v1::ObserveRequest> shown = decoder_.daemon->TakeObserved();
  ASSERT_EQ(shown.size(), model().layers());
  for (const v1::ObserveRequest& request : shown) {
    EXPECT_TRUE(request.has_first_norm_token());
    EXPECT_EQ(request.first_norm_token(), 0u);
    EXPECT_FALSE(request.all_norms());
    // Fewer than required, and only the strongest.
    const int known = request.norm_positions_size() / 4;
    EXPECT_LT(known, kNormShare * kTokens);
    if (known > 0) {
      CheckNorms(request, seen_[request.layer()], static_cast<std::uint64_t>(known / kNormShare));
    }
  }
  for (std::uint32_t layer = 0; layer < model().layers(); ++layer) see(0, layer, 0.01f);
  ASSERT_NO_FATAL_FAILURE(CompressAndCheck());
}

// Without a truncation nothing is missing, however short the announced prompt was.
TEST_P(Observing, WhatGoesOnBehindAPromptIsNoReasonToRefuse) {
  ASSERT_NO_FATAL_FAILURE(Prompt(100, 100));
  ASSERT_NO_FATAL_FAILURE(Step());
  TESSERA_ASSERT_OK(track_.sequence.Compress().status());
  ASSERT_NO_FATAL_FAILURE(Prompt(100, 100));
  ASSERT_NO_FATAL_FAILURE(Prompt(100, 100));
  TESSERA_ASSERT_OK(track_.sequence.Compress().status());
}

// The report says from which tokens the strongest were selected, and whether any is missing.
TEST_P(Observing, SaysWhatTheStrongestAreOf) {
  const auto shown = [&](std::uint64_t first, bool all, int rows) {
    const std::vector<v1::ObserveRequest> requests = decoder_.daemon->TakeObserved();
    ASSERT_EQ(requests.size(), model().layers());
    for (const v1::ObserveRequest& request : requests) {
      EXPECT_TRUE(request.has_first_norm_token());
      EXPECT_EQ(request.first_norm_token(), first);
      EXPECT_EQ(request.all_norms(), all);
      EXPECT_EQ(request.norm_positions_size(), 4 * rows);
    }
  };
  ASSERT_NO_FATAL_FAILURE(Prompt(1, 0));
  TESSERA_ASSERT_OK(track_.sequence.Compress().status());
  shown(0, /*all=*/true, 1);
  ASSERT_NO_FATAL_FAILURE(Prompt(2, 0));
  TESSERA_ASSERT_OK(track_.sequence.Compress().status());
  shown(1, /*all=*/false, 1);
  // As many as are kept: the next worker may need all of them.
  ASSERT_NO_FATAL_FAILURE(Prompt(600, 600));
  ASSERT_EQ(kernels::CountUp(kNormShare * (603 + 4096)), 470u);
  TESSERA_ASSERT_OK(track_.sequence.Handover(decoder_.worker->session_id()));
  shown(3, /*all=*/false, 470);
}

// Decoded tokens may have been settled silently. The next report covers only the others, among
// which other queries are the strongest.
TEST_P(Observing, OfTokensThatWereSettledNoQueryCounts) {
  ASSERT_NO_FATAL_FAILURE(Prompt(50, 50));
  TESSERA_ASSERT_OK(track_.sequence.Compress().status());
  for (int i = 0; i < 100; ++i) ASSERT_NO_FATAL_FAILURE(Step());
  for (Seen& seen : seen_) seen = {};
  decoder_.daemon->Absorb();
  for (int i = 0; i < 70; ++i) ASSERT_NO_FATAL_FAILURE(Step());
  decoder_.daemon->TakeObserved();
  decoder_.daemon->SetNormsFrom(150);
  TESSERA_ASSERT_OK(track_.sequence.Compress().status());
  const std::vector<v1::ObserveRequest> shown = decoder_.daemon->TakeObserved();
  ASSERT_EQ(shown.size(), 2 * model().layers());
  for (std::uint32_t layer = 0; layer < model().layers(); ++layer) {
    EXPECT_EQ(shown[2 * layer].first_norm_token(), 50u);
    EXPECT_EQ(shown[2 * layer].norm_positions_size(), 4 * 22);
    EXPECT_EQ(shown[2 * layer + 1].first_norm_token(), 150u);
    CheckNorms(shown[2 * layer + 1], seen_[layer], 70);
  }
}

// Nor do any tokens decoded before a prompt, so it does not matter whether they were settled. They
// count again if the prompt is truncated.
TEST_P(Observing, WhatWasDecodedBeforeAPromptCountsWithoutItAlone) {
  ASSERT_NO_FATAL_FAILURE(Prompt(50, 50));
  ASSERT_NO_FATAL_FAILURE(CompressAndCheck());
  for (int i = 0; i < 600; ++i) {
    ASSERT_NO_FATAL_FAILURE(Step());
    if (i % 32 == 0) decoder_.daemon->Absorb();
  }
  const std::vector<Seen> decoded = seen_;
  const bool taken_back = random_.OneIn(2);
  for (Seen& seen : seen_) seen = {};
  ASSERT_NO_FATAL_FAILURE(Prompt(30, 70));
  ASSERT_NO_FATAL_FAILURE(Prompt(40, 40));
  ASSERT_NO_FATAL_FAILURE(Step());
  if (taken_back) {
    const std::uint64_t tokens = random_.Between(600, 650);
    TESSERA_ASSERT_OK(track_.sequence.Truncate(tokens));
    track_.history.Truncate(tokens);
    seen_ = decoded;
    for (Seen& seen : seen_) seen.rows.resize((tokens - 50) * token_bytes());
  }
  TESSERA_ASSERT_OK(track_.sequence.Compress().status());
  const std::vector<v1::ObserveRequest> shown = decoder_.daemon->TakeObserved();
  const std::size_t messages = taken_back ? 1 : 2;
  ASSERT_EQ(shown.size(), messages * model().layers());
  for (std::uint32_t layer = 0; layer < model().layers(); ++layer) {
    const v1::ObserveRequest& request = shown[messages * (layer + 1) - 1];
    EXPECT_EQ(request.first_norm_token(), taken_back ? 50 : 650);
    EXPECT_EQ(request.norm_token_end(), track_.history.tokens());
    CheckNorms(request, seen_[layer], track_.history.tokens());
  }
}

// Without a decision over many turns, the rows kept of each stay bounded, and are the strongest.
TEST_P(Observing, ManyTurnsAreKeptTogether) {
  for (int turn = 0; turn < 9; ++turn) {
    ASSERT_NO_FATAL_FAILURE(Prompt(random_.Between(1, 60), random_.OneIn(2) ? 60 : 0));
    const std::uint64_t steps = random_.Between(1, 60);
    for (std::uint64_t i = 0; i < steps; ++i) ASSERT_NO_FATAL_FAILURE(Step());
    decoder_.daemon->Absorb();
  }
  ASSERT_NO_FATAL_FAILURE(CompressAndCheck());
}

// A cut to before everything observed since the last compression leaves nothing to report.
TEST_P(Observing, NothingIsReportedAfterACut) {
  ASSERT_NO_FATAL_FAILURE(Prompt(100, 0));
  ASSERT_NO_FATAL_FAILURE(CompressAndCheck());
  for (int i = 0; i < 10; ++i) ASSERT_NO_FATAL_FAILURE(Step());
  TESSERA_ASSERT_OK(track_.sequence.Truncate(90));
  track_.history.Truncate(90);
  TESSERA_ASSERT_OK(track_.sequence.Compress().status());
  EXPECT_EQ(decoder_.daemon->TakeObserved().size(), 0u);
}

// Rotating keys and queries by position does not change which are the strongest. (Uses quarter
// turns, which are exact.)
TEST_P(Observing, QueriesAreAsStrongHoweverTheyAreTurned) {
  constexpr std::uint64_t kTokens = 90;
  Track turned = decoder_.NewTrack();
  decoder_.Prefill(track_, kTokens);
  decoder_.Prefill(turned, kTokens);
  const std::uint32_t dim = model().geometry(0).head_dim;
  for (std::uint32_t layer = 0; layer < model().layers(); ++layer) {
    std::vector<std::byte> rows =
        RandomRows(random_, kTokens * LayerRows::QueryElements(model(), layer), model().type());
    TESSERA_ASSERT_OK(track_.sequence.Observe({.layer = layer, .query = rows}));
    auto* const numbers = reinterpret_cast<std::uint16_t*>(rows.data());
    constexpr std::uint16_t kSign = 0x8000;
    for (std::uint64_t row = 0; row < kTokens * 4; ++row) {
      for (std::uint64_t quarter = 0; quarter < row / 4 % 4; ++quarter) {
        std::uint16_t* const x = numbers + row * dim;
        for (std::uint32_t i = 0; i < dim / 2; ++i) {
          std::swap(x[i], x[i + dim / 2]);
          x[i] ^= kSign;
        }
      }
    }
    TESSERA_ASSERT_OK(turned.sequence.Observe({.layer = layer, .query = rows}));
  }
  TESSERA_ASSERT_OK(track_.sequence.Compress().status());
  TESSERA_ASSERT_OK(turned.sequence.Compress().status());
  const std::vector<v1::ObserveRequest> shown = decoder_.daemon->TakeObserved();
  ASSERT_EQ(shown.size(), 2 * model().layers());
  for (std::uint32_t layer = 0; layer < model().layers(); ++layer) {
    const v1::ObserveRequest& other = shown[model().layers() + layer];
    EXPECT_EQ(shown[layer].norm_positions_size(), 4 * 9);
    EXPECT_THAT(other.norm_positions(), testing::ElementsAreArray(shown[layer].norm_positions()));
    EXPECT_NE(other.norm_queries().inline_(), "");
    EXPECT_NE(other.norm_queries().inline_(), shown[layer].norm_queries().inline_());
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, Observing,
                         testing::Values(Way{"Staged", true, true}, Way{"NoStaging", true, false},
                                         Way{"Remote", false, true}),
                         [](const auto& way) { return way.param.name; });

}  // namespace
}  // namespace tessera::client
