#include "daemon/platform/lock_file.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "daemon/platform/unix_socket.h"
#include "gtest/gtest.h"
#include "tests/fakes/daemon/peer_process.h"

namespace tessera {
namespace {

class LockFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "tessera-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    path_ = folder_ + "/lock";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // A process that takes the lock, reports it, and holds it until it is killed.
  int Hold(int socket) const {
    const absl::StatusOr<LockFile> lock = LockFile::Acquire(path_);
    const std::byte said{static_cast<unsigned char>(lock.ok() ? 1 : 0)};
    if (!SendMessage(socket, {&said, 1}).ok()) return 1;
    std::byte never;
    (void)ReceiveMessage(socket, {&never, 1});
    return 0;
  }

  std::string folder_;
  std::string path_;
};

TEST_F(LockFileTest, AnotherProcessThatHoldsItIsNamed) {
  PeerProcess other([this](int socket) { return Hold(socket); });
  std::byte held{};
  ASSERT_TRUE(ReceiveMessage(other.socket(), {&held, 1}).ok());
  ASSERT_EQ(held, std::byte{1});
  const absl::StatusOr<LockFile> lock = LockFile::Acquire(path_);
  ASSERT_EQ(lock.status().code(), absl::StatusCode::kAlreadyExists);
  const std::string text = lock.status().ToString();
  EXPECT_NE(text.find(path_), std::string::npos) << text;
  EXPECT_NE(text.find("pid " + std::to_string(other.pid())), std::string::npos) << text;
}

TEST_F(LockFileTest, AKilledProcessHoldsNothing) {
  {
    PeerProcess other([this](int socket) { return Hold(socket); });
    std::byte held{};
    ASSERT_TRUE(ReceiveMessage(other.socket(), {&held, 1}).ok());
    ASSERT_EQ(LockFile::Acquire(path_).status().code(), absl::StatusCode::kAlreadyExists);
    other.Kill();
    EXPECT_EQ(other.Wait(), 128 + SIGKILL);
  }
  const absl::StatusOr<LockFile> lock = LockFile::Acquire(path_);
  ASSERT_TRUE(lock.ok()) << lock.status();
  std::ifstream file(path_);
  std::string pid;
  file >> pid;
  EXPECT_EQ(pid, std::to_string(::getpid()));  // without remains of a longer pid
}

TEST_F(LockFileTest, TheFileStaysWhenTheLockGoes) {
  ino_t inode = 0;
  for (int i = 0; i < 3; ++i) {
    const absl::StatusOr<LockFile> lock = LockFile::Acquire(path_);
    ASSERT_TRUE(lock.ok()) << lock.status();
    EXPECT_EQ(LockFile::Acquire(path_).status().code(), absl::StatusCode::kAlreadyExists);
    struct stat info {};
    ASSERT_EQ(::stat(path_.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600u);
    if (i > 0) {
      EXPECT_EQ(info.st_ino, inode);
    }
    inode = info.st_ino;
  }
}

TEST_F(LockFileTest, ALinkIsNotFollowed) {
  const std::string target = folder_ + "/precious";
  std::ofstream(target) << "contents";
  std::filesystem::create_symlink(target, path_);
  EXPECT_FALSE(LockFile::Acquire(path_).ok());
  std::ifstream file(target);
  std::string text;
  file >> text;
  EXPECT_EQ(text, "contents");
}

TEST_F(LockFileTest, AFolderThatIsNotThereIsAnErrorThatNamesThePath) {
  const std::string path = folder_ + "/none/lock";
  const absl::StatusOr<LockFile> lock = LockFile::Acquire(path);
  ASSERT_FALSE(lock.ok());
  EXPECT_NE(lock.status().ToString().find(path), std::string::npos);
}

}  // namespace
}  // namespace tessera
