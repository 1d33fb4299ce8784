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

std::vector<std::string> LinesOf(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// Whatever the columns, no line is longer than the terminal, and columns that must stay do.
TEST(Table, FitsTheWidth) {
  TestRandom random;
  for (int round = 0; round < 500; ++round) {
    std::vector<Table::Column> columns;
    for (std::uint64_t c = random.Between(1, 9); c > 0; --c) {
      columns.push_back({.title = std::string(random.Between(1, 9), 'T'),
                         .align = random.OneIn(2) ? Align::kLeft : Align::kRight,
                         .leave_out = static_cast<std::uint8_t>(random.Below(4)),
                         .least = random.OneIn(3) ? random.Between(2, 9) : 0});
    }
    Table table(columns);
    for (std::uint64_t r = random.Below(5); r > 0; --r) {
      std::vector<std::string> row;
      for (std::size_t c = 0; c < columns.size(); ++c) row.emplace_back(random.Below(30), 'x');
      table.Add(row);
    }
    const std::size_t width = random.Between(1, 120);
    const int indent = static_cast<int>(random.Below(4));
    for (const std::string& line : LinesOf(table.Render(indent, width))) {
      EXPECT_LE(line.size(), width);
    }
    for (const std::string& line : table.Lines(width)) EXPECT_LE(line.size(), width);
    // A width that is enough changes nothing.
    EXPECT_EQ(table.Render(indent, 1000), table.Render(indent));
  }
}

TEST(Table, CutsBeforeItLeavesOutAndLeavesOutTheLeastImportant) {
  Table table({{.title = "id"},
               {.title = "name", .align = Align::kLeft, .leave_out = 1, .least = 6},
               {.title = "extra", .leave_out = 2},
               {.title = "state"}});
  table.Add({"1", "a-long-name", "123456", "idle"});
  EXPECT_EQ(table.Render(0, 80),
            "id  name          extra  state\n"
            "--  -----------  ------  -----\n"
            " 1  a-long-name  123456   idle\n");
  EXPECT_EQ(table.Lines(28).back(), " 1  a-long-n~  123456   idle");
  EXPECT_EQ(table.Lines(20).back(), " 1  a-long-n~   idle");
  EXPECT_EQ(table.Lines(20).front(), "id  name       state");
  EXPECT_EQ(table.Lines(10).back(), " 1   idle");
}

TEST(Table, NamesOfWorkersCannotControlTheTerminal) {
  Table table({{"name", Align::kLeft}});
  table.Add({"evil\x1b[2J\n"});
  EXPECT_EQ(table.Lines(0).back(), "evil?[2J?");
}

TEST(Cut, CountsCharactersAndMarksTheCut) {
  EXPECT_EQ(Cut("abcdef", 6), "abcdef");
  EXPECT_EQ(Cut("abcdef", 4), "abc~");
  EXPECT_EQ(Cut("\xc3\xa4\xc3\xb6\xc3\xbc", 3), "\xc3\xa4\xc3\xb6\xc3\xbc");
  EXPECT_EQ(Cut("\xc3\xa4\xc3\xb6\xc3\xbc", 2), "\xc3\xa4~");
  EXPECT_EQ(Cut("abc", 0), "");
}

}  // namespace
}  // namespace tessera::cli
