// One request's KV: its lanes, its tail while it decodes, and the block by which readers find them.
//
// Every change follows the same three steps: reserve everything the change needs, fill memory that
// no reader can see, then publish: lane words first, the block's version after them. What was
// published before is retired through the tenant's epoch.
//
// Thread-safe. Locks: `mutex_` for everything that changes; `tail_mutex_` for the tail handle
// alone, so that a reader never waits for an append. Order: mutex_, then tail_mutex_, then the
// pool's.
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
#include "daemon/cache/tail/control.h"
#include "daemon/cache/tail/tail.h"

namespace tessera::cache {

// The open tail of a decoding sequence: rings and committed count, both in the worker's hands.
class TailHandle {
 public:
  TailHandle(TailRegion region, CommitSlot commit_slot, std::uint32_t generation,
             std::shared_ptr<pool::Block> block)
      : region_(std::move(region)),
        commit_slot_(std::move(commit_slot)),
        block_(std::move(block)),
        generation_(generation) {}

  const TailRegion& region() const { return region_; }
  std::uint32_t generation() const { return generation_; }

  // The worker's word, once; nothing where it belongs to an earlier tail (nothing committed yet).
  std::optional<std::uint64_t> CommittedTokens() const;

  // Whether a step of the worker is at the sequence now, as far as it says so.
  bool InStep() const;

  // Lets the worker overwrite ring rows before `token`. No effect once closed.
  void PublishRingStart(std::uint64_t token);
  void Close();

 private:
  const TailRegion region_;
  const CommitSlot commit_slot_;
  const std::shared_ptr<pool::Block> block_;
  const std::uint32_t generation_;
  Mutex mutex_;
  bool closed_ TESSERA_GUARDED_BY(mutex_) = false;
};

// What an upper layer knows of a sequence: its policy, what it has learnt of rows. Goes with it.
class Companion {
 public:
  virtual ~Companion() = default;
  // Whether work waits that needs the rows in the pool. Never blocks.
  virtual bool Busy() const { return false; }
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
  // The session whose end frees it. An atomic of its own: asking never waits for an append.
  SessionId owner() const { return SessionId(owner_.load()); }
  void set_owner(SessionId owner) { owner_.store(owner.value()); }

  // Appends `tokens` rows to layers [first_layer, first_layer + layers). `first_token` must be what
  // they hold. A tail that is open is absorbed and closed first, and stays closed where the append
  // is refused. Returns the tokens that every
  // layer holds then. DATA_LOSS where a value is not usable: the sequence is FAILED.
  struct AppendSpan {
    std::uint32_t first_layer = 0;
    std::uint32_t layers = 0;
    std::uint64_t first_token = 0;
    std::uint64_t tokens = 0;
    // For which the rows were computed: FAILED_PRECONDITION where it is another. None: any.
    std::optional<std::uint64_t> position_shift{};
    bool decoded = false;  // by a step, which may take some of them back
  };
  // `before_seen` is called when nothing can fail any more and nobody has seen a row; under the
  // sequence's lock.
  absl::StatusOr<std::uint64_t> Append(
      const AppendSpan& span, const RowSource& rows, absl::FunctionRef<void()> before_seen = [] {});

  // A new sequence that shares this one's segments. This one's open segment is frozen.
  absl::StatusOr<std::shared_ptr<Sequence>> Fork(SequenceId id, SessionId owner);

  // Takes over another's segments in place of its own of the same tokens, which the caller knows to
  // be its first ones. What it has behind them stays: rows of a segment that their end parts are
  // copied, in the form that they have. FAILED_PRECONDITION where it holds fewer tokens in
  // segments, or more where either has dropped some, or others are at other positions; ABORTED
  // while it is compressed, or has rows there that wait for a strategy.
  enum class HeadTaken : std::uint8_t {
    kHadIt,   // all of these segments, before
    kAll,     // of as many tokens as it holds itself
    kBehind,  // it holds tokens behind them
  };
  absl::StatusOr<HeadTaken> TakeHeadOf(const Sequence& other);

  // Of a sequence that came from a prefix, by forks: counted there while it lives.
  void set_prefix(ForkHold hold);
  ForkHold prefix() const;

