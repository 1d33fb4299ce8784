#include "kernels/dispatch/merge.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <limits>

#include "kernels/dispatch/numerics.h"

namespace tessera::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

void StoreRow(ElementType type, const double* row, std::uint32_t head_dim, double factor,
              void* output) {
  switch (type) {
    case ElementType::kFp32:
      for (std::uint32_t c = 0; c < head_dim; ++c) {
        static_cast<float*>(output)[c] = static_cast<float>(row[c] * factor);
      }
      return;
    case ElementType::kBf16:
      for (std::uint32_t c = 0; c < head_dim; ++c) {
        static_cast<std::uint16_t*>(output)[c] = FloatToBf16(static_cast<float>(row[c] * factor));
      }
      return;
    case ElementType::kFp16:
      for (std::uint32_t c = 0; c < head_dim; ++c) {
        static_cast<std::uint16_t*>(output)[c] = FloatToFp16(static_cast<float>(row[c] * factor));
      }
      return;
  }
}

double LoadElement(ElementType type, const void* row, std::size_t index) {
  switch (type) {
    case ElementType::kFp32:
      return static_cast<const float*>(row)[index];
    case ElementType::kBf16:
      return Bf16ToFloat(static_cast<const std::uint16_t*>(row)[index]);
    case ElementType::kFp16:
      return Fp16ToFloat(static_cast<const std::uint16_t*>(row)[index]);
  }
  return 0;
}

// ln(e^a + e^b), and each side's share.
struct Shares {
  double a;
  double b;
  float lse;
};

Shares ShareOut(float lse_a, float lse_b) {
  const double max = std::max(lse_a, lse_b);
  const double a = Exp2((lse_a - max) * kLog2E);
  const double b = Exp2((lse_b - max) * kLog2E);
  return {.a = a / (a + b), .b = b / (a + b), .lse = static_cast<float>(max + Ln(a + b))};
}

}  // namespace

void MergeOutputs(const MergeShape& shape, const AttendOutput& into,
                  const ConstAttendOutput& other) {
  const std::size_t row_bytes = shape.head_dim * ElementBytes(shape.type);
  for (std::uint32_t r = 0; r < shape.rows; ++r) {
    if (other.lse[r] == -kInfinity) continue;
    auto* target = static_cast<std::byte*>(into.output) + r * row_bytes;
    const auto* source = static_cast<const std::byte*>(other.output) + r * row_bytes;
    if (into.lse[r] == -kInfinity) {
      std::memcpy(target, source, row_bytes);
      into.lse[r] = other.lse[r];
      continue;
    }
    const Shares shares = ShareOut(into.lse[r], other.lse[r]);
    double row[kMaxMergeHeadDim];
    for (std::uint32_t c = 0; c < shape.head_dim; ++c) {
      row[c] = shares.a * LoadElement(shape.type, target, c) +
               shares.b * LoadElement(shape.type, source, c);
    }
    StoreRow(shape.type, row, shape.head_dim, 1, target);
    into.lse[r] = shares.lse;
  }
}

RowMerge::RowMerge(double max, std::uint32_t head_dim) : max_(max), head_dim_(head_dim) {
  std::fill_n(output_, head_dim, 0.0);
}

void RowMerge::AddPartial(const PartialRows& partial, std::uint32_t row) {
  if (partial.sum[row] == 0) return;  // the neutral element; NaN does not match
  const double weight = Exp2(partial.max[row] - max_);
  sum_ += weight * partial.sum[row];
  const float* output = partial.output + std::size_t{row} * head_dim_;
  for (std::uint32_t c = 0; c < head_dim_; ++c) output_[c] += weight * output[c];
}

void RowMerge::AddSink(double sink_log2) {
  if (sink_log2 > -kInfinity) sum_ += Exp2(sink_log2 - max_);
}

float RowMerge::Finish(ElementType type, void* output) const {
  if (sum_ == 0) {  // nothing visible and no sink
    StoreRow(type, output_, head_dim_, 0, output);
    return -kInfinity;
  }
  StoreRow(type, output_, head_dim_, 1 / sum_, output);
  return static_cast<float>(max_ * kLn2 + Ln(sum_));
}

}  // namespace tessera::kernels
