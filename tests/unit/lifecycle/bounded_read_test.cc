#include "daemon/lifecycle/bounded_read.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

namespace tessera::lifecycle {
namespace {

using ::testing::HasSubstr;

// A file on a server that a test makes unreachable.
class RemoteFile {
 public:
  std::string Read() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reachable_; });
    ++reads_;
    changed_.notify_all();
    return "content " + std::to_string(reads_);
  }
  void SetReachable(bool reachable) {
    std::lock_guard lock(mutex_);
    reachable_ = reachable;
    changed_.notify_all();
  }
  void WaitForReads(int count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reads_ == count; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reachable_ = true;
  int reads_ = 0;
};

constexpr std::chrono::milliseconds kShort{20};
constexpr std::chrono::minutes kLong{5};

TEST(BoundedRead, ReturnsWhatIsRead) {
  const auto file = std::make_shared<RemoteFile>();
  BoundedRead<std::string> read([file] { return file->Read(); }, kLong);
  EXPECT_EQ(*read.Read(), "content 1");
  EXPECT_EQ(*read.Read(), "content 2");
}

TEST(BoundedRead, GivesUpAndReadsAgainWhenTheFileIsBack) {
  const auto file = std::make_shared<RemoteFile>();
  BoundedRead<std::string> read([file] { return file->Read(); }, kShort);
  file->SetReachable(false);
  const absl::Status late = read.Read().status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(late)) << late;
  EXPECT_THAT(std::string(late.message()), HasSubstr("20 ms"));
  const absl::Status busy = read.Read().status();
  EXPECT_TRUE(absl::IsUnavailable(busy)) << busy;
  file->SetReachable(true);
  file->WaitForReads(1);
  absl::StatusOr<std::string> again = read.Read();
  while (!again.ok()) again = read.Read();  // a busy machine may take longer than the limit
  EXPECT_NE(*again, "content 1") << "older than the question";
}

TEST(BoundedRead, AHangingReadMayOutliveIt) {
  const auto file = std::make_shared<RemoteFile>();
  file->SetReachable(false);
  {
    BoundedRead<std::string> read([file] { return file->Read(); }, kShort);
    EXPECT_TRUE(absl::IsDeadlineExceeded(read.Read().status()));
  }
  file->SetReachable(true);
  file->WaitForReads(1);
}

}  // namespace
}  // namespace tessera::lifecycle
