#include "daemon/base/log.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "absl/status/status.h"
#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/base/strings.h"
#include "daemon/base/utf8.h"
#include "spdlog/logger.h"
#include "spdlog/pattern_formatter.h"
#include "spdlog/sinks/base_sink.h"

namespace tessera {
namespace {

struct LevelRow {
  LogLevel level;
  std::string_view name;
  spdlog::level::level_enum spdlog_level;
};

// The names equal those that spdlog prints for %l.
constexpr std::array<LevelRow, 5> kLevels = {{
    {LogLevel::kDebug, "debug", spdlog::level::debug},
    {LogLevel::kInfo, "info", spdlog::level::info},
    {LogLevel::kWarning, "warning", spdlog::level::warn},
    {LogLevel::kError, "error", spdlog::level::err},
    {LogLevel::kOff, "off", spdlog::level::off},
}};

const LevelRow& RowOf(LogLevel level) { return kLevels[static_cast<std::size_t>(level)]; }

// One fwrite per event: stderr is unbuffered, so an event is one write(2).
class StreamSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit StreamSink(std::FILE* stream) : stream_(stream) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    std::fwrite(line.data(), 1, line.size(), stream_);
  }
  void flush_() override { std::fflush(stream_); }

 private:
  std::FILE* const stream_;
};

}  // namespace

// The writer thread shares it, because a thread that is stuck in a write cannot be joined.
class LogQueue {
 public:
  LogQueue(std::size_t most, int fd) : most_(most), fd_(fd) {}

  void Push(std::string line) {
    MutexLock lock(mutex_);
    if (lines_.size() >= most_) {
      ++dropped_;
      ++unsaid_;
      return;
    }
    lines_.push_back(std::move(line));
    changed_.NotifyAll();
  }
  // Lines dropped since the last call, if there is room to say so.
  std::uint64_t TakeUnsaid() {
    MutexLock lock(mutex_);
    return lines_.size() < most_ ? std::exchange(unsaid_, 0) : 0;
  }
  std::uint64_t dropped() const {
    MutexLock lock(mutex_);
    return dropped_;
  }
  // The thread's work.
  void WriteLines() {
    for (;;) {
      std::string line;
      {
        MutexLock lock(mutex_);
        writing_ = false;
        if (lines_.empty()) changed_.NotifyAll();
        while (lines_.empty() && !stopping_) changed_.Wait(mutex_);
        if (lines_.empty()) {
          ended_ = true;
          changed_.NotifyAll();
          return;
        }
        line = std::move(lines_.front());
        lines_.pop_front();
        writing_ = true;
      }
      // One write per event, as long as the system takes it whole.
      for (std::string_view rest = line; !rest.empty();) {
        const ssize_t count = ::write(fd_, rest.data(), rest.size());
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) break;  // nobody reads any more; the line is lost
        rest.remove_prefix(static_cast<std::size_t>(count));
      }
    }
  }
  void Flush() {
    MutexLock lock(mutex_);
    const Clock::TimePoint until = SystemClock().Now() + kPatience;
    while ((!lines_.empty() || writing_) && changed_.WaitUntil(mutex_, until)) {
    }
  }
  // Ends the thread when it has written what there is.
  void Stop() {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.NotifyAll();
    const Clock::TimePoint until = SystemClock().Now() + kPatience;
    while (!ended_ && changed_.WaitUntil(mutex_, until)) {
    }
  }

 private:
  static constexpr std::chrono::seconds kPatience{1};

  const std::size_t most_;
  const int fd_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<std::string> lines_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t dropped_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::uint64_t unsaid_ TESSERA_GUARDED_BY(mutex_) = 0;
  bool writing_ TESSERA_GUARDED_BY(mutex_) = false;
  bool stopping_ TESSERA_GUARDED_BY(mutex_) = false;
  bool ended_ TESSERA_GUARDED_BY(mutex_) = false;
};

