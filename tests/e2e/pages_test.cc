// The pages of the HTTP address of a real daemon: metrics, health, readiness, version, index. And
// `tessera health`, which gives the same answers without one.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "daemon/platform/fd.h"
#include "daemon/platform/unix_socket.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/daemon/http_get.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::RawWorker;
using testing::AllOf;
using testing::ContainsRegex;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

// Exit code and output of a command.
std::pair<int, std::string> Shell(const std::string& command) {
  std::FILE* const pipe = ::popen((command + " 2>&1").c_str(), "r");
  std::string output;
  char buffer[4096];
  for (std::size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) {
    output.append(buffer, n);
  }
  const int status = ::pclose(pipe);
  return {WEXITSTATUS(status), output};
}

class Pages : public testing::Test {
 protected:
  void SetUp() override {
    daemon_ = DaemonProcess::Start({.flags = {"--metrics=127.0.0.1:0"}});
    ASSERT_NE(daemon_, nullptr);
    std::smatch match;
    const std::string log = daemon_->Log();
    ASSERT_TRUE(std::regex_search(log, match, std::regex("metrics port=([0-9]+)"))) << log;
    port_ = static_cast<std::uint16_t>(std::stoi(match[1]));
  }
  std::string Get(const std::string& path) {
    return fakes::HttpExchange(port_, "GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n");
  }
  // Polls until the page answers with the status; a poll is a round trip, so this needs no sleep.
  bool Becomes(const std::string& path, const std::string& status) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (std::chrono::steady_clock::now() < end) {
      if (Get(path).starts_with("HTTP/1.1 " + status)) return true;
    }
    return false;
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::uint16_t port_ = 0;
};

TEST_F(Pages, EachHasItsPath) {
  EXPECT_THAT(Get("/healthz"), AllOf(StartsWith("HTTP/1.1 200 "), EndsWith("\r\n\r\nok\n")));
  EXPECT_THAT(Get("/readyz"), AllOf(StartsWith("HTTP/1.1 200 "), EndsWith("\r\n\r\nready\n")));
  EXPECT_THAT(Get("/metrics"),
              AllOf(StartsWith("HTTP/1.1 200 "),
                    HasSubstr("Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"),
                    HasSubstr("\ntessera_build_info{")));
  EXPECT_THAT(Get("/version"),
              AllOf(HasSubstr("Content-Type: application/json\r\n"),
                    ContainsRegex("\\{\"name\":\"tesserad\",\"version\":\"[0-9.]+\",.*"
                                  "\"libraries\":\\{\"grpc\":\"[0-9.]+\",.*\"mapped\":[0-9]+,"
                                  "\"tile_format\":[0-9]+\\}\\}\n$")));
  for (const char* path : {"/metricsx", "/metrics/", "/health", "/favicon.ico"}) {
    EXPECT_THAT(Get(path), StartsWith("HTTP/1.1 404 ")) << path;
  }
}

TEST_F(Pages, TheIndexLinksWhatIsThere) {
  const std::string index = Get("/");
  const std::regex link("href=\"([^\"]+)\"");
  int links = 0;
  for (std::sregex_iterator it(index.begin(), index.end(), link), end; it != end; ++it, ++links) {
    EXPECT_THAT(Get((*it)[1]), StartsWith("HTTP/1.1 200 ")) << (*it)[1];
  }
  EXPECT_EQ(links, 4);
}

