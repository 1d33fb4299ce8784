#include "client/model/matrix.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "daemon/base/check.h"
#include "kernels/cpu/features.h"
#include "kernels/format/element.h"

namespace tessera::llm {

namespace {

// Compiler vector types of one register: AVX2 (or two of SSE), and AVX-512.
struct Lanes8 {
  static constexpr std::size_t kWidth = 8;
  // 12 sums, two vectors of the panel and one factor fit AVX2's 16 registers.
  static constexpr std::size_t kBlockRows = 6;
  typedef float Floats __attribute__((vector_size(32)));
  typedef std::int32_t Ints __attribute__((vector_size(32)));
  typedef std::uint16_t Halves __attribute__((vector_size(16)));
};
struct Lanes16 {
  static constexpr std::size_t kWidth = 16;
  static constexpr std::size_t kBlockRows = 14;
  typedef float Floats __attribute__((vector_size(64)));
  typedef std::int32_t Ints __attribute__((vector_size(64)));
  typedef std::uint16_t Halves __attribute__((vector_size(32)));
};

// Rows multiplied with all panels before the next rows, so that they stay in the L2 cache.
constexpr std::size_t kPassRows = 84;

// Forced inlining: the code is compiled for the instruction set of its caller.
#define TESSERA_LLM_INLINE inline __attribute__((always_inline))

// A panel of each kind. Begin starts a group of inputs; Load gives elements of an input. kStep
// inputs are loaded from the same place.
template <typename Lanes>
struct Bf16Panel {
  static constexpr std::size_t kStep = 1;
  const std::uint16_t* data;
  TESSERA_LLM_INLINE Bf16Panel(const Panels& matrix, std::size_t panel)
      : data(matrix.bf16(panel)) {}
  TESSERA_LLM_INLINE void Begin(std::size_t) {}
  TESSERA_LLM_INLINE void Load(std::size_t i, std::size_t column,
                               typename Lanes::Floats& values) const {
    typename Lanes::Halves bits;
    std::memcpy(&bits, data + i * Panels::kColumns + column, sizeof bits);
    values = (typename Lanes::Floats)(__builtin_convertvector(bits, typename Lanes::Ints) << 16);
  }
};

template <typename Lanes>
struct F32Panel {
  static constexpr std::size_t kStep = 1;
  const float* data;
  TESSERA_LLM_INLINE F32Panel(const Panels& matrix, std::size_t panel) : data(matrix.f32(panel)) {}
  TESSERA_LLM_INLINE void Begin(std::size_t) {}
  TESSERA_LLM_INLINE void Load(std::size_t i, std::size_t column,
                               typename Lanes::Floats& values) const {
    std::memcpy(&values, data + i * Panels::kColumns + column, sizeof values);
  }
};

template <typename Lanes>
struct CodePanel {
  // A word holds four inputs' codes of a column.
  static constexpr std::size_t kStep = 4;
  const std::uint32_t* data;
  const float* scales;
  typename Lanes::Floats scale[Panels::kColumns / Lanes::kWidth];
  typename Lanes::Floats offset[Panels::kColumns / Lanes::kWidth];
  TESSERA_LLM_INLINE CodePanel(const Panels& matrix, std::size_t panel)
      : data(matrix.codes(panel)), scales(matrix.scales(panel)) {}
  TESSERA_LLM_INLINE void Begin(std::size_t group) {
    std::memcpy(scale, scales + group * 2 * Panels::kColumns, sizeof scale);
    std::memcpy(offset, scales + (group * 2 + 1) * Panels::kColumns, sizeof offset);
  }
  TESSERA_LLM_INLINE void Load(std::size_t i, std::size_t column,
                               typename Lanes::Floats& values) const {
    typename Lanes::Ints words;
    std::memcpy(&words, data + i / kStep * Panels::kColumns + column, sizeof words);
    words = words >> static_cast<int>(8 * (i % kStep)) & 255;
    const std::size_t half = column / Lanes::kWidth;
    values = __builtin_convertvector(words, typename Lanes::Floats) * scale[half] + offset[half];
  }
};

// `x` is [in][kRows].
template <std::size_t kRows, typename Lanes, typename Panel>
TESSERA_LLM_INLINE void MultiplyPanel(const float* x, Panel& panel, std::size_t in,
                                      std::size_t group, float* sums) {
  constexpr std::size_t kHalves = Panels::kColumns / Lanes::kWidth;
  typename Lanes::Floats sum[kRows][kHalves] = {};
  for (std::size_t first = 0; first < in; first += group) {
    panel.Begin(first / group);
    const std::size_t end = std::min(in, first + group);
    for (std::size_t i = first; i < end; i += Panel::kStep) {
      for (std::size_t step = 0; step < Panel::kStep; ++step) {
        typename Lanes::Floats factor[kHalves];
        for (std::size_t half = 0; half < kHalves; ++half) {
          panel.Load(i + step, half * Lanes::kWidth, factor[half]);
        }
        for (std::size_t row = 0; row < kRows; ++row) {
          const float value = x[(i + step) * kRows + row];
          for (std::size_t half = 0; half < kHalves; ++half) {
            sum[row][half] += factor[half] * value;
          }
        }
      }
    }
  }
  std::memcpy(sums, sum, sizeof sum);
}

template <std::size_t kRows, typename Lanes, template <typename> typename Panel>
TESSERA_LLM_INLINE void MultiplyBlock(const float* x, const Panels& matrix, std::size_t panel,
                                      const Extent& extent, float* y, std::size_t y_stride) {
  alignas(64) float sums[kRows][Panels::kColumns];
  const std::size_t group = matrix.kind() == Panels::Kind::kCodes ? matrix.group() : extent.in;
  Panel<Lanes> source(matrix, panel);
  MultiplyPanel<kRows, Lanes>(x, source, extent.in, group, &sums[0][0]);
  const std::size_t first = panel * Panels::kColumns;
  const std::size_t columns = std::min(Panels::kColumns, extent.out - first);
  for (std::size_t row = 0; row < kRows; ++row) {
    std::memcpy(y + row * y_stride + first, sums[row], columns * sizeof(float));
  }
}

// Rows [0, rows) of x as [in][rows], so that a product reads them sequentially.
void Interleave(const float* x, std::size_t x_stride, std::size_t rows, std::size_t in,
                float* packed) {
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::size_t i = 0; i < in; ++i) packed[i * rows + row] = x[row * x_stride + i];
  }
}

