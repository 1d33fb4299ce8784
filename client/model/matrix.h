// Products of fp32 rows with a bf16 matrix: what a forward pass spends its time on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::llm {

// A matrix [in][out] of bf16, cut into panels of 16 columns: a product reads each from front to
// end, in[0] of 16 outputs first. The last panel is filled up with zeros.
class Panels {
 public:
  static constexpr std::size_t kColumns = 16;

  Panels() = default;
  // Of a matrix that lies transposed, [out] rows of `in` elements, `stride` apart: weights, keys.
  static Panels OfColumns(const std::uint16_t* columns, std::size_t stride, std::size_t in,
                          std::size_t out);
  // Of [in] rows of `out` elements, `stride` apart: values.
  static Panels OfRows(const std::uint16_t* rows, std::size_t stride, std::size_t in,
                       std::size_t out);

  std::size_t in() const { return in_; }
  std::size_t out() const { return out_; }
  const std::uint16_t* panel(std::size_t index) const { return &data_[index * in_ * kColumns]; }

 private:
  Panels(std::size_t in, std::size_t out)
      : in_(in), out_(out), data_((out + kColumns - 1) / kColumns * in * kColumns) {}
  std::uint16_t& at(std::size_t in, std::size_t out) {
    return data_[(out / kColumns * in_ + in) * kColumns + out % kColumns];
  }

  std::size_t in_ = 0;
  std::size_t out_ = 0;
  std::vector<std::uint16_t> data_;
};

// Which part of a product: `rows` rows of x with the first `in` rows and `out` columns of a matrix.
struct Extent {
  std::size_t rows = 0;
  std::size_t in = 0;
  std::size_t out = 0;
};

// y = x · matrix, accumulated in fp32. Rows of x lie `x_stride` apart, rows of y `y_stride`.
void Multiply(const float* x, std::size_t x_stride, const Panels& matrix, const Extent& extent,
              float* y, std::size_t y_stride);

}  // namespace tessera::llm
