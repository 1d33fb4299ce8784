#include "daemon/serving/fork.h"

#include "daemon/base/strings.h"
#include "daemon/serving/resident.h"

namespace tessera::serving {

namespace {

absl::StatusOr<std::shared_ptr<cache::Sequence>> ForkPrefix(const Services& services,
                                                            const Caller& caller,
                                                            const cache::PrefixStore::ForFork& from,
                                                            std::uint64_t tokens) {
  const cache::Prefix& prefix = *from.prefix;
  if (tokens == 0) tokens = prefix.tokens();
  if (!prefix.MayEndAt(tokens)) {
    return absl::InvalidArgumentError(
        Concat("tokens is ", tokens, "; ", prefix.id().ToString(), " of ", prefix.tokens(),
               prefix.options().chain.every_boundary
                   ? " tokens can be forked at its end and at any multiple of 32 before it"
                   : " tokens can be forked at its end alone, under its token policy"));
  }
  absl::StatusOr<std::shared_ptr<cache::Sequence>> child = services.compactor->Fork(
      prefix.sequence(), [&] { return caller.tenant->ForkPrefix(*caller.session, from); });
  if (!child.ok()) return child;
  if (tokens != prefix.tokens()) {
    if (absl::Status cut = services.compactor->Truncate(**child, tokens); !cut.ok()) {
      caller.tenant->FreeSequence((*child)->id()).IgnoreError();
      return cut;
    }
  }
  caller.tenant->prefixes().Forked(prefix.id(), caller.session->id());
  return child;
}

}  // namespace

absl::StatusOr<std::shared_ptr<cache::Sequence>> ForkParent(const Services& services,
                                                            const Caller& caller,
                                                            const v1::ForkRequest& request) {
  const SequenceId id(request.parent_id());
  const absl::StatusOr<cache::Residence> parent = FindResident(*caller.tenant, id);
  if (absl::IsNotFound(parent.status())) {
    const absl::StatusOr<cache::PrefixStore::ForFork> prefix =
        caller.tenant->prefixes().TakeForFork(PrefixId(id.value()), caller.session->id());
    if (!prefix.ok()) return parent.status();
    return ForkPrefix(services, caller, *prefix, request.tokens());
  }
  if (!parent.ok()) return parent.status();
  if (request.tokens() != 0) {
    return absl::InvalidArgumentError(Concat("tokens is ", request.tokens(), "; ", id.ToString(),
                                             " is no prefix: fork it and truncate the fork"));
  }
  return services.compactor->Fork(**parent,
                                  [&] { return caller.tenant->Fork(*caller.session, id); });
}

}  // namespace tessera::serving
