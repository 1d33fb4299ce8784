// The terminal behind standard output.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::cli {

struct TerminalSize {
  std::size_t columns = 80;
  std::size_t rows = 24;
};

// nullopt: standard output is not a terminal.
std::optional<TerminalSize> SizeOfOutput();

// The width that tables must fit. 0: no limit, for a pipe or a file.
std::size_t OutputColumns();

// Whether standard output is a terminal that shows colours, and NO_COLOR is not set.
bool OutputHasColours();

// A style of text, as the parameters of an SGR sequence.
enum class Style : unsigned char { kPlain, kBold, kDim, kReverse, kRed, kGreen, kYellow, kCyan };

// `text` in that style where `colours`; plain text otherwise.
std::string Styled(std::string_view text, Style style, bool colours);

}  // namespace tessera::cli
