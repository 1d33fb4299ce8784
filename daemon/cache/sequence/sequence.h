// `Sequence` is one request's KV: its lanes, its tail while it decodes, and the block through which
// readers find them. Owned by its Tenant, or by a Prefix if it is frozen.
//
// Every change has three steps: reserve everything it needs, fill memory that no reader can see,
// then publish (lane words first, then the block's version). Whatever was published before is
// retired through the tenant's epoch.
//
// Thread-safe. `mutex_` guards what changes; `tail_mutex_` guards only the tail handle, so that a
// reader never waits for an append. Lock order: mutex_, tail_mutex_, the pool's lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"
#include "daemon/cache/memory/tenant_memory.h"
#include "daemon/cache/model/model.h"
#include "daemon/cache/segment/lane.h"
#include "daemon/cache/segment/pack.h"
#include "daemon/cache/segment/recode.h"
#include "daemon/cache/segment/row_source.h"
#include "daemon/cache/sequence/prefix_forks.h"
#include "daemon/cache/sequence/residence.h"
#include "daemon/cache/sequence/tail_handle.h"
#include "daemon/cache/tail/control.h"
#include "daemon/cache/tail/tail.h"

namespace tessera::cache {

// State that an upper layer attaches to a sequence, such as its policy and statistics about its
// rows. Dropped when the sequence is freed.
class Companion {
 public:
  virtual ~Companion() = default;
  // True if pending work needs the rows in the pool. Never blocks.
  virtual bool Busy() const { return false; }
  // Called under the sequence's lock before it gets its first rows, or a companion when it has
  // some: allocates what is kept for each lane. Idempotent. RESOURCE_EXHAUSTED: no room for it.
  virtual absl::Status MakeLanes() { return absl::OkStatus(); }
};

class Offloading;

class Sequence : public std::enable_shared_from_this<Sequence> {
 public:
  static absl::StatusOr<std::shared_ptr<Sequence>> Create(const TenantMemory& memory, SequenceId id,
                                                          std::shared_ptr<const Model> model,
                                                          SessionId owner);
  ~Sequence();

  SequenceId id() const { return id_; }
  const Model& model() const { return *model_; }
  const TenantMemory& memory() const { return memory_; }
  std::uint64_t directory_offset() const { return block_offset_; }
  // The session that owns the sequence; the sequence is freed when that session ends. A separate
  // atomic, so that reading it never waits for an append.
  SessionId owner() const { return SessionId(owner_.load()); }
  void set_owner(SessionId owner) { owner_.store(owner.value()); }

  // Appends `tokens` rows to layers [first_layer, first_layer + layers). `first_token` must equal
  // the number of tokens that these layers hold. An open tail is absorbed and closed first, and
  // remains closed if the append fails. Returns the number of tokens that every layer then holds.
  // DATA_LOSS means that a value is not usable; the sequence is then FAILED.
  struct AppendSpan {
    std::uint32_t first_layer = 0;
    std::uint32_t layers = 0;
    std::uint64_t first_token = 0;
    std::uint64_t tokens = 0;
    // The position shift the rows were computed for; FAILED_PRECONDITION if the sequence's differs.
    // nullopt: any.
    std::optional<std::uint64_t> position_shift{};
    bool decoded = false;  // rows come from a decode step, which may take some of them back
  };
  // `before_seen` runs under the sequence's lock, when nothing can fail any more and no reader has
  // seen a row.
  absl::StatusOr<std::uint64_t> Append(
      const AppendSpan& span, const RowSource& rows, absl::FunctionRef<void()> before_seen = [] {});

  // Creates a sequence that shares this one's segments, and freezes this one's open segment.
  absl::StatusOr<std::shared_ptr<Sequence>> Fork(SequenceId id, SessionId owner);

  // Replaces this sequence's first segments with the equivalent segments of `other`. The caller
  // must know that both hold the same tokens there. Later rows are kept; if the end of the prefix
  // splits a segment, the rows after it are copied in their stored form. FAILED_PRECONDITION if
  // this sequence holds fewer tokens in segments, has tokens at other positions, or (when either
  // has dropped entries) holds more tokens. ABORTED while it is being compressed or has rows there
  // that wait for a strategy.
  enum class PrefixAdoption : std::uint8_t {
    kAlreadyHeld,  // it already held all of these segments
    kAll,          // all its tokens are covered
    kHasMore,      // it has further tokens after the prefix
  };
  absl::StatusOr<PrefixAdoption> AdoptPrefix(const Sequence& other);

