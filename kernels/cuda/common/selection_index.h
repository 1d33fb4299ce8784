// Selection of blocks, as arithmetic: budgets, the order of values, and how what was taken becomes
// parts. Shared by the kernels and by the host that plans for them; tested on the host.
//
//   pieces   1024 entries of a segment, scored by one block of threads
//   taken    the device's list of a lane's taken blocks, choice after choice, each as its number in
//            its segment
//   parts    256 entries' worth of one choice's taken blocks. How many there are is known on the
//            device only; the host reserves slots for the most there can be
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/cuda/common/lane_index.h"
#include "kernels/cuda/common/step_view.h"
#include "kernels/cuda/common/target.h"
#include "kernels/cuda/common/tuning.h"

namespace tessera::kernels::cuda {

inline constexpr std::uint32_t kMaxBlockEntries = 16;
inline constexpr std::uint32_t kMostTakenBlocks = kSelectedEntries / kMinBlock;  // of a part
static_assert(kSelectedEntries % kMaxBlockEntries == 0);
// Entries of a layer's blocks are counted in 32 bits.
inline constexpr std::uint32_t kMostLayerBlocks = 1u << 27;
// Query rows that are looked at together, as kMaxPartRows of the CPUs: a segment that none of them
// sees says nothing to any of them.
inline constexpr std::uint32_t kCellColumns = 32;
static_assert(kCellColumns % kTileColumns == 0);

// Blocks of `entries` entries, the last perhaps partial; 0 without summaries.
TESSERA_HOST_DEVICE constexpr std::uint32_t BlocksOf(std::uint32_t entries, std::uint32_t block) {
  return block == 0 ? 0 : entries / block + (entries % block != 0 ? 1 : 0);
}
TESSERA_HOST_DEVICE constexpr std::uint32_t PiecesOf(std::uint32_t entries) {
  return static_cast<std::uint32_t>((std::uint64_t{entries} + kScoreEntries - 1) / kScoreEntries);
}
// Parts that `taken` blocks fill.
TESSERA_HOST_DEVICE constexpr std::uint32_t SelectedPartsOf(std::uint32_t taken,
                                                            std::uint32_t block) {
  return static_cast<std::uint32_t>((std::uint64_t{taken} * block + kSelectedEntries - 1) /
                                    kSelectedEntries);
}

// A rule's share of `all` entries.
TESSERA_HOST_DEVICE inline std::uint64_t ShareOf(double rate, std::uint64_t all) {
#if defined(__CUDA_ARCH__)
  const double product = __dmul_rn(rate, static_cast<double>(all));  // not fused with what follows
#else
  const double product = rate * static_cast<double>(all);
#endif
  // Ratios are doubles: the excess of a product over a whole number may be rounding.
  const double wanted = ::ceil(product - 1e-6);
  if (!(wanted > 0)) return 0;
  return wanted < static_cast<double>(all) ? static_cast<std::uint64_t>(wanted) : all;
}

// What a rule's budget has to go round: entries that the queries see.
struct Selectable {
  std::uint64_t entries = 0;  // of choices
  std::uint32_t newest = 0;   // behind the last block, up to a tile, and in the tail
  std::uint32_t partial = 0;  // of the last block, where it is taken anyway and not full
  std::uint32_t block = 1;    // that the newest count in: a power of two
};

// Of a rule's budget what is left for choices.
TESSERA_HOST_DEVICE inline std::uint64_t BudgetOf(const StepRule& rule, const Selectable& visible) {
  std::uint32_t outside = 0;
  if (rule.counts_tail != 0) {
    const std::uint32_t rows = visible.partial + visible.newest;
    outside = ((rows + visible.block - 1) & ~(visible.block - 1)) - visible.partial;
  }
  std::uint64_t budget = rule.entries;
  if (budget == 0) {
    budget = ShareOf(rule.rate, visible.entries + outside);
    if (budget < rule.floor) budget = rule.floor;
  }
  budget = budget > outside ? budget - outside : 0;
  return budget < visible.entries ? budget : visible.entries;
}

// The blocks of a lane that are taken whatever their values.
struct ForcedBlocks {
  static constexpr std::uint32_t kNone = ~0u;
  std::uint32_t first = kNone;
  std::uint32_t last = kNone;
  TESSERA_HOST_DEVICE constexpr bool Has(std::uint32_t block) const {
    return block == first || block == last;
  }
};
// `tail`: rows of it that the queries see.
TESSERA_HOST_DEVICE constexpr ForcedBlocks ForcedOf(const StepSelection& selection,
                                                    std::uint32_t tail) {
  ForcedBlocks forced;
  if (selection.blocks == 0) return forced;
  if (selection.first_forced != 0) forced.first = 0;
  if (selection.last_forced == LastForced::kYes ||
      (selection.last_forced == LastForced::kWithoutTail && tail == 0)) {
    forced.last = selection.blocks - 1;
  }
  return forced;
}

// The most parts that a lane's taken blocks may fill: `entries` in `choices` segments may be
// selected, `whole` parts would hold them all. What is taken exceeds the budget by less than a
// block, or by two forced ones; and where the queries see a range of positions, a segment's first
// and last visible block count for less than they fill.
TESSERA_HOST_DEVICE inline std::uint32_t MostSelectedParts(const StepRule& rule,
                                                           std::uint64_t entries,
                                                           std::uint32_t choices,
                                                           std::uint32_t whole) {
  const std::uint64_t filled = BudgetOf(rule, {.entries = entries}) + 2 * kMaxBlockEntries +
                               std::uint64_t{choices} * 2 * kMaxBlockEntries;
  // Each choice but one may end with a part that is not full.
  const std::uint64_t parts = (filled + kSelectedEntries - 1) / kSelectedEntries + choices - 1;
  return parts < whole ? static_cast<std::uint32_t>(parts) : whole;
}

// What the cell of a column sees together. `columns` is not 0.
TESSERA_HOST_DEVICE constexpr Positions VisibleFromCell(std::uint64_t first_position,
                                                        std::uint32_t columns, std::uint32_t group,
                                                        std::uint32_t column, VisibleRule rule) {
  const std::uint32_t first = column / kCellColumns * kCellColumns;
  const std::uint32_t last = columns - first > kCellColumns ? first + kCellColumns : columns;
  const std::uint32_t query = first / group;
  return VisibleFromAll(first_position + query, (last - 1) / group - query + 1, rule);
}

TESSERA_HOST_DEVICE constexpr bool Meets(Positions visible, std::uint64_t first,
                                         std::uint64_t count) {
  return count != 0 && first < visible.end &&
         (first >= visible.begin || visible.begin - first < count);
}

// Greater keys for greater values; zeros of both signs are equal. Of numbers only.
TESSERA_HOST_DEVICE inline std::uint32_t OrderedKey(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// The choice that a lane's block, or its piece, belongs to: the last that begins at it or before.
TESSERA_HOST_DEVICE inline std::uint32_t ChoiceOfBlock(const StepChoice* choices,
                                                       std::uint32_t count, std::uint32_t block) {
  std::uint32_t low = 0;
  std::uint32_t high = count;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    (choices[middle].first_block <= block ? low : high) = middle;
  }
  return low;
}
TESSERA_HOST_DEVICE inline std::uint32_t ChoiceOfPiece(const StepChoice* choices,
                                                       std::uint32_t count, std::uint32_t piece) {
  std::uint32_t low = 0;
  std::uint32_t high = count;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    (choices[middle].first_piece <= piece ? low : high) = middle;
  }
  return low;
}

