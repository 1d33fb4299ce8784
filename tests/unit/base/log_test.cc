#include "daemon/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "daemon/base/utf8.h"
#include "tests/fakes/seed.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::StartsWith;

constexpr char kTime[] = "[0-9]+-[0-9]+-[0-9]+T[0-9]+:[0-9]+:[0-9]+\\.[0-9]+Z";

// A logger that writes to memory.
class Captured {
 public:
  explicit Captured(LogFormat format, LogLevel level = LogLevel::kDebug)
      : stream_(open_memstream(&data_, &size_)),
        logger_({.level = level, .format = format, .stream = stream_}) {}
  ~Captured() {
    std::fclose(stream_);
    std::free(data_);
  }
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;

  Logger& logger() { return logger_; }
  std::string text() {
    std::fflush(stream_);
    return std::string(data_, size_);
  }

 private:
  char* data_ = nullptr;
  std::size_t size_ = 0;
  std::FILE* stream_;
  Logger logger_;
};

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::size_t from = 0;
  for (std::size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n', from)) {
    lines.push_back(text.substr(from, end - from));
    from = end + 1;
  }
  EXPECT_EQ(from, text.size()) << "the last line is not ended";
  return lines;
}

TEST(Log, WritesText) {
  Captured captured(LogFormat::kText);
  captured.logger().Log(LogLevel::kInfo, "session attached",
                        {{"session", std::uint64_t{7}},
                         {"offset", -3},
                         {"ratio", 0.25},
                         {"cuda", false},
                         {"peer", "unix"},
                         {"reason", "not a word"},
                         {"empty", ""}});
  EXPECT_THAT(captured.text(),
              MatchesRegex(std::string(kTime) +
                           " info session attached session=7 offset=-3 ratio=0.25 cuda=false "
                           "peer=unix reason=\"not a word\" empty=\"\"\n"));
}

TEST(Log, WritesJson) {
  Captured captured(LogFormat::kJson);
  captured.logger().Log(LogLevel::kWarning, "say \"hi\"",
                        {{"bytes", std::numeric_limits<std::uint64_t>::max()},
                         {"path", "a\\b\tc"},
                         {"loss", std::numeric_limits<double>::quiet_NaN()},
                         {"ok", true}});
  const std::string text = captured.text();
  EXPECT_THAT(text, StartsWith("{\"time\":\""));
  EXPECT_THAT(text, EndsWith("\",\"level\":\"warning\",\"event\":\"say \\\"hi\\\"\","
                             "\"bytes\":18446744073709551615,\"path\":\"a\\\\b\\u0009c\","
                             "\"loss\":\"nan\",\"ok\":true}\n"));
}

TEST(Log, LevelsBelowTheSetOneWriteNothing) {
  Captured captured(LogFormat::kText, LogLevel::kWarning);
  captured.logger().Log(LogLevel::kDebug, "a");
  captured.logger().Log(LogLevel::kInfo, "b");
  EXPECT_EQ(captured.text(), "");
  captured.logger().Log(LogLevel::kWarning, "c");
  captured.logger().Log(LogLevel::kError, "d");
  EXPECT_THAT(captured.text(), AllOf(HasSubstr(" warning c\n"), HasSubstr(" error d\n")));
}

TEST(Log, TheLevelCanChange) {
  Captured captured(LogFormat::kText, LogLevel::kWarning);
  captured.logger().set_level(LogLevel::kDebug);
  captured.logger().Log(LogLevel::kDebug, "a");
  EXPECT_THAT(captured.text(), HasSubstr(" debug a\n"));
  captured.logger().set_level(LogLevel::kOff);
  captured.logger().Log(LogLevel::kError, "b");
  EXPECT_THAT(captured.text(), Not(HasSubstr(" error b\n")));
}

TEST(Log, OffWritesNothingAtAll) {
  Captured captured(LogFormat::kText, LogLevel::kOff);
  captured.logger().Log(LogLevel::kError, "a");
  captured.logger().Log(LogLevel::kOff, "b");
  EXPECT_EQ(captured.text(), "");
}

TEST(Log, LongStringsAreCutAndSaySo) {
  for (const LogFormat format : {LogFormat::kText, LogFormat::kJson}) {
    Captured captured(format);
    captured.logger().Log(LogLevel::kInfo, "e", {{"s", std::string(kMaxLoggedString + 9, 'x')}});
    EXPECT_THAT(captured.text(), HasSubstr("x... (9 more bytes)\""));
  }
}

