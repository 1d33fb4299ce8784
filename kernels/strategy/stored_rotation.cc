#include "kernels/strategy/stored_rotation.h"

#include <cstring>

namespace tessera::kernels {
namespace {

void StoreElement(ElementType type, double element, std::byte* to) {
  const auto value = static_cast<float>(element);
  if (type == ElementType::kFp32) {
    std::memcpy(to, &value, sizeof(value));
    return;
  }
  const std::uint16_t bits = type == ElementType::kBf16 ? FloatToBf16(value) : FloatToFp16(value);
  std::memcpy(to, &bits, sizeof(bits));
}

}  // namespace

StoredRotation StoreRotation(const Eigenbasis& basis, const ChannelOrder& order,
                             std::uint32_t channels, ElementType type, std::byte* matrix) {
  std::byte* to = matrix;
  for (std::uint32_t c = 0; c < channels; ++c) {
    const double* const vector = basis.vector(order.empty() ? c : order[c]);
    for (std::uint32_t d = 0; d < basis.head_dim; ++d, to += ElementBytes(type)) {
      StoreElement(type, vector[d], to);
    }
  }
  return {.matrix = matrix, .type = type, .channels = channels};
}

}  // namespace tessera::kernels
