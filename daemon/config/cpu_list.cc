#include "daemon/config/cpu_list.h"

#include <charconv>
#include <optional>
#include <set>

#include "absl/status/status.h"
#include "daemon/base/strings.h"
#include "daemon/config/limits.h"

namespace tessera::config {
namespace {

// Parses a text of digits only; nullopt for other text and for numbers that do not fit.
std::optional<std::uint32_t> ParseNumber(std::string_view text) {
  std::uint32_t number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  if (text.empty() || parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return number;
}

// Adds "8" or "2-3" to `cpus`.
absl::Status AddPart(std::string_view part, std::set<std::uint32_t>& cpus) {
  const std::size_t dash = part.find('-');
  const std::optional<std::uint32_t> first = ParseNumber(part.substr(0, dash));
  const std::optional<std::uint32_t> last =
      dash == std::string_view::npos ? first : ParseNumber(part.substr(dash + 1));
  if (!first.has_value() || !last.has_value()) {
    return absl::InvalidArgumentError(
        Concat(Quoted(part), " is not a CPU number or a range, e.g. 2-3"));
  }
  if (*first > *last) {
    return absl::InvalidArgumentError(
        Concat(Quoted(part), ": the end of the range is below its start"));
  }
  if (*last > kCompactorCpus.max) {
    return absl::InvalidArgumentError(Concat(Quoted(part), ": CPU ", *last, " is not from ",
                                             kCompactorCpus.min, " to ", kCompactorCpus.max));
  }
  for (std::uint32_t cpu = *first; cpu <= *last; ++cpu) {
    if (!cpus.insert(cpu).second) {
      return absl::InvalidArgumentError(Concat(Quoted(part), ": CPU ", cpu, " is listed twice"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::uint32_t>> ParseCpuList(std::string_view text) {
  std::set<std::uint32_t> cpus;
  while (!text.empty()) {
    const std::size_t comma = text.find(',');
    if (absl::Status status = AddPart(text.substr(0, comma), cpus); !status.ok()) return status;
    if (comma == std::string_view::npos) break;
    text.remove_prefix(comma + 1);
    if (text.empty()) return absl::InvalidArgumentError("the list ends with a comma");
  }
  return std::vector<std::uint32_t>(cpus.begin(), cpus.end());
}

std::string FormatCpuList(const std::vector<std::uint32_t>& cpus) {
  std::string text;
  for (std::size_t i = 0; i < cpus.size();) {
    std::size_t end = i + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    if (i > 0) text += ',';
    Append(text, cpus[i]);
    if (end > i + 1) Append(text, "-", cpus[end - 1]);
    i = end;
  }
  return text;
}

}  // namespace tessera::config
