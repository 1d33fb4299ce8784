// `LaneCoder` encodes the open run of one lane: full tiles with the previous segment's strategy,
// and sealed segments with their own.
//
//   EncodeTiles   dense rows ──▶ provisional tiles (raw rows kept) │ fewer than 32 rows stay dense
//   Seal          raw rows + dense rows ──▶ sealed segments        │ rows that stay dense
//   Retain        dense rows ──▶ rows that a token policy keeps    │ rows that came since
//   CutKeys       dense rows ──▶ rows without some key channels    │ the newest rows stay dense
//
// Runs inside Sequence::Recode, without the sequence's lock, on one lane at a time. Rows change
// only through the LaneSwap that each function returns; nullopt: nothing to change.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/model/model.h"
#include "daemon/cache/segment/book_shelf.h"
#include "daemon/cache/segment/build.h"
#include "daemon/cache/segment/recode.h"
#include "daemon/compaction/lanes/lane_outcome.h"
#include "daemon/compaction/lanes/lane_rows.h"
#include "daemon/compaction/lanes/lane_state.h"
#include "daemon/compaction/lanes/seal_requests.h"
#include "daemon/policies/plan.h"
#include "daemon/policies/policy.h"
#include "daemon/policies/registry.h"
#include "kernels/strategy/strategy.h"

namespace tessera::compaction {

// Counts since start.
struct CodingCounters {
  std::atomic<std::uint64_t> tiles_encoded{0};    // with the previous strategy
  std::atomic<std::uint64_t> segments_sealed{0};  // with their own strategy or the previous one
  std::atomic<std::uint64_t> strategies_made{0};
  std::atomic<std::uint64_t> left_plain{
      0};  // ends of prompts, and rows with values that the form cannot represent
  // Attempts that left rows of a lane dense, by DenseReason.
  std::array<std::atomic<std::uint64_t>, kDenseReasons> left_dense{};
  std::atomic<std::uint64_t> raw_rows_dropped{0};  // or not kept, because the budget was used up
  std::atomic<std::uint64_t> decisions_made{0};    // by token policies, counted per layer
  std::atomic<std::uint64_t> decision_ns{0};       // time for decisions, without carrying them out
  std::atomic<std::uint64_t> shown_bytes{0};       // observations received from workers
  // By policies::Systems: the first system of the sequence's policy.
  std::array<cache::ReplacedBytes, policies::kSystems> replaced_by_system{};
};

// The segment whose key channels new rows keep under this policy: the last packed one, if it has
// the policy's form. Else null.
const cache::Segment* KeyChannelFormOf(const cache::OpenRun& run, const policies::Policy& policy,
                                       const kernels::LayerGeometry& geometry);

inline std::uint64_t FullTiles(std::uint64_t entries) {
  return entries / kernels::kTileEntries * kernels::kTileEntries;
}

class LaneCoder {
 public:
  struct Options {
    const cache::TenantMemory* memory;
    const cache::Model* model;
    const policies::Policy* policy;
    LaneState* state;
    const kernels::Operations* operations;
    CodingCounters* counters;
    // The decision about the run's first `decided` entries; null: all are kept.
    const policies::LaneDecision* decision = nullptr;
    std::uint64_t decided = 0;
    bool settles = false;  // later choices skip the entries that it keeps
    // ManagedSequence::chosen_before of the run's layer: a run that begins before this token is
    // sealed by a choice, not by its length.
    std::uint64_t chosen_before = 0;
    // Rows from this token on are not encoded yet: a choice has to score them as they are.
    std::uint64_t encode_before = ~std::uint64_t{0};
    // The key channels to keep; null: those of the previous segment.
    const std::vector<std::uint32_t>* key_channels = nullptr;
    std::uint64_t first_position = 0;    // of the decided entries
    HostLaneRows::Turning turning = {};  // set if the policy re-rotates keys
  };
  LaneCoder(const Options& options, const cache::OpenRun& run);

  using Swap = absl::StatusOr<std::optional<cache::LaneSwap>>;
  Swap EncodeTiles();
  // For policies that use books: full tiles of dense rows, for good. A lane that has no book yet
  // makes one, if it holds enough rows.
  Swap EncodeWithBook();
  // Makes a limited number of segments per call. If there are more, nothing is swapped yet and
  // is_continuation() is true.
  Swap Seal(const SealRequest& wish);
  // For policies that do not pack: stores the kept rows, dense or with block summaries.
  Swap Retain();
  // For policies that use books: codes the kept rows. A lane that has no book yet makes one, also
  // of the rows that are dropped.
  Swap RetainWithBook();
  // Dense rows that arrived at different times become one segment.
  Swap JoinPlain();
  // For policies that drop key channels: stores the kept rows without these channels, except for
  // the newest rows.
  Swap CutKeys();