template <typename Lanes, template <typename> typename Panel>
TESSERA_LLM_INLINE void MultiplyKind(const float* x, std::size_t x_stride, const Panels& matrix,
                                     const Extent& extent, float* y, std::size_t y_stride) {
  constexpr std::size_t kRows = Lanes::kBlockRows, kFewRows = 4;
  const auto block_at = [](std::size_t row, std::size_t end) {
    return row + kRows <= end ? kRows : row + kFewRows <= end ? kFewRows : std::size_t{1};
  };
  std::vector<float> packed(std::min(kPassRows, extent.rows) * extent.in);
  for (std::size_t pass = 0; pass < extent.rows; pass += kPassRows) {
    const std::size_t end = std::min(extent.rows, pass + kPassRows);
    for (std::size_t row = pass; row < end; row += block_at(row, end)) {
      Interleave(x + row * x_stride, x_stride, block_at(row, end), extent.in,
                 &packed[(row - pass) * extent.in]);
    }
    for (std::size_t panel = 0; panel * Panels::kColumns < extent.out; ++panel) {
      for (std::size_t row = pass; row < end;) {
        const float* const rows = &packed[(row - pass) * extent.in];
        float* const to = y + row * y_stride;
        if (row + kRows <= end) {
          MultiplyBlock<kRows, Lanes, Panel>(rows, matrix, panel, extent, to, y_stride);
          row += kRows;
        } else if (row + kFewRows <= end) {
          MultiplyBlock<kFewRows, Lanes, Panel>(rows, matrix, panel, extent, to, y_stride);
          row += kFewRows;
        } else {
          MultiplyBlock<1, Lanes, Panel>(rows, matrix, panel, extent, to, y_stride);
          row += 1;
        }
      }
    }
  }
}

template <typename Lanes>
TESSERA_LLM_INLINE void MultiplyAll(const float* x, std::size_t x_stride, const Panels& matrix,
                                    const Extent& extent, float* y, std::size_t y_stride) {
  switch (matrix.kind()) {
    case Panels::Kind::kBf16:
      return MultiplyKind<Lanes, Bf16Panel>(x, x_stride, matrix, extent, y, y_stride);
    case Panels::Kind::kF32:
      return MultiplyKind<Lanes, F32Panel>(x, x_stride, matrix, extent, y, y_stride);
    case Panels::Kind::kCodes:
      return MultiplyKind<Lanes, CodePanel>(x, x_stride, matrix, extent, y, y_stride);
  }
}

using MultiplyFunction = void (*)(const float*, std::size_t, const Panels&, const Extent&, float*,
                                  std::size_t);

void MultiplyAnywhere(const float* x, std::size_t x_stride, const Panels& matrix,
                      const Extent& extent, float* y, std::size_t y_stride) {
  MultiplyAll<Lanes8>(x, x_stride, matrix, extent, y, y_stride);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void MultiplyAvx2(const float* x, std::size_t x_stride,
                                                      const Panels& matrix, const Extent& extent,
                                                      float* y, std::size_t y_stride) {
  MultiplyAll<Lanes8>(x, x_stride, matrix, extent, y, y_stride);
}

__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))) void MultiplyAvx512(
    const float* x, std::size_t x_stride, const Panels& matrix, const Extent& extent, float* y,
    std::size_t y_stride) {
  MultiplyAll<Lanes16>(x, x_stride, matrix, extent, y, y_stride);
}
#endif