  // Marks the sequence as derived from a prefix, which counts it as a user while it lives.
  void set_prefix(ForkHold hold);
  ForkHold prefix() const;

  // True if some content was produced by an explicit call or an earlier policy, so that the current
  // policy does not describe it. Forks inherit the flag.
  bool has_manual_changes() const { return has_manual_changes_.load(); }
  void set_has_manual_changes() { has_manual_changes_.store(true); }
  // True if every lane has one entry per token and no row has been re-encoded.
  bool HasOriginalRows() const;
  // True if every lane has one entry per token.
  bool KeepsEveryToken() const;

  // Drops all tokens from `tokens` on. `before_seen` runs under the sequence's lock, when nothing
  // can fail any more and no reader has seen that rows are gone.
  absl::Status Truncate(
      std::uint64_t tokens, absl::FunctionRef<void()> before_seen = [] {});

  // Starts decoding through the mapped transport. An open tail is closed first.
  struct OpenedTail {
    std::uint32_t extent;
    std::uint64_t extent_bytes;
    std::uint64_t offset;
    std::uint32_t commit_slot;
    std::uint32_t generation;
    std::uint64_t tokens;
    std::uint64_t position_shift;  // constant while the tail is open
  };
  absl::StatusOr<OpenedTail> OpenTail(TailMemory& memory, Control& control);
  // Absorbs all committed tokens and releases the rings. No effect without a tail. If the pool has
  // no room, the tail remains open and nothing is lost.
  absl::Status CloseTail();
  // Moves committed tokens from the tail into segments, but only as many as fill whole tiles.
  // Returns the number moved.
  absl::StatusOr<std::uint64_t> AbsorbFullTiles();

  // Encodes every dense segment of the layers named in the form that the spec gives them. The work
  // runs without the sequence's lock: appends, tails and readers continue, and rows that arrive in
  // the meantime remain dense. All lanes are published together, and an error changes nothing.
  // INVALID_ARGUMENT: a value cannot be represented in that form. ABORTED: another packing is
  // running.
  absl::StatusOr<PackOutcome> Pack(const PackSpec& spec, const GoOn& go_on);

  // Must be held while entries of some layers move to other positions, which a swap does
  // (LaneSwap). Closes the tail, because rows written through it stand at the positions valid when
  // it was opened; no tail can be opened while the result is held. FAILED_PRECONDITION if a named
  // layer holds fewer tokens than another one: its missing rows would stand at other positions.
  using TailBlock = std::shared_ptr<const void>;
  absl::StatusOr<TailBlock> BeginMoves(std::uint32_t first_layer, std::uint32_t layers);
  // The number of positions by which tokens have moved: token number minus rotary position. It is 0
  // unless a policy drops tokens and re-rotates the remaining keys. The old value remains valid
  // until all lanes have moved.
  std::uint64_t position_shift() const;
  // True if any lane has moved tokens.
  bool HasMoved() const;
  // Returns FAILED_PRECONDITION if some lanes have moved tokens and others have not yet.
  absl::Status CheckPositionsAgree() const;
  // The same for a reader of one layer: FAILED_PRECONDITION if lanes of that layer disagree with
  // the position of the sequence's next query. Everything published before this call has its
  // version by now.
  absl::StatusOr<std::uint64_t> PositionShiftOf(std::uint32_t layer) const;

  // Number of tokens a layer holds, including committed ones in the tail.
  absl::StatusOr<std::uint64_t> TokensOfLayer(std::uint32_t layer);

  // Number of entries of a lane that wait for a strategy.
  std::uint64_t OpenEntries(std::uint32_t lane) const;

  // Lanes that have more segments than this.
  std::vector<std::uint32_t> LanesNearSegmentLimit(std::size_t segments) const;

  // The first token of the most recent decode step, if nothing was appended after it; else the end
  // of the sequence.
  std::uint64_t step_begin() const;

  // Drops the raw copies of rows that wait for a strategy, which makes their current encoding
  // final. Copies of segments that another sequence also holds are kept.
  void DropRawRows();

