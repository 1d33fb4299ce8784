#include "client/cli/top_view.h"

#include <algorithm>
#include <utility>

#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

constexpr std::pair<std::string_view, std::string_view> kHelp[] = {
    {"arrows, page up and down, home, end", "scroll the table"},
    {"Tab, or 1 2 3", "sequences, sessions, tenants"},
    {"n", "sort sequences by age, the newest first"},
    {"r", "sort by tokens per second"},
    {"t", "sort by tokens"},
    {"b", "sort by bytes of tiles"},
    {"s", "the next of these orders"},
    {"h or ?", "this help"},
    {"q or Ctrl-C", "quit"},
};

std::string_view NameOf(SequenceOrder order) {
  constexpr std::string_view kNames[] = {"newest", "tokens/s", "tokens", "tiles"};
  return kNames[static_cast<std::size_t>(order)];
}

}  // namespace

bool TopView::Press(char key) {
  if (help_ && key != 'q') {
    help_ = false;
    return true;
  }
  const auto sort = [this](SequenceOrder order) {
    order_ = order;
    page_ = Page::kSequences;
    first_row_ = 0;
  };
  switch (key) {
    case 'q':
      return false;
    case 'h':
    case '?':
      help_ = true;
      break;
    case '1':
    case '2':
    case '3':
      page_ = static_cast<Page>(key - '1');
      first_row_ = 0;
      break;
    case 'n':
      sort(SequenceOrder::kNewest);
      break;
    case 'r':
      sort(SequenceOrder::kRate);
      break;
    case 't':
      sort(SequenceOrder::kTokens);
      break;
    case 'b':
      sort(SequenceOrder::kBytes);
      break;
    case 's':
      sort(static_cast<SequenceOrder>((static_cast<int>(order_) + 1) % 4));
      break;
    case 'k':
      Press(Key::kUp);
      break;
    case 'j':
    case '\n':
      Press(Key::kDown);
      break;
    case ' ':
      Press(Key::kPageDown);
      break;
    default:
      break;
  }
  return true;
}

void TopView::Press(Key key) {
  const auto up = [this](std::size_t rows) { first_row_ -= std::min(rows, first_row_); };
  constexpr std::size_t kLast = 1'000'000'000;  // Draw stops at the table's end
  switch (key) {
    case Key::kUp:
      up(1);
      break;
    case Key::kDown:
      ++first_row_;
      break;
    case Key::kPageUp:
      up(page_rows_);
      break;
    case Key::kPageDown:
      first_row_ += page_rows_;
      break;
    case Key::kHome:
      first_row_ = 0;
      break;
    case Key::kEnd:
      first_row_ = kLast;
      break;
    case Key::kTab:
    case Key::kRight:
      page_ = static_cast<Page>((static_cast<int>(page_) + 1) % 3);
      first_row_ = 0;
      break;
    case Key::kLeft:
      page_ = static_cast<Page>((static_cast<int>(page_) + 2) % 3);
      first_row_ = 0;
      break;
  }
}

Table TopView::PageTable(const Look& look, const Since& since) const {
  if (page_ == Page::kSessions) return SessionTable(look);
  if (page_ == Page::kTenants) return TenantTable(look, since);
  return SequenceTable(look, since, order_);
}

std::string TopView::Footer(const Look& look, std::size_t below, std::size_t columns) const {
  std::string text = "q quit  h help  Tab ";
  text += page_ == Page::kSequences  ? "sessions"
          : page_ == Page::kSessions ? "tenants"
                                     : "sequences";
  if (page_ == Page::kSequences) Append(text, "  s sort: ", NameOf(order_));
  const auto listed = static_cast<std::uint64_t>(look.sequences.sequences_size());
  if (below > 0) Append(text, "  ", below, " more below");
  if (page_ == Page::kSequences && look.sequences.total() > listed) {
    Append(text, "  (the newest ", listed, " of ", look.sequences.total(), ")");
  }
  return Styled(Cut(text, columns), Style::kDim, colours_);
}

std::vector<std::string> TopView::HelpLines(TerminalSize size) const {
  Table table({{.title = "key", .align = Align::kLeft}, {.title = "does", .align = Align::kLeft}});
  for (const auto& [key, does] : kHelp) table.Add({std::string(key), std::string(does)});
  std::vector<std::string> lines = table.Lines(size.columns);
  lines.insert(lines.end(), {"", "Bytes are binary: 1 KiB is 1,024 bytes. Tokens: 1k is 1,000.",
                             "Commands take the ids that are shown: tessera describe s51", "",
                             "any key goes back"});
  for (std::string& line : lines) line = Cut(line, size.columns);
  if (lines.size() > size.rows) lines.resize(size.rows);
  return lines;
}

std::vector<std::string> TopView::Draw(const Look& look, const Since& since, TerminalSize size,
                                       const std::string& problem) {
  if (help_) return HelpLines(size);
  std::vector<std::string> lines = HeadLines(look, since, size.columns, colours_);
  if (!problem.empty()) {
    lines.insert(lines.begin() + 1, Styled(Cut(problem, size.columns), Style::kRed, colours_));
  }
  std::vector<std::string> table = PageTable(look, since).Lines(size.columns);
  const std::string titles = table.front();
  table.erase(table.begin());
  // Titles and footer take a line each. A terminal that is too low shows the head only.
  const std::size_t fixed = lines.size() + 2;
  if (size.rows <= fixed) {
    lines.resize(std::min(lines.size(), size.rows));
    return lines;
  }
  page_rows_ = size.rows - fixed;
  first_row_ = std::min(first_row_, table.size() - std::min(table.size(), page_rows_));
  const std::size_t end = std::min(table.size(), first_row_ + page_rows_);
  std::string bar = titles;
  bar.resize(std::max(bar.size(), size.columns), ' ');
  lines.push_back(Styled(bar, Style::kReverse, colours_));
  for (std::size_t i = first_row_; i < end; ++i) {
    const bool failed = table[i].find("FAILED") != std::string::npos;
    lines.push_back(Styled(table[i], failed ? Style::kRed : Style::kPlain, colours_));
  }
  lines.resize(size.rows - 1);
  lines.push_back(Footer(look, table.size() - end, size.columns));
  return lines;
}

}  // namespace tessera::cli
