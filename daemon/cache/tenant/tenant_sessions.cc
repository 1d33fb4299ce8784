// The sessions and models of a tenant.

#include <utility>

#include "daemon/base/error_cause.h"
#include "daemon/base/random.h"
#include "daemon/base/strings.h"
#include "daemon/cache/tenant/tenant.h"

namespace tessera::cache {

// ---- sessions

absl::StatusOr<std::shared_ptr<SessionState>> Tenant::OpenSession(const NewSession& hello) {
  if (absl::Status status = directory_->Open(); !status.ok()) return status;
  absl::StatusOr<std::shared_ptr<SessionState>> session =
      SessionState::Create({.id = SessionId(NextId()),
                            .tenant_id = options_.id,
                            .secret = NewSecret64(),
                            .nonce = NewSecret64(),
                            .worker_name = hello.worker_name,
                            .group = hello.group,
                            .rank = hello.rank,
                            .group_size = hello.group_size,
                            .cache_salt = hello.cache_salt,
                            .pin_limit = hello.pin_limit.value_or(options_.pin_limit),
                            .staging_bytes = options_.staging_bytes,
                            .tail_extent_bytes = options_.tail_extent_bytes,
                            .device = options_.device,
                            .node = &held_,
                            .tenant = &account_,
                            .heap = &heap_,
                            .attached = options_.clock->Now()});
  if (!session.ok()) return session.status();
  epochs_->AddSource((*session)->pins());
  prefixes_->SessionOpened((*session)->id(),
                           {hello.group, hello.rank, hello.group_size, hello.worker_name});
  MutexLock lock(mutex_);
  sessions_[(*session)->id()] = *session;
  return session;
}

Tenant::Freed Tenant::EndSession(SessionId id) {
  Freed freed;
  std::shared_ptr<SessionState> session;
  {
    MutexLock lock(mutex_);
    const auto it = sessions_.find(id);
    if (it == sessions_.end()) return freed;
    session = std::move(it->second);
    sessions_.erase(it);
  }
  // First, so that callers waiting for this session's computations are answered.
  prefixes_->SessionEnded(id);
  // Next the pins, so that the freed sequences do not wait for a reader that no longer exists.
  epochs_->RemoveSource(session->pins().get());
  for (SequenceId sequence : session->Owned()) (void)FreeIfOwned(sequence, id, &freed);
  {
    MutexLock lock(mutex_);
    for (auto& [model_id, model] : models_) {
      model.users.erase(id);
      if (model.users.empty()) model.held = nullptr;
    }
    ForgetUnusedModels();
  }
  session->CountSteps(counters_);
  session->ReturnCharge();
  return freed;
}

absl::StatusOr<std::shared_ptr<SessionState>> Tenant::FindSession(SessionId id,
                                                                  std::uint64_t secret) const {
  MutexLock lock(mutex_);
  const auto it = sessions_.find(id);
  if (it == sessions_.end() || it->second->options().secret != secret) {
    return absl::UnauthenticatedError(
        Concat(id.ToString(), " is not attached to this daemon, or its key is wrong"));
  }
  return it->second;
}

std::size_t Tenant::session_count() const {
  MutexLock lock(mutex_);
  return sessions_.size();
}

std::vector<std::shared_ptr<SessionState>> Tenant::Sessions() const {
  std::vector<std::shared_ptr<SessionState>> sessions;
  MutexLock lock(mutex_);
  for (const auto& [id, session] : sessions_) sessions.push_back(session);
  return sessions;
}

// ---- models

absl::StatusOr<std::shared_ptr<const Model>> Tenant::RegisterModel(ModelSpec spec,
                                                                   SessionId session) {
  absl::StatusOr<Model> model =
      Model::Create(ModelId(NextId()), std::move(spec), options_.ring_tiles);
  if (!model.ok()) return model.status();
  MutexLock lock(mutex_);
  // Otherwise, a model registered while its session ends would be kept for ever.
  if (session.valid() && !sessions_.contains(session)) {
    return absl::UnauthenticatedError(Concat(session.ToString(), " has ended"));
  }
  ForgetUnusedModels();
  for (auto& [id, registered] : models_) {
    const std::shared_ptr<const Model> known = registered.model.lock();
    if (known == nullptr || !known->spec().SameWeights(model->spec())) continue;
    if (known->spec() == model->spec()) {
      registered.users.insert(session);
      registered.held = known;
      return known;
    }
    return absl::AlreadyExistsError(
        Concat("model \"", known->spec().name,
               "\" is already registered with a different geometry; choose another name"));
  }
  if (models_.size() >= options_.max_models) {
    return WithCause(
        absl::ResourceExhaustedError(Concat("tenant ", name(), " has ", models_.size(),
                                            " models; the limit is ", options_.max_models,
                                            "; retry when one of them is unused, "
                                            "or raise max_models_per_tenant")),
        ErrorCause::kQuota);
  }
  absl::StatusOr<pool::Charge> charge =
      memory_.heap->Reserve(pool::MemoryTag::kModels, model->bytes());
  if (!charge.ok()) return charge.status();
  struct Charged {
    Model model;
    pool::Charge charge;
  };
  const auto charged = std::make_shared<Charged>(Charged{*std::move(model), *std::move(charge)});
  const std::shared_ptr<const Model> shared(charged, &charged->model);
  models_[shared->id()] = {.model = shared, .held = shared, .users = {session}};
  return shared;
}

absl::StatusOr<std::shared_ptr<const Model>> Tenant::FindModel(ModelId id) const {
  MutexLock lock(mutex_);
  const auto it = models_.find(id);
  std::shared_ptr<const Model> model = it == models_.end() ? nullptr : it->second.model.lock();
  if (model == nullptr) return absl::NotFoundError(Concat("no ", id.ToString()));
  return model;
}

}  // namespace tessera::cache
