// A rotation in the form that tiles and kernels use: truncated, ordered, rounded.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/format/element.h"
#include "kernels/strategy/eigen.h"

namespace tessera::kernels {

// Channel i of a rotation is vector order[i] of its basis. Empty: by falling eigenvalue.
using ChannelOrder = std::vector<std::uint16_t>;

// One side's matrix, [channels][head_dim] of `type`, 64-byte aligned; null: the identity.
struct StoredRotation {
  const std::byte* matrix = nullptr;
  ElementType type = ElementType::kBf16;
  std::uint32_t channels = 0;
};

// Writes the first `channels` vectors of `order` to `matrix`, rounded to `type`.
StoredRotation StoreRotation(const Eigenbasis& basis, const ChannelOrder& order,
                             std::uint32_t channels, ElementType type, std::byte* matrix);

}  // namespace tessera::kernels
