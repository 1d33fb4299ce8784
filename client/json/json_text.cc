#include "client/json/json_text.h"

#include <cstdio>

#include "daemon/base/strings.h"

namespace tessera::client {

std::string JsonString(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

std::string ShortId(char letter, std::uint64_t id) {
  const std::uint64_t tenant = id >> kIdCountBits;
  const std::uint64_t count = id & ((std::uint64_t{1} << kIdCountBits) - 1);
  return tenant == 1 ? Concat(letter, count) : Concat(letter, tenant, ".", count);
}

}  // namespace tessera::client
