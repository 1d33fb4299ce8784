// The server's contract, by raw sockets.
#include "daemon/http/server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"

namespace tessera::http {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

const std::string kGet = "GET /page HTTP/1.1\r\nHost: x\r\n\r\n";
// More than the kernel holds for a peer that does not read, see Client::Connect.
constexpr std::size_t kBigBytes = 8 << 20;
const std::string kGetBig = "GET /big HTTP/1.1\r\nHost: x\r\n\r\n";

// A connection that gives up after 20 s.
class Client {
 public:
  Client() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {}
  explicit Client(std::uint16_t port, const std::string& text = "") : Client() {
    Connect(port);
    if (!text.empty()) Send(text);
  }
  void Connect(std::uint16_t port) {
    const timeval patience = {.tv_sec = 20, .tv_usec = 0};
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    const int receive_bytes = 64 << 10;
    ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVBUF, &receive_bytes, sizeof receive_bytes);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    ASSERT_EQ(::connect(fd_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  }
  bool Send(const std::string& text) {
    return ::send(fd_.get(), text.data(), text.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(text.size());
  }
  void StopSending() { ::shutdown(fd_.get(), SHUT_WR); }
  // Everything until the server closes the connection; with "(timed out)" if it does not, and
  // "(reset)" if the kernel may have discarded a part of it.
  std::string ReadAll() {
    std::string all;
    char buffer[65536];
    ssize_t n = 0;
    while ((n = ::recv(fd_.get(), buffer, sizeof buffer, 0)) > 0) all.append(buffer, n);
    if (n < 0) all += errno == EAGAIN ? "(timed out)" : "(reset)";
    return all;
  }

 private:
  Fd fd_;
};

// Counts how often the server looks at it: once in each turn of its loop, and for each request.
class CountingClock final : public Clock {
 public:
  TimePoint Now() const override {
    looks_.fetch_add(1);
    return system_.Now();
  }
  int looks() const { return looks_.load(); }

 private:
  SystemClock system_;
  mutable std::atomic<int> looks_{0};
};

class HttpServer : public ::testing::Test {
 protected:
  void Start(Clock::Duration request_time = seconds(2), std::size_t max_connections = 32) {
    auto server = Server::Start(
        "127.0.0.1", 0,
        {.pages = {{"/page", [this] { return TextResponse(200, Concat("page ", ++answered_)); }},
                   {"/big", [] { return Response{.body = std::string(kBigBytes, 'x')}; }},
                   {"/ill", [] { return TextResponse(503, "ill"); }}},
         .clock = &clock_,
         .max_connections = max_connections,
         .request_time = request_time});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }
  std::string Ask(const std::string& request) { return Client(server_->port(), request).ReadAll(); }
  std::string AskLine(const std::string& line) { return Ask(Concat(line, "\r\nHost: x\r\n\r\n")); }

  CountingClock clock_;
  std::atomic<int> answered_{0};
  std::unique_ptr<Server> server_;
};

TEST_F(HttpServer, ServesExactPathsByGetAndHead) {
  Start();
  EXPECT_THAT(Ask(kGet), AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), EndsWith("\r\n\r\npage 1\n")));
  EXPECT_THAT(AskLine("GET /page?x=1 HTTP/1.1"), EndsWith("page 2\n"));
  EXPECT_THAT(
      AskLine("HEAD /page HTTP/1.1"),
      AllOf(StartsWith("HTTP/1.1 200 "), HasSubstr("Content-Length: 7"), EndsWith("\r\n\r\n")));
  EXPECT_THAT(AskLine("GET /ill HTTP/1.1"), AllOf(StartsWith("HTTP/1.1 503 "), EndsWith("ill\n")));
  for (const char* path : {"/pagex", "/page/", "/Page", "/", "//page"}) {
    EXPECT_THAT(AskLine(Concat("GET ", path, " HTTP/1.1")), StartsWith("HTTP/1.1 404 ")) << path;
  }
  EXPECT_THAT(AskLine("POST /page HTTP/1.1"),
              AllOf(StartsWith("HTTP/1.1 405 "), HasSubstr("Allow: GET, HEAD")));
  EXPECT_THAT(AskLine("nonsense"), StartsWith("HTTP/1.1 400 "));
  EXPECT_EQ(answered_, 3);
}

TEST_F(HttpServer, TakesRequestsInPieces) {
  Start();
  Client client(server_->port());
  for (const char c : kGet) ASSERT_TRUE(client.Send(std::string(1, c)));
  EXPECT_THAT(client.ReadAll(), EndsWith("page 1\n"));
}

TEST_F(HttpServer, AnswersPeersThatSendMoreThanARequest) {
  Start();
  EXPECT_THAT(Ask(kGet + std::string(100'000, 'x')), EndsWith("page 1\n"));
  EXPECT_TRUE(Ask(kGetBig + std::string(100'000, 'x')).ends_with(std::string(kBigBytes, 'x')));
  EXPECT_THAT(Ask(std::string(100'000, 'x')), StartsWith("HTTP/1.1 414 "));
  EXPECT_THAT(Ask("GET /page HTTP/1.1\r\nx: " + std::string(100'000, 'x')),
              StartsWith("HTTP/1.1 431 "));
}

TEST_F(HttpServer, AnswersPeersThatStopSending) {
  Start();
  Client client(server_->port(), kGet);
  client.StopSending();
  EXPECT_THAT(client.ReadAll(), EndsWith("page 1\n"));
  Client half(server_->port(), "GET /pa");
  half.StopSending();
  EXPECT_EQ(half.ReadAll(), "");
}

TEST_F(HttpServer, SendsLongAnswersWhole) {
  Start(seconds(20));
  EXPECT_EQ(AskLine("GET /big HTTP/1.1").size() / kBigBytes, 1u);
}

TEST_F(HttpServer, HalfRequestsKeepNobodyOut) {
  Start(seconds(20));
  std::vector<std::unique_ptr<Client>> halves;
  for (int i = 0; i < 200; ++i) {
    halves.push_back(std::make_unique<Client>(server_->port(), "GET /page HTTP/1.1\r\n"));
  }
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(Ask(kGet), EndsWith("page 1\n"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(2));
  // The newest of them are still served.
  ASSERT_TRUE(halves.back()->Send("Host: x\r\n\r\n"));
  EXPECT_THAT(halves.back()->ReadAll(), EndsWith("page 2\n"));
  // The oldest were dropped, long before their time.
  EXPECT_EQ(halves.front()->ReadAll(), "");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(10));
}

TEST_F(HttpServer, PeersThatDoNotReadKeepNobodyOut) {
  Start(seconds(20), 4);
  std::vector<std::unique_ptr<Client>> deaf;
  for (int i = 0; i < 10; ++i) deaf.push_back(std::make_unique<Client>(server_->port(), kGetBig));
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(Ask(kGet), EndsWith("page 1\n"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(10));
}

TEST_F(HttpServer, LatePeersAreDropped) {
  Start(milliseconds(100));
  Client silent(server_->port());
  Client half(server_->port(), "GET /page HTTP/1.1\r\n");
  Client deaf(server_->port(), kGetBig);
  EXPECT_EQ(silent.ReadAll(), "");
  EXPECT_EQ(half.ReadAll(), "");
  // A peer that keeps sending is late as well.
  Client slow(server_->port(), "GET /page HTTP/1.1\r\n");
  int sent = 0;
  const auto end = std::chrono::steady_clock::now() + seconds(20);
  while (std::chrono::steady_clock::now() < end && slow.Send("a")) ++sent;
  EXPECT_LT(std::chrono::steady_clock::now(), end);
  EXPECT_LT(deaf.ReadAll().size(), kBigBytes);
}

// Nothing may be reported to the event loop again and again.
TEST_F(HttpServer, WaitsWithoutWorking) {
  Start(milliseconds(1500));
  Client half(server_->port(), "GET /page HTTP/1.1\r\n");
  Client deaf(server_->port(), kGetBig);
  deaf.StopSending();
  Client answered(server_->port(), kGet);
  answered.StopSending();
  EXPECT_THAT(answered.ReadAll(), EndsWith("page 1\n"));
  const int before = clock_.looks();
  EXPECT_EQ(half.ReadAll(), "");  // after 1.5 s
  EXPECT_LT(clock_.looks() - before, 50);
}

TEST_F(HttpServer, AnswersWithoutFreeDescriptors) {
  Start();
  std::vector<Client> clients(5);  // their sockets exist before the shortage
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  std::vector<Fd> fill;
  for (;;) {
    fill.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    if (!fill.back().valid()) break;
    if (fill.size() == 50) {  // few enough to stay quick
      rlimit few = before;
      few.rlim_cur = static_cast<rlim_t>(fill.back().get()) + 20;
      ::setrlimit(RLIMIT_NOFILE, &few);
    }
  }
  EXPECT_EQ(errno, EMFILE);
  // One that says nothing, then others: it is dropped for them.
  clients[0].Connect(server_->port());
  for (std::size_t i = 1; i < clients.size(); ++i) {
    clients[i].Connect(server_->port());
    clients[i].Send(kGet);
    EXPECT_THAT(clients[i].ReadAll(), EndsWith(Concat("page ", i, "\n")));
  }
  fill.clear();
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_THAT(Ask(kGet), EndsWith("page 5\n"));
}

TEST_F(HttpServer, StopsWithOpenConnections) {
  Start(seconds(20));
  Client half(server_->port(), "GET /page HTTP/1.1\r\n");
  Client deaf(server_->port(), kGetBig);
  EXPECT_THAT(Ask(kGet), EndsWith("page 1\n"));
  server_.reset();
  EXPECT_EQ(half.ReadAll(), "");
}

TEST(HttpListen, EveryAddressOfAName) {
  const SystemClock clock;
  const auto server = Server::Start("localhost", 0, {.pages = {}, .clock = &clock});
  ASSERT_TRUE(server.ok()) << server.status();
  EXPECT_THAT(Client((*server)->port(), kGet).ReadAll(), StartsWith("HTTP/1.1 404 "));
}

TEST(HttpListen, TheIpv6WildcardIncludesIpv4) {
  const SystemClock clock;
  const auto server = Server::Start("::", 0, {.pages = {}, .clock = &clock});
  if (!server.ok()) GTEST_SKIP() << "no IPv6: " << server.status();
  EXPECT_THAT(Client((*server)->port(), kGet).ReadAll(), StartsWith("HTTP/1.1 404 "));
}

TEST(HttpListen, ErrorsNameTheAddress) {
  const SystemClock clock;
  const auto first = Server::Start("127.0.0.1", 0, {.pages = {}, .clock = &clock});
  ASSERT_TRUE(first.ok()) << first.status();
  const std::uint16_t port = (*first)->port();
  const auto second = Server::Start("127.0.0.1", port, {.pages = {}, .clock = &clock});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(second.status().message()),
              AllOf(HasSubstr(Concat("\"127.0.0.1:", port, "\"")), HasSubstr("in use")));
  // 192.0.2.0/24 is reserved for documentation, so no machine has it.
  const auto foreign = Server::Start("192.0.2.1", 9464, {.pages = {}, .clock = &clock});
  EXPECT_THAT(std::string(foreign.status().message()),
              AllOf(HasSubstr("\"192.0.2.1:9464\""), HasSubstr("assign requested address")));
}

TEST(HttpListen, GivesThePortBack) {
  const SystemClock clock;
  auto first = Server::Start("127.0.0.1", 0, {.pages = {}, .clock = &clock});
  ASSERT_TRUE(first.ok()) << first.status();
  const std::uint16_t port = (*first)->port();
  Client client(port, kGet);
  EXPECT_THAT(client.ReadAll(), StartsWith("HTTP/1.1 404 "));
  first->reset();
  const auto again = Server::Start("127.0.0.1", port, {.pages = {}, .clock = &clock});
  EXPECT_TRUE(again.ok()) << again.status();
}

}  // namespace
}  // namespace tessera::http
