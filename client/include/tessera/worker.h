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
// Over a Unix socket the worker maps the pool, and the decode loop runs in its process, without
// RPCs. Over TCP, or with map_memory=false, every call is an RPC.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "tessera/error.h"
#include "tessera/model.h"
#include "tessera/options.h"
#include "tessera/prefix.h"
#include "tessera/read.h"
#include "tessera/sequence.h"
#include "tessera/step.h"
#include "tessera/tensor.h"

namespace tessera::client {

class Core;

// One item of AttendRpc.
struct AttendQuery {
  const Sequence* sequence = nullptr;
  std::uint32_t queries = 1;
  std::span<const std::byte> query;  // [queries][query_heads][head_dim], the model's type
  std::span<std::byte> output;       // the same shape, in the output type
  std::span<float> lse;              // [queries][query_heads]; empty: not wanted
  // Unset: the last query has the position of the last token.
  std::optional<std::uint64_t> first_query_position;
};

struct AttendOptions {
  ElementType output_type = ElementType::kFp32;  // or the model's
  bool causal = true;
  // For every query; at most kMaxSelectingTokens queries each. Unset: the policy decides.
  std::optional<SelectionRule> selection;
};

// The argument of Select.
struct SelectQuery {
  const Sequence* sequence = nullptr;
  std::uint32_t queries = 1;         // at most kMaxSelectingTokens
  std::span<const std::byte> query;  // [queries][query_heads][head_dim], the model's type
  // Unset: the last query has the position of the last token.
  std::optional<std::uint64_t> first_query_position;
  bool causal = true;
};

// Thread-safe, except for its destruction. Handles that outlive it answer UNAVAILABLE. Null or
// default-constructed arguments answer INVALID_ARGUMENT.
class Worker {
 public:
  // FAILED_PRECONDITION if versions or layouts differ, PERMISSION_DENIED for an unknown token,
  // UNAVAILABLE if no daemon answers.
  static absl::StatusOr<std::unique_ptr<Worker>> Attach(AttachOptions options);
  // Detaches: the daemon frees the session's sequences.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  absl::StatusOr<Model> RegisterModel(const ModelGeometry& geometry);
  // `policy`: text such as "mosaickv:keep=0.25"; "" means dense.
  absl::StatusOr<Sequence> CreateSequence(const Model& model, const std::string& policy = "");
  // Returns a handle of a sequence that another session has handed over to this one.
  absl::StatusOr<Sequence> Adopt(const Model& model, SequenceId sequence);

  // Finds the longest published prefix of a token list, under a model and a policy. Ranks of a
  // group that make the same calls get the same answer. Fork can use the result for at least 30 s.
  absl::StatusOr<PrefixMatch> Match(const Model& model, const MatchOptions& options);
  // Creates a sequence that begins with the matched tokens, without copying KV. `tokens`: only the
  // first so many, a multiple of 32, if the policy keeps every token; 0: all. NOT_FOUND if the
  // prefix is gone.
  absl::StatusOr<Sequence> Fork(const PrefixMatch& match, std::uint64_t tokens = 0);
  // Removes the prefix from the index; its forks are not affected. OK if it is gone already.
  absl::Status Free(PrefixId prefix);
  // Withdraws the announcement of MatchOptions::will_compute; waiting workers get their answers.
  absl::Status Withdraw(ComputationId computation);

  // Starts a step of a batch of sequences of one model. Opens tail rings on first use and waits for
  // space in them: RESOURCE_EXHAUSTED after options.timeout, or if 64 steps are in flight.
  // FAILED_PRECONDITION for a FAILED sequence, with the daemon's reason. The sequences may be
  // moved, but neither used nor freed, until the step is over.
  absl::StatusOr<Step> BeginStep(std::span<Sequence* const> sequences,
                                 const StepOptions& options = {});

  // Starts a read of a batch of sequences of one model, for attention over their committed tokens.
  // RESOURCE_EXHAUSTED if 64 steps and reads are in flight. FAILED_PRECONDITION for a FAILED
  // sequence, and if the layers of one hold different numbers of tokens.
  absl::StatusOr<Read> BeginRead(std::span<Sequence* const> sequences,
                                 const ReadOptions& options = {});

  // Has the daemon compute attention over committed tokens. Works with both transports.
  absl::Status AttendRpc(std::uint32_t layer, std::span<const AttendQuery> queries,
                         const AttendOptions& options = {});

  // Returns the entries of a layer that attention would read under this rule: ranges of positions
  // per kv head, or per query head if the rule has each_head, and per query if it has
  // each_query.
  absl::StatusOr<SelectResult> Select(std::uint32_t layer, const SelectQuery& query,
                                      const SelectionRule& rule);

  // Memory for tensors of steps: on the GPU if the session maps one, else on the host. Steps accept
  // any other memory, too.
  absl::StatusOr<Tensor> NewTensor(std::uint64_t bytes);

  absl::StatusOr<DaemonStats> Stats();

  // Attaches again after the lease was lost, with the pauses and timeouts of options.reattach.
  // Models are registered again; sequences that are gone are listed, and their handles answer
  // NOT_FOUND. Returns OK at once if the lease is held.
  absl::StatusOr<ReattachReport> Reattach();

  // OK while attached; else UNAVAILABLE with the reason.
  absl::Status status() const;
  bool mapped() const;    // steps use mapped memory
  bool draining() const;  // the daemon has announced that it will exit
  SessionId session_id() const;
  // Of the current attachment; empty if there is none.
  DaemonInfo daemon() const;

 private:
  friend struct WorkerAccess;  // for this tree's tests and tools
  explicit Worker(std::shared_ptr<Core> core) : core_(std::move(core)) {}
  absl::Status FreeId(std::uint64_t id);
  const std::shared_ptr<Core> core_;
};

}  // namespace tessera::client
