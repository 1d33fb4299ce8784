// Reading the JSON of an earlier run.

#include "client/bench/earlier_run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "daemon/base/strings.h"

namespace tessera::cli::bench {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

class EarlierRunTest : public testing::Test {
 protected:
  ~EarlierRunTest() override { std::filesystem::remove(path_); }
  absl::StatusOr<EarlierRun> Read(const std::string& text, std::string_view benchmark = "serve") {
    std::ofstream(path_) << text;
    return ReadEarlierRun(path_, benchmark);
  }
  const std::string path_ = testing::TempDir() + Concat("earlier_", ::getpid(), ".json");
};

TEST_F(EarlierRunTest, ReadsWhatAReportWrites) {
  Report report{.name = "serve"};
  report.Add({.name = "own_k16", .value = 1500, .unit = "tokens/s"});
  report.Add(
      {.name = "none", .value = std::numeric_limits<double>::quiet_NaN(), .unit = "refused"});
  const absl::StatusOr<EarlierRun> run = Read(report.Json());
  ASSERT_TRUE(run.ok()) << run.status();
  EXPECT_EQ(run->machine, Machine());
  EXPECT_THAT(run->values, ElementsAre(Pair("own_k16", 1500)));
}

TEST_F(EarlierRunTest, OtherFilesAreRefused) {
  EXPECT_TRUE(absl::IsNotFound(ReadEarlierRun("/nonexistent", "serve").status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Read("a table").status()));
  EXPECT_THAT(Read("{}").status().ToString(), HasSubstr("is not a run"));
  EXPECT_THAT(Read(Report{.name = "scale"}.Json()).status().ToString(),
              HasSubstr("is a run of scale, not of serve"));
}

}  // namespace
}  // namespace tessera::cli::bench
