// The attention geometry of one layer, as registered with the model.
#pragma once

#include <cstdint>

#include "kernels/format/element.h"

namespace tessera::kernels {

// Unsupported values are rejected at registration, so kernels need not check.
struct LayerGeometry {
  std::uint32_t query_heads = 0;  // a multiple of kv_heads; query head h reads kv head h / group
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  ElementType type = ElementType::kBf16;  // of K, V and Q
  float scale = 0;                        // usually 1 / sqrt(head_dim)
  std::uint32_t sliding_window = 0;  // 0: none; w: the newest w positions, including the query's
  float logit_softcap = 0;           // 0: none
  const float* sinks = nullptr;      // query_heads natural-log logits, or null

  std::uint32_t group() const { return query_heads / kv_heads; }
};

}  // namespace tessera::kernels
