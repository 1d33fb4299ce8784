#include "daemon/base/strings.h"

namespace tessera {

std::string Quoted(std::string_view text) {
  constexpr std::size_t kMost = 200;
  std::string quoted = "\"";
  for (const char c : text.substr(0, kMost)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f) {
      quoted += c;
      continue;
    }
    constexpr char kDigits[] = "0123456789abcdef";
    quoted += {'\\', 'x', kDigits[byte / 16], kDigits[byte % 16]};
  }
  if (text.size() > kMost) quoted += "...";
  quoted += '"';
  if (text.size() > kMost) Append(quoted, " (", text.size(), " bytes)");
  return quoted;
}

}  // namespace tessera
