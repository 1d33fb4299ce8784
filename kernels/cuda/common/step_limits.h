// The most that a step may hold: grids and scratch are sized by it when a graph is captured.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/step_view.h"

namespace tessera::kernels::cuda {

struct StepLimits {
  std::uint32_t batch = 0;
  std::uint32_t queries = 1;   // of one sequence
  std::uint32_t appended = 1;  // of one sequence
  // What StepWriter::Widen sets:
  std::uint32_t works = 0;                          // parts of all lanes of one layer
  std::uint32_t strategies = 0;                     // segments of one layer that are not plain
  std::uint32_t kinds = KindBit(PartKind::kDense);  // of parts, of all layers
  // Of one layer, 0 where nothing selects:
  std::uint32_t selections = 0;  // lanes
  std::uint32_t choices = 0;     // their segments with summaries
  std::uint32_t blocks = 0;      // of these
  std::uint32_t pieces = 0;      // that they are scored in
  std::uint32_t slots = 0;       // parts of what is taken
  std::uint32_t selected_kinds = 0;
};

}  // namespace tessera::kernels::cuda
