#include "daemon/platform/read_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace tessera {
namespace {

class SecretFile : public testing::Test {
 protected:
  SecretFile() {
    std::string name = std::filesystem::temp_directory_path() / "secret-XXXXXX";
    const int fd = ::mkstemp(name.data());
    EXPECT_GE(fd, 0);
    ::close(fd);
    path_ = name;
  }
  ~SecretFile() override { std::filesystem::remove(path_); }

  absl::Status With(mode_t mode) {
    EXPECT_EQ(::chmod(path_.c_str(), mode), 0);
    return CheckSecret(path_);
  }

  std::string path_;
};

TEST_F(SecretFile, WhatOthersMayReadIsRefused) {
  for (const mode_t mode : {0644, 0604, 0622, 0660, 0777, 0641}) {
    const absl::Status status = With(mode);
    EXPECT_TRUE(absl::IsPermissionDenied(status)) << std::oct << mode;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(path_ + "\" has mode 0"));
  }
  for (const mode_t mode : {0600, 0400, 0700}) EXPECT_TRUE(With(mode).ok()) << std::oct << mode;
}

// A mounted secret belongs to root and the group of the daemon.
TEST_F(SecretFile, AGroupMayReadWhatBelongsToRoot) {
  const bool root = ::geteuid() == 0;
  EXPECT_EQ(With(0440).ok(), root);
  EXPECT_EQ(With(0640).ok(), root);
  if (!root) return;
  ASSERT_EQ(::chown(path_.c_str(), 12345, 0), 0);
  EXPECT_TRUE(With(0640).ok()) << "another user's";
}

TEST_F(SecretFile, TheFileCountsThatALinkLeadsTo) {
  const std::string link = path_ + ".link";
  std::filesystem::create_symlink(path_, link);
  EXPECT_TRUE(With(0600).ok());
  EXPECT_TRUE(CheckSecret(link).ok());
  std::filesystem::remove(link);
}

TEST_F(SecretFile, AMissingFileIsNoSecret) { EXPECT_TRUE(CheckSecret(path_ + ".none").ok()); }

}  // namespace
}  // namespace tessera