  // After Seal: whether it must be called again.
  bool is_continuation() const { return goes_on_; }
  // After Seal or CutKeys: what was left dense; nullopt: no rows were considered.
  const std::optional<DenseRows>& left_dense() const { return left_dense_; }
  // After EncodeTiles: whether the run should be sealed now.
  bool wants_seal() const { return wants_seal_; }
  // After EncodeTiles: whether full tiles are left to encode.
  bool leaves_tiles() const { return leaves_tiles_; }
  std::uint64_t end_of_run() const {
    return run_.first_position + run_.provisional_entries() + run_.plain_entries();
  }

 private:
  struct Form {
    kernels::TileShape shape;
    std::shared_ptr<const cache::Rotations> rotations;
    cache::SegmentLoss loss = {};
    device::ErrorLimits limits = {};                        // planes only
    std::shared_ptr<const cache::LaneBook> book = nullptr;  // planes only
  };
  absl::StatusOr<HostLaneRows> RowsThatStay() const;
  // The rows that the decision keeps, and those that came since. ABORTED: the lane was truncated.
  absl::StatusOr<HostLaneRows> StayOf(const HostLaneRows& rows) const;
  bool LeftPlain() const;
  // How many of the run's first `entries` are before that token.
  std::uint64_t EntriesBefore(std::uint64_t token, std::uint64_t entries) const {
    return std::min(token - std::min(token, run_.first_position), entries);
  }
  // How many of these rows the decision covers.
  std::uint64_t CountDecided(const HostLaneRows& rows) const;
  static void Settle(const cache::LaneSwap& swap);
  static std::optional<Form> FormOf(const cache::Segment* segment);
  std::optional<Form> FormBefore() const;
  std::optional<Form> FormOfNewTiles() const;
  // The number of dense rows that may be encoded.
  std::uint64_t EncodableRows() const;
  // The number of dense rows to encode now: whole tiles.
  std::uint64_t CountForNewTiles() const;
  // Whether the run is long enough for a segment, and may be sealed without a choice.
  bool MayBeSealed() const;
  // `entries`, the last ones of the lane, without those that stay dense as the newest (`recent`).
  // Whole tiles if there are such.
  std::uint64_t OlderOf(std::uint64_t entries) const;
  // How many of the run's first `entries` stay dense because the lane begins with them.
  std::uint64_t SinksAmong(std::uint64_t entries) const;
  bool LossIsTooHigh(const Form& form) const;
  // Decides whether raw copies are kept. False: the budget has no room, and the run is long enough
  // to be sealed instead.
  bool DecideAboutRaw(std::uint64_t count);
  void GiveUpRaw();
  void DropRaw();

  // Returns the first tile with a value that the form cannot represent; nullopt: none.
  absl::StatusOr<std::optional<std::size_t>> EncodeProvisional(const Form& form,
                                                               const HostLaneRows& rows,
                                                               std::uint64_t count,
                                                               cache::LaneSwap& swap);
  void SealPlainAt(std::size_t tile);
  absl::Status FitsALane(std::uint64_t entries) const;
  absl::Status ObserveTiles(const Form& form, const HostLaneRows& rows,
                            const std::vector<device::TilePlace>& tiles);