  // Whether some of what it holds was made by a call or by an earlier policy, so that its policy
  // does not say what it is. Its forks say so, too.
  bool made_by_hand() const { return made_by_hand_.load(); }
  void set_made_by_hand() { made_by_hand_.store(true); }
  // Every lane has an entry of its own for every token, and all rows are as they came.
  bool AsItCame() const;
  // Every lane has an entry of its own for every token.
  bool KeepsEveryToken() const;

  // `before_seen` is called when nothing can fail any more and nobody has seen that rows have gone;
  // under the sequence's lock.
  absl::Status Truncate(
      std::uint64_t tokens, absl::FunctionRef<void()> before_seen = [] {});

  // Starts decoding through the mapping. An open tail is closed first.
  struct OpenedTail {
    std::uint32_t extent;
    std::uint64_t extent_bytes;
    std::uint64_t offset;
    std::uint32_t commit_slot;
    std::uint32_t generation;
    std::uint64_t tokens;
    std::uint64_t position_shift;  // for as long as the tail is open
  };
  absl::StatusOr<OpenedTail> OpenTail(TailMemory& memory, Control& control);
  // Absorbs everything committed and gives the rings back. No effect without a tail. Where the pool
  // has no room the tail stays open and nothing is lost.
  absl::Status CloseTail();
  // Moves committed tokens from the tail into segments, so many as fill tiles there. Returns how
  // many moved.
  absl::StatusOr<std::uint64_t> AbsorbFullTiles();

  // Encodes every dense segment of the layers named into the form that the spec gives them. The
  // work is done without the sequence's lock: appends, tails and readers go on, and what comes in
  // meanwhile stays dense. All lanes are published together; an error changes nothing.
  // INVALID_ARGUMENT where a value has no place in that form, ABORTED while another packing runs.
  absl::StatusOr<PackOutcome> Pack(const PackSpec& spec, const GoOn& go_on);

  // Before entries of some layers are moved to other positions, which a swap does (LaneSwap).
  // Closes the tail: rows that come through it stand where its worker was told when it opened it.
  // None is opened while the answer is held. FAILED_PRECONDITION where a layer is named that holds
  // fewer tokens than another: those that it misses would stand elsewhere than what it holds.
  using TailShut = std::shared_ptr<const void>;
  absl::StatusOr<TailShut> BeginMoves(std::uint32_t first_layer, std::uint32_t layers);
  // How far the rotary position of a token is behind its number, because keys were turned to the
  // places that they have after others went. 0 unless a policy moves positions.
  // While that is done lane by lane, or where it has ended in between, it is what it was before.
  std::uint64_t position_shift() const;
  // Whether any lane has moved any.
  bool HasMoved() const;
  // FAILED_PRECONDITION where some lanes have moved tokens that others have not moved yet.
  absl::Status StandsAlike() const;
  // The same for whoever reads one layer; FAILED_PRECONDITION where lanes of it stand elsewhere
  // than the sequence's next query. Whatever was published before this call has a version by now.
  absl::StatusOr<std::uint64_t> PositionShiftOf(std::uint32_t layer) const;

  // Tokens that a layer holds, committed ones of the tail included.
  absl::StatusOr<std::uint64_t> TokensOfLayer(std::uint32_t layer);

  // Entries of a lane that wait for a strategy.
  std::uint64_t OpenEntries(std::uint32_t lane) const;

  // Lanes with more segments than this.
  std::vector<std::uint32_t> CrowdedLanes(std::size_t segments) const;

  // The first of the last tokens that a step has appended, if nothing came behind them; else behind
  // the last token.
  std::uint64_t step_begin() const;

  // Gives up the copies of rows that wait for a strategy, but for those of segments that somebody
  // else holds, too: what they were encoded to is final.
  void DropRawRows();

  // What an upper layer keeps with the sequence; null once it is freed.
  std::shared_ptr<Companion> companion() const;
  void set_companion(std::shared_ptr<Companion> companion);

  // Hands what waits for a strategy in one lane to `work`, which runs without the sequence's lock,
  // and publishes what comes of it. Lanes can be recoded at the same time, each by one caller.
  // ABORTED where another call is at it, or where the lane was forked or cut meanwhile so that the
  // work does not fit it any more. An error changes nothing.
  struct RecodeOptions {
    std::uint32_t lane = 0;
    std::uint64_t least_plain = 0;  // fewer plain entries: nothing is done
    bool whole = false;             // all of the lane, and not only what waits
  };
  absl::Status Recode(const RecodeOptions& options, const Recoder& work);
  // The same of all lanes of a layer at one moment, by kv head, to look at: rows stay as they are
  // while they are held here. Others may go on appending behind them.
  absl::StatusOr<std::vector<OpenRun>> LookAt(std::uint32_t layer, bool whole) const;