TEST_F(Pages, StayUntilTheEndOfADrain) {
  RawWorker worker(daemon_->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  daemon_->Kill(SIGTERM);
  EXPECT_TRUE(Becomes("/readyz", "503"));
  EXPECT_THAT(Get("/readyz"), EndsWith("the daemon is draining and accepts no new sessions\n"));
  EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 200 "));
  EXPECT_THAT(Get("/metrics"), HasSubstr("\ntessera_sessions 1\n"));
  worker.Leave();
  EXPECT_EQ(daemon_->WaitForExit(20), 0);
}

TEST_F(Pages, AnswerWhateverOthersDo) {
  std::vector<Fd> halves;
  for (int i = 0; i < 200; ++i) {
    halves.push_back(fakes::HttpSend(port_, "GET /metrics HTTP/1.1\r\n"));
    ASSERT_TRUE(halves.back().valid()) << i;
  }
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(Get("/metrics"), HasSubstr("\ntessera_build_info{"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(1500));
}

TEST_F(Pages, AnswerWithoutFreeDescriptors) {
  const auto open = static_cast<rlim_t>(daemon_->OpenFds());
  const rlimit few = {.rlim_cur = open + 10, .rlim_max = open + 10};
  ASSERT_EQ(::prlimit(daemon_->pid(), RLIMIT_NOFILE, &few, nullptr), 0);
  std::vector<Fd> workers;
  for (rlim_t i = 0; i < 2 * few.rlim_cur; ++i) {
    absl::StatusOr<Fd> worker = ConnectUnix(daemon_->socket_path());
    if (worker.ok()) workers.push_back(*std::move(worker));
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (daemon_->Log().find("Too many open files") == std::string::npos) {
    ASSERT_LT(std::chrono::steady_clock::now(), end) << daemon_->Log();
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(Get("/healthz"), StartsWith("HTTP/1.1 ")) << i;
  }
}

// What an operator's tools get.
TEST_F(Pages, ByCurl) {
  const auto curl = [this](const std::string& flags, const std::string& path) {
    return Shell("curl -sS --max-time 20 --noproxy '*' " + flags +
                 " http://127.0.0.1:" + std::to_string(port_) + path);
  };
  if (std::system("curl --version > /dev/null 2>&1") != 0) GTEST_SKIP() << "needs curl";
  EXPECT_EQ(curl("--fail", "/readyz"), std::pair(0, std::string("ready\n")));
  EXPECT_THAT(curl("--head", "/metrics").second, HasSubstr("Content-Length: "));
  EXPECT_THAT(curl("--compressed --include", "/metrics").second,
              AllOf(HasSubstr("Content-Encoding: gzip"), HasSubstr("\ntessera_build_info{")));
  EXPECT_EQ(curl("--fail -X POST -d x=1", "/healthz").first, 22);
  EXPECT_EQ(curl("--fail", "/nothing").first, 22);
  // Two pages on one command line: the second needs a new connection.
  const std::string second = "http://127.0.0.1:" + std::to_string(port_) + "/healthz";
  EXPECT_EQ(curl(second, "/healthz"), std::pair(0, std::string("ok\nok\n")));
}

using Health = Pages;

TEST_F(Health, IsAnExitCode) {
  const auto health = [this](const std::string& flags) {
    return Shell(std::string(TESSERA_BINARY) + " health --address=" + daemon_->address() + flags);
  };
  EXPECT_EQ(health(""), std::pair(0, std::string("ok\n")));
  EXPECT_EQ(health(" --ready"), std::pair(0, std::string("ready\n")));
  EXPECT_EQ(health(" --alive").first, 2);
  RawWorker worker(daemon_->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  daemon_->Kill(SIGTERM);
  EXPECT_TRUE(Becomes("/readyz", "503"));
  EXPECT_EQ(health("").first, 0);
  const auto draining = health(" --ready");
  EXPECT_EQ(draining.first, 1);
  EXPECT_THAT(draining.second, HasSubstr("not ready: the daemon is draining"));
  // A stopped process accepts connections and answers nothing.
  daemon_->Kill(SIGSTOP);
  const auto stopped = health(" --timeout-ms=300");
  EXPECT_EQ(stopped.first, 1);
  EXPECT_THAT(stopped.second, HasSubstr("unhealthy: no answer from " + daemon_->address()));
  daemon_->Kill(SIGKILL);
  daemon_->WaitForExit(20);
  EXPECT_EQ(health("").first, 1);
}

}  // namespace
}  // namespace tessera
