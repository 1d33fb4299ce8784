// What the process gives up for good when it starts.
#pragma once

namespace tessera::lifecycle {

struct Privileges {
  bool core_dumps = false;  // and debuggers of the same user
};

// No program that this process runs gets more rights than it has. Without `core_dumps`, nothing
// shows its memory, which has rows, tokens and keys, but root.
void GiveUpPrivileges(const Privileges& kept);

}  // namespace tessera::lifecycle