// Whatever a peer sends, an event remains one line of printable, well-formed UTF-8.
TEST(Log, HostileStringsNeitherForgeNorTearLines) {
  const std::uint64_t seed = TestSeed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (const LogFormat format : {LogFormat::kText, LogFormat::kJson}) {
    Captured captured(format);
    constexpr int kEvents = 500;
    for (int i = 0; i < kEvents; ++i) {
      std::string bytes(random() % 40, '\0');
      for (char& c : bytes) c = static_cast<char>(random() % 3 == 0 ? '\n' : random());
      captured.logger().Log(LogLevel::kInfo, "event", {{"bytes", bytes}, {"i", i}});
    }
    const std::vector<std::string> lines = Lines(captured.text());
    ASSERT_EQ(lines.size(), static_cast<std::size_t>(kEvents));
    for (int i = 0; i < kEvents; ++i) {
      const std::string end = format == LogFormat::kJson ? ",\"i\":" + std::to_string(i) + "}"
                                                         : " i=" + std::to_string(i);
      EXPECT_THAT(lines[i], EndsWith(end));
      for (std::string_view rest = lines[i]; !rest.empty();) {
        const std::size_t length = Utf8SequenceLength(rest);
        ASSERT_GT(length, 0u);
        ASSERT_GE(static_cast<unsigned char>(rest[0]), 0x20);
        rest.remove_prefix(length);
      }
    }
  }
}

TEST(Log, ThreadsDoNotMixTheirLines) {
  Captured captured(LogFormat::kText);
  constexpr int kThreads = 4;
  constexpr int kEach = 500;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&captured, t] {
      for (int i = 0; i < kEach; ++i) {
        captured.logger().Log(LogLevel::kInfo, "tick", {{"thread", t}, {"i", i}});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::vector<int> next(kThreads, 0);
  for (const std::string& line : Lines(captured.text())) {
    int thread = -1;
    int i = -1;
    ASSERT_EQ(
        std::sscanf(line.c_str() + line.find(" info "), " info tick thread=%d i=%d", &thread, &i),
        2)
        << line;
    EXPECT_EQ(i, next.at(thread)++);
  }
  EXPECT_THAT(next, ::testing::Each(kEach));
}

TEST(Log, ALogThatNobodyReadsHoldsUpNobody) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  std::FILE* const stream = ::fdopen(ends[1], "w");
  constexpr int kLines = 5000;
  constexpr std::size_t kQueued = 16;
  const std::string kilobyte(1000, 'x');
  std::string text;
  std::thread reader;
  {
    Logger logger({.stream = stream, .queue_lines = kQueued});
    for (int i = 0; i < kLines; ++i) logger.Log(LogLevel::kInfo, "line", {{"text", kilobyte}});
    EXPECT_GT(logger.dropped_lines(), kLines / 2);  // a pipe holds 64 KiB
    reader = std::thread([&] {
      char bytes[4096];
      for (ssize_t n = 0; (n = ::read(ends[0], bytes, sizeof bytes)) > 0;) text.append(bytes, n);
    });
    // When there is room again, the log says how many lines are missing.
    logger.Flush();
    logger.Log(LogLevel::kInfo, "again");
  }
  std::fclose(stream);
  reader.join();
  ::close(ends[0]);
  EXPECT_THAT(text, testing::HasSubstr("warning log lines dropped lines="));
}

TEST(Log, TextThatTurnsItsSurroundingsIsEscaped) {
  std::FILE* const stream = std::tmpfile();
  { Logger({.stream = stream}).Log(LogLevel::kInfo, "x", {{"name", "a\u202eb\u2066c\u2065d"}}); }
  std::rewind(stream);
  char line[256] = {};
  ASSERT_NE(std::fgets(line, sizeof line, stream), nullptr);
  std::fclose(stream);
  EXPECT_THAT(std::string(line), testing::HasSubstr("name=\"a\\u202eb\\u2066c\u2065d\""));
}

TEST(LogNames, RoundTripAndRefuse) {
  for (const LogLevel level :
       {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning, LogLevel::kError, LogLevel::kOff}) {
    EXPECT_EQ(*ParseLogLevel(LogLevelName(level)), level);
  }
  for (const LogFormat format : {LogFormat::kText, LogFormat::kJson}) {
    EXPECT_EQ(*ParseLogFormat(LogFormatName(format)), format);
  }
  EXPECT_THAT(ParseLogLevel("loud").status().message(),
              AllOf(HasSubstr("\"loud\""), HasSubstr("warning")));
  EXPECT_THAT(ParseLogFormat("xml").status().message(),
              AllOf(HasSubstr("\"xml\""), HasSubstr("json")));
}

}  // namespace
}  // namespace tessera
