#include "kernels/tokens/channels.h"

#include <cstring>

namespace tessera::kernels {
namespace {

template <ElementType kType>
float ElementAt(const std::byte* row, std::size_t index) {
  if constexpr (kType == ElementType::kFp32) {
    float element;
    std::memcpy(&element, row + index * sizeof(element), sizeof(element));
    return element;
  } else {
    std::uint16_t bits;
    std::memcpy(&bits, row + index * sizeof(bits), sizeof(bits));
    return kType == ElementType::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
  }
}

template <ElementType kType>
void Add(const std::byte* rows, std::uint64_t count, std::uint32_t head_dim,
         std::span<double> sums) {
  const std::size_t row_bytes = head_dim * ElementBytes(kType);
  for (std::uint64_t r = 0; r < count; ++r, rows += row_bytes) {
    for (std::size_t d = 0; d < head_dim; ++d) {
      const double element = ElementAt<kType>(rows, d);
      sums[d] += element * element;
    }
  }
}

}  // namespace

void AddChannelSquares(const std::byte* rows, std::uint64_t count, std::uint32_t head_dim,
                       ElementType type, std::span<double> sums) {
  switch (type) {
    case ElementType::kBf16:
      return Add<ElementType::kBf16>(rows, count, head_dim, sums);
    case ElementType::kFp16:
      return Add<ElementType::kFp16>(rows, count, head_dim, sums);
    case ElementType::kFp32:
      return Add<ElementType::kFp32>(rows, count, head_dim, sums);
  }
}

}  // namespace tessera::kernels