  // State attached by an upper layer; null once the sequence is freed.
  std::shared_ptr<Companion> companion() const;
  // Calls MakeLanes of the companion if the sequence has lanes. Its failure is ignored: who needs
  // it calls it before.
  void set_companion(std::shared_ptr<Companion> companion);
  // Whether the sequence has had rows or a tail. Before, it keeps nothing for each lane.
  bool has_lanes() const;

  // Passes the part of one lane that waits for a strategy to `work`, which runs without the
  // sequence's lock, and publishes the result. Different lanes can be recoded concurrently, each by
  // one caller. ABORTED if another call is recoding the lane, or if a fork or truncation in the
  // meantime invalidated the result. An error changes nothing.
  struct RecodeOptions {
    std::uint32_t lane = 0;
    std::uint64_t min_dense_entries = 0;  // no-op if the lane has fewer dense entries
    bool whole = false;                   // pass the entire lane, not only the part that waits
    ReplacedBytes* counted = nullptr;     // counts the result; null: not counted
  };
  absl::Status Recode(const RecodeOptions& options, const Recoder& work);
  // Returns that part of every lane of a layer (`whole`: the entire lanes) at one moment, by kv
  // head, for inspection. Its rows do not change while the result is held; others may append after
  // them.
  absl::StatusOr<std::vector<OpenRun>> LookAt(std::uint32_t layer, bool whole) const;

  // Moves every committed token from the tail into segments. The tail remains open.
  absl::Status AbsorbTail();

  // ---- offloading and restoring; see sequence_residency.cc

  // Moves the segments that only this sequence holds from the pool to the host tier; shared
  // segments remain. The tail is closed first, and remains closed if a later step fails. Readers
  // then see the state kSequenceOffloaded, and operations that need rows return ABORTED until
  // Restore. Returns the bytes that leave the pool once its readers are done. ABORTED: another
  // call, a step or a packing is using the sequence. RESOURCE_EXHAUSTED: the tier is full, or the
  // pool has no room to close the tail.
  struct OffloadOptions {
    // Offload only if the sequence has not been used since this time.
    std::optional<Clock::TimePoint> unused_since{};
  };
  absl::StatusOr<std::uint64_t> Offload(const OffloadOptions& options);
  // Restores everything from the tier, byte for byte, and keeps it in the pool while the result is
  // held. Counts as a use. Waits while another call moves the rows. RESOURCE_EXHAUSTED: the pool
  // has no room, and nothing has changed.
  absl::StatusOr<Residence> Restore();
  bool offloaded() const { return offloaded_.load(std::memory_order_relaxed); }
  // What the pressure ladder needs to choose a victim: the time of the last use (a committed count
  // that moved since the last call counts as a use now), and whether Offload would move anything,
  // now or once the current user is done. Never blocks, because the caller may act for another
  // tenant.
  struct Rest {
    Clock::TimePoint last_use;
    bool may_go = false;
    bool at_work = false;
  };
  Rest GetIdleState();

  // Hides the sequence from readers and frees its memory when they are done. Every later operation
  // is refused. Idempotent.
  void Free();

  // The tail as readers may use it, or null. Load it after pinning and before the lane words.
  std::shared_ptr<const TailHandle> tail() const;
  // Number of tokens, including committed ones in the tail. Waits for no append, so the number may
  // be that before a running one.
  std::uint64_t CountTokens() const;
  // Adds the tokens committed in the tail since the last call to TenantCounters::tokens_committed.
  void CountCommitted();
  bool decoding() const { return tail() != nullptr; }
  bool failed() const;

  struct LaneDescription {
    std::uint32_t layer;
    std::uint32_t kv_head;
    std::uint64_t entries;
    std::uint64_t tail_entries;
    std::uint32_t segments;
    std::uint64_t tile_bytes;
    std::vector<SegmentRun> runs;
    std::uint64_t tokens = 0;  // tokens that the entries represent
    std::uint64_t position_shift = 0;
    // Per entry; filled only for Detail::kEntries.
    std::vector<std::uint64_t> positions;
    std::vector<float> weights;
  };
  struct Description {
    SequenceId id;
    SessionId owner;
    bool failed = false;
    std::string failure;
    std::uint64_t tokens = 0;  // including committed tokens in the tail
    bool decoding = false;
    std::uint64_t tile_bytes = 0;
    std::uint64_t shared_tile_bytes = 0;
    bool offloaded = false;
    std::uint64_t stored_bytes = 0;  // bytes in the host tier
    std::vector<LaneDescription> lanes;
  };
  enum class Detail { kSums, kLanes, kEntries };
  Description Describe(Detail detail) const;
  Description Describe(bool lanes) const {
    return Describe(lanes ? Detail::kLanes : Detail::kSums);
  }
  // Sums over the segments of all lanes, by form.
  std::vector<SegmentRun> Form() const;