namespace {

class QueueSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit QueueSink(std::shared_ptr<LogQueue> queue) : queue_(std::move(queue)) {}

 protected:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    queue_->Push(std::string(line.data(), line.size()));
  }
  void flush_() override {}

 private:
  const std::shared_ptr<LogQueue> queue_;
};

std::shared_ptr<LogQueue> MakeQueue(const LogOptions& options) {
  if (options.queue_lines == 0) return nullptr;
  auto queue = std::make_shared<LogQueue>(options.queue_lines, ::fileno(options.stream));
  std::thread([queue] { queue->WriteLines(); }).detach();
  return queue;
}

// Whether a character changes the direction of the text around it: U+202A to 202E, 2066 to 2069.
bool TurnsText(std::string_view character) {
  return (character >= "\u202a" && character <= "\u202e") ||
         (character >= "\u2066" && character <= "\u2069");
}

// Appends a string field in double quotes: valid JSON, safe on a terminal, and with escapes that
// logfmt readers understand.
void AppendQuoted(std::string& out, std::string_view text) {
  const std::size_t dropped =
      text.size() > kMaxLoggedString ? text.size() - kMaxLoggedString : std::size_t{0};
  std::string_view rest = text.substr(0, kMaxLoggedString);
  out += '"';
  while (!rest.empty()) {
    const std::size_t length = Utf8SequenceLength(rest);
    const unsigned char first = static_cast<unsigned char>(rest[0]);
    if (length == 0) {
      out += "\\ufffd";
      rest.remove_prefix(1);
      continue;
    }
    if (length == 3 && TurnsText(rest.substr(0, 3))) {
      const unsigned low = static_cast<unsigned char>(rest[1]) << 6 & 0xc0;
      const unsigned code = 0x2000 | low | (static_cast<unsigned char>(rest[2]) & 0x3f);
      constexpr std::string_view kHexDigits = "0123456789abcdef";
      out += "\\u";
      for (const int shift : {12, 8, 4, 0}) out += kHexDigits[code >> shift & 15];
      rest.remove_prefix(3);
      continue;
    }
    if (first == '"' || first == '\\') {
      out += '\\';
      out += rest[0];
    } else if (first == '\n') {
      out += "\\n";
    } else if (first < 0x20 || first == 0x7f) {
      constexpr std::string_view kHex = "0123456789abcdef";
      out += "\\u00";
      out += kHex[first >> 4];
      out += kHex[first & 15];
    } else {
      out += rest.substr(0, length);
    }
    rest.remove_prefix(length);
  }
  if (dropped > 0) Append(out, "... (", dropped, " more bytes)");
  out += '"';
}

// Whether a value needs no quotes in the text format: nothing in it can be taken for its end.
bool IsPlainWord(std::string_view text) {
  if (text.empty() || text.size() > kMaxLoggedString) return false;
  for (const char c : text) {
    if (c <= ' ' || c > '~' || c == '"' || c == '=' || c == '\\') return false;
  }
  return true;
}

void AppendDouble(std::string& out, double value, LogFormat format) {
  if (!std::isfinite(value)) {  // JSON has no numbers for these
    const std::string_view word = std::isnan(value) ? "nan" : (value > 0 ? "inf" : "-inf");
    if (format == LogFormat::kJson) {
      Append(out, "\"", word, "\"");
    } else {
      Append(out, word);
    }
    return;
  }
  Append(out, value);
}

void AppendValue(std::string& out, const LogField::Value& value, LogFormat format) {
  if (const auto* text = std::get_if<std::string_view>(&value)) {
    if (format == LogFormat::kText && IsPlainWord(*text)) {
      out += *text;
    } else {
      AppendQuoted(out, *text);
    }
  } else if (const auto* real = std::get_if<double>(&value)) {
    AppendDouble(out, *real, format);
  } else if (const auto* flag = std::get_if<bool>(&value)) {
    out += *flag ? "true" : "false";
  } else if (const auto* number = std::get_if<std::int64_t>(&value)) {
    Append(out, *number);
  } else {
    Append(out, std::get<std::uint64_t>(value));
  }
}

