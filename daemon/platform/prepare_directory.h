// PrepareDirectory makes the directory of the daemon's sockets and gives it to the daemon's user.
// For a start as root before the daemon itself starts without privileges.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace tessera {

struct DirectoryRequest {
  std::string path;  // absolute
  std::uint32_t uid = 0;
  std::uint32_t gid = 0;
  unsigned mode = 0750;

  friend bool operator==(const DirectoryRequest&, const DirectoryRequest&) = default;
};

enum class Prepared : std::uint8_t { kMade, kAdjusted, kUnchanged };

// Makes the last component of `path` if it does not exist, and sets owner and mode. Adjusts an
// existing directory only if it is empty or already belongs to `uid`, so that a wrong path takes no
// directory away from another program. Refuses symbolic links in every component, because a link
// could be replaced between the check and the change. Needs CAP_CHOWN and CAP_FOWNER only.
//
// INVALID_ARGUMENT: the path cannot be used. FAILED_PRECONDITION: the directory belongs to another
// user and has files. Other codes are the system's. Each message names the path.
absl::StatusOr<Prepared> PrepareDirectory(const DirectoryRequest& request);

}  // namespace tessera
