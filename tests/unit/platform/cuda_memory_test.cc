#include "daemon/platform/cuda_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>

#include "tests/fakes/gpu/fake_cuda.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using tests::FakeCuda;

constexpr std::uint64_t kExtent = 32 * kCudaGranularity;

// Runs `work` once for each of its calls, letting that call fail. Each time nothing may be left,
// and the error must contain CUDA's message.
void FailEveryCall(const std::function<absl::Status(FakeCuda&)>& work) {
  FakeCuda well;
  ASSERT_TRUE(work(well).ok());
  ASSERT_EQ(well.broken, "");
  ASSERT_EQ(well.live(), 0u);
  const int descriptors = CountOpenFds();
  // A failed release does not fail the work; the driver keeps the object.
  for (int i = 0; i < static_cast<int>(well.calls.size()); ++i) {
    const std::string& name = well.calls[i];
    if (name == "Unmap" || name == "Release" || name == "FreeReservation" || name == "Free" ||
        name == "CloseIpc") {
      continue;
    }
    SCOPED_TRACE(name + " is call " + std::to_string(i));
    FakeCuda failing;
    failing.fail_at = i;
    const absl::Status status = work(failing);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr("CUDA_ERROR_UNKNOWN"));
    EXPECT_EQ(failing.broken, "");
    EXPECT_EQ(failing.live(), 0u);
    EXPECT_EQ(CountOpenFds(), descriptors);
  }
}

