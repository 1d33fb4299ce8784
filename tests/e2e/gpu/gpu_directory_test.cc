// A node with two emulated GPUs and a daemon for each. Workers see both GPUs or one, under other
// numbers than the daemons, and find the daemon of theirs.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "client/api/worker_access.h"
#include "tessera/worker.h"
#include "tests/e2e/gpu/emulated_gpu.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using testing::AllOf;
using testing::HasSubstr;

const std::string kFirst = "GPU-aaaaaaaa-0000-0000-0000-000000000001";
const std::string kSecond = "MIG-bbbbbbbb-0000-0000-0000-000000000002";

class GpuDirectory : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    folder_ = fakes::MakeTemporaryFolder();
    for (int i = 0; i < 2; ++i) {
      // Both daemons see both GPUs; each serves one.
      daemons_.push_back(DaemonProcess::Start(
          {.flags = {"--gpu-uuids=" + kFirst + "," + kSecond, "--device=cuda:" + std::to_string(i),
                     GetParam() ? "--gpu-shares-by-ipc" : "--log-level=info"},
           .pool_bytes = "128MiB",
           .folder = folder_,
           .listen = "{uuid}.sock",
           .uuid = i == 0 ? kFirst : kSecond,
           .binary = EMULATED_GPU_DAEMON}));
      ASSERT_NE(daemons_.back(), nullptr);
    }
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  // The GPUs that a worker sees, of which its thread uses `current`.
  client::GpuPlatform Sees(const std::vector<std::string>& uuids, int current) {
    gpus_.devices = static_cast<int>(uuids.size());
    tests::SharedGpu::Options options = {
        .exports_fds = !GetParam(), .uuids = {}, .current = current};
    for (const std::string& uuid : uuids) options.uuids.push_back(ParseDeviceUuid(uuid).value());
    return {.load_cuda = [options]() -> absl::StatusOr<std::unique_ptr<CudaCalls>> {
              return std::make_unique<tests::SharedGpu>(options);
            },
            .gpus = &gpus_};
  }
  absl::StatusOr<std::string> DeviceOfWorker(const client::GpuPlatform& platform,
                                             const std::string& device = "") {
    const auto worker =
        client::AttachWith({.address = directory(), .device = device}, {.gpus = &platform});
    if (!worker.ok()) return worker.status();
    EXPECT_TRUE((*worker)->mapped());
    // Memory of that GPU, which the daemon shares.
    const auto tensor = (*worker)->NewTensor(4096);
    EXPECT_TRUE(tensor.ok()) << tensor.status();
    return (*worker)->daemon().device_uuid;
  }
  std::string directory() const { return "unix:" + folder_ + "/"; }

  std::string folder_;
  std::vector<std::unique_ptr<DaemonProcess>> daemons_;
  tests::EmulatedGpus gpus_;
};

TEST_P(GpuDirectory, AWorkerFindsTheDaemonOfTheDeviceThatItsThreadUses) {
  EXPECT_EQ(*DeviceOfWorker(Sees({kFirst, kSecond}, 0)), kFirst);
  EXPECT_EQ(*DeviceOfWorker(Sees({kFirst, kSecond}, 1)), kSecond);
  // In a container, or under CUDA_VISIBLE_DEVICES: the second GPU is device 0.
  EXPECT_EQ(*DeviceOfWorker(Sees({kSecond}, 0)), kSecond);
  EXPECT_EQ(*DeviceOfWorker(Sees({kSecond, kFirst}, 0)), kSecond);
}

TEST_P(GpuDirectory, AWorkerCanNameAnotherDevice) {
  const client::GpuPlatform both = Sees({kSecond, kFirst}, 0);
  EXPECT_EQ(*DeviceOfWorker(both, "cuda:1"), kFirst);
  EXPECT_EQ(*DeviceOfWorker(both, kFirst), kFirst);
  EXPECT_EQ(*DeviceOfWorker(both, "MIG-"), kSecond);
}

TEST_P(GpuDirectory, AWorkerOnAGpuWithoutDaemonIsToldWhichThereAre) {
  const std::string third = "GPU-cccccccc-0000-0000-0000-000000000003";
  const auto device = DeviceOfWorker(Sees({third}, 0));
  ASSERT_TRUE(absl::IsUnavailable(device.status())) << device.status();
  EXPECT_THAT(device.status().ToString(),
              AllOf(HasSubstr("has no socket for " + third), HasSubstr("cuda:0"),
                    HasSubstr(kFirst + ".sock, " + kSecond + ".sock")));
}

INSTANTIATE_TEST_SUITE_P(Sharing, GpuDirectory, testing::Bool(), [](const auto& sharing) {
  return sharing.param ? "ByIpc" : "ByDescriptor";
});

}  // namespace
}  // namespace tessera
