// README.md of the layer agrees with the registry, and its examples behave as stated.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"
#include "tests/unit/policies/policy_reference.h"

namespace tessera::policies {
namespace {

using Cells = std::vector<std::string>;

// The cells of a table's line. "\|" is a bar, and code loses its backquotes.
Cells CellsOf(std::string_view line) {
  Cells cells;
  std::string cell;
  for (std::size_t i = 1; i < line.size(); ++i) {
    if (line[i] == '\\' && i + 1 < line.size() && line[i + 1] == '|') {
      cell += line[++i];
    } else if (line[i] == '|') {
      cells.emplace_back(Trim(cell));
      cell.clear();
    } else if (line[i] != '`') {
      cell += line[i];
    }
  }
  return cells;
}

struct Section {
  std::string heading;  // without markup
  std::string text;
  std::vector<Cells> rows;  // table rows without headers
};

std::vector<Section> Sections() {
  std::ifstream readme(TESSERA_POLICIES_README);
  EXPECT_TRUE(readme) << TESSERA_POLICIES_README;
  std::vector<Section> sections(1);
  bool in_table = false;
  for (std::string line; std::getline(readme, line);) {
    if (line.starts_with("#")) {
      sections.push_back({.heading = line.substr(line.find(' ') + 1), .text = {}, .rows = {}});
    } else if (!line.starts_with("|")) {
      Append(sections.back().text, line, "\n");
    } else if (line.starts_with("|---")) {
      in_table = true;
    } else if (in_table) {
      sections.back().rows.push_back(CellsOf(line));
    }
    in_table = in_table && line.starts_with("|");
  }
  return sections;
}

const Section* FindSection(const std::vector<Section>& sections, std::string_view heading) {
  for (const Section& section : sections) {
    if (section.heading == heading) return &section;
  }
  return nullptr;
}

TEST(Readme, ThePageOfOptionsIsGenerated) {
  std::ifstream file(TESSERA_POLICY_OPTIONS);
  const std::string page((std::istreambuf_iterator<char>(file)), {});
  EXPECT_TRUE(page == PolicyReference())
      << "run: build/tests/policy_reference > deploy/docs/policy-options.md";
}

// | policy | canonical text | meaning |
TEST(Readme, ItsExamplesHaveTheirCanonicalText) {
  const std::vector<Section> sections = Sections();
  const Section* section = FindSection(sections, "Examples");
  ASSERT_NE(section, nullptr);
  for (const Cells& row : section->rows) {
    ASSERT_EQ(row.size(), 3u);
    const absl::StatusOr<Policy> policy = ParsePolicy(row[0]);
    ASSERT_TRUE(policy.ok()) << row[0] << ": " << policy.status();
    EXPECT_EQ(policy->text, row[1]) << row[0];
  }
  EXPECT_GE(section->rows.size(), 5u);
}

// | policy | message |
TEST(Readme, ItsRefusalsAreTheMessages) {
  const std::vector<Section> sections = Sections();
  const Section* section = FindSection(sections, "Refusals");
  ASSERT_NE(section, nullptr);
  for (const Cells& row : section->rows) {
    ASSERT_EQ(row.size(), 2u);
    const absl::StatusOr<Policy> policy = ParsePolicy(row[0]);
    ASSERT_FALSE(policy.ok()) << row[0];
    EXPECT_EQ(std::string(AsStringView(policy.status().message())), row[1]) << row[0];
  }
  EXPECT_GE(section->rows.size(), 5u);
}

}  // namespace
}  // namespace tessera::policies