  // Moves every committed token from the tail into segments; the tail goes on.
  absl::Status AbsorbTail();

  // ---- where its rows are; sequence_residency.cc

  // Moves what it alone holds from the pool into the host tier; segments that others share stay.
  // The tail is closed first, and stays closed where the rest is refused. Readers see the block's
  // state kSequenceOffloaded, and whatever needs rows answers ABORTED until they are restored.
  // Returns the bytes that leave the pool when its readers have moved on. ABORTED where another
  // call, a step or a packing works on it; RESOURCE_EXHAUSTED where the tier is full, or the pool
  // has no room to close the tail.
  struct OffloadOptions {
    // Only where nobody has used it since.
    std::optional<Clock::TimePoint> unused_since{};
  };
  absl::StatusOr<std::uint64_t> Offload(const OffloadOptions& options);
  // Brings back all that is in the tier, byte for byte, and keeps it here while the answer is held.
  // Counts as a use. Waits while another call moves it. RESOURCE_EXHAUSTED where the pool has no
  // room: nothing has changed then.
  absl::StatusOr<Residence> Restore();
  bool offloaded() const;
  // What the ladder goes by: since when nobody has used it (a committed count that has moved since
  // the last look counts as now), and whether Offload would move anything: now, or once whoever is
  // at it has done. Waits for nobody: who looks may be another tenant's call.
  struct Rest {
    Clock::TimePoint last_use;
    bool may_go = false;
    bool at_work = false;
  };
  Rest LookForRest();

  // Readers see it gone; its memory goes when they have moved on. The sequence refuses everything
  // from now on. Idempotent.
  void Free();

  // The tail as a reader may use it, or null. Take it after pinning and before the lane words.
  std::shared_ptr<const TailHandle> tail() const;
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
    std::uint64_t tokens = 0;  // that its entries are what is left of
    std::uint64_t position_shift = 0;
    // Only where they were asked for: of each entry.
    std::vector<std::uint64_t> positions;
    std::vector<float> weights;
  };
  struct Description {
    SequenceId id;
    SessionId owner;
    bool failed = false;
    std::string failure;
    std::uint64_t tokens = 0;  // committed tail tokens included
    bool decoding = false;
    std::uint64_t tile_bytes = 0;
    std::uint64_t shared_tile_bytes = 0;
    bool offloaded = false;
    std::uint64_t stored_bytes = 0;  // in the host tier
    std::vector<LaneDescription> lanes;
  };
  enum class Detail { kSums, kLanes, kEntries };
  Description Describe(Detail detail) const;
  Description Describe(bool lanes) const {
    return Describe(lanes ? Detail::kLanes : Detail::kSums);
  }
  // What the segments of all lanes hold, form by form.
  std::vector<SegmentRun> Form() const;

 private:
  friend class Residence;
  // What one lane needs to take an append: reserved first, used after every lane has its own.
  struct Growth {
    std::shared_ptr<Segment> segment;
    bool fresh;                 // not yet in the lane's list
    std::uint32_t first_entry;  // of the rows that go in
    std::uint32_t count;
    Tiles tiles;
    pool::Block table;
    // The tile of an entry: the segment's, or one that is reserved for it.
    std::byte* TileOf(std::uint32_t entry) const;
  };
  struct LanePlan {
    std::uint32_t lane;
    std::uint32_t layer;
    std::uint32_t kv_head;
    // So many of the lane's last segments go: the first growth begins with copies of their rows.
    std::size_t taken_over = 0;
    std::vector<Growth> growths{};
    pool::Block snapshot{};
  };
  // What a plan brings to the device, many lanes at a time.
  struct FillBatch {
    struct Origin {
      std::uint32_t layer;
      std::uint32_t kv_head;
      std::uint64_t first_token;
    };
    std::vector<device::RowRun> runs;
    std::vector<Origin> origins;  // of each run
    std::vector<device::WordStore> words;
  };
  // What a publication replaces, on its way to the epoch.
  struct Replaced {
    std::vector<pool::Block> blocks;
    std::vector<std::shared_ptr<Segment>> segments;
    std::uint64_t bytes() const;
  };

