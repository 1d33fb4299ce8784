#include "client/tools/short_id.h"

#include "client/tools/flags.h"

namespace tessera::cli {

namespace {

constexpr std::uint64_t kCounts = std::uint64_t{1} << client::kIdCountBits;
constexpr std::uint64_t kTenants = std::uint64_t{1} << (64 - client::kIdCountBits);

}  // namespace

std::optional<std::uint64_t> ParseId(std::string_view text, std::string_view letters) {
  if (!text.empty() && letters.find(text.front()) != std::string_view::npos) text.remove_prefix(1);
  std::uint64_t tenant = 1;
  const std::size_t point = text.find('.');
  if (point != std::string_view::npos) {
    tenant = WholeNumber(text.substr(0, point)).value_or(kTenants);
    text.remove_prefix(point + 1);
  }
  const std::optional<std::uint64_t> number = WholeNumber(text);
  if (!number.has_value() || *number == 0 || tenant >= kTenants) return std::nullopt;
  if (*number < kCounts) return tenant << client::kIdCountBits | *number;
  if (point != std::string_view::npos) return std::nullopt;
  return *number;
}

}  // namespace tessera::cli
