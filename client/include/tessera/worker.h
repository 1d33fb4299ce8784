// A worker's attachment to its node's daemon: the entry point of the client library.
//
//   absl::StatusOr<std::unique_ptr<Worker>> worker = Worker::Attach({.worker_name = "decode-0"});
//   absl::StatusOr<Model> model = (*worker)->RegisterModel(geometry);
//   absl::StatusOr<Sequence> sequence = (*worker)->CreateSequence(*model);
//   sequence->Append(...);                                          // prefill, in bulk
//   Sequence* batch[] = {&*sequence};
//   absl::StatusOr<Step> step = (*worker)->BeginStep(batch);        // decode, step by step
//   for (layer ...) step->AppendAndAttend(layer, tensors);
//   step->End();
//
// Over a Unix socket the worker maps the pool and all of the loop above happens in its own process;
// over TCP, or with map_memory=false, the same calls travel as RPCs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "client/rpc/transport.h"
#include "tessera/model.h"
#include "tessera/options.h"
#include "tessera/prefix.h"
#include "tessera/sequence.h"
#include "tessera/step.h"
#include "tessera/tensor.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::client {

class Core;

// One item of AttendRpc.
struct AttendQuery {
  const Sequence* sequence = nullptr;
  std::uint32_t queries = 1;
  std::span<const std::byte> query;  // [queries][query_heads][head_dim], the model's type
  std::span<std::byte> output;       // the same shape, in the output type
  std::span<float> lse;              // [queries][query_heads]; empty: not wanted
  // Unset: the last query stands on the last token held.
  std::optional<std::uint64_t> first_query_position;
};

struct AttendOptions {
  kernels::ElementType output_type = kernels::ElementType::kFp32;  // or the model's
  bool causal = true;
  // Of every query; at most kMaxSelectingTokens queries each. Unset: what the policy says.
  std::optional<kernels::SelectionRule> selection;
};

// What Select is asked.
struct SelectQuery {
  const Sequence* sequence = nullptr;
  std::uint32_t queries = 1;         // at most kMaxSelectingTokens
  std::span<const std::byte> query;  // [queries][query_heads][head_dim], the model's type
  // Unset: the last query stands on the last token held.
  std::optional<std::uint64_t> first_query_position;
  bool causal = true;
};

// Thread-safe, but for its destruction. Handles that outlive it answer UNAVAILABLE.
class Worker {
 public:
  // FAILED_PRECONDITION where versions or layouts differ, PERMISSION_DENIED for an unknown token,
  // UNAVAILABLE where no daemon answers.
  static absl::StatusOr<std::unique_ptr<Worker>> Attach(AttachOptions options);
  // Over another transport than gRPC.
  static absl::StatusOr<std::unique_ptr<Worker>> Attach(AttachOptions options,
                                                        std::unique_ptr<Connector> connector);
  // Detaches: the daemon frees the session's sequences.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  absl::StatusOr<Model> RegisterModel(const ModelGeometry& geometry);
  // `policy`: "" or a preset or composition by name.
  absl::StatusOr<Sequence> CreateSequence(const Model& model, const std::string& policy = "");
  // The handle of a sequence that another session has handed over to this one.
  absl::StatusOr<Sequence> Adopt(const Model& model, SequenceId sequence);

  // The longest published prefix of a token list, under a model and a policy. Ranks of a group that
  // ask the same get the same answer. What is found can be forked for 30 s at least.
  absl::StatusOr<PrefixMatch> Match(const Model& model, const MatchOptions& options);
  // A sequence of this worker that begins with what was matched, or with the first `tokens` of it:
  // at its end, or at a multiple of 32 where the policy keeps every token. No KV is copied.
  // NOT_FOUND where the prefix has gone meanwhile.
  absl::StatusOr<Sequence> Fork(const PrefixMatch& match, std::uint64_t tokens = 0);
  // Nobody finds it from now on; what was forked from it lives on. OK where it is gone already.
  absl::Status Free(PrefixId prefix);
  // This worker will not compute what it said: those who wait are told.
  absl::Status Withdraw(ComputationId computation);

  // Starts a step of a batch of sequences of one model. Opens tail rings on first use and waits for
  // space in them: RESOURCE_EXHAUSTED after options.timeout, or where 64 steps are in flight.
  // FAILED_PRECONDITION for a FAILED sequence, with the daemon's reason. The sequences may be
  // moved, but neither used nor freed, until the step is over.
  absl::StatusOr<Step> BeginStep(std::span<Sequence* const> sequences,
                                 const StepOptions& options = {});

  // Attention in the daemon, over committed tokens, through either door.
  absl::Status AttendRpc(std::uint32_t layer, std::span<const AttendQuery> queries,
                         const AttendOptions& options = {});

  // Which entries attention would read of a layer under this rule: runs of positions per kv
  // head, or per query head where each chooses for itself.
  absl::StatusOr<v1::SelectResponse> Select(std::uint32_t layer, const SelectQuery& query,
                                            const kernels::SelectionRule& rule);

  // Memory that steps of the running attachment take tensors from. (The worker's own will do.)
  absl::StatusOr<Tensor> NewTensor(std::uint64_t bytes);

  absl::StatusOr<v1::StatsResponse> Stats();

  // Attaches again after the lease was lost, with the pauses and patience of options.reattach.
  // Models are registered anew; sequences that are gone are listed, and their handles answer
  // NOT_FOUND. OK at once where the lease lives.
  absl::StatusOr<ReattachReport> Reattach();

  // OK while attached; else UNAVAILABLE with the reason.
  absl::Status status() const;
  bool mapped() const;    // whether the hot path goes through mapped memory
  bool draining() const;  // the daemon has said that it will go away
  SessionId session_id() const;
  // Of the running attachment; empty while there is none.
  v1::Welcome welcome() const;

 private:
  explicit Worker(std::shared_ptr<Core> core) : core_(std::move(core)) {}
  absl::Status FreeId(std::uint64_t id);
  const std::shared_ptr<Core> core_;
};

}  // namespace tessera::client
