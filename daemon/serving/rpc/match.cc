#include "daemon/serving/rpc/match.h"

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/serving/call/caller.h"
#include "daemon/serving/call/status.h"
#include "daemon/serving/convert/convert.h"
#include "daemon/serving/rpc/publish.h"

namespace tessera::serving {

namespace {

constexpr std::uint64_t kMaxWaitMs = 3'600'000;

absl::StatusOr<cache::PrefixStore::Question> ToQuestion(const Caller& caller,
                                                        const v1::MatchRequest& request) {
  if (request.token_ids().empty()) {
    return absl::InvalidArgumentError("token_ids is empty; send at least one id");
  }
  const absl::StatusOr<Clock::Duration> wait = ToDuration("wait_ms", request.wait_ms(), kMaxWaitMs);
  if (!wait.ok()) return wait.status();
  const absl::StatusOr<std::shared_ptr<const cache::Model>> model =
      caller.tenant->FindModel(ModelId(request.model_id()));
  if (!model.ok()) return model.status();
  const absl::StatusOr<policies::Policy> policy =
      ToPolicy(request.policy(), request.has_policy_spec() ? &request.policy_spec() : nullptr);
  if (!policy.ok()) return policy.status();
  return cache::PrefixStore::Question{
      .session = caller.session->id(),
      .scope = ScopeOf(caller, **model, *policy),
      .ids = {request.token_ids().begin(), request.token_ids().end()},
      .wait = *wait,
      .will_compute = request.will_compute()};
}

v1::MatchResponse ToResponse(const cache::PrefixStore::Answer& answer) {
  v1::MatchResponse response;
  response.set_prefix_id(answer.prefix.value());
  response.set_tokens(answer.tokens);
  response.set_computing_tokens(answer.computing);
  response.set_computation_id(answer.computation.value());
  return response;
}

// A question to the store, which may be cancelled at any time, before it is asked, too.
class Asking {
 public:
  // `answered` may be called before Ask returns. Errors are those of a question that was not asked.
  absl::Status Ask(const Caller& caller, const v1::MatchRequest& request,
                   cache::PrefixStore::Done answered) {
    absl::StatusOr<cache::PrefixStore::Question> question = ToQuestion(caller, request);
    if (!question.ok()) return question.status();
    store_ = &caller.tenant->prefixes();
    question_.store(store_->Match(*std::move(question), std::move(answered)));
    if (cancelled_.load()) Cancel();
    return absl::OkStatus();
  }
  void Cancel() {
    cancelled_.store(true);
    if (const std::uint64_t question = question_.load(); question != 0) store_->Cancel(question);
  }

 private:
  cache::PrefixStore* store_ = nullptr;
  std::atomic<std::uint64_t> question_{0};  // 0: not asked yet, or answered at once
  std::atomic<bool> cancelled_{false};
};

class MatchCall final : public UnaryCall {
 public:
  MatchCall(const CallHost& host, metrics::RpcMethod& rpc, const Wire& wire)
      : UnaryCall(host, "Match", rpc, wire) {}

  void OnCancel() override { asking_.Cancel(); }

 private:
  std::optional<absl::Status> Work(Caller& caller) override {
    v1::MatchRequest request;
    if (absl::Status status = Parse(request); !status.ok()) return status;
    const absl::Status asked =
        asking_.Ask(caller, request, [this](absl::StatusOr<cache::PrefixStore::Answer> answer) {
          End(answer.ok() ? Answer(ToResponse(*answer), Effect::kChanges) : answer.status());
        });
    if (!asked.ok()) return asked;
    return std::nullopt;
  }

  Asking asking_;
};

// gRPC binds the reactor after the method has returned, so OnCancel and OnDone cannot run earlier.
class MatchReactor final : public grpc::ServerUnaryReactor {
 public:
  MatchReactor(Services& services, metrics::RpcMethod& rpc, v1::MatchResponse& response)
      : services_(services), rpc_(rpc), response_(response), begun_(services.clock->Now()) {}

  void Start(const v1::MatchRequest& request) {
    const absl::StatusOr<Caller> caller = FindCaller(*services_.node, request.session());
    if (!caller.ok()) return End(caller.status());
    const absl::Status asked =
        asking_.Ask(*caller, request, [this](absl::StatusOr<cache::PrefixStore::Answer> answer) {
          if (answer.ok()) response_ = ToResponse(*answer);
          End(answer.status());
        });
    if (!asked.ok()) End(asked);
  }

  void OnCancel() override { asking_.Cancel(); }
  void OnDone() override { delete this; }

 private:
  void End(const absl::Status& status) {
    rpc_.Finished(status.code(), services_.clock->Now() - begun_);
    Finish(ToGrpc(status));
  }

  Services& services_;
  metrics::RpcMethod& rpc_;
  v1::MatchResponse& response_;
  const Clock::TimePoint begun_;
  Asking asking_;
};

}  // namespace

grpc::ServerUnaryReactor* StartMatch(const CallHost& host, metrics::RpcMethod& rpc,
                                     const UnaryCall::Wire& wire) {
  auto* const call = new MatchCall(host, rpc, wire);
  call->Start();
  return call;
}

grpc::ServerUnaryReactor* NewMatchReactor(Services& services, metrics::RpcMethod& rpc,
                                          const v1::MatchRequest& request,
                                          v1::MatchResponse& response) {
  auto* const reactor = new MatchReactor(services, rpc, response);
  reactor->Start(request);
  return reactor;
}

}  // namespace tessera::serving
