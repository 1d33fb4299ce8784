// Attention by its definition: one query row over a whole lane in double precision, in two passes,
// with no parts, no merging and no running maximum. The judge of every implementation; shares no
// code with the split and merge of kernels/dispatch.
#pragma once

#include <cstdint>

#include "kernels/format/lane_view.h"
#include "kernels/format/layer_geometry.h"

namespace tessera::kernels {

struct OracleQuery {
  const LayerGeometry* geometry = nullptr;
  const LaneView* lane = nullptr;
  const void* row = nullptr;     // head_dim elements
  std::uint32_t query_head = 0;  // picks the sink
  std::uint64_t position = 0;
  bool causal = true;
};

struct OracleAnswer {
  double lse;         // -infinity where nothing is visible and there is no sink
  double logit_mass;  // max over visible entries of |scale| * sum |q_c * k_c|: scales the error
  double value_peak;  // max |v_c| over visible entries
  std::uint64_t visible;
};

// Writes head_dim doubles to `output`.
OracleAnswer AttendByDefinition(const OracleQuery& query, double* output);

}  // namespace tessera::kernels
