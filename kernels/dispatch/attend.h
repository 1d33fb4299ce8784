// Attention over lanes. The RPC transport, the mapped transport, tests and benchmarks all call it.
//
//   logit = scale * q.k            (then softcap * tanh(logit / softcap) if a soft-cap is set)
//           + ln weight            (weight 1 if a segment has no weights)
//   visible: position <= query position if causal; position > query position - window if windowed
//   output = sum softmax(logit) * v,  lse = ln sum exp(logit), the learned sink included in both
//
// A lane with nothing visible and no sink gives output 0 and lse = -infinity, the neutral element
// of merging.
//
// Packed segments are not rotated back entry by entry. The query is rotated once per segment,
// partial outputs stay in the rotated space of V, and the merged output is rotated back once.
//
// Determinism: a lane is split into parts of kPartEntries entries that never cross a segment. The
// tail is a separate part (several if it spans more than 64 tiles). Parts are computed
// independently and merged in lane order. The result depends only on the LaneView, the selection
// rule and the implementation, never on threads, batch composition or transport.
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

// What attention reads of a lane. In segments with block summaries: the best blocks until they hold
// a budget of entries. All other segments and the tail are read whole. There is one choice per kv
// head, shared by its query heads and all queries of the item; or, with `each_head`, one per query
// head, and with `each_query` one per query. The lane's last block (if partial) and block 0 (if
// `first_block`) are taken first and count.
struct SelectionRule {
  // How a query row rates a block: kShare is the block's score minus the row's log-sum-exp over all
  // blocks, so that every row counts equally; kLogit is the score itself. The maximum over rows
  // decides.
  enum class Judge : std::uint8_t { kShare, kLogit };

  double rate = 1;            // budget as a share of the visible entries of such segments
  std::uint64_t entries = 0;  // if not 0: the budget itself, instead of `rate`
  std::uint64_t floor = 0;    // entries that a budget by `rate` has at least
  Judge judge = Judge::kShare;
  bool first_block = false;
  // If set, the budget also covers the newest rows, which belong to no block yet: those of an
  // unfilled last tile and of the tail. They are counted in whole blocks, together with the newest
  // block if that is partial; segments get the rest of the budget. If the lane has no tail, its
  // newest block is always taken.
  bool counts_tail = false;
  // Items that set it must come from per_head.h, with a layer without groups; others give kBadTile.
  bool each_head = false;
  // Likewise, as items of one query.
  bool each_query = false;

  friend bool operator==(const SelectionRule&, const SelectionRule&) = default;
};

// One (sequence, kv head). `query`, `output` and `lse` are the whole sequence's rows of this layer;
// the kernel selects the query heads of `kv_head`. Nothing may alias.
struct AttendItem {
  const LaneView* lane = nullptr;
  std::uint32_t kv_head = 0;
  std::uint32_t queries = 1;                 // n_q
  std::uint64_t first_query_position = 0;    // query i is at first_query_position + i
  const void* query = nullptr;               // [queries][query_heads][head_dim], geometry.type
  void* output = nullptr;                    // the same shape, AttendBatch::output_type
  float* lse = nullptr;                      // [queries][query_heads], natural log; may be null
  const SelectionRule* selection = nullptr;  // null: read everything
};

struct AttendBatch {
  LayerGeometry geometry;
  bool causal = true;
  ElementType output_type = ElementType::kFp32;
  std::span<const AttendItem> items;
};

enum class AttendStatus : std::uint8_t {
  kOk,
  kBadTile,  // a tile outside its arena, a shape that does not match the layer, or a tail longer
             // than its ring: the lane changed under a revoked reader. The item's output and lse
             // may be partly written; other items are complete.
  kWorkspaceTooSmall  // a bug of the caller, like a misaligned workspace: see AttendWorkspaceBytes
};

struct AttendResult {
  AttendStatus status = AttendStatus::kOk;
  std::string_view implementation;  // name returned by the code that ran, for tests
  std::uint32_t item = 0;           // the first failing item, if status is not kOk
};

// Runs `task(context, i)` for every i in [0, tasks), in any order and on any threads, and returns
// when all are done. The caller owns the threads; kernels start none.
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

// The scratch that Attend or Select needs for this batch: rotated queries, scores, partial results.
// It depends on the shapes only; a caller that reuses the buffer allocates nothing while decoding.
std::size_t AttendWorkspaceBytes(const AttendBatch& batch);

// Thread-safe; accesses only what the batch names and the workspace, which must be 64-byte aligned.
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
  // Called in lane order. Segments without summaries and the tail are not reported: they are read
  // whole.
  virtual void Take(std::uint32_t item, const SelectedRun& run) = 0;
};

// Reports what Attend would read for items that have a selection rule. Writes no outputs.
AttendResult Select(const Implementation& implementation, const AttendBatch& batch,
                    std::span<std::byte> workspace, Executor& executor, SelectionSink& sink);

}  // namespace tessera::kernels
