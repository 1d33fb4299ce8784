#include "daemon/cache/segment/raw_rows.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/status/statusor.h"
#include "daemon/base/check.h"

namespace tessera::cache {

using kernels::kTileEntries;

absl::Status RawRows::Put(std::size_t first_tile, const std::byte* keys, const std::byte* values,
                          std::size_t tiles) {
  const std::size_t bytes = kTileEntries * tile_.row_bytes();
  std::vector<Chunk> chunks;
  for (std::size_t i = 0; i < tiles; ++i) {
    absl::StatusOr<pool::Charge> charge = budget_->Reserve(pool::MemoryTag::kRawCopies, 2 * bytes);
    if (!charge.ok()) return charge.status();
    Chunk& chunk = chunks.emplace_back(
        Chunk{NewClearedBytes(bytes), NewClearedBytes(bytes), *std::move(charge)});
    if (chunk.keys == nullptr || chunk.values == nullptr) {
      return absl::ResourceExhaustedError("the machine has no memory for raw copies of rows");
    }
    std::memcpy(chunk.keys.get(), keys + i * bytes, bytes);
    std::memcpy(chunk.values.get(), values + i * bytes, bytes);
  }
  MutexLock lock(mutex_);
  if (dropped_) return absl::AbortedError("raw copies of the rows have just been dropped");
  TESSERA_CHECK(first_tile <= chunks_.size(), "rows are stored without gaps");
  chunks_.resize(first_tile);
  std::move(chunks.begin(), chunks.end(), std::back_inserter(chunks_));
  return absl::OkStatus();
}

bool RawRows::CopyTo(std::uint64_t rows, std::byte* keys, std::byte* values) const {
  MutexLock lock(mutex_);
  if (dropped_) return false;
  TESSERA_CHECK(rows <= chunks_.size() * kTileEntries, "only rows that were stored can be copied");
  for (std::uint64_t row = 0; row < rows; row += kTileEntries) {
    const Chunk& chunk = chunks_[row / kTileEntries];
    const std::size_t bytes = std::min<std::uint64_t>(rows - row, kTileEntries) * tile_.row_bytes();
    std::memcpy(keys + row * tile_.row_bytes(), chunk.keys.get(), bytes);
    std::memcpy(values + row * tile_.row_bytes(), chunk.values.get(), bytes);
  }
  return true;
}

void RawRows::Drop() {
  std::vector<Chunk> chunks;  // freed after the lock
  MutexLock lock(mutex_);
  dropped_ = true;
  chunks.swap(chunks_);
}

bool RawRows::dropped() const {
  MutexLock lock(mutex_);
  return dropped_;
}

std::uint64_t RawRows::bytes() const {
  MutexLock lock(mutex_);
  return chunks_.size() * tile_.bytes();
}

}  // namespace tessera::cache
