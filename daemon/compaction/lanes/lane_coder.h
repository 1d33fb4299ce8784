// The work on one lane: new full tiles take the strategy before, and a run that has come to its end
// gets a strategy of its own.
//
//   EncodeTiles   plain rows ──▶ provisional tiles (raw rows kept) │ fewer than 32 stay plain
//   Seal          raw rows + plain rows ──▶ sealed segments        │ what stays plain
//   Retain        plain rows ──▶ those that a token policy keeps   │ rows that came since
//   CutKeys       the same ──▶ without some key channels           │ the newest stay plain
//
// Runs inside Sequence::Recode: without a lock, on one lane at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/cache/model/model.h"
#include "daemon/cache/segment/build.h"
#include "daemon/cache/segment/recode.h"
#include "daemon/compaction/lanes/lane_rows.h"
#include "daemon/compaction/lanes/lane_state.h"
#include "daemon/compaction/lanes/seal_requests.h"
#include "daemon/policies/policy.h"
#include "kernels/strategy/strategy.h"

namespace tessera::compaction {

// Counts since start.
struct CodingCounters {
  std::atomic<std::uint64_t> tiles_encoded{0};    // with the strategy before
  std::atomic<std::uint64_t> segments_sealed{0};  // with a strategy of their own, or that before
  std::atomic<std::uint64_t> strategies_made{0};
  std::atomic<std::uint64_t> left_plain{
      0};  // ends of prompts, and rows that have no place in a form
  std::atomic<std::uint64_t> raw_rows_dropped{0};  // or not kept, for want of budget
  std::atomic<std::uint64_t> decisions_made{0};    // of token policies, layer by layer
  std::atomic<std::uint64_t> decision_ns{0};       // spent on them, carrying out left out
  std::atomic<std::uint64_t> shown_bytes{0};       // that workers have shown for them
};

// The segment that says which key channels new rows lose under this policy: the last one, where its
// rows have lost so many. Else null.
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
    // What a token policy leaves of the run's first `decided` entries; null: all of them.
    const policies::LaneDecision* decision = nullptr;
    std::uint64_t decided = 0;
    bool settles = false;  // what it leaves is not chosen from again
    // ManagedSequence::chosen_before of the run's layer: a run that begins before it is sealed by a
    // choice, whenever that comes; no tile waits for one.
    std::uint64_t chosen_before = 0;
    // The channels of keys that stay, where they are not those of the segment before.
    const std::vector<std::uint32_t>* key_channels = nullptr;
    std::uint64_t first_position = 0;  // of these
    HeldRows::Turning turning = {};    // of policies that turn keys
  };
  LaneCoder(const Options& options, const cache::OpenRun& run);

  using Swap = absl::StatusOr<std::optional<cache::LaneSwap>>;
  Swap EncodeTiles();
  // Of many segments some are made at a time: then nothing is swapped yet, and goes_on().
  Swap Seal(const SealWish& wish);
  // Of policies that pack nothing: what the decision leaves, in the form of new tiles or as it is.
  Swap Retain();
  // Of policies that have key channels go: what the decision leaves, but for the newest, without
  // them.
  Swap CutKeys();

  // After Seal: whether it is to be called again.
  bool goes_on() const { return goes_on_; }
  // After EncodeTiles: whether the run should be sealed now, as far as it is known here.
  bool wants_seal() const { return wants_seal_; }
  // After EncodeTiles: whether there are more than it took.
  bool leaves_tiles() const { return leaves_tiles_; }
  std::uint64_t end_of_run() const {
    return run_.first_position + run_.provisional_entries() + run_.plain_entries();
  }

 private:
  struct Form {
    kernels::TileShape shape;
    std::shared_ptr<const cache::Rotations> rotations;
    cache::SegmentLoss loss;
  };
  absl::StatusOr<HeldRows> RowsThatStay() const;
  bool LeftPlain() const;
  // How many of the run's first `entries` stand before that token.
  std::uint64_t EntriesBefore(std::uint64_t token, std::uint64_t entries) const {
    return std::min(token - std::min(token, run_.first_position), entries);
  }
  // Of these, those that the decision was about.
  std::uint64_t CountDecided(const HeldRows& rows) const;
  static void Settle(const cache::LaneSwap& swap);
  static std::optional<Form> FormOf(const cache::Segment* segment);
  std::optional<Form> FormBefore() const;
  std::optional<Form> FormOfNewTiles() const;
  // Plain rows that are to be encoded when there are so many: whole tiles.
  std::uint64_t CountForNewTiles() const;
  // For a seal, which may come at any time.
  bool MayBeSealed() const;
  // Of so many, the last ones of the lane, those that do not wait as the policy's newest: whole
  // tiles, where some wait.
  std::uint64_t OlderOf(std::uint64_t entries) const;
  // How many of the run's first `entries` stay dense because the lane begins with them.
  std::uint64_t SinksAmong(std::uint64_t entries) const;
  bool LossIsTooHigh(const Form& form) const;
  // False: the budget has no room, and the run is long enough to be sealed instead.
  bool DecideAboutRaw(std::uint64_t count);
  void GiveUpRaw();
  void DropRaw();

  // Nothing, or the first tile of which a value has no place in that form.
  absl::StatusOr<std::optional<std::size_t>> EncodeProvisional(const Form& form,
                                                               const HeldRows& rows,
                                                               std::uint64_t count,
                                                               cache::LaneSwap& swap);
  void SealPlainAt(std::size_t tile);
  absl::Status FitsALane(std::uint64_t entries) const;
  absl::Status ObserveTiles(const Form& form, const HeldRows& rows,
                            const std::vector<device::TilePlace>& tiles);

  kernels::Strategy MakeStrategyOf(const HeldRows& rows, std::uint64_t first, std::uint64_t count);
  absl::StatusOr<Form> Store(const kernels::Strategy& strategy);
  absl::StatusOr<Form> Store(const kernels::TileShape& shape, const kernels::RotationView& matrices,
                             cache::SegmentLoss loss);
  // R_k: the rows of the identity that choose these channels.
  absl::StatusOr<Form> StoreKeyChannels(const std::vector<std::uint32_t>& channels);
  absl::StatusOr<Form> MakeForm(const HeldRows& rows, std::uint64_t first, std::uint64_t count);
  absl::StatusOr<std::optional<Form>> FormOfShortEnd(const HeldRows& rows, std::uint64_t first,
                                                     std::uint64_t count,
                                                     const std::optional<Form>& before);
  absl::StatusOr<kernels::Loss> LossOf(const Form& form, const kernels::LaneRows& rows);
  // Null: a value has no place in that form.
  absl::StatusOr<std::shared_ptr<cache::Segment>> Encoded(const Form& form, const HeldRows& rows,
                                                          std::uint64_t first, std::uint64_t count);
  std::vector<std::shared_ptr<cache::Segment>> SealedElsewhere(std::uint64_t most) const;
  void TakeWhatIsMade(std::uint64_t most, cache::LaneSwap& swap) const;
  void TellOthers(std::uint64_t done, cache::LaneSwap& swap) const;
  absl::Status AddSinks(const HeldRows& rows, std::uint64_t count, cache::LaneSwap& swap);
  absl::StatusOr<bool> AddSealed(const Form& form, const HeldRows& rows, std::uint64_t first,
                                 std::uint64_t count, cache::LaneSwap& swap);
  absl::Status AddPlain(const HeldRows& rows, std::uint64_t first, std::uint64_t count,
                        cache::LaneSwap& swap);
  absl::Status AddAs(const Form& form, const HeldRows& rows, std::uint64_t first,
                     std::uint64_t count, cache::LaneSwap& swap);

  const Options options_;
  const cache::OpenRun& run_;
  const kernels::DenseTile tile_;
  const kernels::LayerGeometry geometry_;
  bool keeps_raw_ = false;  // of the tiles that are encoded now
  bool wants_seal_ = false;
  bool leaves_tiles_ = false;
  bool goes_on_ = false;
};

}  // namespace tessera::compaction
