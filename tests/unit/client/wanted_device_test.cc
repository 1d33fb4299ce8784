// The device whose daemon a worker wants: its own, one by number, one by UUID.
#include "client/gpu/wanted_device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "tests/fakes/gpu/fake_cuda.h"

namespace tessera::client {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr char kFirst[] = "GPU-01234567-89ab-cdef-f0e1-d2c3b4a59687";
constexpr char kSecond[] = "MIG-00000000-0000-0000-0000-00000000000b";

// A machine with these devices, of which the calling thread uses `current`.
GpuPlatform Machine(int devices, int current) {
  return {.load_cuda = [=]() -> absl::StatusOr<std::unique_ptr<CudaCalls>> {
    auto cuda = std::make_unique<tests::FakeCuda>();
    cuda->devices = devices;
    cuda->current = current;
    cuda->uuids = {ParseDeviceUuid(kFirst).value(), ParseDeviceUuid(kSecond).value()};
    return cuda;
  }};
}

GpuPlatform NoDriver() {
  return {.load_cuda = []() -> absl::StatusOr<std::unique_ptr<CudaCalls>> {
    return absl::FailedPreconditionError("no CUDA driver");
  }};
}

TEST(WantedDevice, IsTheOneThatTheThreadUses) {
  for (const auto& [current, uuid] : {std::pair(0, kFirst), std::pair(1, kSecond)}) {
    const auto wanted = FindWantedDevice(Machine(2, current), "");
    ASSERT_TRUE(wanted.ok()) << wanted.status();
    EXPECT_EQ(wanted->uuid, uuid);
    EXPECT_FALSE(wanted->is_explicit);
    EXPECT_THAT(wanted->source, HasSubstr("cuda:" + std::to_string(current)));
  }
}

TEST(WantedDevice, IsUnknownWithoutAGpu) {
  const auto without_driver = FindWantedDevice(NoDriver(), "");
  ASSERT_TRUE(without_driver.ok()) << without_driver.status();
  EXPECT_EQ(without_driver->uuid, "");
  EXPECT_EQ(without_driver->source, "no CUDA driver");
  const auto without_device = FindWantedDevice(Machine(0, 0), "");
  ASSERT_TRUE(without_device.ok()) << without_device.status();
  EXPECT_EQ(without_device->uuid, "");
  EXPECT_THAT(without_device->source, HasSubstr("sees no CUDA device"));
}

TEST(WantedDevice, IsUnknownWhenCudaFails) {
  for (int call = 0; call < 3; ++call) {
    const GpuPlatform failing = {.load_cuda = [=]() -> absl::StatusOr<std::unique_ptr<CudaCalls>> {
      auto cuda = std::make_unique<tests::FakeCuda>();
      cuda->fail_at = call;
      return cuda;
    }};
    const auto wanted = FindWantedDevice(failing, "");
    ASSERT_TRUE(wanted.ok()) << wanted.status();
    EXPECT_EQ(wanted->uuid, "") << call;
    EXPECT_EQ(wanted->source, "CUDA_ERROR_UNKNOWN") << call;
  }
}

TEST(WantedDevice, CanBeGivenByNumber) {
  const auto wanted = FindWantedDevice(Machine(2, 0), "cuda:1");
  ASSERT_TRUE(wanted.ok()) << wanted.status();
  EXPECT_EQ(wanted->uuid, kSecond);
  EXPECT_TRUE(wanted->is_explicit);
  EXPECT_THAT(FindWantedDevice(Machine(2, 0), "cuda:2").status().ToString(),
              AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("\"cuda:2\""),
                    HasSubstr("sees 2 CUDA devices")));
  EXPECT_THAT(FindWantedDevice(NoDriver(), "cuda:0").status().ToString(),
              AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("no CUDA driver")));
  for (const char* text : {"cuda:", "cuda:-1", "cuda:1x", "cuda:99999999999"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(FindWantedDevice(Machine(2, 0), text).status())) << text;
  }
}

TEST(WantedDevice, CanBeGivenByUuidOrItsBeginning) {
  for (const std::string text : {kFirst, kSecond, "GPU-0123", "CPU-", "GPU-01234567-89ab"}) {
    const auto wanted = FindWantedDevice(NoDriver(), text);
    ASSERT_TRUE(wanted.ok()) << wanted.status();
    EXPECT_EQ(wanted->uuid, text);
    EXPECT_TRUE(wanted->is_explicit);
  }
  EXPECT_EQ(FindWantedDevice(NoDriver(), "GPU-0123ABCD")->uuid, "GPU-0123abcd");
  for (const std::string text :
       {"cpu", "0", "gpu-0123", "GPU-xyz", "all", "GPU-01234567-89ab-cdef-f0e1-d2c3b4a596870"}) {
    const auto wanted = FindWantedDevice(NoDriver(), text);
    ASSERT_TRUE(absl::IsInvalidArgument(wanted.status())) << text;
    EXPECT_THAT(wanted.status().ToString(), HasSubstr("\"" + text + "\""));
  }
}

}  // namespace
}  // namespace tessera::client
