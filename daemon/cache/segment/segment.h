// A run of a lane's entries that share one strategy. Owns its tiles and their table; shared between
// sequences by reference count, never copied.
//
// Invariants:
//   tiles and table only ever grow, and only while one lane holds the segment open;
//   the table has the offset of each tile, then, where there are summaries, of those of each tile,
//   in two halves: written before any snapshot shows an entry of it; rows at and beyond the count a
//   snapshot shows may change, rows below it never do; where rows change that some lane has shown
//   before it was cut, `rewrites` is counted; a segment is in the pool, or stored: then it has no
//   tiles, and neither changes. What goes to a tier, or comes back, is another segment with the
//   same description; a segment that is packed, or has block summaries, is never appended to row by
//   row; it may take whole tiles behind full ones (Lane::growing).
//
// A lane may show any number of a segment's first entries, packed or not. The summary of the block
// that it cuts was made of more rows than it shows: min and max still bound those, and the mean is
// an estimate as it always was.
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

// A segment longer than this is closed and the next one opened.
using shm::kMaxSegmentEntries;

// R_k, then R_v, in the pool, those that there are. Shared by the segments of a lane that have one
// strategy.
struct Rotations {
  pool::Block block;
  kernels::ElementType type;
  bool turns_keys = true;  // there is an R_k
  bool turns_values = true;
};

// What a strategy loses of K and V: the mean over rows of 1 - |kept|^2 / |row|^2, judged on rows
// that it was not made from.
struct SegmentLoss {
  double key = 0;
  double value = 0;
};

// Of entries that are not the tokens one after another: what the words of their tiles say, where
// the daemon can look.
struct EntryList {
  std::vector<std::uint32_t> positions;  // less the segment's first, ascending
  std::vector<float> weights;            // how many tokens each stands for; empty: 1
  // Of merged entries: the position behind the last token that one of them stands for.
  std::uint64_t merged_until = 0;
};

class SealedRows;
struct StoredTiles;

class Segment {
 public:
  // `rotations`: of packed shapes; null: the identity. `raw`: of provisional segments, the rows
  // that their tiles are encoded from.
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
  // Whether no twin (WithoutTiles) waits with the same rows.
  bool raw_unshared() const { return raw_.use_count() == 1; }

  // Rows as they came, and nothing else.
  bool plain() const {
    return !shape_.packed() && shape_.summary == kernels::Summary::kNone && !shape_.weights &&
           !shape_.positions;
  }
  // Where rows can be put after those it has.
  bool appendable() const { return plain() && !sealed_.load(std::memory_order_relaxed); }
  // Whether it waits for a strategy: plain, or encoded with one that is not its own.
  bool open_to_strategy() const { return raw_ != nullptr ? !raw_->dropped() : appendable(); }
  // Plain rows that stay so.
  void SealPlain() { sealed_.store(true, std::memory_order_relaxed); }

  SegmentLoss loss() const { return loss_; }
  // Before anybody else sees the segment.
  void set_loss(SegmentLoss loss) { loss_ = loss; }