  // Another's segments, on their way into this one (TakeHeadOf).
  struct HeadLane {
    std::vector<HeldSegment> segments;
    std::uint64_t entries = 0;
    std::uint64_t tokens = 0;
    bool held = false;                  // by this one, too
    std::uint64_t losses = 0;           // of this one's lane until then
    HeldSegment parted{};               // of this one, by the head's end; none: it parts none
    std::shared_ptr<Segment> newest{};  // of this one: nobody appends to it
    std::shared_ptr<Segment> rest{};    // a copy of what `parted` has behind that

    bool HeldBy(const Lane& lane) const;
  };
  struct Head {
    SequenceId of;
    PositionMove moved;
    std::vector<HeadLane> lanes;

    bool held() const;
  };

  Sequence(const TenantMemory& memory, SequenceId id, std::shared_ptr<const Model> model,
           SessionId owner, pool::Block block);

  shm::SequenceBlock& block() const;
  shm::Word* lane_words() const;

  absl::Status Usable() const TESSERA_REQUIRES(mutex_);
  void AdoptMoves() TESSERA_REQUIRES(mutex_);
  // Tokens up to which some lanes have moved, and others have not; 0: all stand alike.
  std::uint64_t MovedAhead() const TESSERA_REQUIRES(mutex_);
  // Whether a lane of the layer has moved, and not all others.
  bool MovedAlone(std::uint32_t layer) const TESSERA_REQUIRES(mutex_);
  absl::Status HalfMoved() const TESSERA_REQUIRES(mutex_);
  // Whether tokens of a lane may be moved that stand before this one.
  absl::Status MayMove(std::uint32_t lane, std::uint64_t until) const TESSERA_REQUIRES(mutex_);
  absl::Status Fail(std::string why) TESSERA_REQUIRES(mutex_);
  std::uint64_t TokensInSegments() const TESSERA_REQUIRES(mutex_);

  // sequence_append.cc
  absl::Status CheckFirstToken(const AppendSpan& span, std::uint64_t committed)
      TESSERA_REQUIRES(mutex_);
  absl::Status AppendLocked(const AppendSpan& span, const RowSource& rows,
                            absl::FunctionRef<void()> before_seen, Replaced& replaced)
      TESSERA_REQUIRES(mutex_);
  // joins: what is appended takes over short segments before it, where it begins one.
  absl::StatusOr<std::vector<LanePlan>> PlanAll(const AppendSpan& span, bool joins)
      TESSERA_REQUIRES(mutex_);
  absl::StatusOr<LanePlan> Plan(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t tokens,
                                bool joins) TESSERA_REQUIRES(mutex_);
  bool MayJoin(const Lane& lane) const TESSERA_REQUIRES(mutex_);
  // Many short segments of the newest rows become one, once and not in each fork. Not where the
  // child, which takes over so many tokens of the tail, then had no room for these.
  absl::Status JoinForFork(Sequence& child, std::uint64_t tail_tokens)
      TESSERA_REQUIRES(mutex_, child.mutex_);
  absl::Status ReserveBesides(Sequence& child, std::uint64_t tail_tokens,
                              std::vector<LanePlan>& plans) TESSERA_REQUIRES(mutex_, child.mutex_);
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
  // After the lane words: bumps the version and sends what was replaced to the epoch.
  void FinishPublication(Replaced replaced, pool::Epochs::Garbage also = nullptr)
      TESSERA_REQUIRES(mutex_);

  // sequence_pack.cc
  absl::Status TakeForPacking(const PackSpec& spec, Packer& packer) TESSERA_REQUIRES(mutex_);
  absl::StatusOr<PackOutcome> PublishPacked(const PackSpec& spec, Packer& packer)
      TESSERA_REQUIRES(mutex_);

  // sequence_prefix.cc
  absl::Status ListHead(Head& head) const;
  bool IsAsLongAs(const Head& head) const TESSERA_REQUIRES(mutex_);
  absl::Status MayTakeHead(const Head& head) const TESSERA_REQUIRES(mutex_);
  absl::Status TakeParted(Head& head) TESSERA_REQUIRES(mutex_);
  absl::Status CopyParted(Head& head) const;
  absl::Status PutHead(Head& head) TESSERA_REQUIRES(mutex_);

