// Structured logs: one event per line, with a constant event text and the variable parts as fields.
//
//   logger.Log(LogLevel::kInfo, "session attached", {{"session", id.value()}, {"pid", pid}});
//
//   2026-03-01T10:20:30.123Z info session attached session=7 pid=4242
//   {"time":"2026-03-01T10:20:30.123Z","level":"info","event":"session attached","session":7,...}
//
// Invariants: an event is one line and one write, whatever its fields contain. Control characters
// and invalid UTF-8 are escaped, so a peer's string cannot forge or split a line. Strings longer
// than kMaxLoggedString are cut and marked as cut.
#pragma once

#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <memory>
#include <span>
#include <string_view>
#include <variant>

#include "absl/status/statusor.h"

namespace spdlog {
class logger;
}

namespace tessera {

enum class LogLevel : std::uint8_t { kDebug, kInfo, kWarning, kError, kOff };
enum class LogFormat : std::uint8_t { kText, kJson };

std::string_view LogLevelName(LogLevel level);     // "debug", "info", "warning", "error", "off"
std::string_view LogFormatName(LogFormat format);  // "text", "json"

// INVALID_ARGUMENT names the text and the accepted names.
absl::StatusOr<LogLevel> ParseLogLevel(std::string_view name);
absl::StatusOr<LogFormat> ParseLogFormat(std::string_view name);

inline constexpr std::size_t kMaxLoggedString = 2048;  // bytes

// A key and a value. Strings are views that must live for the duration of the Log call. Keys are
// snake_case literals with the unit last ("wait_seconds"), and never "time", "level" or "event".
struct LogField {
  using Value = std::variant<std::string_view, std::int64_t, std::uint64_t, double, bool>;

  LogField(std::string_view key, std::string_view value) : key(key), value(value) {}
  LogField(std::string_view key, const char* value) : key(key), value(std::string_view(value)) {}
  template <typename T>
  requires std::integral<T> || std::floating_point<T> LogField(std::string_view key, T value)
      : key(key), value(Widen(value)) {}

  std::string_view key;
  Value value;

 private:
  template <typename T>
  static Value Widen(T value) {
    if constexpr (std::same_as<T, bool>) {
      return value;
    } else if constexpr (std::floating_point<T>) {
      return static_cast<double>(value);
    } else if constexpr (std::signed_integral<T>) {
      return static_cast<std::int64_t>(value);
    } else {
      return static_cast<std::uint64_t>(value);
    }
  }
};

struct LogOptions {
  LogLevel level = LogLevel::kInfo;
  LogFormat format = LogFormat::kText;
  std::FILE* stream = stderr;  // not owned; outlives the logger
  // Lines that may wait for a thread that writes them. When they are full, further lines are
  // dropped and counted, so that no caller ever waits for a reader of the log. 0: callers write.
  std::size_t queue_lines = 0;
};

class LogQueue;

// Writes events to a stream. Owned by RunDaemon and passed by reference. Thread-safe.
class Logger {
 public:
  // With a queue, the descriptor of the stream is written to.
  explicit Logger(const LogOptions& options);
  // Waits a second at most for lines that are still in the queue.
  ~Logger();
  Logger(const Logger&) = delete;
  Logger& operator=(const Logger&) = delete;

  bool Enabled(LogLevel level) const {
    return level >= level_.load(std::memory_order_relaxed) && level < LogLevel::kOff;
  }
  void set_level(LogLevel level);
  std::uint64_t dropped_lines() const;
  // Waits a second at most until all lines are written. For an exit that destroys nothing.
  void Flush();

  // Costs one comparison if `level` is not enabled.
  void Log(LogLevel level, std::string_view event, std::initializer_list<LogField> fields = {}) {
    if (Enabled(level)) Write(level, event, {fields.begin(), fields.size()});
  }
  void Log(LogLevel level, std::string_view event, std::span<const LogField> fields) {
    if (Enabled(level)) Write(level, event, fields);
  }

 private:
  void Write(LogLevel level, std::string_view event, std::span<const LogField> fields);

  std::atomic<LogLevel> level_;
  const LogFormat format_;
  const std::shared_ptr<LogQueue> queue_;  // nullptr: none
  const std::unique_ptr<spdlog::logger> logger_;
};

}  // namespace tessera
