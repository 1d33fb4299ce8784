#include "client/tools/table.h"

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::cli {
namespace {

TEST(Table, AlignsAndUnderlines) {
  Table table({{"name", Align::kLeft}, {"n", Align::kRight}});
  table.Add({"a", "1"});
  table.Add({"longer", "12"});
  EXPECT_EQ(table.Render(),
            "name     n\n"
            "------  --\n"
            "a        1\n"
            "longer  12\n");
  EXPECT_EQ(table.Render(2).substr(0, 6), "  name");
}

TEST(Table, LongCellsGoOnBelow) {
  Table table({{"t", Align::kLeft}, {"text", Align::kLeft, 9}, {"n"}});
  table.Add({"a", "one two three four", "1"});
  table.Add({"b", "unbreakable word", "2"});
  table.Add({"c", "", "3"});
  EXPECT_EQ(table.Render(),
            "t  text         n\n"
            "-  -----------  -\n"
            "a  one two      1\n"
            "   three\n"
            "   four\n"
            "b  unbreakable  2\n"
            "   word\n"
            "c               3\n");
}

// Every word is present, in order, and no line exceeds the width.
TEST(Table, WrappingLosesNothing) {
  TestRandom random;
  for (int round = 0; round < 200; ++round) {
    const std::size_t most = random.Between(8, 20);
    std::string text;
    std::vector<std::string> words;
    for (std::uint64_t i = random.Between(1, 30); i > 0; --i) {
      words.emplace_back(random.Between(1, 8), static_cast<char>('a' + random.Below(26)));
      text += (text.empty() ? "" : " ") + words.back();
    }
    Table table({{"", Align::kLeft, most}});
    table.Add({text});
    std::istringstream lines(table.Render());
    std::string line;
    std::getline(lines, line);  // the title
    std::getline(lines, line);
    std::string back;
    while (std::getline(lines, line)) {
      EXPECT_LE(line.size(), most);
      back += (back.empty() ? "" : " ") + line;
    }
    EXPECT_EQ(back, text);
  }
}

}  // namespace
}  // namespace tessera::cli
