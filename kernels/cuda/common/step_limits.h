// Upper limits of a step. They size the grids and the scratch of a captured graph.
#pragma once

#include <cstdint>

#include "kernels/cuda/common/step_view.h"

namespace tessera::kernels::cuda {

struct StepLimits {
  std::uint32_t batch = 0;
  std::uint32_t queries = 1;   // per sequence
  std::uint32_t appended = 1;  // per sequence
  // Set by StepWriter::Widen:
  std::uint32_t works = 0;                          // parts of all lanes of one layer
  std::uint32_t strategies = 0;                     // per layer: segments that are not plain
  std::uint32_t kinds = KindBit(PartKind::kDense);  // kinds of parts in any layer
  // Per layer; 0 if no sequence selects:
  std::uint32_t selections = 0;  // lanes that select
  std::uint32_t choices = 0;     // their segments with block summaries
  std::uint32_t blocks = 0;      // blocks of these segments
  std::uint32_t pieces = 0;      // pieces that the blocks are scored in
  std::uint32_t slots = 0;       // parts of selected blocks, at most
  std::uint32_t selected_kinds = 0;
  std::uint32_t summaries = 0;  // kinds of block summaries
};

}  // namespace tessera::kernels::cuda
