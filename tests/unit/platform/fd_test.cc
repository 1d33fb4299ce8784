#include "daemon/platform/fd.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "gtest/gtest.h"

namespace tessera {
namespace {

TEST(Fd, ClosesOnceAndMoves) {
  const int before = CountOpenFds();
  {
    Fd first(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    ASSERT_TRUE(first.valid());
    EXPECT_EQ(CountOpenFds(), before + 1);
    Fd second = std::move(first);
    EXPECT_FALSE(first.valid());
    Fd third(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    third = std::move(second);
    EXPECT_EQ(CountOpenFds(), before + 1);
    Fd& self = third;
    third = std::move(self);
    EXPECT_TRUE(third.valid());
    const int raw = third.Release();
    EXPECT_FALSE(third.valid());
    EXPECT_EQ(::close(raw), 0);
  }
  EXPECT_EQ(CountOpenFds(), before);
}

TEST(Fd, ADuplicateIsAnotherNumberOfTheSameFile) {
  Fd first(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  Fd second;
  ASSERT_TRUE(DuplicateFd(first.get(), &second).ok());
  EXPECT_NE(first.get(), second.get());
  EXPECT_EQ(::fcntl(second.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  const absl::Status bad = DuplicateFd(-1, &second);
  EXPECT_FALSE(bad.ok());
  EXPECT_FALSE(second.valid());
}

TEST(Fd, TheLimitIsRaisedToWhatTheProcessMayHave) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit low = {.rlim_cur = 64, .rlim_max = before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_EQ(RaiseFdLimit(), before.rlim_max);
  rlimit after{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &after), 0);
  EXPECT_EQ(after.rlim_cur, before.rlim_max);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(Fd, AnErrorSaysWhatAndWhy) {
  errno = ENOMEM;
  const absl::Status status = ErrnoStatus("mmap of 4096 bytes");
  EXPECT_EQ(status.message(), "mmap of 4096 bytes: Cannot allocate memory");
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

}  // namespace
}  // namespace tessera
