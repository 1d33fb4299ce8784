// Formats and parses byte counts. Units are binary with or without the "i": "G", "Gi" and "GiB" all
// mean 1024^3. "GB" is refused because many readers take it as 1000^3.
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

// "0 B", "512 B", "64.0 MiB", "1.5 GiB": one decimal, rounded to nearest. For messages only.
std::string FormatBytes(std::uint64_t bytes);

// Parses "4096", "512MiB", "8 GiB" or "1.5G". INVALID_ARGUMENT names the text and what is accepted.
// A value must be a whole number of bytes and fit 64 bits.
absl::StatusOr<std::uint64_t> ParseBytes(std::string_view text);

}  // namespace tessera
