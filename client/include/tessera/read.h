// Attention over the committed tokens of a batch, without new ones: begin, attend, end.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "tessera/compression.h"
#include "tessera/model.h"
#include "tessera/step.h"

namespace tessera::client {

class ReadEngine;

struct ReadOptions {
  // How long to wait for memory, if a sequence must be restored first.
  std::chrono::nanoseconds timeout = std::chrono::seconds(1);
  Executor* executor = nullptr;  // not owned; null: the calling thread alone
  void* cuda_stream = nullptr;   // as in StepOptions
};

// Queries of one layer, row after row, sequence after sequence. Memory is as in StepTensors.
struct ReadTensors {
  std::uint32_t queries = 1;                    // of each sequence
  std::span<const std::uint32_t> queries_each;  // or one count per sequence, each at least 1
  // One position per sequence, of its first query. Empty: the last query has the position of the
  // last token.
  std::span<const std::uint64_t> first_query_positions;
  std::span<const std::byte> query;  // [queries][query_heads][head_dim], the model's type
  std::span<std::byte> output;       // the same shape, in `output_type`
  std::span<float> lse;              // [queries][query_heads], natural log; empty: not wanted
  ElementType output_type = ElementType::kFp32;  // or the model's
  bool causal = true;                            // a query sees its own position and earlier ones
  // As in StepTensors, for at most kMaxSelectingTokens queries of a sequence.
  std::optional<SelectionRule> selection;
};

// Reads what is committed when it begins: any number of queries, and any number of calls per layer.
// The results are those of Worker::AttendRpc, bit for bit. The sequences take no other call until
// the read is over.
//
// Used by one thread at a time. Outputs are valid only once End has returned OK. ABORTED, from any
// call, means that the daemon revoked the read's pin: repeat it from BeginRead. UNAVAILABLE means
// that the lease is lost. All later calls repeat the status that ended a read early. A
// default-constructed or moved-from read answers INVALID_ARGUMENT.
class Read {
 public:
  Read() = default;
  Read(Read&& other) noexcept;
  Read& operator=(Read&& other) noexcept;
  ~Read() { Abandon(); }

  absl::Status Attend(std::uint32_t layer, const ReadTensors& tensors);
  absl::Status End();
  // Ends it without waiting for results to be valid. The destructor does the same.
  void Abandon();
  bool open() const;

 private:
  friend class Worker;
  explicit Read(std::shared_ptr<ReadEngine> engine);
  absl::Status NotOpen(const char* call) const;
  absl::Status After(absl::Status status);

  std::shared_ptr<ReadEngine> engine_;
  absl::Status ended_by_;
  bool began_ = false;  // false: default-constructed or moved from
};

}  // namespace tessera::client
