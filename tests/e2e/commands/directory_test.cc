// `tessera` on a node with several daemons: each command picks one by its device, and shows all.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "daemon/base/strings.h"
#include "tests/fakes/daemon/daemon_process.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

const std::string kFirstDaemon = "CPU-aaaaaaaa-0000-0000-0000-000000000001";
const std::string kSecondDaemon = "CPU-bbbbbbbb-0000-0000-0000-000000000002";

class Directory : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fakes::MakeTemporaryFolder();
    first_ = Start(kFirstDaemon);
    second_ = Start(kSecondDaemon);
    ASSERT_TRUE(first_ != nullptr && second_ != nullptr);
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::unique_ptr<DaemonProcess> Start(const std::string& uuid) const {
    return DaemonProcess::Start({.flags = {"--device=" + uuid},
                                 .pool_bytes = "64MiB",
                                 .folder = folder_,
                                 .listen = "{uuid}.sock",
                                 .uuid = uuid});
  }
  // Output and errors of a command that exits with `code`.
  std::string Run(const std::string& arguments, int code = 0) const {
    const std::string line = Concat(TESSERA_BINARY " ", arguments, " 2>&1");
    FILE* const pipe = ::popen(line.c_str(), "r");
    if (pipe == nullptr) return "popen failed";
    std::string text;
    std::array<char, 4096> piece{};
    for (std::size_t got; (got = ::fread(piece.data(), 1, piece.size(), pipe)) > 0;) {
      text.append(piece.data(), got);
    }
    const int status = ::pclose(pipe);
    EXPECT_EQ(WIFEXITED(status) ? WEXITSTATUS(status) : -1, code) << line << "\n" << text;
    return text;
  }
  std::string there() const { return Concat(" --address=unix:", folder_, "/ "); }

  std::string folder_;
  std::unique_ptr<DaemonProcess> first_, second_;
};

TEST_F(Directory, SeveralDaemonsAreListedUntilADeviceIsNamed) {
  EXPECT_THAT(Run("status" + there(), 1),
              AllOf(HasSubstr("has 2 sockets"), HasSubstr(kFirstDaemon + ".sock"),
                    HasSubstr(kSecondDaemon + ".sock"), HasSubstr("--device")));
  EXPECT_THAT(Run("status --json --device=CPU-b" + there()),
              AllOf(HasSubstr(kSecondDaemon), Not(HasSubstr(kFirstDaemon))));
  EXPECT_THAT(Run("status --device=CPU-b" + there()), HasSubstr("uuid " + kSecondDaemon));
  EXPECT_THAT(Run("status --device=CPU-c" + there(), 1), HasSubstr("has no socket for CPU-c"));
  EXPECT_THAT(Run("status --device=3" + there(), 2), HasSubstr("device \"3\""));
  EXPECT_THAT(Run(Concat("status --device=CPU-b --address=", first_->address()), 2),
              HasSubstr("unix:DIRECTORY/"));
  EXPECT_THAT(Run(Concat("status --address=unix:", folder_, "/nowhere/"), 1),
              HasSubstr(folder_ + "/nowhere/"));
}

TEST_F(Directory, TheOnlyDaemonNeedsNoDevice) {
  second_->Kill(SIGTERM);
  ASSERT_EQ(second_->WaitForExit(10), 0);
  EXPECT_THAT(Run("status --json" + there()), HasSubstr(kFirstDaemon));
}

TEST_F(Directory, AllShowsALinePerDaemonAndWhichDoNotAnswer) {
  EXPECT_THAT(Run("status --all" + there()),
              AllOf(ContainsRegex("cpu +" + kFirstDaemon + " .*serving"),
                    ContainsRegex("cpu +" + kSecondDaemon + " .*serving")));
  EXPECT_THAT(Run("top --all --once" + there()),
              AllOf(HasSubstr(kFirstDaemon), HasSubstr(kSecondDaemon), HasSubstr("sessions")));
  first_->Kill(SIGKILL);
  first_->WaitForExit(5);
  EXPECT_THAT(Run("status --all" + there()),
              AllOf(ContainsRegex("- +" + kFirstDaemon + " .*no answer"),
                    HasSubstr("no daemon answers at unix:" + first_->socket_path()),
                    ContainsRegex("cpu +" + kSecondDaemon + " .*serving")));
  EXPECT_THAT(Run("status --all --json" + there()),
              AllOf(HasSubstr("{\"daemons\":[{\"address\":\"unix:" + first_->socket_path()),
                    HasSubstr("\"stats\":null"), HasSubstr("\"error\":\"\",\"stats\":{")));
  EXPECT_THAT(Run(Concat("status --all --address=", second_->address()), 2),
              HasSubstr("--all needs the address of a directory"));
}

TEST_F(Directory, WorkersAndDrainsReachTheDaemonThatIsNamed) {
  Run("worker --sequences=1 --prompt=40 --steps=8 --device=CPU-b" + there());
  EXPECT_THAT(second_->Log(), HasSubstr("session"));
  EXPECT_THAT(first_->Log(), Not(HasSubstr("session")));
  EXPECT_THAT(Run("worker --sequences=1 --prompt=40 --steps=8" + there(), 1),
              HasSubstr("has 2 sockets"));
  Run("drain --device=CPU-b" + there());
  EXPECT_EQ(second_->WaitForExit(10), 0);
  EXPECT_THAT(Run("status --json" + there()), HasSubstr(kFirstDaemon)) << "the other one serves on";
}

TEST_F(Directory, ACommandWithItsOwnDaemonTakesNoDevice) {
  EXPECT_THAT(Run("eval --quick --device=CPU-b", 2), HasSubstr("needs --address"));
}

}  // namespace
}  // namespace tessera
