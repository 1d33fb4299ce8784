#include "daemon/base/bytes.h"

#include <array>
#include <cstdio>
#include <limits>
#include <optional>

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera {
namespace {

constexpr std::array<const char*, 7> kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};

// The power of two that `unit` stands for, or nullopt if it is not a unit.
std::optional<int> UnitShift(std::string_view unit) {
  if (unit.empty() || unit == "B") return 0;
  constexpr std::string_view kPrefixes = "KMGTPE";
  const std::size_t index =
      kPrefixes.find(unit[0] >= 'a' ? static_cast<char>(unit[0] - 32) : unit[0]);
  if (index == std::string_view::npos) return std::nullopt;
  const std::string_view rest = unit.substr(1);
  if (!rest.empty() && rest != "i" && rest != "iB") return std::nullopt;
  return static_cast<int>(index + 1) * 10;
}

absl::Status BadBytes(std::string_view text, std::string_view why) {
  return absl::InvalidArgumentError(
      Concat("\"", text, "\" is not a byte count: ", why, " (write 4096, 512MiB, 8GiB or 1.5G)"));
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

}  // namespace

std::string FormatBytes(std::uint64_t bytes) {
  std::size_t unit = 0;
  std::uint64_t scale = 1;
  while (unit + 1 < kUnits.size() && bytes / scale >= 1024) {
    scale *= 1024;
    ++unit;
  }
  if (unit == 0) return Concat(bytes, " B");
  std::uint64_t whole = bytes / scale;
  // No overflow: the remainder is below 2^60.
  std::uint64_t tenths = (bytes % scale * 10 + scale / 2) / scale;
  if (tenths >= 10) {
    tenths = 0;
    ++whole;
  }
  if (whole == 1024 && unit + 1 < kUnits.size()) {
    whole = 1;
    ++unit;
  }
  return Concat(whole, ".", tenths, " ", kUnits[unit]);
}

absl::StatusOr<std::uint64_t> ParseBytes(std::string_view text) {
  const std::string_view trimmed = Trim(text);
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  std::size_t at = 0;
  std::uint64_t whole = 0;
  for (; at < trimmed.size() && IsDigit(trimmed[at]); ++at) {
    const std::uint64_t digit = static_cast<std::uint64_t>(trimmed[at] - '0');
    if (whole > (kMax - digit) / 10) return BadBytes(text, "it does not fit 64 bits");
    whole = whole * 10 + digit;
  }
  if (at == 0) return BadBytes(text, "it does not start with a digit");

  // The fraction as numerator / denominator, exact.
  std::uint64_t numerator = 0;
  std::uint64_t denominator = 1;
  if (at < trimmed.size() && trimmed[at] == '.') {
    const std::size_t point = at++;
    for (; at < trimmed.size() && IsDigit(trimmed[at]); ++at) {
      if (at - point > 6) return BadBytes(text, "it has more than 6 decimals");
      numerator = numerator * 10 + static_cast<std::uint64_t>(trimmed[at] - '0');
      denominator *= 10;
    }
    if (at == point + 1) return BadBytes(text, "a digit must follow the point");
  }

  const std::string_view unit = Trim(trimmed.substr(at));
  const std::optional<int> shift = UnitShift(unit);
  if (!shift.has_value()) {
    return BadBytes(text, Concat("\"", unit, "\" is not one of B, KiB, MiB, GiB, TiB"));
  }
  if (*shift > 0 && whole > (kMax >> *shift)) return BadBytes(text, "it does not fit 64 bits");
  // numerator * 2^shift needs up to 80 bits.
  const unsigned __int128 scaled = static_cast<unsigned __int128>(numerator) << *shift;
  if (scaled % denominator != 0) return BadBytes(text, "it is not a whole number of bytes");
  const std::uint64_t fraction = static_cast<std::uint64_t>(scaled / denominator);
  const std::uint64_t base = whole << *shift;
  if (base > kMax - fraction) return BadBytes(text, "it does not fit 64 bits");
  return base + fraction;
}

}  // namespace tessera