 private:
  friend class Residence;
  // Memory that one lane needs for an append. All lanes reserve theirs before any is used.
  struct Growth {
    std::shared_ptr<Segment> segment;
    bool fresh;                 // not yet in the lane's list
    std::uint32_t first_entry;  // of the rows being appended
    std::uint32_t count;
    Tiles tiles;
    pool::Block table;
    // The tile of an entry: one that the segment has, or one reserved for it.
    std::byte* TileOf(std::uint32_t entry) const;
  };
  struct LanePlan {
    std::uint32_t lane;
    std::uint32_t layer;
    std::uint32_t kv_head;
    // Number of the lane's last segments that are replaced: the first growth begins with their
    // rows.
    std::size_t taken_over = 0;
    std::vector<Growth> growths{};
    pool::Block snapshot{};
  };
  // Work for the device, batched over many lanes.
  struct FillBatch {
    struct Origin {
      std::uint32_t layer;
      std::uint32_t kv_head;
      std::uint64_t first_token;
    };
    std::vector<device::RowRun> runs;
    std::vector<Origin> origins;  // one per run
    std::vector<device::WordStore> words;
  };
  // What a publication replaces; it goes to the epoch.
  struct Replaced {
    std::vector<pool::Block> blocks;
    std::vector<std::shared_ptr<Segment>> segments;
    std::uint64_t bytes() const;
  };

  // Segments of another sequence that this one is about to adopt (AdoptPrefix).
  struct AdoptedLane {
    std::vector<HeldSegment> segments;
    std::uint64_t entries = 0;
    std::uint64_t tokens = 0;
    bool held = false;         // this sequence already holds them
    std::uint64_t losses = 0;  // of this sequence's lane at the time of the check
    HeldSegment parted{};  // this sequence's segment split by the end of the prefix; empty: none
    std::shared_ptr<Segment> newest{};  // this sequence's last segment; holding it blocks appends
    std::shared_ptr<Segment> rest{};  // a copy of the rows of `parted` after the end of the prefix

    bool HeldBy(const Lane& lane) const;
  };
  struct Head {
    SequenceId of;
    PositionMove moved;
    std::vector<AdoptedLane> lanes;

    bool held() const;
  };

  Sequence(const TenantMemory& memory, SequenceId id, std::shared_ptr<const Model> model,
           SessionId owner, pool::Block block, pool::Charge charge);

  shm::SequenceBlock& block() const;
  shm::Word* lane_words() const;

  // Makes the lanes, and those of the companion. Called before the first rows and the first tail.
  absl::Status MakeLanes() TESSERA_REQUIRES(mutex_);
  void DropLanes() TESSERA_REQUIRES(mutex_);
  // An empty lane if there are none yet.
  const Lane& LaneAt(std::uint32_t lane) const TESSERA_REQUIRES(mutex_);
  absl::Status Usable() const TESSERA_REQUIRES(mutex_);
  void AdoptMoves() TESSERA_REQUIRES(mutex_);
  // Number of leading tokens that some lanes have moved and others have not; 0: all lanes agree.
  std::uint64_t TokensMovedAhead() const TESSERA_REQUIRES(mutex_);
  // True if a lane of the layer has moved while others have not.
  bool IsOnlyMovedLayer(std::uint32_t layer) const TESSERA_REQUIRES(mutex_);
  absl::Status PartlyMovedError() const TESSERA_REQUIRES(mutex_);
  // Checks that the lane may move its tokens before `until`.
  absl::Status MayMove(std::uint32_t lane, std::uint64_t until) const TESSERA_REQUIRES(mutex_);
  absl::Status Fail(std::string why) TESSERA_REQUIRES(mutex_);
  std::uint64_t TokensInSegments() const TESSERA_REQUIRES(mutex_);

