// The term `dense`: no compression.
#include "daemon/policies/registry_rows.h"

namespace tessera::policies {

constexpr TermKind kDense = {
    .name = "dense",
    .is = "Stores rows uncompressed; attention reads all of them",
    .sets = "nothing",
    .decides = Decides::kNothing,
    .apply = [](const Values&, Policy&) {},
    .read = [](const Policy&) -> std::optional<Values> { return std::nullopt; },
};

}  // namespace tessera::policies