  kernels::Strategy MakeStrategyOf(const HostLaneRows& rows, std::uint64_t first,
                                   std::uint64_t count);
  absl::StatusOr<Form> Store(const kernels::Strategy& strategy);
  absl::StatusOr<Form> Store(const kernels::TileShape& shape, const kernels::RotationView& matrices,
                             cache::SegmentLoss loss);
  // Stores R_k: the rows of the identity matrix that pick these channels.
  absl::StatusOr<Form> StoreKeyChannels(const std::vector<std::uint32_t>& channels);
  absl::StatusOr<Form> MakeForm(const HostLaneRows& rows, std::uint64_t first, std::uint64_t count);
  absl::StatusOr<std::optional<Form>> FormOfShortEnd(const HostLaneRows& rows, std::uint64_t first,
                                                     std::uint64_t count,
                                                     const std::optional<Form>& before);
  absl::StatusOr<kernels::Loss> LossOf(const Form& form, const kernels::LaneRows& rows);
  // Why a segment with its own strategy is not used for these rows.
  DenseRows WhyDense(const HostLaneRows& rows, std::uint64_t first, std::uint64_t count,
                     const kernels::Strategy& own) const;
  // Records rows [done, total) as waiting, and later ones as newest, unless a reason is known.
  void NoteWaiting(const HostLaneRows& rows, std::uint64_t done, std::uint64_t total);
  struct EncodedOrUnfit {
    std::shared_ptr<cache::Segment> segment;  // null: the form cannot represent a row
    std::size_t unfit_tile = 0;
  };
  absl::StatusOr<EncodedOrUnfit> TryEncode(const Form& form, const HostLaneRows& rows,
                                           std::uint64_t first, std::uint64_t count);
  // Null: the form cannot represent a value.
  absl::StatusOr<std::shared_ptr<cache::Segment>> Encoded(const Form& form,
                                                          const HostLaneRows& rows,
                                                          std::uint64_t first, std::uint64_t count);
  std::vector<std::shared_ptr<cache::Segment>> SealedElsewhere(std::uint64_t most) const;
  void TakeWhatIsMade(std::uint64_t most, cache::LaneSwap& swap) const;
  void TellOthers(std::uint64_t done, cache::LaneSwap& swap) const;
  absl::Status AddSinks(const HostLaneRows& rows, std::uint64_t count, cache::LaneSwap& swap);
  absl::StatusOr<bool> AddSealed(const Form& form, const HostLaneRows& rows, std::uint64_t first,
                                 std::uint64_t count, cache::LaneSwap& swap);
  absl::StatusOr<std::optional<Form>> BookForm(const policies::BookPlan& plan,
                                               const HostLaneRows& rows, std::uint64_t first,
                                               std::uint64_t count);
  static Form PlanesForm(const kernels::TileShape& shape,
                         std::shared_ptr<const cache::LaneBook> book);
  cache::BookShelf::Key BookKey(const policies::BookPlan& plan) const;
  // Null: there are too few rows to make the book that is missing.
  using BookOrWait = absl::StatusOr<std::shared_ptr<const cache::LaneBook>>;
  BookOrWait SharedBook(const policies::BookPlan& plan, const HostLaneRows& rows,
                        std::uint64_t first, std::uint64_t count);
  BookOrWait OwnBook(const policies::BookPlan& plan, const HostLaneRows& rows, std::uint64_t first,
                     std::uint64_t count);
  absl::StatusOr<cache::LaneBook> MakeBook(const policies::BookPlan& plan,
                                           const kernels::LaneRows& sample);
  absl::StatusOr<cache::LaneBook> StoreBook(kernels::Book book);
  bool MeasuresDrift() const;
  absl::Status ObserveDrift(const Form& form, const kernels::LaneRows& rows,
                            const std::vector<device::TilePlace>& tiles, std::uint64_t at);
  void ObserveRefusal(const Form& form);
  void Drifted(const Form& form, const cache::DriftSums& sums);
  absl::Status AddDenseForGood(const HostLaneRows& rows, std::uint64_t first, std::uint64_t count,
                               cache::LaneSwap& swap);
  absl::StatusOr<std::uint64_t> GrowInPlanes(const Form& wanted, const HostLaneRows& rows,
                                             std::uint64_t count, cache::LaneSwap& swap);
  absl::Status AddPlanes(const Form& form, const HostLaneRows& rows, std::uint64_t first,
                         std::uint64_t count, cache::LaneSwap& swap);
  absl::Status AddPlain(const HostLaneRows& rows, std::uint64_t first, std::uint64_t count,
                        cache::LaneSwap& swap);
  absl::Status AddAs(const Form& form, const HostLaneRows& rows, std::uint64_t first,
                     std::uint64_t count, cache::LaneSwap& swap);

  const Options options_;
  const cache::OpenRun& run_;
  const kernels::DenseTile tile_;
  const kernels::LayerGeometry geometry_;
  bool keeps_raw_ = false;  // of the tiles that are encoded now
  bool wants_seal_ = false;
  bool leaves_tiles_ = false;
  bool goes_on_ = false;
  std::optional<DenseRows> left_dense_;
};

}  // namespace tessera::compaction