  // sequence_append.cc
  absl::Status CheckFirstToken(const AppendSpan& span, std::uint64_t committed)
      TESSERA_REQUIRES(mutex_);
  absl::Status AppendLocked(const AppendSpan& span, const RowSource& rows,
                            absl::FunctionRef<void()> before_seen, Replaced& replaced)
      TESSERA_REQUIRES(mutex_);
  absl::Status AppendToLanes(const AppendSpan& span, const RowSource& rows,
                             absl::FunctionRef<void()> before_seen, Replaced& replaced)
      TESSERA_REQUIRES(mutex_);
  // joins: an append that begins a segment first copies the short segments before it.
  absl::StatusOr<std::vector<LanePlan>> PlanAll(const AppendSpan& span, bool joins)
      TESSERA_REQUIRES(mutex_);
  absl::StatusOr<LanePlan> Plan(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t tokens,
                                bool joins) TESSERA_REQUIRES(mutex_);
  bool MayJoin(const Lane& lane) const TESSERA_REQUIRES(mutex_);
  // Joins many short segments of the newest rows, so that it happens once and not in each fork.
  // Skipped if the child would then lack room for the tokens it takes over from the tail.
  absl::Status JoinForFork(Sequence& child, std::uint64_t tail_tokens)
      TESSERA_REQUIRES(mutex_, child.mutex_);
  absl::Status ReserveAlongside(Sequence& child, std::uint64_t tail_tokens,
                                std::vector<LanePlan>& plans)
      TESSERA_REQUIRES(mutex_, child.mutex_);
  absl::Status Reserve(LanePlan& plan, std::uint64_t tokens) TESSERA_REQUIRES(mutex_);
  absl::Status FillTakenOver(const std::vector<LanePlan>& plans) TESSERA_REQUIRES(mutex_);
  absl::Status ReserveGrowth(Growth& growth);
  absl::Status Fill(const std::vector<LanePlan>& plans, const RowSource& rows,
                    std::uint64_t first_token) TESSERA_REQUIRES(mutex_);
  void AddToBatch(const LanePlan& plan, const RowSource& rows, std::uint64_t first_token,
                  FillBatch& batch);
  absl::Status Flush(device::Place source, FillBatch& batch) TESSERA_REQUIRES(mutex_);
  void Commit(LanePlan& plan, std::uint64_t tokens, Replaced& replaced) TESSERA_REQUIRES(mutex_);
  void PublishLane(std::uint32_t lane, pool::Block snapshot, Replaced& replaced)
      TESSERA_REQUIRES(mutex_);
  // Called after the lane words are written: bumps the version and retires what was replaced.
  void FinishPublication(Replaced replaced, pool::Epochs::Garbage also = nullptr)
      TESSERA_REQUIRES(mutex_);

  // sequence_pack.cc
  absl::Status TakeForPacking(const PackSpec& spec, Packer& packer) TESSERA_REQUIRES(mutex_);
  absl::StatusOr<PackOutcome> PublishPacked(const PackSpec& spec, Packer& packer)
      TESSERA_REQUIRES(mutex_);

  // sequence_prefix.cc
  absl::Status ListPrefixSegments(Head& head) const;
  bool IsAsLongAs(const Head& head) const TESSERA_REQUIRES(mutex_);
  absl::Status CheckAdoptable(const Head& head) const TESSERA_REQUIRES(mutex_);
  absl::Status TakeSplitSegments(Head& head) TESSERA_REQUIRES(mutex_);
  absl::Status CopySplitSegments(Head& head) const;
  absl::Status PublishAdopted(Head& head) TESSERA_REQUIRES(mutex_);

  // sequence_recode.cc
  OpenRun OpenRunOf(std::uint32_t lane, bool whole = false) const TESSERA_REQUIRES(mutex_);
  absl::Status SwapIn(const OpenRun& run, LaneSwap& swap, ReplacedBytes* counted,
                      Replaced& replaced) TESSERA_REQUIRES(mutex_);
  void CountSwap(const std::vector<HeldSegment>& sources, const LaneSwap& swap);

  // sequence_residency.cc
  Rest IdleStateLocked() TESSERA_REQUIRES(mutex_);
  void Leave();
  void Used() TESSERA_REQUIRES(mutex_);
  // Checks that the sequence is usable and its rows are in the pool.
  absl::Status Resident() const TESSERA_REQUIRES(mutex_);
  absl::Status MayOffload() const TESSERA_REQUIRES(mutex_);
  absl::Status CloseTailBetweenSteps() TESSERA_REQUIRES(mutex_);
  // Runs a transfer to or from the tier and counts it. That the pool has no room is not the tier's
  // error.
  absl::Status Transfer(absl::FunctionRef<absl::Status()> copy) const;
  void Withdraw(const Offloading& work, Replaced& replaced) TESSERA_REQUIRES(mutex_);
  Clock::TimePoint LastUseLocked() TESSERA_REQUIRES(mutex_);