  // sequence_recode.cc
  OpenRun OpenRunOf(std::uint32_t lane, bool whole = false) const TESSERA_REQUIRES(mutex_);
  absl::Status SwapIn(const OpenRun& run, LaneSwap& swap, Replaced& replaced)
      TESSERA_REQUIRES(mutex_);
  void CountSwap(const std::vector<HeldSegment>& sources, const LaneSwap& swap);

  // sequence_residency.cc
  Rest RestLocked() TESSERA_REQUIRES(mutex_);
  void Leave();
  void Used() TESSERA_REQUIRES(mutex_);
  // Usable, and in the pool.
  absl::Status Resident() const TESSERA_REQUIRES(mutex_);
  absl::Status MayOffload() const TESSERA_REQUIRES(mutex_);
  absl::Status CloseTailOutOfStep() TESSERA_REQUIRES(mutex_);
  void Withdraw(const Offloading& work, Replaced& replaced) TESSERA_REQUIRES(mutex_);
  Clock::TimePoint LastUseLocked() TESSERA_REQUIRES(mutex_);

  // sequence_tail.cc
  absl::StatusOr<std::uint64_t> CommittedLocked() TESSERA_REQUIRES(mutex_);
  absl::Status AbsorbLocked(std::uint64_t upto) TESSERA_REQUIRES(mutex_);
  static std::uint64_t RowsOfTheLastTile(const Lane& lane);
  absl::Status CloseTailLocked() TESSERA_REQUIRES(mutex_);
  void DropTail() TESSERA_REQUIRES(mutex_);

  // sequence.cc
  absl::Status CopyLanesOf(const Sequence& parent, std::uint64_t tokens)
      TESSERA_REQUIRES(mutex_, parent.mutex_);
  absl::StatusOr<std::vector<pool::Block>> ReserveSnapshots(std::size_t more_segments)
      TESSERA_REQUIRES(mutex_);
  void CutLanes(std::uint64_t tokens, std::vector<pool::Block> snapshots) TESSERA_REQUIRES(mutex_);
  // FAILED_PRECONDITION where a token before the cut has been merged with one behind it.
  absl::Status MayCut(std::uint64_t tokens) const TESSERA_REQUIRES(mutex_);

  const TenantMemory memory_;
  const SequenceId id_;
  const std::shared_ptr<const Model> model_;
  const std::shared_ptr<pool::Block> block_;  // retired by Free, shared with tail handles
  const std::uint64_t block_offset_;
  std::atomic<std::uint64_t> owner_;

  mutable Mutex mutex_;
  std::vector<Lane> lanes_ TESSERA_GUARDED_BY(mutex_);
  std::uint32_t tail_generation_ TESSERA_GUARDED_BY(mutex_) = 0;
  bool freed_ TESSERA_GUARDED_BY(mutex_) = false;
  bool packing_ TESSERA_GUARDED_BY(mutex_) = false;
  PositionMove moved_ TESSERA_GUARDED_BY(mutex_);           // of all lanes together: AdoptMoves
  std::uint32_t tail_shut_ TESSERA_GUARDED_BY(mutex_) = 0;  // TailShuts that are held
  std::string failure_ TESSERA_GUARDED_BY(mutex_);          // empty: live
  bool offloaded_ TESSERA_GUARDED_BY(mutex_) = false;
  bool moving_ TESSERA_GUARDED_BY(mutex_) = false;  // rows are copied out or in, without the lock
  CondVar still_;                                   // `moving_` has ended
  std::uint32_t residents_ TESSERA_GUARDED_BY(mutex_) = 0;  // Residences that live
  Clock::TimePoint last_use_ TESSERA_GUARDED_BY(mutex_);
  std::uint64_t seen_committed_ TESSERA_GUARDED_BY(mutex_) = 0;
  // Of the newest append, as far as it was not cut; what no step brought begins at its end.
  std::uint64_t step_begin_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::uint64_t step_end_ TESSERA_GUARDED_BY(mutex_) = 0;

  std::atomic<bool> made_by_hand_{false};

  mutable Mutex companion_mutex_;
  std::shared_ptr<Companion> companion_ TESSERA_GUARDED_BY(companion_mutex_);
  ForkHold prefix_ TESSERA_GUARDED_BY(companion_mutex_);

  mutable Mutex tail_mutex_;
  std::shared_ptr<TailHandle> tail_ TESSERA_GUARDED_BY(tail_mutex_);
};

}  // namespace tessera::cache
