// Dense: the identity.
#include "daemon/policies/registry_rows.h"

namespace tessera::policies {

constexpr TermKind kDense = {
    .name = "dense",
    .is = "Rows stay as they are and attention reads all of them",
    .sets = "nothing",
    .decides = Decides::kNothing,
    .apply = [](const Values&, Policy&) {},
    .read = [](const Policy&) -> std::optional<Values> { return std::nullopt; },
};

}  // namespace tessera::policies
