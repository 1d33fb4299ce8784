// Products of fp32 rows with a matrix, where a forward pass spends its time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "client/model/checkpoint/tensor.h"

namespace tessera::llm {

// A matrix [in][out], stored as panels of 16 columns, each [in][16], so that a product reads every
// panel sequentially. The last panel is padded with zeros. Elements are bf16, fp32, or codes of 8
// bits with a scale and an offset per column and group of inputs: nothing that a file stores is
// rounded.
class Panels {
 public:
  static constexpr std::size_t kColumns = 16;
  enum class Kind : std::uint8_t { kBf16, kF32, kCodes };

  Panels() = default;
  // bf16, from the transposed matrix: `out` rows of `in` elements, `stride` apart. For keys.
  static Panels OfColumns(const std::uint16_t* columns, std::size_t stride, std::size_t in,
                          std::size_t out);
  // bf16, from `in` rows of `out` elements, `stride` apart. For values.
  static Panels OfRows(const std::uint16_t* rows, std::size_t stride, std::size_t in,
                       std::size_t out);
  // From a tensor [out][in]. Column i is the tensor's row `row_of(i)`.
  static Panels OfTensor(const Tensor& tensor,
                         const std::function<std::uint64_t(std::uint64_t)>& row_of);

  std::size_t in() const { return in_; }
  std::size_t out() const { return out_; }
  Kind kind() const { return kind_; }
  // Inputs that share a scale.
  std::size_t group() const { return group_; }
  const std::uint16_t* bf16(std::size_t panel) const { return &bf16_[panel * in_ * kColumns]; }
  const float* f32(std::size_t panel) const { return &f32_[panel * in_ * kColumns]; }
  // [in / 4][16]: byte j of a word is the code of input 4i + j.
  const std::uint32_t* codes(std::size_t panel) const {
    return &codes_[panel * (in_ / 4) * kColumns];
  }
  // [in / group][2][16]: scales and offsets.
  const float* scales(std::size_t panel) const {
    return &scales_[panel * (in_ / group_) * 2 * kColumns];
  }

 private:
  Panels(Kind kind, std::size_t in, std::size_t out, std::size_t group = 1);
  // Of column `out` in row `in` of panels with so many rows.
  static std::size_t Place(std::size_t in, std::size_t out, std::size_t rows) {
    return (out / kColumns * rows + in) * kColumns + out % kColumns;
  }
  void SetColumn(std::size_t column, const Tensor& tensor, std::uint64_t row);
  void SetCodes(std::size_t column, const Tensor& tensor, std::uint64_t row);

  Kind kind_ = Kind::kBf16;
  std::size_t in_ = 0;
  std::size_t out_ = 0;
  std::size_t group_ = 1;
  std::vector<std::uint16_t> bf16_;
  std::vector<float> f32_;
  std::vector<std::uint32_t> codes_;
  std::vector<float> scales_;
};

// The part of a product to compute: `rows` rows of x, and the first `in` rows and `out` columns of
// the matrix.
struct Extent {
  std::size_t rows = 0;
  std::size_t in = 0;
  std::size_t out = 0;
};

// y = x · matrix, accumulated in fp32. Strides are in elements.
void Multiply(const float* x, std::size_t x_stride, const Panels& matrix, const Extent& extent,
              float* y, std::size_t y_stride);

}  // namespace tessera::llm
