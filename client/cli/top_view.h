// What `tessera top` shows: lines for a terminal of any size, and what keys do to them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "client/cli/state.h"
#include "client/tools/screen.h"
#include "client/tools/terminal.h"

namespace tessera::cli {

class TopView {
 public:
  explicit TopView(bool colours) : colours_(colours) {}

  // False: the key ends the command.
  bool Press(char key);
  void Press(Key key);

  // At most size.rows lines of at most size.columns columns. `problem`: why the state is old; empty
  // if it is not.
  std::vector<std::string> Draw(const Look& look, const Since& since, TerminalSize size,
                                const std::string& problem);

 private:
  enum class Page : std::uint8_t { kSequences, kSessions, kTenants };

  Table PageTable(const Look& look, const Since& since) const;
  std::string Footer(const Look& look, std::size_t below, std::size_t columns) const;
  std::vector<std::string> HelpLines(TerminalSize size) const;

  const bool colours_;
  Page page_ = Page::kSequences;
  SequenceOrder order_ = SequenceOrder::kNewest;
  bool help_ = false;
  std::size_t first_row_ = 0;  // that is shown; Draw keeps it within the table
  std::size_t page_rows_ = 1;  // of the last Draw
};

}  // namespace tessera::cli
