#include "daemon/cache/segment/segment.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/cache/segment/lane.h"

namespace tessera::cache {

namespace {
constexpr std::size_t kFirstTableTiles = 8;
}  // namespace

std::uint64_t Segment::TableBytes(std::size_t tiles) const {
  // Doubling makes the copying cost of a growing segment linear.
  return std::bit_ceil(std::max(tiles, kFirstTableTiles)) * kWordBytes * (has_summaries() ? 2 : 1);
}

void Segment::ListTableWords(const Tiles& tiles, const pool::Block& larger_table,
                             std::vector<device::WordStore>& words) const {
  const bool moves = larger_table.valid();
  const pool::Block& table = moves ? larger_table : table_;
  std::byte* at = table.data() + (moves ? 0 : tiles_.size() * kWordBytes);
  const std::size_t half = TableRoom(table) * kWordBytes;
  const auto list = [&](const Tiles& some) {
    for (std::size_t i = 0; i < some.size(); ++i, at += kWordBytes) {
      words.push_back({at, some.tile_offset(i)});
      if (has_summaries()) words.push_back({at + half, some.summary_offset(i)});
    }
  };
  if (moves) list(tiles_);
  list(tiles);
}

std::uint32_t HeldSegment::EntriesBefore(std::uint64_t position) const {
  const std::uint64_t first = segment->first_position();
  if (position <= first) return 0;
  const std::uint64_t offset = position - first;
  const EntryList* const list = segment->entry_list();
  if (list == nullptr) return static_cast<std::uint32_t>(std::min<std::uint64_t>(offset, entries));
  const auto begin = list->positions.begin();
  return static_cast<std::uint32_t>(std::lower_bound(begin, begin + entries, offset) - begin);
}

std::shared_ptr<Segment> Segment::WithoutTiles(std::shared_ptr<const Rotations> rotations,
                                               std::shared_ptr<const StoredTiles> stored) const {
  auto twin = std::make_shared<Segment>(shape_, first_position_, std::move(rotations), raw_);
  twin->sealed_.store(sealed_.load(std::memory_order_relaxed), std::memory_order_relaxed);
  twin->entry_list_ = entry_list_;
  twin->loss_ = loss_;
  twin->filled_ = filled_;
  twin->stored_ = std::move(stored);
  twin->TakeNotesOf(*this);
  return twin;
}

void Segment::TakeNotesOf(const Segment& other) {
  MutexLock others_lock(other.notes_mutex_);
  MutexLock lock(notes_mutex_);
  kept_dense_under_ = other.kept_dense_under_;
}

pool::Block Segment::AddTiles(Tiles tiles, pool::Block larger_table) {
  pool::Block old;
  if (larger_table.valid()) old = std::exchange(table_, std::move(larger_table));
  TESSERA_CHECK(TableHolds(tiles_.size() + tiles.size()), "the table has room for the tiles");
  tiles_.Append(std::move(tiles));
  return old;
}

std::uint32_t Segment::FirstRewritten(std::uint64_t since) const {
  MutexLock lock(notes_mutex_);
  for (const Rewrite& rewrite : rewritten_) {
    if (rewrite.count > since) return rewrite.first_entry;
  }
  return kMaxSegmentEntries;
}

void Segment::CountRewrite(std::uint32_t first_entry) {
  first_entry -= first_entry % kernels::kTileEntries;
  MutexLock lock(notes_mutex_);
  while (!rewritten_.empty() && rewritten_.back().first_entry >= first_entry) rewritten_.pop_back();
  rewritten_.push_back({++rewrites_, first_entry});
}

}  // namespace tessera::cache
