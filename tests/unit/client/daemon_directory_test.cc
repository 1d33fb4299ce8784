// Which socket of a directory a client picks. The sockets are real; nobody speaks behind them.
#include "client/rpc/daemon_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "daemon/platform/unix_socket.h"

namespace tessera::client {
namespace {

using testing::AllOf;
using testing::HasSubstr;

const std::string kA = "GPU-aaaaaaaa-0000-0000-0000-000000000001";
const std::string kB = "GPU-bbbbbbbb-0000-0000-0000-000000000002";
const std::string kC = "MIG-cccccccc-0000-0000-0000-000000000003";

WantedDevice Own(const std::string& uuid) { return {.uuid = uuid, .source = "cuda:0"}; }

class DaemonDirectory : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "tessera-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name + "/";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // Listens as a daemon does, with the files beside the socket.
  void Serve(const std::string& name) {
    for (const std::string& path : {folder_ + name, folder_ + name + ".fd"}) {
      auto socket = ListenUnix(path, 0600, /*non_blocking=*/false);
      ASSERT_TRUE(socket.ok()) << socket.status();
      listening_.push_back(*std::move(socket));
    }
    std::ofstream(folder_ + name + ".lock") << "1\n";
  }
  // What a daemon leaves that was killed.
  void Leave(const std::string& name) {
    Serve(name);
    listening_.resize(listening_.size() - 2);
  }
  absl::StatusOr<std::string> Pick(const WantedDevice& wanted) const {
    const auto socket = PickDaemon(address(), wanted);
    if (!socket.ok()) return socket.status();
    return std::filesystem::path(socket->path).filename().string();
  }
  std::string address() const { return "unix:" + folder_; }

  std::string folder_;
  std::vector<Fd> listening_;
};

TEST_F(DaemonDirectory, TheSocketOfTheOwnDeviceIsPicked) {
  for (const std::string& uuid : {kA, kB, kC}) Serve(uuid + ".sock");
  for (const std::string& uuid : {kC, kA, kB}) {
    const auto picked = Pick(Own(uuid));
    ASSERT_TRUE(picked.ok()) << picked.status();
    EXPECT_EQ(*picked, uuid + ".sock");
  }
  EXPECT_EQ(*Pick({.uuid = "GPU-b", .source = "", .is_explicit = true}), kB + ".sock");
}

TEST_F(DaemonDirectory, OnlySocketsOfDaemonsAreListed) {
  Serve(kB + ".sock");
  Serve("tessera-" + kA + "-x");
  std::ofstream(folder_ + kC + ".sock") << "a file";
  std::filesystem::create_directory(folder_ + kC);
  const auto listed = ListDaemons(address());
  ASSERT_TRUE(listed.ok()) << listed.status();
  ASSERT_EQ(listed->size(), 2u);
  EXPECT_EQ((*listed)[0].address(), "unix:" + folder_ + kB + ".sock");
  EXPECT_EQ((*listed)[0].uuid->ToString(), kB);
  EXPECT_EQ((*listed)[1].uuid->ToString(), kA);
}

TEST_F(DaemonDirectory, AnotherDeviceIsAnErrorThatListsTheSockets) {
  Serve(kA + ".sock");
  Serve(kB + ".sock");
  const absl::Status status = Pick(Own(kC)).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << "a daemon may come: " << status;
  EXPECT_THAT(status.ToString(), AllOf(HasSubstr(folder_ + " has no socket for " + kC),
                                       HasSubstr("cuda:0"), HasSubstr(kA + ".sock, " + kB),
                                       HasSubstr("--listen=unix:" + folder_ + "{uuid}.sock")));
}

TEST_F(DaemonDirectory, WithoutAGpuTheOnlySocketIsPicked) {
  Serve(kA + ".sock");
  EXPECT_EQ(*Pick({}), kA + ".sock");
  Serve(kB + ".sock");
  const absl::Status status = Pick({.uuid = "", .source = "no CUDA driver"}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(status.ToString(),
              AllOf(HasSubstr("has 2 sockets"), HasSubstr("no CUDA driver"),
                    HasSubstr(kA + ".sock, " + kB + ".sock"), HasSubstr("--device")));
}

TEST_F(DaemonDirectory, AnEmptyDirectoryHasNoDaemon) {
  const absl::Status status = Pick({}).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("has no socket"));
}

TEST_F(DaemonDirectory, SeveralSocketsOfOneDeviceAreAnError) {
  Serve("a-" + kA + ".sock");
  Serve("b-" + kA + ".sock");
  const absl::Status status = Pick(Own(kA)).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(status.ToString(),
              AllOf(HasSubstr("has 2 sockets for " + kA), HasSubstr("a-" + kA),
                    HasSubstr("b-" + kA), HasSubstr("give the address of one socket")));
}

TEST_F(DaemonDirectory, ABeginningMustNotFitSeveralDevices) {
  Serve(kA + ".sock");
  Serve(kB + ".sock");
  const absl::Status status = Pick({.uuid = "GPU-", .source = "", .is_explicit = true}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("has 2 sockets for GPU-"));
}

TEST_F(DaemonDirectory, DeadSocketsDoNotCountBesideALiveOne) {
  Leave("a-" + kA + ".sock");
  Serve("b-" + kA + ".sock");
  EXPECT_EQ(*Pick(Own(kA)), "b-" + kA + ".sock");
  EXPECT_EQ(*Pick({}), "b-" + kA + ".sock");
}

TEST_F(DaemonDirectory, AnOnlyDeadSocketIsSaidToBeDead) {
  Leave(kA + ".sock");
  Serve(kB + ".sock");
  const absl::Status status = Pick(Own(kA)).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(status.ToString(),
              AllOf(HasSubstr("no daemon answers for " + kA), HasSubstr("Connection refused"),
                    HasSubstr("A daemon that was killed leaves its socket")));
}

TEST_F(DaemonDirectory, ASocketWithoutUuidMayServeAnyDevice) {
  Serve("tesserad.sock");
  EXPECT_EQ(*Pick(Own(kA)), "tesserad.sock");
  Serve(kA + ".sock");
  EXPECT_EQ(*Pick(Own(kA)), kA + ".sock") << "the name with the UUID is better";
  EXPECT_EQ(*Pick(Own(kB)), "tesserad.sock");
  Serve("other.sock");
  EXPECT_THAT(Pick(Own(kB)).status().ToString(), HasSubstr("has 2 sockets for " + kB));
}

TEST_F(DaemonDirectory, DirectoriesThatCannotBeReadAreNamed) {
  const absl::Status missing = PickDaemon("unix:" + folder_ + "nowhere/", {}).status();
  EXPECT_TRUE(absl::IsNotFound(missing)) << missing;
  EXPECT_THAT(missing.ToString(), HasSubstr(folder_ + "nowhere/"));
  std::ofstream(folder_ + "file") << "";
  const absl::Status file = PickDaemon("unix:" + folder_ + "file/", {}).status();
  EXPECT_THAT(file.ToString(), HasSubstr("Not a directory"));
}

TEST_F(DaemonDirectory, APermissionThatIsMissingIsNamed) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may connect to every socket";
  Serve(kA + ".sock");
  ASSERT_EQ(::chmod((folder_ + kA + ".sock").c_str(), 0), 0);
  const absl::Status status = Pick({}).status();
  EXPECT_TRUE(absl::IsPermissionDenied(status)) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("supplementary group"));
}

