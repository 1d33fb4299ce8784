#include "daemon/base/error_cause.h"

#include <charconv>
#include <cstdint>

#include "absl/strings/cord.h"
#include "daemon/base/strings.h"

namespace tessera {

namespace {

struct Row {
  ErrorCause cause;
  std::string_view name;
};
constexpr Row kRows[] = {
    {ErrorCause::kPoolFull, "pool_full"},
    {ErrorCause::kQuota, "quota"},
    {ErrorCause::kTailRingFull, "tail_ring_full"},
    {ErrorCause::kReaderSlots, "reader_slots"},
    {ErrorCause::kHostMemory, "host_memory"},
    {ErrorCause::kOverloaded, "overloaded"},
    {ErrorCause::kSequenceFailed, "sequence_failed"},
    {ErrorCause::kSequenceBusy, "sequence_busy"},
    {ErrorCause::kLeaseLost, "lease_lost"},
    {ErrorCause::kDraining, "draining"},
    {ErrorCause::kPinRevoked, "pin_revoked"},
    {ErrorCause::kPolicy, "policy"},
    {ErrorCause::kArgument, "argument"},
};

constexpr std::string_view kCause = "cause=";
constexpr std::string_view kRetry = " retry_after_ms=";

}  // namespace

std::string_view CauseName(ErrorCause cause) {
  for (const Row& row : kRows) {
    if (row.cause == cause) return row.name;
  }
  return "unknown";
}

std::string FormatErrorInfo(const ErrorInfo& info) {
  return Concat(kCause, CauseName(info.cause), kRetry, info.retry_after.count());
}

std::optional<ErrorInfo> ParseErrorInfo(std::string_view text) {
  if (!text.starts_with(kCause)) return std::nullopt;
  text.remove_prefix(kCause.size());
  const std::size_t end = text.find(kRetry);
  if (end == std::string_view::npos) return std::nullopt;
  const std::string_view name = text.substr(0, end);
  text.remove_prefix(end + kRetry.size());
  std::uint32_t retry_ms = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), retry_ms);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) return std::nullopt;
  for (const Row& row : kRows) {
    if (row.name == name) {
      return ErrorInfo{.cause = row.cause, .retry_after = std::chrono::milliseconds(retry_ms)};
    }
  }
  return std::nullopt;
}

absl::Status WithCause(absl::Status status, const ErrorInfo& info) {
  if (status.ok() || status.GetPayload(kErrorCausePayload).has_value()) return status;
  status.SetPayload(kErrorCausePayload, absl::Cord(FormatErrorInfo(info)));
  return status;
}

std::optional<ErrorInfo> CauseOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kErrorCausePayload);
  if (!payload.has_value()) return std::nullopt;
  return ParseErrorInfo(std::string(*payload));
}

}  // namespace tessera
