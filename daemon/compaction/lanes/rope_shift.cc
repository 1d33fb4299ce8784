#include "daemon/compaction/lanes/rope_shift.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <string_view>

#include "daemon/base/strings.h"
#include "daemon/compaction/lanes/element.h"

namespace tessera::compaction {

namespace {

// `whose` begins the message: a model, or a layer of it.
absl::Status WhyNotMoved(const cache::RopeSpec& rope, const std::string& whose) {
  // Other scalings may depend on the length, as dynamic and longrope do.
  constexpr std::string_view kFixed[] = {"", "default", "linear", "llama3", "yarn"};
  if (std::ranges::find(kFixed, rope.scaling) == std::end(kFixed)) {
    return absl::InvalidArgumentError(
        Concat(whose, " has RoPE scaling ", Quoted(rope.scaling),
               ", whose frequencies may depend on the text length, so its keys cannot be moved to "
               "other positions; supported scalings are linear, llama3 and yarn"));
  }
  if (!rope.frequencies.empty()) return absl::OkStatus();
  if (rope.theta <= 0) {
    return absl::InvalidArgumentError(
        Concat(whose, " has no rotary positions, so keys cannot be moved"));
  }
  const bool plain = rope.scaling.empty() || rope.scaling == "default";
  if (plain || rope.scaling == "linear") return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat(whose, " has RoPE scaling ", Quoted(rope.scaling),
             "; to move its keys, register the model with its frequencies (Rope.frequency)"));
}

}  // namespace

absl::Status RopeShift::WhyNot(const cache::ModelSpec& spec) {
  const std::string model = Concat("model ", Quoted(spec.name));
  bool some = spec.layers.empty();  // have the model's RoPE
  for (std::size_t i = 0; i < spec.layers.size(); ++i) {
    some = some || !spec.layers[i].rope.has_value();
    if (!spec.layers[i].rope.has_value()) continue;
    absl::Status status = WhyNotMoved(*spec.layers[i].rope, Concat("layer ", i, " of ", model));
    if (!status.ok()) return status;
  }
  return some ? WhyNotMoved(spec.rope(), model) : absl::OkStatus();
}

RopeShift::RopeShift(const cache::RopeSpec& rope, const kernels::DenseTile& tile)
    : tile_(tile), interleaved_(rope.interleaved), frequencies_(rope.frequencies) {
  if (!frequencies_.empty()) return;
  const std::uint32_t pairs = tile.head_dim / 2;
  const bool scaled = rope.scaling == "linear" && rope.scaling_factor > 0;
  for (std::uint32_t i = 0; i < pairs; ++i) {
    const double frequency = std::pow(rope.theta, -static_cast<double>(i) / pairs);
    frequencies_.push_back(scaled ? frequency / rope.scaling_factor : frequency);
  }
}

void RopeShift::ShiftInto(const std::byte* key, std::int64_t by, std::span<double> row) const {
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

void RopeShift::Turn(std::byte* key, std::int64_t by) const {
  if (by == 0) return;
  std::vector<double> row(tile_.head_dim);
  ShiftInto(key, by, row);
  for (std::uint32_t d = 0; d < tile_.head_dim; ++d) {
    SetElement(key, tile_.type, d, static_cast<float>(row[d]));
  }
}

}  // namespace tessera::compaction