  // sequence_tail.cc
  absl::StatusOr<std::uint64_t> CommittedLocked() TESSERA_REQUIRES(mutex_);
  absl::Status AbsorbLocked(std::uint64_t upto) TESSERA_REQUIRES(mutex_);
  static std::uint64_t RowsInLastTile(const Lane& lane);
  absl::Status CloseTailLocked() TESSERA_REQUIRES(mutex_);
  void DropTail() TESSERA_REQUIRES(mutex_);
  std::uint64_t CommittedForCounting() const TESSERA_REQUIRES(tail_mutex_);

  // sequence.cc
  absl::Status CopyLanesOf(const Sequence& parent, std::uint64_t tokens)
      TESSERA_REQUIRES(mutex_, parent.mutex_);
  absl::StatusOr<std::vector<pool::Block>> ReserveSnapshots(std::size_t more_segments)
      TESSERA_REQUIRES(mutex_);
  void CutLanes(std::uint64_t tokens, std::vector<pool::Block> snapshots) TESSERA_REQUIRES(mutex_);
  // Returns FAILED_PRECONDITION if a token before the cut was merged with a later one.
  absl::Status MayCut(std::uint64_t tokens) const TESSERA_REQUIRES(mutex_);

  const TenantMemory memory_;
  const SequenceId id_;
  const std::shared_ptr<const Model> model_;
  const std::shared_ptr<pool::Block> block_;  // retired by Free; shared with tail handles
  const std::uint64_t block_offset_;
  std::atomic<std::uint64_t> owner_;

  mutable Mutex mutex_;
  pool::Charge charge_ TESSERA_GUARDED_BY(mutex_);  // of this object
  pool::Charge lanes_charge_ TESSERA_GUARDED_BY(mutex_);
  std::vector<Lane> lanes_ TESSERA_GUARDED_BY(mutex_);  // none until MakeLanes: all are empty
  std::uint32_t tail_generation_ TESSERA_GUARDED_BY(mutex_) = 0;
  bool freed_ TESSERA_GUARDED_BY(mutex_) = false;
  bool packing_ TESSERA_GUARDED_BY(mutex_) = false;
  PositionMove moved_ TESSERA_GUARDED_BY(mutex_);             // common to all lanes: AdoptMoves
  std::uint32_t tail_blocks_ TESSERA_GUARDED_BY(mutex_) = 0;  // number of live TailBlocks
  std::string failure_ TESSERA_GUARDED_BY(mutex_);            // empty: not failed
  std::atomic<bool> offloaded_{false};                        // written under mutex_
  bool moving_ TESSERA_GUARDED_BY(mutex_) = false;  // rows are being copied, without the lock
  CondVar moving_done_;                             // signalled when `moving_` becomes false
  std::uint32_t residents_ TESSERA_GUARDED_BY(mutex_) = 0;  // number of live Residences
  Clock::TimePoint last_use_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t seen_committed_ TESSERA_GUARDED_BY(mutex_) = 0;
  // Token range of the newest append, less what was truncated. For an append that is not a decode
  // step the range is empty and starts at its end.
  std::uint64_t step_begin_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::uint64_t step_end_ TESSERA_GUARDED_BY(mutex_) = 0;

  std::atomic<bool> has_manual_changes_{false};
  std::atomic<std::uint64_t> published_tokens_{0};  // TokensInSegments, written under mutex_

  mutable Mutex companion_mutex_;
  std::shared_ptr<Companion> companion_ TESSERA_GUARDED_BY(companion_mutex_);
  ForkHold prefix_ TESSERA_GUARDED_BY(companion_mutex_);

  mutable Mutex tail_mutex_;
  std::shared_ptr<TailHandle> tail_ TESSERA_GUARDED_BY(tail_mutex_);
  std::uint64_t counted_tokens_ TESSERA_GUARDED_BY(tail_mutex_) = 0;  // see CountCommitted
};

}  // namespace tessera::cache