  std::uint64_t first_position() const { return first_position_; }
  // Null: entry e is the token at first_position + e.
  const EntryList* entry_list() const { return entry_list_.get(); }
  const std::shared_ptr<const EntryList>& shared_entry_list() const { return entry_list_; }
  // Before anybody else sees the segment.
  void set_entry_list(std::shared_ptr<const EntryList> list) { entry_list_ = std::move(list); }
  std::uint64_t PositionOf(std::uint32_t entry) const {
    return first_position_ + (entry_list_ == nullptr ? entry : entry_list_->positions[entry]);
  }
  std::uint64_t table_offset() const { return table_.offset(); }
  std::uint64_t table_bytes() const { return table_.valid() ? table_.bytes() : 0; }
  // Rows [0, filled) hold what some lane has shown, or shows.
  std::uint32_t filled() const { return filled_; }
  void set_filled(std::uint32_t entries) { filled_ = entries; }
  // How often rows were written anew; and from which entry on some have been since that had
  // happened `since` times: kMaxSegmentEntries, none.
  std::uint64_t rewrites() const {
    MutexLock lock(notes_mutex_);
    return rewrites_;
  }
  std::uint32_t FirstRewritten(std::uint64_t since) const;
  void CountRewrite(std::uint32_t first_entry);
  // What its rows, and those of the segments behind it, have become elsewhere. Null: nothing.
  std::shared_ptr<const SealedRows> sealed_rows() const {
    MutexLock lock(notes_mutex_);
    return sealed_rows_;
  }
  void set_sealed_rows(std::shared_ptr<const SealedRows> rows) {
    MutexLock lock(notes_mutex_);
    sealed_rows_.swap(rows);
  }
  // With its first row begins the end of a prompt that is too short for a segment, and of which the
  // strategy before loses too much, by that policy (in its canonical form): the rows wait as they
  // came for one of their own. Whoever holds them knows it.
  void LeavePlainUnder(const std::string& policy) {
    MutexLock lock(notes_mutex_);
    left_plain_under_ = policy;
  }
  bool LeftPlainUnder(std::string_view policy) const {
    MutexLock lock(notes_mutex_);
    return left_plain_under_.has_value() && *left_plain_under_ == policy;
  }
  // Of one whose first rows these are a copy of; before anybody else sees the segment.
  void TakeNotesOf(const Segment& other);
  // What its tiles take in the pool, summaries included.
  std::uint64_t tile_bytes() const { return tiles_.pool_bytes(); }
  std::size_t tiles() const { return tiles_.size(); }

  // What AddTiles(n) would need: more tiles, and a larger table where the present one is full.
  bool TableHolds(std::size_t tiles) const { return tiles <= TableRoom(table_); }
  std::uint64_t TableBytes(std::size_t tiles) const;
  // Of the half that says where summaries are; 0 where there are none.
  std::uint64_t summary_table_offset() const {
    return has_summaries() ? table_.offset() + TableRoom(table_) * kWordBytes : 0;
  }

  // The words that AddTiles of the same will need in the table: all of them where it is a larger
  // one. To be written before.
  void ListTableWords(const Tiles& tiles, const pool::Block& larger_table,
                      std::vector<device::WordStore>& words) const;

  // Takes tiles over. Where the table must grow, `larger_table` replaces it and the old one is
  // returned, to be retired: readers of older snapshots still use it.
  pool::Block AddTiles(Tiles tiles, pool::Block larger_table);

  std::byte* TileData(std::size_t tile) const { return tiles_.tile(tile); }
  device::TilePlace PlaceOf(std::size_t tile) const { return tiles_.place(tile); }
  std::vector<device::TilePlace> Places() const { return tiles_.places(); }

  // Its tiles while they are in a tier; null: they are in the pool.
  const StoredTiles* stored() const { return stored_.get(); }
  // The same segment elsewhere: everything but tiles, table and rotations. Nobody appends to it as
  // yet. Rows that it waits with for a strategy belong to both.
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
  // Each with the count that it made. Of two the later one begins behind the earlier one: else it
  // stands for both. By whole tiles, so that there are few.
  struct Rewrite {
    std::uint64_t count;
    std::uint32_t first_entry;
  };
  std::vector<Rewrite> rewritten_ TESSERA_GUARDED_BY(notes_mutex_);
  std::shared_ptr<const SealedRows> sealed_rows_ TESSERA_GUARDED_BY(notes_mutex_);
  std::optional<std::string> left_plain_under_ TESSERA_GUARDED_BY(notes_mutex_);
  static constexpr std::size_t kWordBytes = sizeof(std::uint64_t);
  bool has_summaries() const { return shape_.summary != kernels::Summary::kNone; }
  // How many tiles it can name.
  std::size_t TableRoom(const pool::Block& table) const {
    return table.valid() ? table.bytes() / kWordBytes / (has_summaries() ? 2 : 1) : 0;
  }
  Tiles tiles_;
  pool::Block table_;
  std::shared_ptr<const StoredTiles> stored_;
};

}  // namespace tessera::cache