// Where a lane's taken ranges begin: each selection before it has an end of its own.
TESSERA_HOST_DEVICE constexpr std::uint32_t FirstRangeOf(const StepSelection& selection,
                                                         std::uint32_t index) {
  return selection.first_choice + index;
}

// The entries [entry, entry + block) that lie in `entries`, counted from `entry`.
TESSERA_HOST_DEVICE constexpr EntryRange LiveOfBlock(EntryRange entries, std::uint32_t entry,
                                                     std::uint32_t block) {
  const std::uint32_t begin = entries.begin > entry ? entries.begin - entry : 0;
  const std::uint32_t end = entries.end > entry ? entries.end - entry : 0;
  return {.begin = begin < block ? begin : block, .end = end < block ? end : block};
}

// Part `part` of what a lane took.
struct TakenSlice {
  std::uint32_t choice = 0;  // of the lane
  std::uint32_t first = 0;   // of the lane's list
  std::uint32_t count = 0;   // blocks; 0: there is no such part
};

// `block_of(choice)`: the entries of a block there. Whatever the ranges say, the slice lies in the
// lane's list.
template <class BlockOf>
TESSERA_HOST_DEVICE inline TakenSlice SliceOfPart(const TakenRange* ranges,
                                                  const StepSelection& selection,
                                                  std::uint32_t part, BlockOf block_of) {
  if (part >= ranges[selection.choices].first_part) return {};
  std::uint32_t low = 0;
  std::uint32_t high = selection.choices;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    (ranges[middle].first_part <= part ? low : high) = middle;
  }
  const std::uint32_t per_part = kSelectedEntries / block_of(low);
  const std::uint64_t first =
      ranges[low].first_taken + std::uint64_t{part - ranges[low].first_part} * per_part;
  const std::uint32_t next = ranges[low + 1].first_taken;
  const std::uint32_t end = next < selection.blocks ? next : selection.blocks;
  if (first >= end) return {};
  const auto begin = static_cast<std::uint32_t>(first);
  return {.choice = low, .first = begin, .count = end - begin < per_part ? end - begin : per_part};
}

}  // namespace tessera::kernels::cuda
