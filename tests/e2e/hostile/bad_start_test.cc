// A daemon that cannot start explains why, with the value and the limit, and has no effect on
// others.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <regex>
#include <string>

#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::RawWorker;
using testing::HasSubstr;

TEST(BadStart, SocketOfALiveDaemon) {
  const std::unique_ptr<DaemonProcess> daemon = DaemonProcess::Start({});
  ASSERT_NE(daemon, nullptr);
  const fakes::FinishedDaemon second =
      fakes::RunDaemonToEnd({"--listen=" + daemon->address(), "--pool-bytes=64MiB", "--metrics="});
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.output, HasSubstr(daemon->socket_path()));
  EXPECT_THAT(second.output, HasSubstr("live daemon"));
  EXPECT_THAT(second.output, HasSubstr(std::to_string(daemon->pid())));
  // The first daemon is unaffected.
  RawWorker worker(daemon->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  EXPECT_TRUE(worker.OpenDescriptors().ok());
}

TEST(BadStart, PortInUse) {
  const std::unique_ptr<DaemonProcess> daemon =
      DaemonProcess::Start({.flags = {"--listen=127.0.0.1:0"}});
  ASSERT_NE(daemon, nullptr);
  const std::string log = daemon->Log();
  std::smatch address;
  ASSERT_TRUE(std::regex_search(log, address, std::regex("address=(127.0.0.1:[0-9]+)"))) << log;
  const std::string folder = fakes::MakeTemporaryFolder();
  const fakes::FinishedDaemon second =
      fakes::RunDaemonToEnd({"--listen=unix:" + folder + "/s", "--listen=" + address[1].str(),
                             "--pool-bytes=64MiB", "--metrics="});
  EXPECT_EQ(second.exit_code, 1);
  EXPECT_THAT(second.output, HasSubstr(address[1].str()));
  EXPECT_FALSE(std::filesystem::exists(folder + "/s.fd"));
  std::filesystem::remove_all(folder);
}

TEST(BadStart, AFileWhereTheDescriptorSocketGoesIsLeftAlone) {
  const std::string folder = fakes::MakeTemporaryFolder();
  const std::string path = folder + "/s.fd";
  std::ofstream(path) << "precious";
  const fakes::FinishedDaemon daemon =
      fakes::RunDaemonToEnd({"--listen=unix:" + folder + "/s", "--pool-bytes=64MiB", "--metrics="});
  EXPECT_EQ(daemon.exit_code, 1);
  EXPECT_THAT(daemon.output, HasSubstr(path + " exists and is not a socket"));
  EXPECT_EQ(std::filesystem::file_size(path), 8u);
  std::filesystem::remove_all(folder);
}

TEST(BadStart, AMissingDirectoryIsNotMade) {
  const std::string folder = fakes::MakeTemporaryFolder();
  const std::string directory = folder + "/misspelt";
  const fakes::FinishedDaemon daemon = fakes::RunDaemonToEnd(
      {"--listen=unix:" + directory + "/s", "--pool-bytes=64MiB", "--metrics="});
  EXPECT_EQ(daemon.exit_code, 1);
  EXPECT_THAT(daemon.output, HasSubstr("listen: the directory " + directory));
  EXPECT_THAT(daemon.output, HasSubstr("--prepare-directory=" + directory + " --owner="));
  EXPECT_FALSE(std::filesystem::exists(directory));
  std::filesystem::remove_all(folder);
}

TEST(BadStart, SocketOfADeadDaemonIsTakenOver) {
  const std::string folder = fakes::MakeTemporaryFolder();
  std::unique_ptr<DaemonProcess> daemon = DaemonProcess::Start({.folder = folder});
  ASSERT_NE(daemon, nullptr);
  daemon->Kill(SIGKILL);
  daemon.reset();
  daemon = DaemonProcess::Start({.folder = folder});
  ASSERT_NE(daemon, nullptr);
  RawWorker worker(daemon->Connect());
  EXPECT_TRUE(worker.Attach().ok());
}

TEST(BadStart, PoolLargerThanMemory) {
  const fakes::FinishedDaemon daemon =
      fakes::RunDaemonToEnd({"--pool-bytes=900000GiB", "--listen=unix:/tmp/never.sock"});
  EXPECT_EQ(daemon.exit_code, 2);
  EXPECT_THAT(daemon.output, HasSubstr("pool_bytes"));
}

TEST(BadStart, ACpuThatDoesNotExist) {
  const std::string folder = fakes::MakeTemporaryFolder();
  const fakes::FinishedDaemon daemon =
      fakes::RunDaemonToEnd({"--listen=unix:" + folder + "/s", "--pool-bytes=64MiB",
                             "--metrics=", "--device=cpu", "--compactor-cpus=0-4095"});
  EXPECT_EQ(daemon.exit_code, 1);
  EXPECT_THAT(daemon.output, testing::ContainsRegex("compactor_cpus: CPU [0-9]+ does not exist"));
  std::filesystem::remove_all(folder);
}

TEST(BadStart, MalformedConfig) {
  const std::string folder = fakes::MakeTemporaryFolder();
  const std::string path = folder + "/config.json";
  for (const char* text : {"{", "{\"pool_bytez\": 1}", "{\"device\": \"tpu\"}", "[]"}) {
    SCOPED_TRACE(text);
    std::FILE* file = std::fopen(path.c_str(), "w");
    std::fputs(text, file);
    std::fclose(file);
    const fakes::FinishedDaemon daemon = fakes::RunDaemonToEnd({"--config=" + path});
    EXPECT_EQ(daemon.exit_code, 2);
    EXPECT_THAT(daemon.output, testing::AnyOf(HasSubstr(path), HasSubstr("tpu")));
  }
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tessera
