// `Segment` is a range of a lane's entries that share one strategy. It owns its tiles and their
// table. Sequences share it by reference count and never copy it.
//
// Invariants:
// - Tiles and table only grow, and only while one lane holds the segment open.
// - The table lists the offset of each tile. With summaries, a second half lists their offsets.
//   Words are written before any snapshot shows their entries.
// - Rows below the count that a snapshot shows never change. Rows at and beyond it may. If rows
//   change that a lane showed before it was cut, `rewrites` is incremented.
// - A segment is either in the pool or stored. A stored segment has no tiles and never changes;
//   offloading and restoring create another segment with the same description.
// - A segment that is packed or has block summaries takes no single rows, but may take whole tiles
//   after full ones (Lane::growing).
//
// A lane may show any number of leading entries, packed or not. The summary of a block that is cut
// covers more rows than the lane shows: min and max are still bounds, and the mean is still an
// estimate.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "daemon/base/mutex.h"
#include "daemon/cache/memory/tiles.h"
#include "daemon/cache/segment/raw_rows.h"
#include "daemon/pool/pool.h"
#include "kernels/format/rotation.h"
#include "kernels/format/tile_shape.h"
#include "proto/shm/layout.h"

namespace tessera::cache {

// A segment that would grow longer is closed, and the next one is opened.
using shm::kMaxSegmentEntries;

// R_k, then R_v, in the pool; either may be absent. Or a book: R_k, R_v and the means, laid out as
// kernels::BookLayout. Shared by the segments of a lane that have the same strategy, and a book by
// the lanes of several sequences.
struct Rotations {
  pool::Block block;
  kernels::ElementType type;
  bool turns_keys = true;  // R_k is present
  bool turns_values = true;
  bool is_book = false;

  std::uint8_t flags() const {
    if (is_book) return shm::kSegmentHasBook;
    return static_cast<std::uint8_t>((turns_keys ? shm::kSegmentRotatesKeys : 0) |
                                     (turns_values ? shm::kSegmentRotatesValues : 0));
  }
};

// The loss of a strategy for K and V: the mean over rows of 1 - |kept|^2 / |row|^2, measured on
// rows that it was not derived from.
struct SegmentLoss {
  double key = 0;
  double value = 0;
};

// Describes entries that are not consecutive tokens. Host copy of the position and weight words in
// their tiles.
struct EntryList {
  std::vector<std::uint32_t> positions;  // relative to first_position, ascending
  std::vector<float> weights;            // number of tokens each entry stands for; empty: all 1
  // The position after the last token that a merged entry stands for.
  std::uint64_t merged_until = 0;
};

class SealedRows;
struct StoredTiles;

class Segment {
 public:
  // `rotations`: for packed shapes; null means the identity. `raw`: for provisional segments, the
  // rows that the tiles were encoded from.
  Segment(const kernels::TileShape& shape, std::uint64_t first_position,
          std::shared_ptr<const Rotations> rotations = nullptr,
          std::shared_ptr<RawRows> raw = nullptr)
      : shape_(shape),
        first_position_(first_position),
        rotations_(std::move(rotations)),
        raw_(std::move(raw)) {}

  const kernels::TileShape& shape() const { return shape_; }
  const Rotations* rotations() const { return rotations_.get(); }
  const std::shared_ptr<const Rotations>& shared_rotations() const { return rotations_; }
  RawRows* raw() const { return raw_.get(); }
  // True if no twin (WithoutTiles) shares the raw rows.
  bool raw_unshared() const { return raw_.use_count() == 1; }

  // Dense rows without summaries, weights or positions.
  bool plain() const {
    return !shape_.packed() && shape_.summary == kernels::Summary::kNone && !shape_.weights &&
           !shape_.positions;
  }
  // True if single rows can be appended.
  bool appendable() const { return plain() && !sealed_.load(std::memory_order_relaxed); }
  // True if it waits for a strategy: dense, or encoded with another segment's strategy.
  bool waits_for_strategy() const { return raw_ != nullptr ? !raw_->dropped() : appendable(); }
  // Marks dense rows as final.
  void SealDense() { sealed_.store(true, std::memory_order_relaxed); }

  SegmentLoss loss() const { return loss_; }
  // Call only before the segment is shared.
  void set_loss(SegmentLoss loss) { loss_ = loss; }

