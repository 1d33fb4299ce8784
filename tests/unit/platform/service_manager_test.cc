#include "daemon/platform/service_manager.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "daemon/base/strings.h"
#include "tests/fakes/notify_socket.h"

namespace tessera {
namespace {

using fakes::NotifySocket;
using testing::StartsWith;

TEST(ServiceManager, SendsEachMessageAsOneDatagram) {
  const NotifySocket socket;
  const ServiceManager manager(socket.name());
  manager.Ready();
  EXPECT_EQ(socket.Receive(), "READY=1\nSTATUS=serving");
  manager.Alive();
  EXPECT_EQ(socket.Receive(), "WATCHDOG=1");
  manager.Stopping(std::chrono::seconds(15));
  EXPECT_EQ(socket.Receive(), "STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=15000000");
}

TEST(ServiceManager, AReloadHasTheTimeOfTheMonotonicClock) {
  const NotifySocket socket;
  timespec before{};
  ::clock_gettime(CLOCK_MONOTONIC, &before);
  ServiceManager(socket.name()).Reloading();
  timespec after{};
  ::clock_gettime(CLOCK_MONOTONIC, &after);
  const std::string message = socket.Receive();
  const std::string start = "RELOADING=1\nMONOTONIC_USEC=";
  ASSERT_THAT(message, StartsWith(start));
  const std::int64_t sent = std::atoll(message.substr(start.size()).c_str());
  EXPECT_GE(sent, std::int64_t{before.tv_sec} * 1'000'000 + before.tv_nsec / 1000);
  EXPECT_LE(sent, std::int64_t{after.tv_sec} * 1'000'000 + after.tv_nsec / 1000);
}

TEST(ServiceManager, AnAbstractNameBeginsWithAnAtSign) {
  const NotifySocket socket(Concat("@tessera-test-", ::getpid()));
  ServiceManager(socket.name()).Alive();
  EXPECT_EQ(socket.Receive(), "WATCHDOG=1");
}

TEST(ServiceManager, NoManagerIsNoError) {
  ServiceManager("").Ready();
  ServiceManager("/nowhere/at/all").Ready();
  ServiceManager(std::string(300, 'x')).Ready();
}

TEST(ServiceManager, AManagerThatDoesNotReadDoesNotBlock) {
  const NotifySocket socket;
  const ServiceManager manager(socket.name());
  for (int i = 0; i < 10'000; ++i) manager.Alive();
}

}  // namespace
}  // namespace tessera
