#include "daemon/platform/memory_limit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "daemon/base/bytes.h"

namespace tessera {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

namespace fs = std::filesystem;

constexpr std::uint64_t kTotal = 16 * kGiB;
constexpr char kNoLimitV1[] = "9223372036854771712\n";  // the kernel's value for "no limit"

// A tree of files like the kernel's, with 16 GiB of memory and no cgroup.
class MemoryLimitTest : public ::testing::Test {
 protected:
  MemoryLimitTest() {
    std::string name = (fs::temp_directory_path() / "memory_limit_XXXXXX").string();
    root_ = mkdtemp(name.data());
    Write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:         1000 kB\n");
  }
  ~MemoryLimitTest() override { fs::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }

  std::uint64_t Bytes() {
    const auto limit = DetectMemoryLimit(root_);
    EXPECT_TRUE(limit.ok()) << limit.status();
    return limit.ok() ? limit->bytes : 0;
  }

  fs::path root_;
};

TEST_F(MemoryLimitTest, WithoutCgroupsIsMemTotal) {
  EXPECT_EQ(Bytes(), kTotal);
  EXPECT_THAT(DetectMemoryLimit(root_)->source, EndsWith("/proc/meminfo MemTotal"));
}

TEST_F(MemoryLimitTest, VersionTwoOwnLimit) {
  Write("proc/self/cgroup", "0::/system.slice/tesserad.service\n");
  Write("sys/fs/cgroup/system.slice/tesserad.service/memory.max", "4294967296\n");
  EXPECT_EQ(Bytes(), 4 * kGiB);
  EXPECT_THAT(DetectMemoryLimit(root_)->source, EndsWith("tesserad.service/memory.max"));
}

TEST_F(MemoryLimitTest, TheTightestLimitAboveCounts) {
  Write("proc/self/cgroup", "0::/a/b/c\n");
  Write("sys/fs/cgroup/a/memory.max", "2147483648\n");
  Write("sys/fs/cgroup/a/b/memory.max", "1073741824\n");
  Write("sys/fs/cgroup/a/b/c/memory.max", "max\n");
  EXPECT_EQ(Bytes(), kGiB);
}

TEST_F(MemoryLimitTest, MaxIsNoLimit) {
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/memory.max", "max\n");
  EXPECT_EQ(Bytes(), kTotal);
}

TEST_F(MemoryLimitTest, ALimitAboveTheMemoryIsNone) {
  Write("proc/self/cgroup", "0::/\n");
  Write("sys/fs/cgroup/memory.max", "99999999999999\n");
  EXPECT_EQ(Bytes(), kTotal);
}

TEST_F(MemoryLimitTest, VersionOne) {
  Write("proc/self/cgroup", "9:cpu,cpuacct:/x\n4:hugetlb,memory:/docker/abc\n1:pids:/y\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", kNoLimitV1);
  Write("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "536870912\n");
  EXPECT_EQ(Bytes(), 512 * kMiB);
}

// Without a cgroup namespace the path is the host's, but the mount shows the container's own
// cgroup.
TEST_F(MemoryLimitTest, VersionOneInsideAContainerWithTheHostsPath) {
  Write("proc/self/cgroup", "4:memory:/docker/abc\n0::/\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "268435456\n");
  EXPECT_EQ(Bytes(), 256 * kMiB);
}

TEST_F(MemoryLimitTest, APathOutsideOfTheNamespaceAsksTheMount) {
  Write("proc/self/cgroup", "0::/../../other\n");
  Write("sys/fs/cgroup/memory.max", "268435456\n");
  Write("sys/other/memory.max", "1\n");
  Write("other/memory.max", "1\n");
  EXPECT_EQ(Bytes(), 256 * kMiB);
}

TEST_F(MemoryLimitTest, Hybrid) {
  Write("proc/self/cgroup", "4:memory:/\n0::/one\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", kNoLimitV1);
  Write("sys/fs/cgroup/unified/one/memory.max", "1073741824\n");
  EXPECT_EQ(Bytes(), kGiB);
}

TEST_F(MemoryLimitTest, MalformedCgroupFilesAreNoLimit) {
  Write("proc/self/cgroup", "nonsense\n:\n0::\n4:memory\n4:memory:/m\n0::/a\n");
  Write("sys/fs/cgroup/a/memory.max", "lots\n");
  Write("sys/fs/cgroup/memory/m/memory.limit_in_bytes", "");
  EXPECT_EQ(Bytes(), kTotal);
}

TEST_F(MemoryLimitTest, WithoutMeminfoSaysWhichFile) {
  Write("proc/meminfo", "MemFree: 3 kB\n");
  EXPECT_THAT(DetectMemoryLimit(root_).status().message(),
              HasSubstr("proc/meminfo has no MemTotal"));
  fs::remove(root_ / "proc/meminfo");
  EXPECT_THAT(DetectMemoryLimit(root_).status().message(),
              HasSubstr("proc/meminfo cannot be read"));
}

TEST(MemoryLimit, OfThisMachineIsPlausible) {
  const auto limit = DetectMemoryLimit();
  ASSERT_TRUE(limit.ok()) << limit.status();
  EXPECT_GE(limit->bytes, 16 * kMiB);
  EXPECT_LE(limit->bytes, 1024 * kTiB);
  EXPECT_LE(limit->bytes, static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                              static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)));
}

TEST(ReturnFreedMemory, LargeBlocksAreReturnedAlsoAfterOneWasFreed) {
  constexpr std::size_t kBlock = 8 << 20;
  const auto mapped = [] { return ::mallinfo2().hblkhd; };
  void* volatile block = std::malloc(kBlock);  // volatile: the compiler keeps the calls
  std::free(block);                            // glibc takes this as a reason to keep the next one
  ReturnFreedMemory();
  const std::size_t before = mapped();
  block = std::malloc(kBlock);
  EXPECT_GE(mapped(), before + kBlock);
  std::free(block);
  EXPECT_EQ(mapped(), before);
}

}  // namespace
}  // namespace tessera
