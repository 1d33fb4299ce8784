// Parses and formats file modes and owners.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tessera::config {

// "0660", octal, at most 7777.
absl::StatusOr<std::uint32_t> ParseFileMode(std::string_view text);
std::string FormatFileMode(std::uint32_t mode);

struct Owner {
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
};

// "65532:65532": numeric, because an image may have no list of users.
absl::StatusOr<Owner> ParseOwner(std::string_view text);
std::string FormatOwner(Owner owner);

}  // namespace tessera::config
