#include "daemon/config/values/duration.h"

#include <charconv>
#include <limits>

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera::config {
namespace {

absl::Status BadDuration(std::string_view text, std::string_view why) {
  return absl::InvalidArgumentError(
      Concat(Quoted(text), " is not a time: ", why, " (write 500, 500ms, 1.5s, 5m or 1h)"));
}

// Milliseconds of a unit; 0 if there is no such unit.
std::uint64_t UnitMilliseconds(std::string_view unit) {
  if (unit.empty() || unit == "ms") return 1;
  if (unit == "s") return 1000;
  if (unit == "m" || unit == "min") return 60'000;
  if (unit == "h") return 3'600'000;
  return 0;
}

}  // namespace

absl::StatusOr<std::uint64_t> ParseMilliseconds(std::string_view text) {
  std::string_view rest = Trim(text);
  constexpr std::uint64_t kMax = std::numeric_limits<std::uint64_t>::max();
  // Reads digits off `rest`; false if there are none or too many.
  const auto take_digits = [&rest](std::uint64_t& value) {
    const auto parsed = std::from_chars(rest.data(), rest.data() + rest.size(), value);
    rest.remove_prefix(static_cast<std::size_t>(parsed.ptr - rest.data()));
    return parsed.ec;
  };
  std::uint64_t whole = 0;
  const std::errc read = take_digits(whole);
  if (read == std::errc::result_out_of_range) return BadDuration(text, "it does not fit 64 bits");
  if (read != std::errc()) return BadDuration(text, "it does not start with a digit");
  std::uint64_t fraction = 0;
  std::uint64_t denominator = 1;
  if (rest.starts_with('.')) {
    rest.remove_prefix(1);
    const std::size_t before = rest.size();
    if (take_digits(fraction) != std::errc() || before - rest.size() > 6) {
      return BadDuration(text, "the point needs 1 to 6 digits after it");
    }
    for (std::size_t i = rest.size(); i < before; ++i) denominator *= 10;
  }
  const std::string_view unit = Trim(rest);
  const std::uint64_t scale = UnitMilliseconds(unit);
  if (scale == 0) return BadDuration(text, Concat(Quoted(unit), " is not one of ms, s, m, h"));
  if (fraction * scale % denominator != 0) {
    return BadDuration(text, "it is not a whole number of milliseconds");
  }
  const std::uint64_t rest_ms = fraction * scale / denominator;
  if (whole > (kMax - rest_ms) / scale) return BadDuration(text, "it does not fit 64 bits");
  return whole * scale + rest_ms;
}

}  // namespace tessera::config
