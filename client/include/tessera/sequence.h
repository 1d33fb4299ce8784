// A worker's handle of one sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "client/observe/observer.h"
#include "daemon/base/ids.h"
#include "tessera/compression.h"
#include "tessera/model.h"
#include "tessera/prefix.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::client {

class Core;
class Session;
struct SequenceState;

// K and V of a run of tokens, [layers][tokens][kv_heads][head_dim] in the model's type. Host
// memory; where the session maps a GPU's memory, of that GPU if you like.
struct AppendTensors {
  std::span<const std::byte> key;
  std::span<const std::byte> value;
  std::uint64_t tokens = 0;
  std::uint32_t first_layer = 0;
  std::uint32_t layers = 0;  // 0: all from first_layer on; they must have the same shape
  // The prompt of these layers ends with these rows: they are compressed in the background. Of
  // every layer that is to be compressed: a layer for which it is not given waits. EndPrompt says
  // it of all layers at once.
  bool end_of_prompt = false;
};

// Move-only. One thread at a time; other sequences may be used on other threads. A sequence that is
// in a step takes no other call until the step has ended (FAILED_PRECONDITION).
//
// The destructor frees the sequence, if the daemon still holds it for this worker.
class Sequence {
 public:
  Sequence() = default;
  Sequence(Sequence&&) noexcept = default;
  Sequence& operator=(Sequence&& other) noexcept;
  ~Sequence();

  bool valid() const { return state_ != nullptr; }
  SequenceId id() const;
  // Committed tokens, as this worker knows them.
  std::uint64_t tokens() const;

  // The rotary position of the next token's query and key: tokens(), unless the policy moves
  // positions. Constant within a step.
  std::uint64_t next_position() const;

  // Appends in bulk, in as many pieces as the staging arena or the largest message asks for. All
  // of it, or nothing: the pieces before one that failed are taken back (unless other layers are
  // ahead, when the message says how far this one got). Returns the tokens that every layer holds
  // then. A sequence that decodes stops decoding; the
  // next BeginStep starts it again.
  absl::StatusOr<std::uint64_t> Append(const AppendTensors& tensors);

  // The policy, and what it asks to see of a prompt before it is compressed.
  const std::string& policy() const;
  const v1::PolicyNeeds& needs() const;
  // Takes what it asks for of the queries of these rows. Kept here, and shown to the daemon by
  // Compress and by the Append that ends the prompt. OK where it asks for nothing.
  absl::Status Observe(const ObservedRows& rows);
  // Where text is cut at delimiters: the ids of all tokens, decoded ones too, in their order,
  // before their rows or after them.
  absl::Status ObserveTokens(std::uint64_t first_token, std::span<const std::uint32_t> ids);

  // Has the daemon encode what the segments hold in this form; tokens in the tail stay there. The
  // sequence may go on decoding. See the proto for the errors.
  absl::StatusOr<v1::CompressResponse> Compress(const Packing& packing,
                                                const RotationTensors& rotations = {});

  // Has it compress what there is as the sequence's policy says, as at the end of a prompt, and
  // waits for the end of that. OK also where nothing could be compressed: `outcomes` of the answer
  // says what was done with the lanes, what was not, and why.
  absl::StatusOr<v1::CompressResponse> Compress();
  // Says that the prompt has ended in every layer, so that what there is gets compressed in the
  // background: as Append's end_of_prompt for all layers, without rows. Waits for nothing.
  absl::Status EndPrompt();

  // A new sequence with the same committed tokens, under the same policy or under one of its own.
  // It goes on from what this one has observed where both policies ask for the same.
  absl::StatusOr<Sequence> Fork();
  absl::StatusOr<Sequence> Fork(const std::string& policy);
  // Makes a head of it a prefix that every worker of the tenant finds: of so many tokens as there
  // are ids, all that it holds unless its policy keeps every token. Compressed first, as by
  // Compress. The sequence goes on; the prefix stays when it ends. See the proto for the errors.
  absl::StatusOr<PublishedPrefix> Publish(std::span<const std::uint32_t> token_ids,
                                          const PublishOptions& options = {});
  // Keeps the first `tokens` tokens. OUT_OF_RANGE where there are fewer.
  absl::Status Truncate(std::uint64_t tokens);
  // Gives the tail rings back: for sequences that will not decode for a while.
  absl::Status Park();
  // Moves what it alone holds to the daemon's host memory; returns the bytes of the pool that go.
  // Any call that needs them brings them back. ABORTED where somebody else works on it.
  absl::StatusOr<std::uint64_t> Offload();
  // Brings it back before it is needed.
  absl::Status Restore();
  absl::StatusOr<v1::DescribeResponse> Describe(bool lanes = false) const;
  // With the position of every entry of every lane.
  absl::StatusOr<v1::DescribeResponse> DescribeEntries() const;
  // Gives the sequence to another session of the tenant, which adopts it by its id, and shows the
  // daemon what was seen of it for its policy. The handle is spent then.
  absl::Status Handover(SessionId to);
  // Spends the handle, unless it fails. OK where the sequence is gone already.
  absl::Status Free();

  // For this library's own files.
  const std::shared_ptr<SequenceState>& state() const { return state_; }

 private:
  friend class Worker;
  // Before a step: where the policy goes on while decoding, and a prompt, or a tile's worth of
  // tokens, has come since it acted last, has it act.
  absl::Status KeepToBudget();
  absl::Status ShowAll(Session& session);
  absl::Status Release();
  absl::StatusOr<v1::DescribeResponse> Ask(v1::DescribeRequest request) const;
  absl::StatusOr<Sequence> Fork(const std::string* policy);
  enum class How { kWait, kToAnother, kMark };  // EndPrompt is to mark
  absl::StatusOr<v1::CompressResponse> Compress(Session& session, std::uint32_t first_layer,
                                                std::uint32_t layers, How how = How::kWait);
  // Before a step: what the worker should be warned of.
  void LookAtPromptEnd(Session& session);
  void WarnOfNoEffect(const v1::CompressResponse& response);
  Sequence(std::shared_ptr<Core> core, std::shared_ptr<SequenceState> state);

  std::shared_ptr<Core> core_;
  std::shared_ptr<SequenceState> state_;
};

}  // namespace tessera::client
