// Merges attention over disjoint sets of entries.
#pragma once

#include <cstdint>
#include <span>

#include "kernels/format/element.h"
#include "kernels/format/part.h"

namespace tessera::kernels {

// A finished result: what Attend wrote for `rows` query rows.
struct AttendOutput {
  void* output = nullptr;  // [rows][head_dim] of MergeShape::type
  float* lse = nullptr;    // [rows], natural log; -infinity marks the neutral element
};
struct ConstAttendOutput {
  const void* output = nullptr;
  const float* lse = nullptr;
};

struct MergeShape {
  std::uint32_t rows = 0;
  std::uint32_t head_dim = 0;
  ElementType type = ElementType::kFp32;
};

// `into` becomes the attention over the entries of both, as if they had been one lane. If one side
// is neutral the other is kept bit for bit. Used by workers that attend over tokens they hold
// themselves. Include a learned sink in one side only. `into` and `other` must not overlap.
void MergeOutputs(const MergeShape& shape, const AttendOutput& into,
                  const ConstAttendOutput& other);

inline constexpr std::uint32_t kMaxMergeHeadDim = 256;

// Merges the partial results of one row, added in lane order.
class RowMerge {
 public:
  // `max` is the maximum over all parts and the sink, in log2 units.
  RowMerge(double max, std::uint32_t head_dim);

  // Adds row `row` of a partial result.
  void AddPartial(const PartialRows& partial, std::uint32_t row);
  void AddSink(double sink_log2);

  // Writes head_dim elements and returns the natural log-sum-exp.
  float Finish(ElementType type, void* output) const;

 private:
  double max_;
  double sum_ = 0;
  std::uint32_t head_dim_;
  double output_[kMaxMergeHeadDim];
};

}  // namespace tessera::kernels
