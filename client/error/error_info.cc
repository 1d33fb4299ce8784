#include "client/error/error_info.h"

#include <array>
#include <charconv>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"
#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

// Indexed by the number of the cause.
constexpr std::array<std::string_view, 14> kNames = {
    "unspecified", "pool_full",       "quota",         "tail_ring_full", "reader_slots",
    "host_memory", "sequence_failed", "sequence_busy", "lease_lost",     "draining",
    "pin_revoked", "policy",          "argument",      "overloaded"};
static_assert(kNames.size() == static_cast<std::size_t>(ErrorCause::kOverloaded) + 1);

// The value of `key` in "key=value key=value"; empty if the key is missing.
std::string_view ValueOf(std::string_view text, std::string_view key) {
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(word.size() == text.size() ? text.size() : word.size() + 1);
    if (word.starts_with(key) && word.size() > key.size() && word[key.size()] == '=') {
      return word.substr(key.size() + 1);
    }
  }
  return {};
}

}  // namespace

std::string_view CauseName(ErrorCause cause) {
  const auto index = static_cast<std::size_t>(cause);
  return kNames[index < kNames.size() ? index : 0];
}

ErrorInfo GetErrorInfo(const absl::Status& status) {
  ErrorInfo info;
  const auto payload = status.GetPayload(kErrorCausePayload);
  if (!payload.has_value()) {
    const bool is_argument = absl::IsInvalidArgument(status) || absl::IsOutOfRange(status);
    if (is_argument) info.cause = ErrorCause::kArgument;
    return info;
  }
  const std::string text(*payload);
  const std::string_view name = ValueOf(text, "cause");
  for (std::size_t i = 0; i < kNames.size(); ++i) {
    if (kNames[i] == name) info.cause = static_cast<ErrorCause>(i);
  }
  const std::string_view retry = ValueOf(text, "retry_after_ms");
  std::int64_t milliseconds = 0;
  const auto [end, error] =
      std::from_chars(retry.data(), retry.data() + retry.size(), milliseconds);
  if (error == std::errc() && end == retry.data() + retry.size() && milliseconds > 0) {
    info.retry_after = std::chrono::milliseconds(milliseconds);
  }
  return info;
}

absl::Status WithCause(absl::Status status, ErrorCause cause,
                       std::chrono::milliseconds retry_after) {
  if (status.ok() || status.GetPayload(kErrorCausePayload).has_value()) return status;
  status.SetPayload(
      kErrorCausePayload,
      absl::Cord(Concat("cause=", CauseName(cause), " retry_after_ms=", retry_after.count())));
  return status;
}

absl::Status WithMessage(const absl::Status& status, std::string_view message) {
  absl::Status changed(status.code(), absl::string_view(message.data(), message.size()));
  if (auto payload = status.GetPayload(kErrorCausePayload); payload.has_value()) {
    changed.SetPayload(kErrorCausePayload, *std::move(payload));
  }
  return changed;
}

absl::Status BadArgument(std::string_view call, std::string_view what) {
  return WithCause(absl::InvalidArgumentError(Concat(call, ": ", what)), ErrorCause::kArgument);
}

}  // namespace tessera::client
