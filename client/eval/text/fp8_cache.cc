#include "client/eval/text/fp8_cache.h"

#include <algorithm>
#include <cmath>

#include "kernels/format/element.h"
#include "kernels/format/value_type.h"

namespace tessera::cli::eval {

Fp8Cache::Fp8Cache(const llm::Config& config, const PromptRows& prompt)
    : config_(config), layers_(config.layers) {
  for (std::uint32_t layer = 0; layer < config.layers; ++layer) {
    Scale(prompt.key(layer), layers_[layer].key);
    Scale(prompt.value(layer), layers_[layer].value);
    Append(prompt.key(layer), layers_[layer].key);
    Append(prompt.value(layer), layers_[layer].value);
  }
}

void Fp8Cache::Scale(std::span<const std::uint16_t> rows, Side& side) const {
  side.scales.assign(config_.kv_heads, 0);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    float& peak = side.scales[i % config_.kv_row() / config_.head_dim];
    peak = std::max(peak, std::abs(kernels::Bf16ToFloat(rows[i])));
  }
  for (float& scale : side.scales) scale /= kernels::LargestStored(kernels::ValueType::kFp8);
}

// Rounding a stored value times its scale to bf16 loses 1/32 of what rounding to fp8 does.
void Fp8Cache::Append(std::span<const std::uint16_t> rows, Side& side) const {
  side.rows.reserve(side.rows.size() + rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const float scale = side.scales[i % config_.kv_row() / config_.head_dim];
    const float stored =
        scale == 0
            ? 0
            : kernels::Fp8ToFloat(kernels::FloatToFp8(kernels::Bf16ToFloat(rows[i]) / scale));
    side.rows.push_back(kernels::FloatToBf16(stored * scale));
  }
}

absl::Status Fp8Cache::Attend(const llm::LayerRows& rows, std::span<float> output) {
  Layer& layer = layers_[rows.layer];
  Append(rows.key, layer.key);
  Append(rows.value, layer.value);
  llm::AttendDense(
      config_,
      {.layer = rows.layer, .key = layer.key.rows, .value = layer.value.rows, .query = rows.query},
      output);
  return absl::OkStatus();
}

double Fp8Cache::bytes_kept() const {
  const auto elements = static_cast<double>(layers_[0].key.rows.size());
  if (elements == 0) return 0;
  return (elements + sizeof(float) * config_.kv_heads) / (sizeof(std::uint16_t) * elements);
}

}  // namespace tessera::cli::eval