TEST(CudaMemory, OwnedMemoryIsUnmappedThenReleasedThenItsAddressesFreed) {
  FakeCuda cuda;
  {
    auto range = CudaRange::Reserve(cuda, 0, 4 * kExtent);
    ASSERT_TRUE(range.ok());
    auto memory = CudaMemory::Create(**range, kExtent, kExtent);
    ASSERT_TRUE(memory.ok());
    EXPECT_EQ(memory->address(), (*range)->address() + kExtent);
    EXPECT_EQ(cuda.AccessAt(memory->address()), "read-write");
    EXPECT_EQ(::fcntl(memory->fd(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  }
  EXPECT_THAT(cuda.calls, ElementsAre("Reserve", "Create", "ExportFd", "Map", "SetAccess", "Clear",
                                      "Unmap", "Release", "FreeReservation"));
  EXPECT_EQ(cuda.broken, "");
}

TEST(CudaMemory, AnImporterChoosesItsAccess) {
  FakeCuda cuda;
  auto range = CudaRange::Reserve(cuda, 0, 2 * kExtent);
  ASSERT_TRUE(range.ok());
  auto pool = CudaMemory::ImportFd(**range, 0, 5, kExtent, Access::kReadOnly);
  auto tail = CudaMemory::ImportFd(**range, kExtent, 6, kExtent, Access::kReadWrite);
  ASSERT_TRUE(pool.ok() && tail.ok());
  EXPECT_EQ(cuda.AccessAt((*range)->address()), "read-only");
  EXPECT_EQ(cuda.AccessAt((*range)->address() + kExtent), "read-write");
  EXPECT_EQ(pool->fd(), -1);
  EXPECT_EQ(tail->address(), pool->address() + kExtent);
}

TEST(CudaMemory, APlaceCanBeFilledAgain) {
  FakeCuda cuda;
  auto range = CudaRange::Reserve(cuda, 0, kExtent);
  ASSERT_TRUE(range.ok());
  for (int i = 0; i < 3; ++i) {
    auto memory = CudaMemory::Create(**range, 0, kExtent);
    ASSERT_TRUE(memory.ok()) << memory.status();
    CudaMemory moved = *std::move(memory);
    moved = CudaMemory(std::move(moved));
    EXPECT_EQ(moved.bytes(), kExtent);
    moved.Reset();
    EXPECT_EQ(cuda.AccessAt((*range)->address()), "unmapped");
  }
  EXPECT_EQ(cuda.broken, "");
  EXPECT_EQ(cuda.live(), 1u);
}

TEST(CudaMemory, NothingStaysBehindWhateverFails) {
  FailEveryCall([](FakeCuda& cuda) -> absl::Status {
    auto range = CudaRange::Reserve(cuda, 0, 4 * kExtent);
    if (!range.ok()) return range.status();
    auto first = CudaMemory::Create(**range, 0, kExtent);
    if (!first.ok()) return first.status();
    auto second = CudaMemory::Create(**range, kExtent, kExtent);
    if (!second.ok()) return second.status();
    return CudaMemory::ImportFd(**range, 3 * kExtent, first->fd(), kExtent, Access::kReadOnly)
        .status();
  });
  FailEveryCall([](FakeCuda& cuda) -> absl::Status {
    auto memory = CudaMemory::CreateUnmapped(cuda, 0, kExtent);
    if (!memory.ok()) return memory.status();
    return CudaMemory::ImportIpc(cuda, 0, memory->ipc_handle(), kExtent).status();
  });
  FailEveryCall([](FakeCuda& cuda) { return ListCudaDevices(cuda).status(); });
}

TEST(CudaMemory, OutOfMemorySaysHowMuchWasAsked) {
  FakeCuda cuda;
  cuda.failure = {.code = 2, .name = "CUDA_ERROR_OUT_OF_MEMORY"};
  auto range = CudaRange::Reserve(cuda, 3, kExtent);
  ASSERT_TRUE(range.ok());
  cuda.fail_at = static_cast<int>(cuda.calls.size());
  const auto memory = CudaMemory::Create(**range, 0, kExtent);
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(memory.status().message(),
            "allocating 67108864 bytes of cuda:3: CUDA_ERROR_OUT_OF_MEMORY");
}

TEST(CudaMemory, SizesAndPlacesAreChecked) {
  FakeCuda cuda;
  EXPECT_EQ(CudaRange::Reserve(cuda, 0, kCudaGranularity + 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  auto range = CudaRange::Reserve(cuda, 0, kExtent);
  ASSERT_TRUE(range.ok());
  const auto create = [&](std::uint64_t offset, std::uint64_t bytes) {
    return CudaMemory::Create(**range, offset, bytes).status().code();
  };
  EXPECT_EQ(create(0, 0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create(0, 4096), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create(4096, kCudaGranularity), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create(kExtent, kCudaGranularity), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(create(0, kExtent + kCudaGranularity), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(create(~std::uint64_t{0} - kCudaGranularity + 1, kCudaGranularity),
            absl::StatusCode::kOutOfRange);
  EXPECT_EQ(CudaMemory::CreateUnmapped(cuda, 0, 4096).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(cuda.calls, ElementsAre("Reserve"));
}

TEST(ProbedCudaDevice, PrefersDescriptorsAndLeavesNothing) {
  FakeCuda cuda;
  const auto device = ProbeCudaDevice(cuda, 0);
  ASSERT_TRUE(device.ok());
  EXPECT_EQ(device->sharing, CudaSharing::kFileDescriptor);
  EXPECT_EQ(device->why_no_descriptors, "");
  EXPECT_EQ(cuda.live(), 0u);
}

TEST(ProbedCudaDevice, FallsBackToIpcAndSaysWhy) {
  FakeCuda refuses;
  refuses.exports_fds = false;
  auto device = ProbeCudaDevice(refuses, 0);
  ASSERT_TRUE(device.ok());
  EXPECT_EQ(device->sharing, CudaSharing::kIpcHandle);
  EXPECT_EQ(device->why_no_descriptors, "the driver reports that it cannot export descriptors");

  FakeCuda coarse;
  coarse.granularity = std::uint64_t{512} << 20;
  device = ProbeCudaDevice(coarse, 0);
  ASSERT_TRUE(device.ok());
  EXPECT_THAT(device->why_no_descriptors, HasSubstr("536870912"));

  FakeCuda container;  // reports the capability, but the call fails
  container.fail_at = 3;
  container.failure = {.code = 800, .name = "CUDA_ERROR_NOT_PERMITTED"};
  device = ProbeCudaDevice(container, 0);
  ASSERT_TRUE(device.ok());
  EXPECT_EQ(device->sharing, CudaSharing::kIpcHandle);
  EXPECT_THAT(device->why_no_descriptors, HasSubstr("CUDA_ERROR_NOT_PERMITTED"));
  EXPECT_EQ(container.live(), 0u);
}

TEST(ProbedCudaDevice, OneThatCanShareNothingIsAnError) {
  FakeCuda cuda;
  cuda.exports_fds = false;
  cuda.fail_at = 2;  // DescribeDevice, Allocate, ExportIpc
  const auto device = ProbeCudaDevice(cuda, 0);
  EXPECT_THAT(std::string(device.status().message()), HasSubstr("by CUDA IPC"));
  EXPECT_EQ(cuda.live(), 0u);
}

// Holds on every machine. With a GPU the table loads; without one, or without CUDA in the build,
// loading returns a reason and does not crash.
TEST(CudaCallsTest, LoadingSaysWhatIsMissing) {
  const auto cuda = LoadCuda();
  if (cuda.ok()) {
    EXPECT_TRUE(ListCudaDevices(**cuda).ok());
    return;
  }
  EXPECT_EQ(cuda.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(cuda.status().message()), HasSubstr("CUDA"));
}

}  // namespace
}  // namespace tessera
