// deploy/docs/policy-options.md, as it follows from the registry.
#pragma once

#include <string>

namespace tessera::policies {

std::string PolicyReference();

}  // namespace tessera::policies
