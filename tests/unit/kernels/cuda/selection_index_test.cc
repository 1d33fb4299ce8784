// Index arithmetic of selection, compared with simple loops.
#include "kernels/cuda/common/selection_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/fakes/seed.h"

namespace tessera::kernels::cuda {
namespace {

TEST(SelectionIndex, BudgetsAreRatesRoundedUpOrEntries) {
  const auto rate = [](double value) { return StepRule{.rate = value, .selects = 1}; };
  EXPECT_EQ(BudgetOf(rate(0), {.entries = 1000}), 0u);
  EXPECT_EQ(BudgetOf(rate(0.0625), {.entries = 1600}), 100u);
  EXPECT_EQ(BudgetOf(rate(0.0625), {.entries = 1601}), 101u);
  EXPECT_EQ(BudgetOf(rate(0.1), {.entries = 30}), 3u);  // 0.1 * 30 exceeds 3 in double
  EXPECT_EQ(BudgetOf(rate(1), {.entries = 77}), 77u);
  EXPECT_EQ(BudgetOf(rate(7), {.entries = 77}), 77u);
  EXPECT_EQ(BudgetOf(rate(-1), {.entries = 77}), 0u);
  EXPECT_EQ(BudgetOf(rate(std::numeric_limits<double>::quiet_NaN()), {.entries = 77}), 0u);
  EXPECT_EQ(BudgetOf({.rate = 1, .entries = 5, .selects = 1}, {.entries = 77}), 5u);
  EXPECT_EQ(BudgetOf({.rate = 0, .entries = 500, .selects = 1}, {.entries = 77}), 77u);
}

TEST(SelectionIndex, BudgetsByRateAreAtLeastTheFloor) {
  const StepRule rule = {.rate = 0.1, .selects = 1, .floor = 64};
  EXPECT_EQ(BudgetOf(rule, {.entries = 63}), 63u);
  EXPECT_EQ(BudgetOf(rule, {.entries = 639}), 64u);
  EXPECT_EQ(BudgetOf(rule, {.entries = 641}), 65u);
  EXPECT_EQ(BudgetOf({.rate = 0, .selects = 1, .floor = 5}, {.entries = 77}), 5u);
  EXPECT_EQ(BudgetOf({.rate = 1, .entries = 5, .selects = 1, .floor = 64}, {.entries = 77}), 5u);
  // The floor is of the same entries as the rate.
  EXPECT_EQ(BudgetOf({.rate = 0.1, .selects = 1, .counts_tail = 1, .floor = 64},
                     {.entries = 100, .newest = 16, .block = 16}),
            48u);
}

TEST(SelectionIndex, BudgetsOfTheTailTooLeaveTheRest) {
  const StepRule pages = {.entries = 64, .selects = 1, .counts_tail = 1};
  EXPECT_EQ(BudgetOf(pages, {.entries = 1000, .newest = 0, .block = 16}), 64u);
  EXPECT_EQ(BudgetOf(pages, {.entries = 1000, .newest = 1, .block = 16}), 48u);
  EXPECT_EQ(BudgetOf(pages, {.entries = 1000, .newest = 16, .block = 16}), 48u);
  EXPECT_EQ(BudgetOf(pages, {.entries = 1000, .newest = 17, .block = 16}), 32u);
  EXPECT_EQ(BudgetOf(pages, {.entries = 1000, .newest = 90, .block = 16}), 0u);
  EXPECT_EQ(BudgetOf(pages, {.entries = 32, .newest = 3, .block = 16}), 32u);
  EXPECT_EQ(BudgetOf({.entries = 64, .selects = 1}, {.entries = 1000, .newest = 90, .block = 16}),
            64u);
  // A partial block counts as a page, and the following rows begin in it.
  EXPECT_EQ(BudgetOf(pages, {.entries = 1000, .partial = 1, .block = 16}), 49u);
  EXPECT_EQ(BudgetOf(pages, {.entries = 1000, .newest = 15, .partial = 1, .block = 16}), 49u);
  EXPECT_EQ(BudgetOf(pages, {.entries = 1000, .newest = 16, .partial = 1, .block = 16}), 33u);
  EXPECT_EQ(BudgetOf({.entries = 64, .selects = 1}, {.entries = 1000, .partial = 1, .block = 16}),
            64u);
  // A rate of 1 selects everything, however the tail is rounded.
  EXPECT_EQ(BudgetOf({.rate = 1, .selects = 1, .counts_tail = 1},
                     {.entries = 1000, .newest = 3, .block = 16}),
            1000u);
  EXPECT_EQ(BudgetOf({.rate = 0.25, .selects = 1, .counts_tail = 1},
                     {.entries = 384, .newest = 10, .block = 16}),
            84u);
}

TEST(SelectionIndex, TheNewestBlockIsForcedWhereItIsPartialOrThereIsNoTail) {
  StepSelection selection = {.blocks = 4, .last_forced = LastForced::kNo};
  EXPECT_FALSE(ForcedOf(selection, 0).Has(3));
  selection.last_forced = LastForced::kWithoutTail;
  EXPECT_TRUE(ForcedOf(selection, 0).Has(3));
  EXPECT_FALSE(ForcedOf(selection, 1).Has(3));
  EXPECT_FALSE(ForcedOf(selection, 0).Has(2));
  selection.last_forced = LastForced::kYes;
  EXPECT_TRUE(ForcedOf(selection, 1).Has(3));
  EXPECT_FALSE(ForcedOf(selection, 1).Has(0));
  selection.first_forced = 1;
  EXPECT_TRUE(ForcedOf(selection, 1).Has(0));
}

TEST(SelectionIndex, KeysAreOrderedAsValues) {
  TestRandom random;
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {-infinity, -3e38f, -1, -1e-40f, 0, 1e-40f, 1, 3e38f, infinity};
  for (int i = 0; i < 200; ++i) {
    values.push_back(static_cast<float>(random.Below(1000)) - 500);
  }
  for (const float a : values) {
    for (const float b : values) {
      EXPECT_EQ(a < b, OrderedKey(a) < OrderedKey(b)) << a << " " << b;
      EXPECT_EQ(a == b, OrderedKey(a) == OrderedKey(b)) << a << " " << b;
    }
  }
  EXPECT_EQ(OrderedKey(0.0f), OrderedKey(-0.0f));
}

TEST(SelectionIndex, LiveEntriesOfABlock) {
  TestRandom random;
  for (int round = 0; round < 500; ++round) {
    const std::uint32_t block = 4u << random.Below(3);
    const auto entry = static_cast<std::uint32_t>(random.Below(5)) * block;
    const auto begin = static_cast<std::uint32_t>(random.Below(60));
    const EntryRange entries = {.begin = begin,
                                .end = static_cast<std::uint32_t>(random.Between(begin, 70))};
    const EntryRange live = LiveOfBlock(entries, entry, block);
    for (std::uint32_t i = 0; i < block; ++i) {
      EXPECT_EQ(live.Contains(i), entries.Contains(entry + i)) << i;
    }
  }
}

TEST(SelectionIndex, ACellSeesWhatItsQueriesSee) {
  TestRandom random;
  for (int round = 0; round < 300; ++round) {
    const auto group = static_cast<std::uint32_t>(random.Between(1, 9));
    const auto columns = static_cast<std::uint32_t>(random.Between(1, 30)) * group;
    const auto column = static_cast<std::uint32_t>(random.Below(columns));
    const std::uint64_t first = random.Below(100);
    const VisibleRule rule = {.causal = !random.OneIn(3),
                              .window = static_cast<std::uint32_t>(random.Below(3) * 20)};
    Positions expected = {.begin = ~std::uint64_t{0}, .end = 0};
    for (std::uint32_t c = 0; c < columns; ++c) {
      if (c / 32 != column / 32) continue;
      const Positions one = VisibleFrom(first + c / group, rule);
      expected = {.begin = std::min(expected.begin, one.begin),
                  .end = std::max(expected.end, one.end)};
    }
    const Positions seen = VisibleFromCell(first, columns, group, column, rule);
    EXPECT_EQ(seen.begin, expected.begin);
    EXPECT_EQ(seen.end, expected.end);
    const std::uint64_t from = random.Below(150);
    const std::uint64_t count = random.Below(20);
    bool meets = false;
    for (std::uint64_t p = from; p < from + count; ++p) meets |= p >= seen.begin && p < seen.end;
    EXPECT_EQ(Meets(seen, from, count), meets);
  }
}

// In a lane of choices with some selected blocks, each of these is in exactly one part, in order.
TEST(SelectionIndex, PartsCoverWhatWasTaken) {
  TestRandom random;
  for (int round = 0; round < 300; ++round) {
    StepSelection selection = {.choices = static_cast<std::uint32_t>(random.Between(1, 5))};
    std::vector<SelectedRange> ranges(selection.choices + 1);
    std::vector<std::uint32_t> blocks(selection.choices);
    std::uint32_t taken = 0;
    std::uint32_t parts = 0;
    for (std::uint32_t c = 0; c < selection.choices; ++c) {
      blocks[c] = 4u << random.Below(3);
      ranges[c] = {.first_taken = taken, .first_part = parts};
      const auto count = static_cast<std::uint32_t>(random.OneIn(3) ? 0 : random.Below(200));
      taken += count;
      parts += SelectedPartsOf(count, blocks[c]);
    }
    ranges.back() = {.first_taken = taken, .first_part = parts};
    selection.blocks = taken + static_cast<std::uint32_t>(random.Below(5));
    const auto block_of = [&](std::uint32_t choice) { return blocks[choice]; };
    std::uint32_t next = 0;
    for (std::uint32_t part = 0; part < parts; ++part) {
      const SelectedSlice slice = SliceOfPart(ranges.data(), selection, part, block_of);
      ASSERT_EQ(slice.first, next);
      ASSERT_GT(slice.count, 0u);
      ASSERT_LE(slice.count * blocks[slice.choice], kSelectedEntries);
      ASSERT_GE(slice.first, ranges[slice.choice].first_taken);
      next += slice.count;
      ASSERT_LE(next, ranges[slice.choice + 1].first_taken);
    }
    EXPECT_EQ(next, taken);
    EXPECT_EQ(SliceOfPart(ranges.data(), selection, parts, block_of).count, 0u);
  }
}

// Arbitrary ranges lead to blocks inside the lane's list, or to none.
TEST(SelectionIndex, AnyRangesStayInTheList) {
  TestRandom random;
  for (int round = 0; round < 2000; ++round) {
    const StepSelection selection = {.choices = 3, .blocks = 50};
    SelectedRange ranges[4];
    for (SelectedRange& range : ranges) {
      range.first_taken = static_cast<std::uint32_t>(random.Border());
      range.first_part = static_cast<std::uint32_t>(random.Border());
    }
    const SelectedSlice slice =
        SliceOfPart(ranges, selection, static_cast<std::uint32_t>(random.Below(9)),
                    [](std::uint32_t) { return 16u; });
    if (slice.count == 0) continue;
    EXPECT_LE(std::uint64_t{slice.first} + slice.count, selection.blocks);
    EXPECT_LE(slice.count, kSelectedEntries / 16);
    EXPECT_LT(slice.choice, selection.choices);
  }
}

TEST(SelectionIndex, ChoicesAreFoundByBlockAndByPiece) {
  TestRandom random;
  for (int round = 0; round < 100; ++round) {
    std::vector<StepChoice> choices(random.Between(1, 7));
    std::uint32_t blocks = 0;
    std::uint32_t pieces = 0;
    std::vector<std::uint32_t> of_block, of_piece;
    for (std::uint32_t c = 0; c < choices.size(); ++c) {
      const auto own = static_cast<std::uint32_t>(random.Between(1, 9));
      const auto own_pieces = static_cast<std::uint32_t>(random.Between(1, 3));
      choices[c] = {.segment = c, .first_block = blocks, .blocks = own, .first_piece = pieces};
      of_block.insert(of_block.end(), own, c);
      of_piece.insert(of_piece.end(), own_pieces, c);
      blocks += own;
      pieces += own_pieces;
    }
    const auto count = static_cast<std::uint32_t>(choices.size());
    for (std::uint32_t b = 0; b < blocks; ++b) {
      EXPECT_EQ(ChoiceOfBlock(choices.data(), count, b), of_block[b]);
    }
    for (std::uint32_t p = 0; p < pieces; ++p) {
      EXPECT_EQ(ChoiceOfPiece(choices.data(), count, p), of_piece[p]);
    }
  }
}

}  // namespace
}  // namespace tessera::kernels::cuda
