// What a service manager hears from the daemon, and what stops the watchdog.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>

#include <cstdio>
#include <memory>
#include <string>

#include "daemon/lifecycle/watchdog.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/fake_clock.h"
#include "tests/fakes/notify_socket.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::NotifySocket;
using testing::StartsWith;

// The next message but those of the watchdog.
std::string Next(const NotifySocket& socket) {
  for (;;) {
    std::string message = socket.Receive();
    if (message != "WATCHDOG=1") return message;
  }
}

TEST(Notify, AServiceManagerHearsOfStartReloadAndStop) {
  const NotifySocket socket;
  ::setenv("NOTIFY_SOCKET", socket.name().c_str(), 1);
  ::setenv("WATCHDOG_USEC", "200000", 1);
  const auto daemon = DaemonProcess::Start({.flags = {"--drain-limit-ms=3000"}});
  ::unsetenv("NOTIFY_SOCKET");
  ::unsetenv("WATCHDOG_USEC");
  ASSERT_NE(daemon, nullptr);
  EXPECT_EQ(Next(socket), "READY=1\nSTATUS=serving");
  EXPECT_EQ(socket.Receive(), "WATCHDOG=1");
  EXPECT_EQ(socket.Receive(), "WATCHDOG=1");
  daemon->Kill(SIGHUP);
  EXPECT_THAT(Next(socket), StartsWith("RELOADING=1\nMONOTONIC_USEC="));
  EXPECT_EQ(Next(socket), "READY=1\nSTATUS=serving");
  fakes::RawWorker worker(daemon->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  daemon->Kill(SIGTERM);
  // The limit, and five seconds for calls and threads to end.
  EXPECT_EQ(Next(socket), "STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=8000000");
  // A drain is no hang.
  EXPECT_EQ(socket.Receive(), "WATCHDOG=1");
  worker.Leave();
  EXPECT_EQ(daemon->WaitForExit(20), 0);
}

TEST(Notify, AWatchdogForAnotherProcessIsNotServed) {
  const NotifySocket socket;
  ::setenv("NOTIFY_SOCKET", socket.name().c_str(), 1);
  ::setenv("WATCHDOG_USEC", "20000", 1);
  ::setenv("WATCHDOG_PID", "1", 1);
  const auto daemon = DaemonProcess::Start({});
  for (const char* name : {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}) ::unsetenv(name);
  ASSERT_NE(daemon, nullptr);
  EXPECT_EQ(socket.Receive(), "READY=1\nSTATUS=serving");
  EXPECT_EQ(socket.Receive(/*timeout_ms=*/100), "");
}

TEST(Watchdog, AHungThreadIsLoggedAndNoLongerReportedAsAlive) {
  std::FILE* const log = std::tmpfile();
  ASSERT_NE(log, nullptr);
  {
    Logger logger({.stream = log});
    FakeClock clock;
    Heartbeats heartbeats(clock);
    Heartbeats::Pulse& pulse = heartbeats.Add("event loop");
    pulse.Beat();
    const NotifySocket socket;
    const ServiceManager manager(socket.name());
    const lifecycle::Watchdog watchdog({.heartbeats = &heartbeats,
                                        .manager = &manager,
                                        .logger = &logger,
                                        .clock = &clock,
                                        .interval = std::chrono::milliseconds(10)});
    EXPECT_EQ(socket.Receive(), "WATCHDOG=1");
    clock.Advance(kHeartbeatLimit + std::chrono::seconds(1));
    // Messages that were under way arrive; then there is silence.
    int rest = 0;
    while (!socket.Receive(/*timeout_ms=*/100).empty()) ASSERT_LT(++rest, 1000);
    pulse.Beat();
    EXPECT_EQ(socket.Receive(), "WATCHDOG=1");
  }
  std::rewind(log);
  std::string text(4096, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), log));
  std::fclose(log);
  EXPECT_THAT(text,
              testing::AllOf(testing::HasSubstr("error a thread hangs thread=\"event loop: no "
                                                "heartbeat for 11 s\""),
                             testing::HasSubstr("warning no thread hangs any more")));
}

}  // namespace
}  // namespace tessera
