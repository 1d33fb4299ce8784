#include "client/model/matrix.h"

#include <algorithm>
#include <cstring>

#include "daemon/base/check.h"
#include "kernels/cpu/features.h"

namespace tessera::llm {

namespace {

// Compiler vector types: eight floats in one AVX register or two SSE registers.
typedef float Floats __attribute__((vector_size(32)));
typedef std::uint32_t Words __attribute__((vector_size(32)));
typedef std::uint16_t Halves __attribute__((vector_size(16)));

// Rows per panel product: 12 sums, two panel vectors and one factor fit AVX2's 16 registers.
constexpr std::size_t kBlockRows = 6;
// Rows multiplied with all panels before the next rows, so that they stay in the L2 cache.
constexpr std::size_t kPassRows = 16 * kBlockRows;

// Forced inlining: the code is compiled for the instruction set of its caller.
#define TESSERA_LLM_INLINE inline __attribute__((always_inline))

template <std::size_t kRows>
TESSERA_LLM_INLINE void MultiplyPanel(const float* x, std::size_t x_stride,
                                      const std::uint16_t* panel, std::size_t in, float* sums) {
  Floats sum[kRows][2] = {};
  for (std::size_t i = 0; i < in; ++i) {
    Floats factor[2];
    for (int half = 0; half < 2; ++half) {
      Halves bits;
      std::memcpy(&bits, panel + i * Panels::kColumns + half * 8, sizeof bits);
      factor[half] = (Floats)(__builtin_convertvector(bits, Words) << 16);
    }
    for (std::size_t row = 0; row < kRows; ++row) {
      const float value = x[row * x_stride + i];
      sum[row][0] += factor[0] * value;
      sum[row][1] += factor[1] * value;
    }
  }
  std::memcpy(sums, sum, sizeof sum);
}

template <std::size_t kRows>
TESSERA_LLM_INLINE void MultiplyBlock(const float* x, std::size_t x_stride, const Panels& matrix,
                                      std::size_t panel, const Extent& extent, float* y,
                                      std::size_t y_stride) {
  alignas(32) float sums[kRows][Panels::kColumns];
  MultiplyPanel<kRows>(x, x_stride, matrix.panel(panel), extent.in, &sums[0][0]);
  const std::size_t first = panel * Panels::kColumns;
  const std::size_t columns = std::min(Panels::kColumns, extent.out - first);
  for (std::size_t row = 0; row < kRows; ++row) {
    std::memcpy(y + row * y_stride + first, sums[row], columns * sizeof(float));
  }
}

TESSERA_LLM_INLINE void MultiplyAll(const float* x, std::size_t x_stride, const Panels& matrix,
                                    const Extent& extent, float* y, std::size_t y_stride) {
  for (std::size_t pass = 0; pass < extent.rows; pass += kPassRows) {
    const std::size_t end = std::min(extent.rows, pass + kPassRows);
    for (std::size_t panel = 0; panel * Panels::kColumns < extent.out; ++panel) {
      std::size_t row = pass;
      for (; row + kBlockRows <= end; row += kBlockRows) {
        MultiplyBlock<kBlockRows>(x + row * x_stride, x_stride, matrix, panel, extent,
                                  y + row * y_stride, y_stride);
      }
      for (; row < end; ++row) {
        MultiplyBlock<1>(x + row * x_stride, x_stride, matrix, panel, extent, y + row * y_stride,
                         y_stride);
      }
    }
  }
}

void MultiplyAnywhere(const float* x, std::size_t x_stride, const Panels& matrix,
                      const Extent& extent, float* y, std::size_t y_stride) {
  MultiplyAll(x, x_stride, matrix, extent, y, y_stride);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void MultiplyAvx2(const float* x, std::size_t x_stride,
                                                      const Panels& matrix, const Extent& extent,
                                                      float* y, std::size_t y_stride) {
  MultiplyAll(x, x_stride, matrix, extent, y, y_stride);
}

bool HasAvx2() {
  const kernels::CpuFeatures features = kernels::DetectCpuFeatures();
  return features.avx2 && features.fma;
}
#endif

}  // namespace

Panels Panels::OfColumns(const std::uint16_t* columns, std::size_t stride, std::size_t in,
                         std::size_t out) {
  Panels panels(in, out);
  for (std::size_t column = 0; column < out; ++column) {
    for (std::size_t i = 0; i < in; ++i) panels.at(i, column) = columns[column * stride + i];
  }
  return panels;
}

Panels Panels::OfRows(const std::uint16_t* rows, std::size_t stride, std::size_t in,
                      std::size_t out) {
  Panels panels(in, out);
  for (std::size_t i = 0; i < in; ++i) {
    for (std::size_t column = 0; column < out; ++column) {
      panels.at(i, column) = rows[i * stride + column];
    }
  }
  return panels;
}

void Multiply(const float* x, std::size_t x_stride, const Panels& matrix, const Extent& extent,
              float* y, std::size_t y_stride) {
  TESSERA_CHECK(extent.in <= matrix.in() && extent.out <= matrix.out(), "within the matrix");
#if defined(__x86_64__)
  static const bool has_avx2 = HasAvx2();
  if (has_avx2) return MultiplyAvx2(x, x_stride, matrix, extent, y, y_stride);
#endif
  MultiplyAnywhere(x, x_stride, matrix, extent, y, y_stride);
}

}  // namespace tessera::llm