template <typename Row>
std::string JoinNames(const Row& rows) {
  std::string names;
  for (const auto& row : rows) Append(names, names.empty() ? "" : ", ", row.name);
  return names;
}

struct FormatRow {
  LogFormat format;
  std::string_view name;
};
constexpr std::array<FormatRow, 2> kFormats = {{
    {LogFormat::kText, "text"},
    {LogFormat::kJson, "json"},
}};

std::unique_ptr<spdlog::logger> MakeLogger(const LogOptions& options,
                                           const std::shared_ptr<LogQueue>& queue) {
  spdlog::sink_ptr sink = std::make_shared<StreamSink>(options.stream);
  if (queue != nullptr) sink = std::make_shared<QueueSink>(queue);
  auto logger = std::make_unique<spdlog::logger>("tessera", std::move(sink));
  constexpr auto kUtc = spdlog::pattern_time_type::utc;
  logger->set_formatter(std::make_unique<spdlog::pattern_formatter>(
      options.format == LogFormat::kJson
          ? R"({"time":"%Y-%m-%dT%H:%M:%S.%eZ","level":"%l","event":%v})"
          : "%Y-%m-%dT%H:%M:%S.%eZ %l %v",
      kUtc, "\n"));
  logger->set_level(RowOf(options.level).spdlog_level);
  logger->flush_on(spdlog::level::debug);
  return logger;
}

}  // namespace

std::string_view LogLevelName(LogLevel level) { return RowOf(level).name; }

std::string_view LogFormatName(LogFormat format) {
  return kFormats[static_cast<std::size_t>(format)].name;
}

absl::StatusOr<LogLevel> ParseLogLevel(std::string_view name) {
  for (const LevelRow& row : kLevels) {
    if (row.name == name) return row.level;
  }
  return absl::InvalidArgumentError(
      Concat("\"", name, "\" is not a log level: use one of ", JoinNames(kLevels)));
}

absl::StatusOr<LogFormat> ParseLogFormat(std::string_view name) {
  for (const FormatRow& row : kFormats) {
    if (row.name == name) return row.format;
  }
  return absl::InvalidArgumentError(
      Concat("\"", name, "\" is not a log format: use one of ", JoinNames(kFormats)));
}

Logger::Logger(const LogOptions& options)
    : level_(options.level),
      format_(options.format),
      queue_(MakeQueue(options)),
      logger_(MakeLogger(options, queue_)) {}

Logger::~Logger() {
  if (queue_ != nullptr) queue_->Stop();
}

void Logger::Flush() {
  if (queue_ != nullptr) queue_->Flush();
}

std::uint64_t Logger::dropped_lines() const { return queue_ == nullptr ? 0 : queue_->dropped(); }

void Logger::set_level(LogLevel level) {
  level_.store(level, std::memory_order_relaxed);
  logger_->set_level(RowOf(level).spdlog_level);
}

void Logger::Write(LogLevel level, std::string_view event, std::span<const LogField> fields) {
  std::string line;
  if (format_ == LogFormat::kJson) {
    AppendQuoted(line, event);
    for (const LogField& field : fields) {
      line += ',';
      AppendQuoted(line, field.key);
      line += ':';
      AppendValue(line, field.value, format_);
    }
  } else {
    line = event;
    for (const LogField& field : fields) {
      Append(line, " ", field.key, "=");
      AppendValue(line, field.value, format_);
    }
  }
  logger_->log(RowOf(level).spdlog_level, spdlog::string_view_t(line.data(), line.size()));
  if (queue_ == nullptr) return;
  if (const std::uint64_t lines = queue_->TakeUnsaid(); lines > 0) {
    Log(LogLevel::kWarning, "log lines dropped", {{"lines", lines}});
  }
}

}  // namespace tessera
