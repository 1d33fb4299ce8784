// What a metric is: described once, in names.h, and used by everything that feeds or shows it.
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

// A metric with N labels. Always a constant: visitors keep views of it.
template <std::size_t N>
struct Description {
  std::string_view name;  // "tessera_", the base unit last, "_total" on counters only
  std::string_view help;  // one sentence, with the unit where the name has none
  Kind kind;
  std::array<std::string_view, N> labels;

  constexpr DescriptionView view() const { return {name, help, kind, labels}; }
};

}  // namespace tessera::metrics
