#include "daemon/serving/rpc/fork.h"

#include <utility>

#include "absl/functional/function_ref.h"
#include "daemon/base/strings.h"
#include "daemon/serving/call/resident.h"

namespace tessera::serving {

namespace {

using Child = absl::StatusOr<std::shared_ptr<cache::Sequence>>;

// Applies `fit` to a new fork, and frees the fork if that fails.
Child Fitted(const Caller& caller, Child child,
             absl::FunctionRef<absl::Status(cache::Sequence&)> fit) {
  if (!child.ok()) return child;
  absl::Status status = fit(**child);
  if (status.ok()) return child;
  caller.tenant->FreeSequence((*child)->id()).IgnoreError();
  return status;
}

absl::Status SetOwn(const Services& services, std::optional<policies::Policy> own,
                    cache::Sequence& child) {
  if (!own.has_value()) return absl::OkStatus();
  return services.compactor->SetPolicy(child, *std::move(own));
}

Child ForkPrefix(const Services& services, const Caller& caller,
                 const cache::PrefixStore::ForFork& from, std::uint64_t tokens,
                 std::optional<policies::Policy> own) {
  const cache::Prefix& prefix = *from.prefix;
  if (tokens == 0) tokens = prefix.tokens();
  if (!prefix.MayEndAt(tokens)) {
    return absl::InvalidArgumentError(
        Concat("tokens is ", tokens, "; ", prefix.id().ToString(), " of ", prefix.tokens(),
               prefix.options().chain.every_boundary
                   ? " tokens can be forked only at its end and at multiples of 32 before it"
                   : " tokens can be forked only at its end, because of its token policy"));
  }
  // It may be in the host tier.
  const absl::StatusOr<cache::Residence> resident = prefix.sequence().Restore();
  if (!resident.ok()) return resident.status();
  Child child = services.compactor->Fork(
      prefix.sequence(), [&] { return caller.tenant->ForkPrefix(*caller.session, from); });
  child = Fitted(caller, std::move(child), [&](cache::Sequence& fork) {
    absl::Status cut =
        tokens == prefix.tokens() ? absl::OkStatus() : services.compactor->Truncate(fork, tokens);
    return cut.ok() ? SetOwn(services, std::move(own), fork) : cut;
  });
  // If the fork fails, the result of Match is still kept for the session.
  if (child.ok()) caller.tenant->prefixes().Forked(prefix.id(), caller.session->id());
  return child;
}

}  // namespace

Child ForkParent(const Services& services, const Caller& caller, const v1::ForkRequest& request,
                 std::optional<policies::Policy> own) {
  const SequenceId id(request.parent_id());
  const absl::StatusOr<cache::Residence> parent = FindResident(*caller.tenant, id);
  if (absl::IsNotFound(parent.status())) {
    const absl::StatusOr<cache::PrefixStore::ForFork> prefix =
        caller.tenant->prefixes().TakeForFork(PrefixId(id.value()), caller.session->id());
    if (!prefix.ok()) return parent.status();
    return ForkPrefix(services, caller, *prefix, request.tokens(), std::move(own));
  }
  if (!parent.ok()) return parent.status();
  if (request.tokens() != 0) {
    return absl::InvalidArgumentError(
        Concat("tokens is ", request.tokens(), "; ", id.ToString(),
               " is not a prefix: fork all of it and truncate the fork"));
  }
  Child child =
      services.compactor->Fork(**parent, [&] { return caller.tenant->Fork(*caller.session, id); });
  return Fitted(caller, std::move(child),
                [&](cache::Sequence& fork) { return SetOwn(services, std::move(own), fork); });
}

}  // namespace tessera::serving
