#include "daemon/config/service_manager.h"

#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string_view>

namespace tessera::config {

namespace {

std::string_view Variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::string_view() : std::string_view(value);
}

std::optional<std::uint64_t> Number(std::string_view text) {
  std::uint64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  if (text.empty() || parsed.ec != std::errc() || parsed.ptr != end) return std::nullopt;
  return number;
}

}  // namespace

ServiceManagerEnvironment ReadServiceManagerEnvironment() {
  ServiceManagerEnvironment environment;
  environment.notify_socket = Variable("NOTIFY_SOCKET");
  const std::optional<std::uint64_t> pid = Number(Variable("WATCHDOG_PID"));
  const bool is_meant = !pid.has_value() || *pid == static_cast<std::uint64_t>(::getpid());
  if (is_meant) {
    environment.watchdog = std::chrono::microseconds(Number(Variable("WATCHDOG_USEC")).value_or(0));
  }
  return environment;
}

}  // namespace tessera::config
