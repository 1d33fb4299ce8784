#include "daemon/base/version.h"

namespace tessera {

std::string_view Version() { return TESSERA_VERSION; }

}  // namespace tessera
