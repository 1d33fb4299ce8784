#include "daemon/base/version.h"

namespace tessera {

std::string_view Version() { return TESSERA_VERSION; }
std::string_view Commit() { return TESSERA_COMMIT; }

}  // namespace tessera
