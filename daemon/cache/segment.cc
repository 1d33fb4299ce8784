#include "daemon/cache/segment.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/cache/lane.h"

namespace tessera::cache {

namespace {
constexpr std::size_t kFirstTableTiles = 8;
constexpr std::size_t kWordBytes = sizeof(std::uint64_t);
}  // namespace

std::uint64_t Segment::TableBytes(std::size_t tiles) {
  // Doubling keeps the copies of a growing segment linear.
  return std::bit_ceil(std::max(tiles, kFirstTableTiles)) * sizeof(std::uint64_t);
}

void Segment::ListTableWords(const std::vector<pool::Block>& tiles, const pool::Block& larger_table,
                             std::vector<device::WordStore>& words) const {
  const bool moves = larger_table.valid();
  std::byte* at = moves ? larger_table.data() : table_.data() + tiles_.size() * kWordBytes;
  const auto list = [&](const std::vector<pool::Block>& blocks) {
    for (const pool::Block& block : blocks) {
      words.push_back({at, block.offset()});
      at += kWordBytes;
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
  left_plain_under_ = other.left_plain_under_;
}

pool::Block Segment::AddTiles(std::vector<pool::Block> tiles, pool::Block larger_table) {
  pool::Block old;
  if (larger_table.valid()) old = std::exchange(table_, std::move(larger_table));
  TESSERA_CHECK(TableHolds(tiles_.size() + tiles.size()), "the table has room for the tiles");
  for (pool::Block& tile : tiles) tiles_.push_back(std::move(tile));
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
