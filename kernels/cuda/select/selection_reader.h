// Reads the device's selection on the host: copies of AttendParams::taken and ranges from a call's
// scratch memory, together with the step image of that call.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "kernels/cuda/common/selection_index.h"
#include "kernels/cuda/common/step_view.h"

namespace tessera::kernels::cuda {

// A range of consecutive selected entries of a segment.
struct SelectedEntries {
  std::uint32_t segment;  // index in the lane
  std::uint32_t first_entry;
  std::uint32_t entries;
};

class SelectionReader {
 public:
  // `taken` has StepLimits::blocks elements; `ranges` has choices + selections.
  SelectionReader(const std::byte* step, std::uint32_t layer, std::span<const std::uint32_t> taken,
                  std::span<const SelectedRange> ranges)
      : step_(step), layer_(layer), taken_(taken), ranges_(ranges) {}

  // Calls take(SelectedEntries) for each selected range of a lane, in order. Calls nothing if the
  // lane reads everything.
  template <class Take>
  void ForEachRun(std::uint32_t lane, Take take) const {
    const StepLane& of_lane = step_.lane(layer_, lane);
    if (of_lane.selection == kReadWhole) return;
    const StepSelection& selection = step_.selection(layer_, of_lane.selection);
    const SelectedRange* ranges = ranges_.data() + FirstRangeOf(selection, of_lane.selection);
    for (std::uint32_t c = 0; c < selection.choices; ++c) {
      const StepChoice& choice = step_.choices(layer_)[selection.first_choice + c];
      const StepSegment& segment = step_.segments(of_lane)[choice.segment];
      const std::uint32_t block = step_.strategy(layer_, segment.strategy).shape.block;
      const std::uint32_t* list = taken_.data() + selection.first_block;
      for (std::uint32_t i = ranges[c].first_taken; i < ranges[c + 1].first_taken;) {
        const std::uint32_t first = list[i];
        std::uint32_t end = first + 1;
        for (++i; i < ranges[c + 1].first_taken && list[i] == end; ++i) ++end;
        take(SelectedEntries{.segment = choice.segment,
                             .first_entry = first * block,
                             .entries = std::min(end * block, segment.entries) - first * block});
      }
    }
  }

 private:
  const StepReader step_;
  const std::uint32_t layer_;
  const std::span<const std::uint32_t> taken_;
  const std::span<const SelectedRange> ranges_;
};

}  // namespace tessera::kernels::cuda
