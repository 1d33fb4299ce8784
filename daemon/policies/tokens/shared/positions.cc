#include "daemon/policies/tokens/shared/positions.h"

#include "daemon/base/strings.h"
#include "daemon/policies/registry_rows.h"

namespace tessera::policies {

std::string SlotPositionConflict(const Values& values, std::span<const Term> all) {
  if (!BySlot(values)) return "";
  for (const Term& other : all) {
    if (other.kind == &kSigns) {
      return "pos=slot re-rotates keys, but an index of signs is of keys as they were appended";
    }
    if (other.kind->decides != Decides::kPacking) continue;
    return Concat("pos=slot re-rotates keys, but keys that ", other.kind->name,
                  " packs cannot be re-rotated");
  }
  return "";
}

}  // namespace tessera::policies
