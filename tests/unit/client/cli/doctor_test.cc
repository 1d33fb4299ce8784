// The checks of `tessera doctor`.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <string>

#include "client/cli/doctor_checks.h"
#include "daemon/platform/unix_socket.h"
#include "tests/fakes/daemon/certificates.h"

namespace tessera::cli {
namespace {

using testing::ElementsAre;
using testing::Field;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr std::time_t kDay = 24 * 3600;

class DoctorTest : public testing::Test {
 protected:
  ~DoctorTest() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(folder_ + "/" + name) << text;
    return folder_ + "/" + name;
  }
  static auto Is(Verdict verdict, const std::string& text) {
    return testing::AllOf(Field(&Finding::verdict, verdict),
                          Field(&Finding::text, HasSubstr(text)));
  }

  static std::string MakeFolder() {
    std::string pattern = testing::TempDir() + "doctor-XXXXXX";
    return ::mkdtemp(pattern.data()) == nullptr ? std::string() : pattern;
  }

  const std::string folder_ = MakeFolder();
};

TEST_F(DoctorTest, ASocketIsThereAndForItsGroup) {
  const std::string path = folder_ + "/s";
  EXPECT_THAT(CheckSocket(path), ElementsAre(Is(Verdict::kBad, "No such file")));
  EXPECT_THAT(CheckSocket(Write("file", "")), ElementsAre(Is(Verdict::kBad, "is not a socket")));
  const absl::StatusOr<Fd> socket = ListenUnix(path, 0660, /*non_blocking=*/true);
  ASSERT_TRUE(socket.ok()) << socket.status();
  EXPECT_THAT(CheckSocket(path), ElementsAre(Is(Verdict::kGood, "mode 0660")));
  ASSERT_EQ(::chmod(path.c_str(), 0666), 0);
  EXPECT_THAT(CheckSocket(path),
              ElementsAre(Is(Verdict::kGood, "mode 0666"), Is(Verdict::kDoubtful, "every user")));
  // This process listens.
  EXPECT_THAT(CheckProcess(path), testing::SizeIs(1));
}

TEST_F(DoctorTest, CertificatesAreReadAndDated) {
  fakes::CertificateAuthority authority("one");
  const std::time_t now = std::time(nullptr);
  const client::TlsOptions tls = {.ca_file = Write("ca.pem", authority.certificate())};
  EXPECT_THAT(CheckTlsFiles(tls, now), ElementsAre(Is(Verdict::kDoubtful, "is valid for 0 days")));
  EXPECT_THAT(CheckTlsFiles(tls, now - 20 * kDay), ElementsAre(Is(Verdict::kBad, "not valid yet")));
  EXPECT_THAT(CheckTlsFiles(tls, now + 20000 * kDay), ElementsAre(Is(Verdict::kBad, " days ago")));
  EXPECT_THAT(CheckTlsFiles({.ca_file = Write("no.pem", "nothing")}, now),
              ElementsAre(Is(Verdict::kBad, "no certificate in PEM form")));
  EXPECT_THAT(CheckTlsFiles({.ca_file = "/nope"}, now),
              ElementsAre(Is(Verdict::kBad, "/nope: No such file")));
}

TEST_F(DoctorTest, AKeyIsForItsOwnerAlone) {
  const std::string key = Write("key.pem", "x");
  ASSERT_EQ(::chmod(key.c_str(), 0600), 0);
  EXPECT_THAT(CheckTlsFiles({.key_file = key}, 0), ElementsAre(Is(Verdict::kGood, key)));
  ASSERT_EQ(::chmod(key.c_str(), 0644), 0);
  EXPECT_THAT(CheckTlsFiles({.key_file = key}, 0),
              ElementsAre(Is(Verdict::kDoubtful, "every user")));
}

TEST_F(DoctorTest, HugePagesDependOnSettingAndKernel) {
  const auto check = [](const char* chosen, const char* release) {
    std::string setting = "always within_size advise never deny force\n";
    const std::string word = chosen;
    setting.replace(setting.find(word), word.size(), "[" + word + "]");
    return CheckHugePages(setting, release);
  };
  EXPECT_THAT(check("never", "6.1.0-18-amd64"), ElementsAre(Is(Verdict::kGood, "never")));
  EXPECT_THAT(check("never", "5.15.0"), ElementsAre(Is(Verdict::kDoubtful, "small pages")));
  EXPECT_THAT(check("advise", "5.15.0"), ElementsAre(Is(Verdict::kGood, "advise")));
  EXPECT_THAT(check("deny", "6.8.0"), ElementsAre(Is(Verdict::kDoubtful, "small pages")));
  EXPECT_THAT(CheckHugePages("", "6.8.0"), IsEmpty());
}

TEST_F(DoctorTest, FewFilesAreDoubtful) {
  EXPECT_THAT(CheckOpenFiles(256), ElementsAre(Is(Verdict::kDoubtful, "256")));
  EXPECT_THAT(CheckOpenFiles(65536), ElementsAre(Is(Verdict::kGood, "65536")));
}

TEST_F(DoctorTest, ACpuNeedsNoDriver) { EXPECT_THAT(CheckGpu("cpu"), IsEmpty()); }

TEST_F(DoctorTest, ADaemonThatDoesNotAnswerIsNamed) {
  EXPECT_THAT(CheckDaemon({.address = "unix:" + folder_ + "/s", .tls = std::nullopt, .token = ""}),
              ElementsAre(Is(Verdict::kBad, "no daemon answers at unix:")));
}

}  // namespace
}  // namespace tessera::cli
