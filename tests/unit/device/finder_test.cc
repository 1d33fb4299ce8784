#include "daemon/device/finder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "daemon/base/strings.h"
#include "tests/fakes/gpu/emulated_runtime.h"
#include "tests/fakes/gpu/shared_gpu.h"

namespace tessera::device {
namespace {

using testing::HasSubstr;

absl::StatusOr<std::unique_ptr<CudaCalls>> OneGpu() { return std::make_unique<tests::SharedGpu>(); }

TEST(Finder, OpensTheGpuThatIsThere) {
  tests::EmulatedGpus gpus;
  Finder finder(OneGpu, gpus);
  const auto bytes = finder.OpenCuda(0);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  EXPECT_EQ(*bytes, std::uint64_t{1} << 30);
  EXPECT_EQ(finder.device().description().name, "cuda:0");
  EXPECT_EQ(finder.device().description().kernels, "cuda_emulated");
  EXPECT_TRUE(finder.device().description().uuid.has_value());
  EXPECT_EQ(finder.why_no_cuda(), "");
}

constexpr char kFirst[] = "GPU-00000000-0000-0000-0000-00000000000a";
constexpr char kSecond[] = "MIG-00000000-0000-0000-0000-00000000000b";

absl::StatusOr<std::unique_ptr<CudaCalls>> TwoGpus() {
  return std::make_unique<tests::SharedGpu>(tests::SharedGpu::Options{
      .uuids = {ParseDeviceUuid(kFirst).value(), ParseDeviceUuid(kSecond).value()}});
}

TEST(Finder, OpensTheGpuWithAUuid) {
  tests::EmulatedGpus gpus;
  gpus.devices = 2;
  Finder finder(TwoGpus, gpus);
  for (const auto& [uuid, name] : {std::pair(kSecond, "cuda:1"), std::pair(kFirst, "cuda:0")}) {
    const auto bytes = finder.OpenCuda(ParseDeviceUuid(uuid).value());
    ASSERT_TRUE(bytes.ok()) << bytes.status();
    EXPECT_EQ(finder.device().description().name, name);
    EXPECT_EQ(finder.device().description().UuidText(), uuid);
  }
  const auto none = finder.OpenCuda(DeviceUuid());
  EXPECT_TRUE(absl::IsFailedPrecondition(none.status())) << none.status();
  EXPECT_THAT(finder.why_no_cuda(), HasSubstr(Concat("it sees ", kFirst, ", ", kSecond)));
}

TEST(Finder, TheCpuHasTheUuidThatItIsGiven) {
  tests::EmulatedGpus gpus;
  Finder finder(OneGpu, gpus);
  finder.OpenCpu(DeviceUuid{.kind = DeviceUuid::Kind::kCpu});
  EXPECT_EQ(finder.device().description().name, "cpu");
  EXPECT_EQ(finder.device().description().UuidText(), "CPU-00000000-0000-0000-0000-000000000000");
  finder.OpenCpu();
  EXPECT_EQ(finder.device().description().UuidText(), "");
}

TEST(Finder, SaysWhyThereIsNoGpuAndServesTheCpu) {
  tests::EmulatedGpus gpus;
  Finder other(OneGpu, gpus);
  EXPECT_THAT(other.OpenCuda(3).status().ToString(),
              HasSubstr("cuda:3: this process sees 1 CUDA devices"));

  Finder none(
      []() -> absl::StatusOr<std::unique_ptr<CudaCalls>> {
        return absl::FailedPreconditionError("no driver");
      },
      gpus);
  EXPECT_TRUE(absl::IsFailedPrecondition(none.OpenCuda(0).status()));
  EXPECT_EQ(none.why_no_cuda(), "no driver");
  none.OpenCpu();
  EXPECT_EQ(none.device().description().name, "cpu");
  EXPECT_FALSE(none.device().description().uuid.has_value());
}

TEST(Finder, TellsOfAFailureWhileSomebodyListens) {
  tests::EmulatedGpus gpus;
  gpus.options.fails_after = 0;
  Finder finder(OneGpu, gpus);
  ASSERT_TRUE(finder.OpenCuda(0).ok());
  int told = 0;
  finder.OnFailure([&](const absl::Status&) { ++told; });
  std::uint64_t word = 0;
  auto piece = finder.device().CreateWorkerMemory("test", std::uint64_t{2} << 20);
  ASSERT_TRUE(piece.ok());
  EXPECT_FALSE(finder.device().Read(reinterpret_cast<std::byte*>(&word), (*piece)->data(), 8).ok());
  EXPECT_EQ(told, 1);
  finder.OnFailure(nullptr);
}

}  // namespace
}  // namespace tessera::device
