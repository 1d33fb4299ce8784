#include "client/eval/state_file.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <iterator>

#include "daemon/base/strings.h"
#include "tests/unit/client/eval/random_plan.h"

namespace tessera::cli::eval {
namespace {

class StateFileTest : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }

  std::string Bytes() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  void Write(const std::string& bytes) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << bytes;
  }
  StateFile Open() const {
    absl::StatusOr<StateFile> state = StateFile::Open(path_, plan_);
    EXPECT_TRUE(state.ok()) << state.status();
    return *std::move(state);
  }
  std::string WhyNot(const EvaluationPlan& plan) const {
    const absl::Status status = StateFile::Open(path_, plan).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(AsStringView(status.message()));
  }
  static void ExpectSame(const FinishedUnit& one, const FinishedUnit& other) {
    EXPECT_EQ(one.unit, other.unit);
    ASSERT_EQ(one.outcomes.size(), other.outcomes.size());
    for (std::size_t i = 0; i < one.outcomes.size(); ++i) {
      EXPECT_EQ(one.outcomes[i].right, other.outcomes[i].right);
      EXPECT_EQ(one.outcomes[i].samples, other.outcomes[i].samples);
      EXPECT_EQ(one.outcomes[i].marks, other.outcomes[i].marks);
      EXPECT_EQ(one.outcomes[i].bytes_kept, other.outcomes[i].bytes_kept);
      EXPECT_EQ(one.outcomes[i].step_ms, other.outcomes[i].step_ms);
      EXPECT_EQ(one.outcomes[i].not_packed, other.outcomes[i].not_packed);
      EXPECT_EQ(one.outcomes[i].refused, other.outcomes[i].refused);
    }
    EXPECT_EQ(one.example.question, other.example.question);
    EXPECT_EQ(one.example.answer, other.example.answer);
    EXPECT_EQ(one.example.answers, other.example.answers);
  }

  TestRandom random_;
  const std::string path_ = testing::TempDir() + Concat("state-", random_.Bits(), ".jsonl");
  const EvaluationPlan plan_ = RandomPlan(random_);
};

// A file truncated at any place returns the units with complete lines, and can be continued.
TEST_F(StateFileTest, GoesOnWhereverItWasTorn) {
  std::vector<FinishedUnit> units;
  std::vector<std::size_t> ends;  // ends of the units' lines
  {
    StateFile state = Open();
    EXPECT_TRUE(state.finished().empty());
    for (std::size_t i = 0; i < UnitsOf(plan_).size(); ++i) {
      units.push_back(RandomUnit(random_, plan_, i));
      ASSERT_TRUE(state.Add(units.back()).ok());
      ends.push_back(Bytes().size());
    }
  }
  const std::string whole = Bytes();
  for (int i = 0; i < 40; ++i) {
    const std::size_t cut = i == 0 ? whole.size() : random_.Below(whole.size() + 1);
    Write(whole.substr(0, cut));
    const auto kept = static_cast<std::size_t>(
        std::count_if(ends.begin(), ends.end(), [&](std::size_t end) { return end <= cut; }));
    {
      StateFile state = Open();
      ASSERT_EQ(state.finished().size(), kept) << cut;
      for (std::size_t u = 0; u < kept; ++u) ExpectSame(state.finished()[u], units[u]);
      for (std::size_t u = kept; u < units.size(); ++u) ASSERT_TRUE(state.Add(units[u]).ok());
    }
    EXPECT_EQ(Bytes(), whole) << cut;
  }
}

TEST_F(StateFileTest, RefusesOtherFlagsByName) {
  ASSERT_TRUE(Open().Add(RandomUnit(random_, plan_, 0)).ok());
  const std::string before = Bytes();
  EvaluationPlan other = plan_;
  other.samples += 1;
  EXPECT_THAT(WhyNot(other), testing::AllOf(testing::HasSubstr("samples"),
                                            testing::HasSubstr(Concat(plan_.samples)),
                                            testing::HasSubstr(Concat(other.samples))));
  other = plan_;
  other.policies[1].budget = 0.123;
  EXPECT_THAT(WhyNot(other), testing::HasSubstr("policies"));
  other = plan_;
  other.depths = {0.25};
  EXPECT_THAT(WhyNot(other), testing::HasSubstr("depths"));
  other = plan_;
  other.questions = {Question::kSeen};
  EXPECT_THAT(WhyNot(other), testing::HasSubstr("question"));
  EXPECT_EQ(Bytes(), before);
}

TEST_F(StateFileTest, LeavesAFileThatIsNotItsOwnAlone) {
  for (const std::string text : {"a diary", "a diary\nof two days\n", "{\"a\": 1}\n"}) {
    Write(text);
    EXPECT_THAT(WhyNot(plan_), testing::HasSubstr("not a state file of an evaluation"));
    EXPECT_EQ(Bytes(), text);
  }
}

TEST_F(StateFileTest, NamesALineThatCannotBe) {
  { Open(); }
  const std::string header = Bytes();
  for (const char* const line : {"{\"unit\": 1000000, \"outcomes\": []}",
                                 "{\"unit\": 0, \"outcomes\": []}", "{}", "[1, 2"}) {
    Write(header + line + "\n");
    EXPECT_THAT(WhyNot(plan_), testing::HasSubstr("line 2"));
  }
  FinishedUnit unit = RandomUnit(random_, plan_, 0);
  unit.outcomes[0] = {.right = 2, .samples = 1};
  Write(header);
  ASSERT_TRUE(Open().Add(unit).ok());
  EXPECT_THAT(WhyNot(plan_), testing::HasSubstr("2 right of 1"));
}

}  // namespace
}  // namespace tessera::cli::eval
