// The uncentred second moments of a lane's rows, in double. Rotations are made from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/element.h"
#include "kernels/format/operations.h"

namespace tessera::kernels {

// The rows of one side (K or V) of a lane, contiguous in memory.
struct RowSpan {
  const std::byte* data = nullptr;  // [count][head_dim] of `type`
  std::uint64_t count = 0;
  std::uint32_t head_dim = 0;
  ElementType type = ElementType::kBf16;

  std::size_t row_bytes() const { return head_dim * ElementBytes(type); }
  const std::byte* row(std::uint64_t index) const { return data + index * row_bytes(); }
  RowSpan Slice(std::uint64_t first, std::uint64_t rows) const {
    return {row(first), rows, head_dim, type};
  }
};

class Moments {
 public:
  explicit Moments(std::uint32_t head_dim)
      : head_dim_(head_dim), sums_(std::size_t{head_dim} * head_dim) {}

  void Add(const RowSpan& rows, const Operations& operations);
  void Add(const Moments& other);

  std::uint32_t head_dim() const { return head_dim_; }
  std::uint64_t rows() const { return rows_; }
  // [head_dim][head_dim], row-major; 0 below the diagonal.
  const double* sums() const { return sums_.data(); }
  std::size_t bytes() const { return sums_.size() * sizeof(double); }

 private:
  std::uint32_t head_dim_;
  std::uint64_t rows_ = 0;
  std::vector<double> sums_;
};

}  // namespace tessera::kernels
