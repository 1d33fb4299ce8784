#include "daemon/metrics/exposer.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <vector>

#include "daemon/base/strings.h"

namespace tessera::metrics {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// A connection to a local port on which `text` was sent.
int Say(std::uint16_t port, const std::string& text) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  EXPECT_EQ(send(fd, text.data(), text.size(), MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
  return fd;
}

// The answer to an HTTP/1.0 GET of `path` on a local port.
std::string Get(std::uint16_t port, const std::string& path) {
  const int fd = Say(port, Concat("GET ", path, " HTTP/1.0\r\n\r\n"));
  std::string answer;
  char buffer[4096];
  for (ssize_t got; (got = read(fd, buffer, sizeof(buffer))) > 0;) answer.append(buffer, got);
  close(fd);
  return answer;
}

TEST(Exposer, ServesMetrics) {
  Metrics metrics({.version = "9.9", .device = "cpu", .isa = "avx2"});
  const auto exposer = Exposer::Start("127.0.0.1:0", metrics);
  ASSERT_TRUE(exposer.ok()) << exposer.status();
  EXPECT_THAT(Get((*exposer)->port(), "/metrics"),
              AllOf(StartsWith("HTTP/1."), HasSubstr(" 200 OK"), HasSubstr("text/plain"),
                    HasSubstr("tessera_sessions_total 0\n")));
  metrics.sessions_total.Increment(3);
  EXPECT_THAT(Get((*exposer)->port(), "/metrics"), HasSubstr("tessera_sessions_total 3\n"));
  EXPECT_THAT(Get((*exposer)->port(), "/elsewhere"), HasSubstr(" 404 "));
}

TEST(Exposer, HalfRequestsHoldNobodyUp) {
  Metrics metrics({});
  const auto exposer = Exposer::Start("127.0.0.1:0", metrics);
  ASSERT_TRUE(exposer.ok()) << exposer.status();
  // As many as the server has threads: they are all busy until the timeout.
  std::vector<int> halves;
  for (int i = 0; i < 4; ++i)
    halves.push_back(Say((*exposer)->port(), "GET /metrics HTTP/1.1\r\n"));
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_THAT(Get((*exposer)->port(), "/metrics"), HasSubstr("tessera_sessions_total"));
  EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(10));
  for (const int fd : halves) close(fd);
}

TEST(Exposer, ResolvesHostNames) {
  Metrics metrics({});
  const auto exposer = Exposer::Start("localhost:0", metrics);
  ASSERT_TRUE(exposer.ok()) << exposer.status();
  EXPECT_NE((*exposer)->port(), 0);
}

TEST(Exposer, APortInUseIsNamed) {
  Metrics metrics({});
  const auto first = Exposer::Start("127.0.0.1:0", metrics);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string address = Concat("127.0.0.1:", (*first)->port());
  const auto second = Exposer::Start(address, metrics);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(second.status().message()),
              AllOf(HasSubstr(address), HasSubstr("in use")));
  EXPECT_THAT(Get((*first)->port(), "/metrics"), HasSubstr("tessera_"));
}

TEST(Exposer, AnAddressOfAnotherMachineIsNamed) {
  Metrics metrics({});
  // 192.0.2.0/24 is reserved for documentation, so no machine has it.
  const auto exposer = Exposer::Start("192.0.2.1:9464", metrics);
  ASSERT_FALSE(exposer.ok());
  EXPECT_THAT(std::string(exposer.status().message()),
              AllOf(HasSubstr("192.0.2.1:9464"), HasSubstr("assign requested address")));
}

TEST(Exposer, GivesThePortBack) {
  Metrics metrics({});
  auto first = Exposer::Start("127.0.0.1:0", metrics);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string address = Concat("127.0.0.1:", (*first)->port());
  first->reset();
  const auto again = Exposer::Start(address, metrics);
  EXPECT_TRUE(again.ok()) << again.status();
}

}  // namespace
}  // namespace tessera::metrics