MultiplyFunction BestMultiply() {
#if defined(__x86_64__)
  const kernels::CpuFeatures features = kernels::DetectCpuFeatures();
  const bool avx512 =
      features.avx512f && features.avx512bw && features.avx512vl && features.avx512dq;
  if (avx512) return MultiplyAvx512;
  if (features.avx2 && features.fma) return MultiplyAvx2;
#endif
  return MultiplyAnywhere;
}

}  // namespace

Panels::Panels(Kind kind, std::size_t in, std::size_t out, std::size_t group)
    : kind_(kind), in_(in), out_(out), group_(group) {
  const std::size_t panels = (out + kColumns - 1) / kColumns;
  const std::size_t elements = panels * in * kColumns;
  if (kind == Kind::kBf16) bf16_.resize(elements);
  if (kind == Kind::kF32) f32_.resize(elements);
  if (kind == Kind::kCodes) {
    codes_.resize(elements / 4);
    scales_.resize(panels * (in / group) * 2 * kColumns);
  }
}

Panels Panels::OfColumns(const std::uint16_t* columns, std::size_t stride, std::size_t in,
                         std::size_t out) {
  Panels panels(Kind::kBf16, in, out);
  for (std::size_t column = 0; column < out; ++column) {
    for (std::size_t i = 0; i < in; ++i) {
      panels.bf16_[panels.Place(i, column, in)] = columns[column * stride + i];
    }
  }
  return panels;
}

Panels Panels::OfRows(const std::uint16_t* rows, std::size_t stride, std::size_t in,
                      std::size_t out) {
  Panels panels(Kind::kBf16, in, out);
  for (std::size_t i = 0; i < in; ++i) {
    for (std::size_t column = 0; column < out; ++column) {
      panels.bf16_[panels.Place(i, column, in)] = rows[i * stride + column];
    }
  }
  return panels;
}

Panels Panels::OfTensor(const Tensor& tensor,
                        const std::function<std::uint64_t(std::uint64_t)>& row_of) {
  TESSERA_CHECK(tensor.shape.size() == 2, "a matrix");
  const std::size_t out = tensor.shape[0], in = tensor.shape[1];
  const bool quantised = IsQuantised(tensor.type);
  const Kind kind = quantised                          ? Kind::kCodes
                    : tensor.type == TensorType::kBf16 ? Kind::kBf16
                                                       : Kind::kF32;
  Panels panels(kind, in, out, quantised ? GroupElements(tensor.type) : 1);
  for (std::size_t column = 0; column < out; ++column) {
    if (quantised) {
      panels.SetCodes(column, tensor, row_of(column));
    } else {
      panels.SetColumn(column, tensor, row_of(column));
    }
  }
  return panels;
}

void Panels::SetColumn(std::size_t column, const Tensor& tensor, std::uint64_t row) {
  std::vector<float> values(in_);
  tensor.ReadRow(row, values);
  for (std::size_t i = 0; i < in_; ++i) {
    if (kind_ == Kind::kF32) {
      f32_[Place(i, column, in_)] = values[i];
    } else {
      bf16_[Place(i, column, in_)] = kernels::FloatToBf16(values[i]);
    }
  }
}

void Panels::SetCodes(std::size_t column, const Tensor& tensor, std::uint64_t row) {
  const std::span<const std::byte> data = tensor.Row(row);
  const std::size_t elements = BlockElements(tensor.type), bytes = BlockBytes(tensor.type);
  const std::size_t panel = column / kColumns, in_panel = column % kColumns;
  float* const scales = &scales_[panel * (in_ / group_) * 2 * kColumns + in_panel];
  QuantisedBlock block;
  for (std::size_t first = 0; first < in_; first += elements) {
    Unpack(tensor.type, data.subspan(first / elements * bytes, bytes), block);
    for (std::size_t i = 0; i < elements; ++i) {
      const std::size_t at = first + i;
      codes_[Place(at / 4, column, in_ / 4)] |= std::uint32_t{block.codes[i]} << at % 4 * 8;
    }
    for (std::size_t g = 0; g < elements / group_; ++g) {
      const std::size_t at = (first / group_ + g) * 2 * kColumns;
      scales[at] = block.scales[g];
      scales[at + kColumns] = block.offsets[g];
    }
  }
}

void Multiply(const float* x, std::size_t x_stride, const Panels& matrix, const Extent& extent,
              float* y, std::size_t y_stride) {
  TESSERA_CHECK(extent.in <= matrix.in() && extent.out <= matrix.out(), "within the matrix");
  static const MultiplyFunction multiply = BestMultiply();
  multiply(x, x_stride, matrix, extent, y, y_stride);
}

}  // namespace tessera::llm
