// Attention over lanes: the one entry point that the daemon's RPC door, the client's mapped door,
// tests and benchmarks all call.
//
//   logit = scale * q.k            (then softcap * tanh(logit / softcap) where a soft-cap is set)
//           + ln weight            (1 where a segment has no weights)
//   visible: position <= query position if causal; position > query position - window if windowed
//   output = sum softmax(logit) * v,  lse = ln sum exp(logit), the learned sink included in both
//
// A lane with nothing visible and no sink gives output 0 and lse = -infinity, the neutral element
// of merging.
//
// Packed segments are read as they are: the query is rotated once per segment, a part's output
// stays in the rotated space of V, and the merged output of a segment is rotated back once.
//
// Determinism: a lane is split into parts of kPartEntries entries that never cross a segment, and
// the tail is a part of its own (parts, if it spans more than 64 tiles). Parts are computed
// independently and merged in lane order, so the result depends on the LaneView, the selection rule
// and the implementation alone: never on threads, batch or door.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kernels/format/lane_view.h"
#include "kernels/format/layer_geometry.h"
#include "kernels/format/part.h"

namespace tessera::kernels {

inline constexpr std::uint32_t kPartEntries = 2048;
static_assert(kPartEntries == kMaxPartRuns * kTileEntries);

// What attention reads of a lane: of the segments that have block summaries, the best blocks until
// they hold a budget of entries; of everything else, and of the tail, all. One choice per kv head,
// for all its query heads and all queries of the item, or one per query head for its queries; the
// lane's very last block, if it is partial, and block 0, if asked for, are taken first and count.
struct SelectionRule {
  // What a query row says of a block: its score less the row's log-sum-exp over all blocks, so that
  // every row has an equal say, or the score itself. The largest over rows counts.
  enum class Judge : std::uint8_t { kShare, kLogit };

  double rate = 1;            // of the entries that the item's queries may see in such segments
  std::uint64_t entries = 0;  // if not 0: the budget itself, instead of `rate`
  std::uint64_t floor = 0;    // entries that a budget by `rate` has at least
  Judge judge = Judge::kShare;
  bool first_block = false;
  // The budget is of the newest rows as well, which are in no block yet: those of a last tile that
  // is not full, and the tail's. With the newest block, where that is partial, they count in whole
  // blocks; segments get the rest of it. Where the lane has no tail its newest block is taken, full
  // or not.
  bool counts_tail = false;
  // Items with it come as by_head.h makes them, of a layer without groups; others are at fault.
  bool each_head = false;

  friend bool operator==(const SelectionRule&, const SelectionRule&) = default;
};

// One (sequence, kv head). The pointers name the whole sequence's rows of this layer; the kernel
// picks the group of `kv_head`. Nothing may alias.
struct AttendItem {
  const LaneView* lane = nullptr;
  std::uint32_t kv_head = 0;
  std::uint32_t queries = 1;                 // n_q
  std::uint64_t first_query_position = 0;    // query i stands at first_query_position + i
  const void* query = nullptr;               // [queries][query_heads][head_dim], geometry.type
  void* output = nullptr;                    // the same shape, AttendBatch::output_type
  float* lse = nullptr;                      // [queries][query_heads], natural log; may be null
  const SelectionRule* selection = nullptr;  // null: everything is read
};

struct AttendBatch {
  LayerGeometry geometry;
  bool causal = true;
  ElementType output_type = ElementType::kFp32;
  std::span<const AttendItem> items;
};

enum class AttendStatus : std::uint8_t {
  kOk,
  kBadTile,           // a tile outside its arena, a shape that does not fit the layer, or a tail
                      // longer than its ring: the lane changed under a revoked reader. The item's
                      // output and lse are then partly written or not at all; others are complete.
  kWorkspaceTooSmall  // the caller's bug, as is a misaligned one: see AttendWorkspaceBytes
};

struct AttendResult {
  AttendStatus status = AttendStatus::kOk;
  std::string_view implementation;  // written by the code that ran, so that tests can tell
  std::uint32_t item = 0;           // the first item at fault, where status is not kOk
};

// Runs `task(context, i)` for every i in [0, tasks), in any order, on any threads, and returns when
// all are done. The caller owns the threads; kernels start none.
class Executor {
 public:
  using Task = void (*)(void* context, std::uint32_t index);
  virtual ~Executor() = default;
  virtual void ParallelFor(std::uint32_t tasks, Task task, void* context) = 0;
};

class InlineExecutor final : public Executor {
 public:
  void ParallelFor(std::uint32_t tasks, Task task, void* context) override {
    for (std::uint32_t i = 0; i < tasks; ++i) task(context, i);
  }
};

class Implementation;  // reference, avx2, avx512: see implementation.h

// Scratch that Attend or Select needs for this batch: rotated queries, scores, partial results.
// Depends on the shapes only; a caller that keeps the buffer allocates nothing while decoding.
std::size_t AttendWorkspaceBytes(const AttendBatch& batch);

// Thread-safe; touches only what the batch names and the workspace (64-byte aligned).
AttendResult Attend(const Implementation& implementation, const AttendBatch& batch,
                    std::span<std::byte> workspace, Executor& executor);

// Consecutive entries of a segment that a selection takes.
struct SelectedRun {
  std::uint32_t segment;
  std::uint32_t first_entry;
  std::uint32_t entries;
};

class SelectionSink {
 public:
  virtual ~SelectionSink() = default;
  // In lane order. Segments without summaries are not mentioned, nor is the tail: both are read
  // whole.
  virtual void Take(std::uint32_t item, const SelectedRun& run) = 0;
};

// What Attend would read of items that have a selection rule; outputs are not touched.
AttendResult Select(const Implementation& implementation, const AttendBatch& batch,
                    std::span<std::byte> workspace, Executor& executor, SelectionSink& sink);

}  // namespace tessera::kernels