TEST_F(DaemonDirectory, AddressesOfDirectoriesAreRecognised) {
  Serve("tesserad.sock");
  const std::string without_slash = address().substr(0, address().size() - 1);
  for (const std::string& text : {address(), without_slash, "unix://" + folder_,
                                  std::string("unix:/no/such/"), std::string("unix:./")}) {
    EXPECT_TRUE(IsDirectoryAddress(text)) << text;
  }
  for (const std::string& text : {address() + "tesserad.sock", std::string("unix:/no/such"),
                                  std::string("127.0.0.1:9000"), folder_}) {
    EXPECT_FALSE(IsDirectoryAddress(text)) << text;
  }
  for (const std::string& text : {address(), without_slash, "unix://" + folder_}) {
    EXPECT_EQ(PickDaemon(text, {})->path, folder_ + "tesserad.sock") << text;
  }
}

TEST(CheckDevice, TheDaemonMustServeTheWantedDevice) {
  v1::Welcome welcome;
  welcome.set_device("cuda:1");
  welcome.set_device_uuid(std::string(16, 'x'));
  welcome.set_device_uuid_text(kA);
  EXPECT_TRUE(CheckDevice(welcome, {}).ok());
  EXPECT_TRUE(CheckDevice(welcome, Own(kA)).ok());
  EXPECT_TRUE(CheckDevice(welcome, {.uuid = "GPU-aa", .source = "", .is_explicit = true}).ok());
  const absl::Status other = CheckDevice(welcome, Own(kB));
  EXPECT_TRUE(absl::IsFailedPrecondition(other)) << other;
  EXPECT_THAT(other.ToString(), AllOf(HasSubstr("serves " + kA), HasSubstr("cuda:1"),
                                      HasSubstr("not " + kB), HasSubstr("cuda:0")));
}

TEST(CheckDevice, HostMemorySuitsAWorkerThatDidNotAskForADevice) {
  v1::Welcome welcome;
  welcome.set_device("cpu");
  EXPECT_TRUE(CheckDevice(welcome, Own(kA)).ok());
  const WantedDevice asked = {.uuid = kA, .source = "the option", .is_explicit = true};
  EXPECT_THAT(CheckDevice(welcome, asked).ToString(), HasSubstr("a device without UUID, cpu"));
  welcome.set_device_uuid_text("CPU-00000000-0000-0000-0000-000000000001");
  EXPECT_TRUE(CheckDevice(welcome, Own(kA)).ok());
  EXPECT_FALSE(CheckDevice(welcome, asked).ok());
}

}  // namespace
}  // namespace tessera::client
