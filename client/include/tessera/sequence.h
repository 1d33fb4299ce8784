// A worker's handle of one sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "tessera/compression.h"
#include "tessera/description.h"
#include "tessera/model.h"
#include "tessera/prefix.h"
#include "tessera/rows.h"

namespace tessera::client {

class Core;
struct SequenceState;

// K and V of consecutive tokens, [layers][tokens][kv_heads][head_dim] in the model's type. Host
// memory, or memory of the GPU that the session maps.
struct AppendTensors {
  std::span<const std::byte> key;
  std::span<const std::byte> value;
  std::uint64_t tokens = 0;
  std::uint32_t first_layer = 0;
  std::uint32_t layers = 0;  // 0: all from first_layer on; they must have the same shape
  // The prompt of these layers ends with these rows: the daemon compresses them in the background.
  // Set it for every layer: others remain uncompressed. EndPrompt ends the prompt of all layers.
  bool end_of_prompt = false;
};

// Queries, and keys where needed, of consecutive tokens of one layer, after RoPE. Host memory.
struct ObservedRows {
  std::uint32_t layer = 0;
  std::uint64_t first_token = 0;
  std::span<const std::byte> query;  // [tokens][query_heads][head_dim], the model's type
  // [tokens][kv_heads][head_dim]: of a prompt, if needs().attention_sums.
  std::span<const std::byte> key;
  // Length of the prompt, if known. Observe then keeps only the queries of largest norm that the
  // policy can use. 0: unknown; Observe keeps them all.
  std::uint64_t prompt_tokens = 0;
};

// Move-only. One thread at a time; other sequences may be used on other threads. A sequence in a
// step takes no other call until the step has ended (FAILED_PRECONDITION). A default-constructed or
// moved-from handle answers INVALID_ARGUMENT.
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

  // Appends in bulk, in as many pieces as the staging arena or the largest message requires, and
  // returns the number of tokens that every layer then holds. If a piece fails, the earlier ones
  // are removed again, unless other layers hold more tokens; the message then says how many tokens
  // these layers hold. Append closes the sequence's tail; the next BeginStep opens it again.
  absl::StatusOr<std::uint64_t> Append(const AppendTensors& tensors);

  // The policy, and the observations of a prompt that it needs before it compresses the prompt.
  const std::string& policy() const;
  PolicyNeeds needs() const;
  // Copies what the policy needs of these rows and keeps it in this process. Compress and the
  // Append that ends the prompt send it to the daemon. OK if the policy needs nothing.
  absl::Status Observe(const ObservedRows& rows);
  // Takes the ids of all tokens, decoded ones too, in order, if needs().token_ids. Before or after
  // the tokens' rows.
  absl::Status ObserveTokens(std::uint64_t first_token, std::span<const std::uint32_t> ids);

  // Has the daemon encode the segments in this form. Tokens in the tail stay dense. The sequence
  // may be decoding.
  absl::StatusOr<CompressResult> Compress(const Packing& packing,
                                          const RotationTensors& rotations = {});

  // Has the daemon compress the sequence as its policy says, as at the end of a prompt, and waits
  // until it has finished. OK even if nothing could be compressed: see CompressResult::outcomes.
  absl::StatusOr<CompressResult> Compress();
  // Ends the prompt in every layer: the daemon compresses it in the background. Does not wait. The
  // same as an Append with end_of_prompt for all layers, without rows.
  absl::Status EndPrompt();

  // Creates a sequence with the same committed tokens, under the same policy or another one. It
  // inherits the observations if both policies need the same ones.
  absl::StatusOr<Sequence> Fork();
  absl::StatusOr<Sequence> Fork(const std::string& policy);
  // Compresses, then publishes the sequence's first tokens as a prefix for every worker of the
  // tenant. `token_ids` names them; under a policy that drops tokens it must name all tokens of the
  // sequence. The sequence remains usable, and the prefix outlives it.
  absl::StatusOr<PublishedPrefix> Publish(std::span<const std::uint32_t> token_ids,
                                          const PublishOptions& options = {});
  // Keeps the first `tokens` tokens. OUT_OF_RANGE if there are fewer.
  absl::Status Truncate(std::uint64_t tokens);
  // Gives the tail rings back to the daemon. For sequences that will not decode for a while.
  absl::Status Park();
  // Moves the memory that only this sequence holds to the daemon's host tier and returns the pool
  // bytes that this frees. Any call that needs the memory restores it. ABORTED if another call
  // works on the sequence.
  absl::StatusOr<std::uint64_t> Offload();
  // Moves the memory back to the pool before a call needs it.
  absl::Status Restore();
  // `lanes`: also every lane.
  absl::StatusOr<SequenceDescription> Describe(bool lanes = false) const;
  // Describe(true) with the position of every entry of every lane.
  absl::StatusOr<SequenceDescription> DescribeEntries() const;
  // Returns decoded rows of one layer, those of its tail included, as attention sees them. Dense
  // rows come back bit for bit. Long lanes take several messages; ABORTED if the lane changes in
  // between, again and again.
  absl::StatusOr<SequenceRows> Read(const RowRange& range);
  // Gives the sequence to another session of the tenant, which adopts it by its id. Sends the
  // observations to the daemon first. The handle cannot be used afterwards.
  absl::Status Handover(SessionId to);
  // Frees the sequence. If it succeeds, the handle cannot be used afterwards. OK if the sequence is
  // already gone.
  absl::Status Free();

 private:
  friend class Worker;
  friend struct SequenceAccess;  // for the library's own files
  absl::Status Release();
  absl::StatusOr<Sequence> ForkWith(const std::string* policy);  // null: the same
  Sequence(std::shared_ptr<Core> core, std::shared_ptr<SequenceState> state);

  std::shared_ptr<Core> core_;
  std::shared_ptr<SequenceState> state_;
};

}  // namespace tessera::client
