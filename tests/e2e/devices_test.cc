// Several daemons on a node, one per device, in one directory: each under the UUID of its device,
// and workers that find theirs by it.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/tessera.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tessera/worker.h"
#include "tests/fakes/daemon/daemon_process.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

const std::string kFirst = "CPU-aaaaaaaa-0000-0000-0000-000000000001";
const std::string kSecond = "CPU-bbbbbbbb-0000-0000-0000-000000000002";

client::ModelGeometry SmallModel() {
  client::ModelGeometry model = {.name = "small"};
  model.layers.assign(2, {.query_heads = 4, .kv_heads = 2, .head_dim = 64});
  return model;
}

class Devices : public testing::Test {
 protected:
  void SetUp() override { folder_ = fakes::MakeTemporaryFolder(); }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::unique_ptr<DaemonProcess> Start(const std::string& uuid) {
    return DaemonProcess::Start({.flags = {"--device=" + uuid},
                                 .pool_bytes = "64MiB",
                                 .folder = folder_,
                                 .listen = "{uuid}.sock",
                                 .uuid = uuid});
  }
  std::string directory() const { return "unix:" + folder_ + "/"; }
  absl::StatusOr<std::unique_ptr<client::Worker>> Attach(const std::string& device) {
    return client::Worker::Attach({.address = directory(), .device = device});
  }

  std::string folder_;
};

v1::StatsResponse StatsOf(const DaemonProcess& daemon) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  v1::StatsResponse stats;
  const grpc::Status status =
      v1::TesseraAdmin::NewStub(daemon.ConnectAdmin())->NodeStats(&context, {}, &stats);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return stats;
}

TEST_F(Devices, EachDaemonServesUnderTheUuidOfItsDevice) {
  for (const std::string& uuid : {kFirst, kSecond}) {
    const auto daemon = Start(uuid);
    ASSERT_NE(daemon, nullptr);
    struct stat found {};
    for (const char* suffix : {"", ".fd"}) {
      const std::string path = folder_ + "/" + uuid + ".sock" + suffix;
      ASSERT_EQ(::stat(path.c_str(), &found), 0) << path;
      EXPECT_TRUE(S_ISSOCK(found.st_mode));
    }
    EXPECT_TRUE(std::filesystem::exists(folder_ + "/" + uuid + ".sock.lock"));
    EXPECT_THAT(daemon->Log(), AllOf(HasSubstr("device=cpu uuid=" + uuid),
                                     HasSubstr("address=unix:" + folder_ + "/" + uuid + ".sock")));
    EXPECT_EQ(StatsOf(*daemon).device_uuid(), uuid);
    EXPECT_EQ(StatsOf(*daemon).device(), "cpu");
  }
}

TEST_F(Devices, WorkersFindTheirDaemonAndMapItsMemory) {
  const auto first = Start(kFirst);
  const auto second = Start(kSecond);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  for (const std::string& uuid : {kSecond, kFirst}) {
    const auto worker = Attach(uuid);
    ASSERT_TRUE(worker.ok()) << worker.status();
    EXPECT_TRUE((*worker)->mapped());
    EXPECT_EQ((*worker)->daemon().device_uuid, uuid);
    EXPECT_EQ((*worker)->Stats()->device_uuid, uuid);
    EXPECT_EQ(StatsOf(*first).sessions(), uuid == kFirst ? 1u : 0u);
    EXPECT_EQ(StatsOf(*second).sessions(), uuid == kSecond ? 1u : 0u);
    const auto model = (*worker)->RegisterModel(SmallModel());
    ASSERT_TRUE(model.ok()) << model.status();
    EXPECT_TRUE((*worker)->CreateSequence(*model).ok());
  }
  const auto by_beginning = Attach("CPU-b");
  ASSERT_TRUE(by_beginning.ok()) << by_beginning.status();
  EXPECT_EQ((*by_beginning)->daemon().device_uuid, kSecond);
}

TEST_F(Devices, AWorkerInCFindsItsDaemon) {
  const auto first = Start(kFirst);
  const auto second = Start(kSecond);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  const std::string address = directory();
  tessera_attach_options options = TESSERA_ATTACH_OPTIONS_INIT;
  options.address = address.c_str();
  options.device = kSecond.c_str();
  tessera_worker* worker = nullptr;
  tessera_error error;
  ASSERT_EQ(tessera_attach(&options, &worker, &error), TESSERA_OK) << error.message;
  EXPECT_EQ(StatsOf(*second).sessions(), 1u);
  tessera_detach(worker);
}

