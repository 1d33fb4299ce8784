#include "daemon/base/strings.h"

namespace tessera {

std::string Quoted(std::string_view text) {
  constexpr std::size_t kMost = 200;
  std::string quoted = "\"";
  quoted += text.substr(0, kMost);
  if (text.size() > kMost) quoted += "...";
  quoted += '"';
  if (text.size() > kMost) Append(quoted, " (", text.size(), " bytes)");
  return quoted;
}

}  // namespace tessera
