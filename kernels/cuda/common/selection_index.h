// Arithmetic of block selection: budgets, the order of values, and how selected blocks become
// parts. Shared by the kernels and by the host code that plans for them. Tested on the host.
//
//   pieces   1024 entries of a segment, scored by one block of threads
//   taken    a lane's list of selected blocks, written by the device: choice by choice, each block
//            as its number in its segment
//   parts    up to 256 entries of selected blocks of one choice. Only the device knows how many
//            there are, so the host reserves slots for the maximum
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
inline constexpr std::uint32_t kMaxSelectedBlocks =
    kSelectedEntries / kMinBlock;  // blocks per part
static_assert(kSelectedEntries % kMaxBlockEntries == 0);
// Limits the entries of a layer's blocks to what 32 bits can count.
inline constexpr std::uint32_t kMostLayerBlocks = 1u << 27;
// Query rows that are considered together, like kMaxPartRows of the CPU kernels. A segment that
// none of them sees gets no score from any of them.
inline constexpr std::uint32_t kCellColumns = 32;
static_assert(kCellColumns % kTileColumns == 0);

// Number of blocks of `entries` entries; the last may be partial. 0 without summaries.
TESSERA_HOST_DEVICE constexpr std::uint32_t BlocksOf(std::uint32_t entries, std::uint32_t block) {
  return block == 0 ? 0 : entries / block + (entries % block != 0 ? 1 : 0);
}
TESSERA_HOST_DEVICE constexpr std::uint32_t PiecesOf(std::uint32_t entries) {
  return static_cast<std::uint32_t>((std::uint64_t{entries} + kScoreEntries - 1) / kScoreEntries);
}
// Number of parts that `taken` blocks fill.
TESSERA_HOST_DEVICE constexpr std::uint32_t SelectedPartsOf(std::uint32_t taken,
                                                            std::uint32_t block) {
  return static_cast<std::uint32_t>((std::uint64_t{taken} * block + kSelectedEntries - 1) /
                                    kSelectedEntries);
}

// A rule's share of `all` entries, rounded up.
TESSERA_HOST_DEVICE inline std::uint64_t ShareOf(double rate, std::uint64_t all) {
#if defined(__CUDA_ARCH__)
  // Keeps the compiler from fusing it with the next operation.
  const double product = __dmul_rn(rate, static_cast<double>(all));
#else
  const double product = rate * static_cast<double>(all);
#endif
  // Rates are doubles, so a tiny excess over a whole number may be rounding error.
  const double wanted = ::ceil(product - 1e-6);
  if (!(wanted > 0)) return 0;
  return wanted < static_cast<double>(all) ? static_cast<std::uint64_t>(wanted) : all;
}

// The visible entries that a rule's budget has to cover.
struct Selectable {
  std::uint64_t entries = 0;  // entries of choices
  std::uint32_t newest = 0;   // entries after the last block (less than a tile), and in the tail
  std::uint32_t partial = 0;  // visible entries of the last block, if it is forced and not full
  std::uint32_t block = 1;    // block that the newest entries are counted in: a power of two
};

// The part of a rule's budget that is left for choices.
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

// The blocks of a lane that are selected whatever their values.
struct ForcedBlocks {
  static constexpr std::uint32_t kNone = ~0u;
  std::uint32_t first = kNone;
  std::uint32_t last = kNone;
  TESSERA_HOST_DEVICE constexpr bool Has(std::uint32_t block) const {
    return block == first || block == last;
  }
};
// `tail` is the number of tail rows that the queries see.
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

// Upper bound of the parts that a lane's selected blocks may fill. `entries` entries in `choices`
// segments may be selected; `whole` parts would hold all of them. The selection exceeds the budget
// by less than one block, or by two forced blocks. If the queries see a range of positions, the
// first and last visible block of a segment count less than they fill.
TESSERA_HOST_DEVICE inline std::uint32_t MostSelectedParts(const StepRule& rule,
                                                           std::uint64_t entries,
                                                           std::uint32_t choices,
                                                           std::uint32_t whole) {
  const std::uint64_t filled = BudgetOf(rule, {.entries = entries}) + 2 * kMaxBlockEntries +
                               std::uint64_t{choices} * 2 * kMaxBlockEntries;
  // Each choice but one may end with a partial part.
  const std::uint64_t parts = (filled + kSelectedEntries - 1) / kSelectedEntries + choices - 1;
  return parts < whole ? static_cast<std::uint32_t>(parts) : whole;
}

// Positions that the queries of a column's cell see together. `columns` is not 0.
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

// Maps a float to an integer key of the same order. Zeros of both signs are equal. NaN is not
// supported.
TESSERA_HOST_DEVICE inline std::uint32_t OrderedKey(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

// Returns the choice that contains a lane's block or piece: the last one that begins at or before
// it.
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

// Index of a lane's first range. Every earlier selection has one extra range that marks its end.
TESSERA_HOST_DEVICE constexpr std::uint32_t FirstRangeOf(const StepSelection& selection,
                                                         std::uint32_t index) {
  return selection.first_choice + index;
}

// The entries [entry, entry + block) that lie in `entries`, relative to `entry`.
TESSERA_HOST_DEVICE constexpr EntryRange LiveOfBlock(EntryRange entries, std::uint32_t entry,
                                                     std::uint32_t block) {
  const std::uint32_t begin = entries.begin > entry ? entries.begin - entry : 0;
  const std::uint32_t end = entries.end > entry ? entries.end - entry : 0;
  return {.begin = begin < block ? begin : block, .end = end < block ? end : block};
}

// Blocks of part `part` of a lane's selection.
struct SelectedSlice {
  std::uint32_t choice = 0;  // index in the lane
  std::uint32_t first = 0;   // index in the lane's list
  std::uint32_t count = 0;   // number of blocks; 0: the part does not exist
};

// `block_of(choice)` returns the entries per block of a choice. The slice always lies within the
// lane's list, even if the ranges are corrupt.
template <class BlockOf>
TESSERA_HOST_DEVICE inline SelectedSlice SliceOfPart(const SelectedRange* ranges,
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
