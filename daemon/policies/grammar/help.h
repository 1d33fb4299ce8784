// The registry as text for people.
#pragma once

#include <string>

namespace tessera::policies {

// What tesserad --print-policies prints: the grammar, and a table per system and modifier.
std::string HelpText();

}  // namespace tessera::policies
