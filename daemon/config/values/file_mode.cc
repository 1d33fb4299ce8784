#include "daemon/config/values/file_mode.h"

#include <charconv>

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera::config {

namespace {

// Whether all of `text` is a number, which is stored in `number`.
bool ParseNumber(std::string_view text, int base, std::uint32_t& number) {
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number, base);
  return !text.empty() && parsed.ec == std::errc() && parsed.ptr == end;
}

}  // namespace

absl::StatusOr<std::uint32_t> ParseFileMode(std::string_view text) {
  std::uint32_t mode = 0;
  if (!ParseNumber(text, 8, mode) || mode > 07777) {
    return absl::InvalidArgumentError(
        Concat(Quoted(text), " is not an octal file mode, e.g. 0660"));
  }
  return mode;
}

std::string FormatFileMode(std::uint32_t mode) {
  std::string text = "0000";
  for (std::size_t i = 0; i < 4; ++i) text[3 - i] = static_cast<char>('0' + (mode >> 3 * i & 7));
  return text;
}

absl::StatusOr<Owner> ParseOwner(std::string_view text) {
  constexpr std::uint32_t kNobody = ~0u;  // "no user" in system calls
  const std::size_t colon = text.find(':');
  Owner owner;
  if (colon == std::string_view::npos || !ParseNumber(text.substr(0, colon), 10, owner.uid) ||
      !ParseNumber(text.substr(colon + 1), 10, owner.gid) || owner.uid == kNobody ||
      owner.gid == kNobody) {
    return absl::InvalidArgumentError(
        Concat(Quoted(text), " is not UID:GID with two numbers, e.g. 65532:65532"));
  }
  return owner;
}

std::string FormatOwner(Owner owner) { return Concat(owner.uid, ":", owner.gid); }

}  // namespace tessera::config
