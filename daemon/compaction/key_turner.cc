#include "daemon/compaction/key_turner.h"

#include <cmath>

#include "daemon/base/strings.h"
#include "daemon/compaction/element.h"

namespace tessera::compaction {

absl::Status KeyTurner::WhyNot(const cache::ModelSpec& spec) {
  if (spec.rope_scaling == "dynamic") {
    return absl::InvalidArgumentError(
        Concat("model ", Quoted(spec.name),
               " scales its rotary frequencies with the length (dynamic), so that keys of one "
               "length cannot be turned into those of another"));
  }
  if (!spec.rope_frequencies.empty()) return absl::OkStatus();
  if (spec.rope_theta <= 0) {
    return absl::InvalidArgumentError(
        Concat("model ", Quoted(spec.name), " has no rotary positions that could be moved"));
  }
  if (spec.rope_scaling.empty() || spec.rope_scaling == "linear") return absl::OkStatus();
  return absl::InvalidArgumentError(Concat(
      "model ", Quoted(spec.name), " scales its rotary positions by ", Quoted(spec.rope_scaling),
      "; to move them, register it with its frequencies (Rope.frequency)"));
}

KeyTurner::KeyTurner(const cache::ModelSpec& spec, const kernels::DenseTile& tile)
    : tile_(tile), interleaved_(spec.rope_interleaved), frequencies_(spec.rope_frequencies) {
  if (!frequencies_.empty()) return;
  const std::uint32_t pairs = tile.head_dim / 2;
  const bool scaled = spec.rope_scaling == "linear" && spec.rope_scaling_factor > 0;
  for (std::uint32_t i = 0; i < pairs; ++i) {
    const double frequency = std::pow(spec.rope_theta, -static_cast<double>(i) / pairs);
    frequencies_.push_back(scaled ? frequency / spec.rope_scaling_factor : frequency);
  }
}

void KeyTurner::TurnInto(const std::byte* key, std::int64_t by, std::span<double> row) const {
  for (std::uint32_t d = 0; d < tile_.head_dim; ++d) row[d] = ElementAt(key, tile_.type, d);
  const auto pairs = static_cast<std::uint32_t>(frequencies_.size());
  for (std::uint32_t i = 0; i < pairs; ++i) {
    double& first = row[interleaved_ ? 2 * i : i];
    double& second = row[interleaved_ ? 2 * i + 1 : i + pairs];
    const double angle = static_cast<double>(by) * frequencies_[i];
    const double x = first;
    const double y = second;
    first = x * std::cos(angle) - y * std::sin(angle);
    second = x * std::sin(angle) + y * std::cos(angle);
  }
}

void KeyTurner::Turn(std::byte* key, std::int64_t by) const {
  if (by == 0) return;
  std::vector<double> row(tile_.head_dim);
  TurnInto(key, by, row);
  for (std::uint32_t d = 0; d < tile_.head_dim; ++d) {
    SetElement(key, tile_.type, d, static_cast<float>(row[d]));
  }
}

}  // namespace tessera::compaction
