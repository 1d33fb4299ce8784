#include "tessera/delimiters.h"

namespace tessera::client {

bool IsDelimiter(std::string_view text) {
  return !text.empty() && text.find_first_not_of(".,?!;: \t\n\r") == std::string_view::npos;
}

std::vector<std::uint32_t> DelimiterTokens(std::span<const std::string_view> texts) {
  std::vector<std::uint32_t> ids;
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (IsDelimiter(texts[i])) ids.push_back(static_cast<std::uint32_t>(i));
  }
  return ids;
}

}  // namespace tessera::client
