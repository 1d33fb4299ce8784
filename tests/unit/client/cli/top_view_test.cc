// `tessera top` on terminals of any size: nothing is ever wider or higher than the terminal.

#include "client/cli/top_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "daemon/base/strings.h"
#include "tests/fakes/seed.h"

namespace tessera::cli {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr std::uint64_t kFirstTenant = std::uint64_t{1} << 48;

Look LookWith(int sequences, std::uint64_t tokens_each = 100) {
  Look look;
  look.stats.set_version("0.1.0");
  look.stats.set_device("cpu");
  look.stats.set_pool_limit_bytes(1000);
  look.stats.set_pool_reserved_bytes(420);
  look.stats.set_host_tier_limit_bytes(1000);
  for (int i = 0; i < 3; ++i) {
    v1::TenantStats& tenant = *look.stats.add_tenants();
    tenant.set_name(Concat("tenant-", i));
    tenant.set_tokens_appended(tokens_each);
    v1::SessionInfo& session = *look.sessions.add_sessions();
    session.set_session_id(kFirstTenant + 1000 + static_cast<std::uint64_t>(i));
    session.set_worker_name(Concat("worker-", i));
  }
  for (int i = sequences; i > 0; --i) {
    v1::SequenceInfo& sequence = *look.sequences.add_sequences();
    sequence.set_sequence_id(kFirstTenant + static_cast<std::uint64_t>(i));
    sequence.set_tenant("a-tenant-with-a-long-name");
    sequence.set_model("a-model-with-a-long-name");
    sequence.set_policy("chunkkv:budget=0.3+mosaickv:keep=0.125|0.25,group=2+int8");
    sequence.set_tokens(tokens_each * static_cast<std::uint64_t>(i));
    sequence.set_tile_bytes(static_cast<std::uint64_t>((i * 7919) % 101));
  }
  look.sequences.set_total(static_cast<std::uint64_t>(sequences));
  return look;
}

std::string Text(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) Append(text, line, "\n");
  return text;
}

std::vector<std::string> Draw(TopView& view, const Look& look, TerminalSize size = {}) {
  return view.Draw(look, {}, size, "");
}

TEST(TopViewTest, FitsEveryTerminal) {
  TestRandom random;
  TopView view(/*colours=*/false);
  const Look before = LookWith(40), look = LookWith(50, 200);
  constexpr char kKeys[] = "nrtbsh123jk x";
  for (int round = 0; round < 2000; ++round) {
    const TerminalSize size = {.columns = random.Between(1, 220), .rows = random.Between(1, 60)};
    if (random.OneIn(2)) {
      view.Press(static_cast<Key>(random.Below(9)));
    } else {
      EXPECT_TRUE(view.Press(kKeys[random.Below(sizeof(kKeys) - 1)]));
    }
    const Since since = {.look = random.OneIn(2) ? &before : nullptr, .seconds = 1};
    const std::string problem = random.OneIn(4) ? "no daemon answers at unix:/nowhere" : "";
    const std::vector<std::string> lines = view.Draw(look, since, size, problem);
    EXPECT_LE(lines.size(), size.rows);
    for (const std::string& line : lines) EXPECT_LE(line.size(), size.columns) << line;
  }
}

// At 80x24, what matters most is there.
TEST(TopViewTest, ASmallTerminalShowsMemoryAndSequences) {
  TopView view(/*colours=*/false);
  const Look before = LookWith(40, 100), look = LookWith(40, 160);
  const std::vector<std::string> lines = view.Draw(look, {.look = &before, .seconds = 2}, {}, "");
  ASSERT_EQ(lines.size(), 24u);
  EXPECT_THAT(lines[0], StartsWith("tesserad 0.1.0"));
  EXPECT_THAT(lines[1], StartsWith("memory  [#############.................]  42 %"));
  EXPECT_THAT(lines[3], HasSubstr("appended 90/s"));
  EXPECT_THAT(lines[5], StartsWith("sequence"));
  for (const char* column : {"policy", "tokens", "tokens/s", "tiles", "state"}) {
    EXPECT_THAT(lines[5], HasSubstr(column));
  }
  EXPECT_THAT(lines[6], StartsWith("s40 "));
  EXPECT_THAT(lines[6], HasSubstr(" 6400 "));
  EXPECT_THAT(lines[6], HasSubstr(" 1.2k "));  // 60 * 40 tokens in 2 s
  EXPECT_THAT(lines[23], HasSubstr("23 more below"));
}

