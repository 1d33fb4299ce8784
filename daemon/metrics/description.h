// Description: the name, help, kind and labels of a metric. Each metric is described once, in
// names.h.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tessera::metrics {

enum class Kind : std::uint8_t { kCounter, kGauge, kHistogram };

struct DescriptionView {
  std::string_view name;
  std::string_view help;
  Kind kind;
  std::span<const std::string_view> labels;
};

// A metric with N labels. Must be a constant: visitors keep views of it.
template <std::size_t N>
struct Description {
  std::string_view name;  // starts with "tessera_", ends with the unit, or "_total" for counters
  std::string_view help;  // one sentence, with the unit if the name has none
  Kind kind;
  std::array<std::string_view, N> labels;

  constexpr DescriptionView view() const { return {name, help, kind, labels}; }
};

}  // namespace tessera::metrics
