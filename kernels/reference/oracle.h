// Attention by definition: one query row over a whole lane in double precision, in two passes,
// without parts, merging or a running maximum. Every implementation is tested against it, so it
// shares no code with the split and merge of kernels/dispatch.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/format/lane_view.h"
#include "kernels/format/layer_geometry.h"

namespace tessera::kernels {

// The entries of a lane in lane order, with packed rows rotated back: k = R_k^T k', v = R_v^T v',
// plus the means of a book.
// Built once, it serves all queries of a test.
class ExactLane {
 public:
  struct Entry {
    std::uint64_t position;
    double log_weight;     // ln s
    const double* key;     // head_dim
    const double* value;   // head_dim
    const double* stored;  // [channels of `space`]: k'; for a dense row the key itself
    double value_peak;     // max |v_c| over the row as stored and as rotated back
    std::uint32_t space;
  };
  // Rows that share a rotation; space 0 has none.
  struct Space {
    std::uint32_t channels;
    std::vector<double> rotation;  // R_k, [channels][head_dim]; empty: identity
    std::vector<double> mean;      // mu_k of planes; empty: zeros
    std::uint32_t planes;          // whose queries are rounded together; 0: not rounded
  };

  ExactLane(const LaneView& lane, const LayerGeometry& geometry);
  ExactLane(const ExactLane&) = delete;
  ExactLane& operator=(const ExactLane&) = delete;

  std::span<const Entry> entries() const { return entries_; }
  std::span<const Space> spaces() const { return spaces_; }

 private:
  struct Source;

  void Add(const Source& source, std::uint64_t position, double log_weight, const double* key,
           const double* value);
  double* Rows(std::size_t elements);

  std::uint32_t head_dim_;
  std::vector<Entry> entries_;
  std::vector<Space> spaces_;
  std::vector<std::vector<double>> rows_;
};

struct OracleQuery {
  const LayerGeometry* geometry = nullptr;
  const LaneView* lane = nullptr;
  const void* row = nullptr;     // head_dim elements
  std::uint32_t query_head = 0;  // selects the sink
  std::uint64_t position = 0;
  bool causal = true;
};

struct OracleAnswer {
  double lse;         // -infinity if nothing is visible and there is no sink
  double logit_mass;  // scales the error of logits: see kernels/format/error_bound.h
  double value_peak;  // scales the error of outputs: likewise
  std::uint64_t visible;
};

// Writes head_dim doubles to `output`. `lane` must have been built from `query.lane`.
OracleAnswer AttendByDefinition(const OracleQuery& query, const ExactLane& lane, double* output);
OracleAnswer AttendByDefinition(const OracleQuery& query, double* output);

}  // namespace tessera::kernels