TEST(TopViewTest, SortsByWhatIsAsked) {
  TopView view(/*colours=*/false);
  const Look look = LookWith(40);
  EXPECT_TRUE(view.Press('t'));
  EXPECT_THAT(Draw(view, look)[6], StartsWith("s40 "));
  EXPECT_TRUE(view.Press('b'));
  const auto sequences = look.sequences.sequences();
  const auto largest = std::ranges::max_element(sequences, {}, &v1::SequenceInfo::tile_bytes);
  EXPECT_THAT(Draw(view, look)[6],
              StartsWith(Concat("s", largest->sequence_id() - kFirstTenant, " ")));
}

TEST(TopViewTest, ScrollsToTheEndAndBack) {
  TopView view(/*colours=*/false);
  const Look look = LookWith(40);
  view.Press(Key::kDown);
  EXPECT_THAT(Draw(view, look)[6], StartsWith("s39 "));
  view.Press(Key::kPageDown);
  EXPECT_THAT(Draw(view, look)[6], StartsWith("s22 "));
  view.Press(Key::kEnd);
  std::vector<std::string> lines = Draw(view, look);
  EXPECT_THAT(lines[22], StartsWith("s1 "));
  EXPECT_THAT(lines[23], Not(HasSubstr("below")));
  view.Press(Key::kDown);
  EXPECT_EQ(Draw(view, look), lines);
  view.Press(Key::kHome);
  EXPECT_THAT(Draw(view, look)[6], StartsWith("s40 "));
  view.Press(Key::kUp);
  EXPECT_THAT(Draw(view, look)[6], StartsWith("s40 "));
  // The table became shorter meanwhile.
  view.Press(Key::kEnd);
  static_cast<void>(Draw(view, look));
  EXPECT_THAT(Draw(view, LookWith(2))[6], StartsWith("s2 "));
}

TEST(TopViewTest, KeysChangePagesShowHelpAndQuit) {
  TopView view(/*colours=*/false);
  const Look look = LookWith(3);
  view.Press(Key::kTab);
  EXPECT_THAT(Text(Draw(view, look)), HasSubstr("\nw1000 "));
  EXPECT_TRUE(view.Press('3'));
  EXPECT_THAT(Text(Draw(view, look)), HasSubstr("\ntenant-2 "));
  EXPECT_TRUE(view.Press('h'));
  EXPECT_THAT(Text(Draw(view, look)), HasSubstr("sort by tokens per second"));
  EXPECT_TRUE(view.Press('x'));
  EXPECT_THAT(Text(Draw(view, look)), HasSubstr("\ntenant-2 "));
  EXPECT_TRUE(view.Press('h'));
  EXPECT_FALSE(view.Press('q'));
}

TEST(TopViewTest, AProblemIsShownAboveTheLastState) {
  TopView view(/*colours=*/false);
  const auto lines = view.Draw(LookWith(3), {}, {}, "no daemon answers at unix:/nowhere");
  EXPECT_EQ(lines[1], "no daemon answers at unix:/nowhere");
  EXPECT_THAT(lines[2], StartsWith("memory"));
}

TEST(TopViewTest, ColoursAddSequencesOnly) {
  TopView plain(/*colours=*/false), coloured(/*colours=*/true);
  const Look look = LookWith(3);
  std::string text = Text(Draw(coloured, look));
  ASSERT_NE(text.find("\x1b["), std::string::npos);
  for (std::size_t at; (at = text.find("\x1b[")) != std::string::npos;) {
    text.erase(at, text.find('m', at) + 1 - at);
  }
  // Titles fill their line, so that its background does.
  const auto trimmed = [](const std::string& lines) {
    std::string out;
    for (std::size_t at = 0; at < lines.size();) {
      const std::size_t end = lines.find('\n', at);
      const std::string line = lines.substr(at, end - at);
      Append(out, line.substr(0, line.find_last_not_of(' ') + 1), "\n");
      at = end + 1;
    }
    return out;
  };
  EXPECT_EQ(trimmed(text), trimmed(Text(Draw(plain, look))));
}

}  // namespace
}  // namespace tessera::cli