  std::uint64_t first_position() const { return first_position_; }
  // Null: entry e is the token at first_position + e.
  const EntryList* entry_list() const { return entry_list_.get(); }
  const std::shared_ptr<const EntryList>& shared_entry_list() const { return entry_list_; }
  // Call only before the segment is shared.
  void set_entry_list(std::shared_ptr<const EntryList> list) { entry_list_ = std::move(list); }
  std::uint64_t PositionOf(std::uint32_t entry) const {
    return first_position_ + (entry_list_ == nullptr ? entry : entry_list_->positions[entry]);
  }
  std::uint64_t table_offset() const { return table_.offset(); }
  std::uint64_t table_bytes() const { return table_.valid() ? table_.bytes() : 0; }
  // Rows [0, filled) hold entries that some lane shows or has shown.
  std::uint32_t filled() const { return filled_; }
  void set_filled(std::uint32_t entries) { filled_ = entries; }
  // `rewrites` counts how often rows were overwritten. FirstRewritten returns the first entry
  // overwritten after that count was `since`, or kMaxSegmentEntries if none was.
  std::uint64_t rewrites() const {
    MutexLock lock(notes_mutex_);
    return rewrites_;
  }
  std::uint32_t FirstRewritten(std::uint64_t since) const;
  void CountRewrite(std::uint32_t first_entry);
  // The sealed replacement of these rows and those of the following segments; null if there is
  // none.
  std::shared_ptr<const SealedRows> sealed_rows() const {
    MutexLock lock(notes_mutex_);
    return sealed_rows_;
  }
  void set_sealed_rows(std::shared_ptr<const SealedRows> rows) {
    MutexLock lock(notes_mutex_);
    sealed_rows_.swap(rows);
  }
  // Records that this segment begins the end of a prompt that is too short for its own segment, and
  // that the previous strategy loses too much on it under that policy (canonical form). The rows
  // then wait, dense, for their own strategy. All holders of the segment see the note.
  void MarkKeptDense(const std::string& policy) {
    MutexLock lock(notes_mutex_);
    kept_dense_under_ = policy;
  }
  bool IsKeptDense(std::string_view policy) const {
    MutexLock lock(notes_mutex_);
    return kept_dense_under_.has_value() && *kept_dense_under_ == policy;
  }
  // Copies the notes of `other`, whose first rows this segment copies. Call only before it is
  // shared.
  void TakeNotesOf(const Segment& other);
  // Pool bytes of the tiles, summaries included.
  std::uint64_t tile_bytes() const { return tiles_.pool_bytes(); }
  std::uint64_t summary_bytes() const { return tiles_.summary_bytes(); }
  std::size_t tiles() const { return tiles_.size(); }

  // Whether the table has room for that many tiles, and the size of a table that does.
  bool TableHolds(std::size_t tiles) const { return tiles <= TableRoom(table_); }
  std::uint64_t TableBytes(std::size_t tiles) const;
  // Offset of the table half that lists summaries; 0 if there are none.
  std::uint64_t summary_table_offset() const {
    return has_summaries() ? table_.offset() + TableRoom(table_) * kWordBytes : 0;
  }

  // Lists the table words that AddTiles will need: all words if there is a larger table. Store them
  // before calling AddTiles.
  void ListTableWords(const Tiles& tiles, const pool::Block& larger_table,
                      std::vector<device::WordStore>& words) const;

  // Adds tiles. If `larger_table` is valid, it replaces the table, and the old one is returned for
  // retirement because readers of older snapshots still use it.
  pool::Block AddTiles(Tiles tiles, pool::Block larger_table);

  std::byte* TileData(std::size_t tile) const { return tiles_.tile(tile); }
  device::TilePlace PlaceOf(std::size_t tile) const { return tiles_.place(tile); }
  std::vector<device::TilePlace> Places() const { return tiles_.places(); }

  // The tiles' copy in a tier; null: the tiles are in the pool.
  const StoredTiles* stored() const { return stored_.get(); }
  // Creates the same segment without tiles, table and rotations, not open for appends. Raw rows are
  // shared by both.
  std::shared_ptr<Segment> WithoutTiles(std::shared_ptr<const Rotations> rotations,
                                        std::shared_ptr<const StoredTiles> stored) const;

 private:
  const kernels::TileShape shape_;
  const std::uint64_t first_position_;
  const std::shared_ptr<const Rotations> rotations_;
  const std::shared_ptr<RawRows> raw_;
  std::atomic<bool> sealed_{false};
  std::shared_ptr<const EntryList> entry_list_;
  SegmentLoss loss_;
  std::uint32_t filled_ = 0;
  mutable Mutex notes_mutex_;
  std::uint64_t rewrites_ TESSERA_GUARDED_BY(notes_mutex_) = 0;
  // Each with the value of `rewrites_` after it. Ascending by first entry: a later rewrite replaces
  // those that begin at or after it. Rounded to whole tiles to keep the list short.
  struct Rewrite {
    std::uint64_t count;
    std::uint32_t first_entry;
  };
  std::vector<Rewrite> rewritten_ TESSERA_GUARDED_BY(notes_mutex_);
  std::shared_ptr<const SealedRows> sealed_rows_ TESSERA_GUARDED_BY(notes_mutex_);
  std::optional<std::string> kept_dense_under_ TESSERA_GUARDED_BY(notes_mutex_);
  static constexpr std::size_t kWordBytes = sizeof(std::uint64_t);
  bool has_summaries() const { return shape_.summary != kernels::Summary::kNone; }
  // Number of tiles that the table can list.
  std::size_t TableRoom(const pool::Block& table) const {
    return table.valid() ? table.bytes() / kWordBytes / (has_summaries() ? 2 : 1) : 0;
  }
  Tiles tiles_;
  pool::Block table_;
  std::shared_ptr<const StoredTiles> stored_;
};

}  // namespace tessera::cache
