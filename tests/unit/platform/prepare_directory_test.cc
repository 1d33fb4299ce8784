#include "daemon/platform/prepare_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::uint32_t kUser = 65532;

class PrepareDirectoryTest : public ::testing::Test {
 protected:
  PrepareDirectoryTest() {
    std::string name = (fs::temp_directory_path() / "prepare_XXXXXX").string();
    root_ = mkdtemp(name.data());
    path_ = root_ / "tessera";
  }
  ~PrepareDirectoryTest() override { fs::remove_all(root_); }

  // A request that needs no privilege: for the test's own user.
  DirectoryRequest Mine(unsigned mode = 0750) const {
    return {.path = path_.string(), .uid = ::getuid(), .gid = ::getgid(), .mode = mode};
  }
  DirectoryRequest Theirs() const {
    return {.path = path_.string(), .uid = kUser, .gid = kUser + 1, .mode = 0750};
  }
  std::string ErrorOf(const DirectoryRequest& request) const {
    const auto prepared = PrepareDirectory(request);
    return prepared.ok() ? "(no error)" : std::string(prepared.status().message());
  }
  struct stat Stat() const {
    struct stat found {};
    EXPECT_EQ(::stat(path_.c_str(), &found), 0) << path_;
    return found;
  }

  fs::path root_;
  fs::path path_;
};

TEST_F(PrepareDirectoryTest, MakesAdjustsAndLeavesAlone) {
  EXPECT_EQ(*PrepareDirectory(Mine()), Prepared::kMade);
  EXPECT_EQ(Stat().st_mode & 07777, 0750u);
  EXPECT_EQ(*PrepareDirectory(Mine()), Prepared::kUnchanged);
  EXPECT_EQ(*PrepareDirectory(Mine(0700)), Prepared::kAdjusted);
  EXPECT_EQ(Stat().st_mode & 07777, 0700u);
  // It stays ours when it has the files of an earlier daemon.
  std::ofstream(path_ / "tesserad.sock.lock") << "1";
  EXPECT_EQ(*PrepareDirectory(Mine(0755)), Prepared::kAdjusted);
  EXPECT_TRUE(fs::exists(path_ / "tesserad.sock.lock"));
}

TEST_F(PrepareDirectoryTest, IgnoresTheMaskAndTrailingSlashes) {
  const mode_t mask = ::umask(0077);
  DirectoryRequest request = Mine(0755);
  request.path += "//./";
  EXPECT_EQ(*PrepareDirectory(request), Prepared::kMade);
  ::umask(mask);
  EXPECT_EQ(Stat().st_mode & 07777, 0755u);
}

TEST_F(PrepareDirectoryTest, RefusesSymbolicLinksInEveryComponent) {
  fs::create_directory(root_ / "real");
  fs::create_directory_symlink(root_ / "real", path_);
  EXPECT_THAT(ErrorOf(Mine()), HasSubstr(path_.string() + " is a symbolic link"));
  DirectoryRequest below = Mine();
  below.path += "/child";
  EXPECT_THAT(ErrorOf(below), HasSubstr(path_.string() + " is a symbolic link"));
  EXPECT_TRUE(fs::is_empty(root_ / "real"));
}

TEST_F(PrepareDirectoryTest, RefusesPathsThatCannotBeMeant) {
  const auto of = [this](const std::string& path) {
    DirectoryRequest request = Mine();
    request.path = path;
    return ErrorOf(request);
  };
  EXPECT_THAT(of("run/tessera"), HasSubstr("\"run/tessera\" is not an absolute path"));
  EXPECT_THAT(of(""), HasSubstr("is not an absolute path"));
  EXPECT_THAT(of("/"), HasSubstr("is the root directory"));
  EXPECT_THAT(of(root_.string() + "/x/../y"), HasSubstr("contains \"..\""));
  EXPECT_THAT(of(root_.string() + "/missing/tessera"),
              AllOf(HasSubstr("/missing does not exist"), HasSubstr("only the last directory")));
  std::ofstream(path_) << "a file";
  EXPECT_THAT(ErrorOf(Mine()), HasSubstr(path_.string() + " is not a directory"));
}

TEST_F(PrepareDirectoryTest, TakesNoDirectoryOfAnotherUserThatIsNotEmpty) {
  if (::getuid() != 0) GTEST_SKIP() << "needs root";
  fs::create_directory(path_);
  std::ofstream(path_ / "data") << "precious";
  EXPECT_THAT(ErrorOf(Theirs()),
              AllOf(HasSubstr("belongs to uid 0, not 65532"), HasSubstr("is not empty")));
  EXPECT_EQ(Stat().st_uid, 0u);
  fs::remove(path_ / "data");
  EXPECT_EQ(*PrepareDirectory(Theirs()), Prepared::kAdjusted);
  EXPECT_EQ(Stat().st_uid, kUser);
  EXPECT_EQ(Stat().st_gid, kUser + 1);
}

// Root of a container that has dropped every other capability may not even list a directory of
// another user.
TEST_F(PrepareDirectoryTest, NeedsOnlyChownAndFowner) {
  if (::getuid() != 0) GTEST_SKIP() << "needs root";
  const pid_t child = ::fork();
  if (child == 0) {
    __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
    __user_cap_data_struct data[2] = {};
    data[0].effective = data[0].permitted = 1u << CAP_CHOWN | 1u << CAP_FOWNER;
    if (::syscall(SYS_capset, &header, data) != 0) ::_exit(10);
    DirectoryRequest request = Theirs();
    const auto made = PrepareDirectory(request);
    if (!made.ok() || *made != Prepared::kMade) ::_exit(11);
    request.mode = 0700;
    const auto adjusted = PrepareDirectory(request);
    if (!adjusted.ok() || *adjusted != Prepared::kAdjusted) ::_exit(12);
    const auto again = PrepareDirectory(request);
    if (!again.ok() || *again != Prepared::kUnchanged) ::_exit(13);
    request.uid = kUser - 1;  // not ours, and it cannot be listed
    const auto refused = PrepareDirectory(request);
    ::_exit(absl::IsFailedPrecondition(refused.status()) ? 0 : 14);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_EQ(Stat().st_uid, kUser);
  EXPECT_EQ(Stat().st_mode & 07777, 0700u);
}

}  // namespace
}  // namespace tessera
