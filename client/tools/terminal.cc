#include "client/tools/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include "client/tools/environment.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

std::optional<TerminalSize> SizeOfOutput() {
  if (::isatty(STDOUT_FILENO) == 0) return std::nullopt;
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) {
    return TerminalSize{};  // a serial line does not know its size
  }
  return TerminalSize{.columns = size.ws_col, .rows = size.ws_row};
}

std::size_t OutputColumns() {
  const std::optional<TerminalSize> size = SizeOfOutput();
  return size.has_value() ? size->columns : 0;
}

bool OutputHasColours() {
  if (::isatty(STDOUT_FILENO) == 0 || !ReadEnvironment("NO_COLOR").empty()) return false;
  const std::string terminal = ReadEnvironment("TERM");
  return !terminal.empty() && terminal != "dumb";
}

std::string Styled(std::string_view text, Style style, bool colours) {
  constexpr const char* kCodes[] = {"", "1", "2", "7", "31", "32", "33", "36"};
  if (!colours || style == Style::kPlain) return std::string(text);
  return Concat("\x1b[", kCodes[static_cast<std::size_t>(style)], "m", text, "\x1b[0m");
}

}  // namespace tessera::cli
