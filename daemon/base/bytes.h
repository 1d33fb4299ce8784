// Byte counts as people write and read them. Units are binary whether or not the "i" is written:
// "G", "Gi" and "GiB" are 1024^3. "GB" is refused, since half of its readers mean 1000^3.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tessera {

inline constexpr std::uint64_t kKiB = std::uint64_t{1} << 10;
inline constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
inline constexpr std::uint64_t kTiB = std::uint64_t{1} << 40;

// "0 B", "512 B", "64.0 MiB", "1.5 GiB": one decimal, rounded to nearest. For messages; not exact.
std::string FormatBytes(std::uint64_t bytes);

// "4096", "512MiB", "8 GiB", "1.5G". INVALID_ARGUMENT names the text and what is accepted; a value
// that is not a whole number of bytes, or does not fit 64 bits, is refused.
absl::StatusOr<std::uint64_t> ParseBytes(std::string_view text);

}  // namespace tessera
