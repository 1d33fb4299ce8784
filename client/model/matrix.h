// Products of fp32 rows with a bf16 matrix, where a forward pass spends its time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::llm {

// A bf16 matrix [in][out], stored as panels of 16 columns, each [in][16], so that a product reads
// every panel sequentially. The last panel is padded with zeros.
class Panels {
 public:
  static constexpr std::size_t kColumns = 16;

  Panels() = default;
  // From the transposed matrix: `out` rows of `in` elements, `stride` apart. For weights and keys.
  static Panels OfColumns(const std::uint16_t* columns, std::size_t stride, std::size_t in,
                          std::size_t out);
  // From `in` rows of `out` elements, `stride` apart. For values.
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
