// Renders the policy grammar and the registry as help text.
#pragma once

#include <string>

namespace tessera::policies {

// The output of tesserad --print-policies: the grammar, and one table of options per term.
std::string HelpText();

}  // namespace tessera::policies