TEST_F(Devices, WithoutAGpuTheOnlyDaemonIsTaken) {
  const auto first = Start(kFirst);
  ASSERT_NE(first, nullptr);
  {
    const auto worker = Attach("");
    ASSERT_TRUE(worker.ok()) << worker.status();
    EXPECT_EQ((*worker)->daemon().device_uuid, kFirst);
  }
  const auto second = Start(kSecond);
  ASSERT_NE(second, nullptr);
  const absl::Status several = Attach("").status();
  EXPECT_TRUE(absl::IsFailedPrecondition(several)) << several;
  EXPECT_THAT(several.ToString(), AllOf(HasSubstr("attaching to " + directory()),
                                        HasSubstr("has 2 sockets"), HasSubstr(kFirst + ".sock"),
                                        HasSubstr(kSecond + ".sock"), HasSubstr("--device")));
}

TEST_F(Devices, ErrorsNameTheDirectoryTheDeviceAndTheSockets) {
  EXPECT_THAT(client::Worker::Attach({.address = directory() + "nowhere/"}).status().ToString(),
              AllOf(HasSubstr("NOT_FOUND"), HasSubstr(folder_ + "/nowhere/")));
  EXPECT_THAT(Attach("").status().ToString(), HasSubstr(folder_ + "/ has no socket"));
  const auto first = Start(kFirst);
  ASSERT_NE(first, nullptr);
  EXPECT_THAT(Attach(kSecond).status().ToString(),
              AllOf(HasSubstr("UNAVAILABLE"), HasSubstr("has no socket for " + kSecond),
                    HasSubstr("It has " + kFirst + ".sock")));
  EXPECT_TRUE(absl::IsInvalidArgument(Attach("cpu").status()));
  // The address of one socket, and the device of another daemon.
  const auto other = client::Worker::Attach({.address = first->address(), .device = kSecond});
  EXPECT_THAT(other.status().ToString(),
              AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("serves " + kFirst),
                    HasSubstr("not " + kSecond)));
}

TEST_F(Devices, TheSocketOfAKilledDaemonIsDeadUntilItsSuccessorComes) {
  auto first = Start(kFirst);
  const auto second = Start(kSecond);
  ASSERT_TRUE(first != nullptr && second != nullptr);
  auto worker = client::Worker::Attach(
      {.address = directory(), .device = kFirst, .reattach = {.automatic = false}});
  ASSERT_TRUE(worker.ok()) << worker.status();
  first->Kill(SIGKILL);
  first->WaitForExit(5);
  ASSERT_TRUE(std::filesystem::exists(first->socket_path())) << "a killed daemon leaves it";
  EXPECT_THAT(Attach(kFirst).status().ToString(),
              AllOf(HasSubstr("UNAVAILABLE"), HasSubstr("no daemon answers for " + kFirst),
                    HasSubstr("Connection refused")));
  // Without a device the dead socket does not count.
  const auto any = Attach("");
  ASSERT_TRUE(any.ok()) << any.status();
  EXPECT_EQ((*any)->daemon().device_uuid, kSecond);

  const auto successor = Start(kFirst);
  ASSERT_NE(successor, nullptr);
  const auto again = (*worker)->Reattach();
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_FALSE(again->same_daemon);
  EXPECT_EQ((*worker)->daemon().device_uuid, kFirst);
}

TEST_F(Devices, ASecondDaemonForADeviceIsRefused) {
  const auto first = Start(kFirst);
  ASSERT_NE(first, nullptr);
  const auto refused = fakes::RunDaemonToEnd(
      {"--device=" + kFirst, "--metrics=", "--listen=" + directory() + "{uuid}.sock"});
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_THAT(refused.output, AllOf(HasSubstr("is served by a live daemon"), HasSubstr(kFirst)));
}

TEST_F(Devices, WrongDevicesAreRefusedAtStart) {
  struct Wrong {
    const char* flag;
    int exit_code;  // 1: the device may appear later
    const char* why;
  };
  for (const auto& [flag, exit_code, why] :
       {Wrong{"--device=cuda:all", 2, "a daemon serves one device"},
        Wrong{"--device=cpu", 2, "the CPU has no UUID"},
        Wrong{"--device=GPU-00000000-0000-0000-0000-000000000001", 1, "device: \"GPU-00000000"}}) {
    const auto refused =
        fakes::RunDaemonToEnd({flag, "--metrics=", "--listen=" + directory() + "{uuid}.sock"});
    EXPECT_EQ(refused.exit_code, exit_code) << flag;
    EXPECT_THAT(refused.output, HasSubstr(why)) << flag;
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_));
}

}  // namespace
}  // namespace tessera
