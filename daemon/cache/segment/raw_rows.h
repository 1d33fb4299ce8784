// `RawRows` keeps the original rows of provisional tiles in host memory, so that re-encoding them
// with a better strategy loses nothing. Kept until the segment's encoding is final.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/mutex.h"
#include "daemon/platform/heap.h"
#include "daemon/pool/account.h"
#include "kernels/format/dense_tile.h"

namespace tessera::cache {

// Thread-safe: sequences that share a segment may read while one of them appends. Appended rows
// never change.
class RawRows {
 public:
  // Charges its memory to `budget`.
  RawRows(const kernels::DenseTile& tile, pool::Account* budget) : tile_(tile), budget_(budget) {}

  // Stores `tiles` full tiles of rows after the first `first_tile` tiles, K and V each
  // [rows][head_dim]. Replaces leftovers of a change that failed. All or none: RESOURCE_EXHAUSTED
  // if the budget is used up, ABORTED if the rows have been dropped, which a fork that shares them
  // may do at any time.
  absl::Status Put(std::size_t first_tile, const std::byte* keys, const std::byte* values,
                   std::size_t tiles);
  // Copies the first `rows` rows. Returns false if they have been dropped.
  bool CopyTo(std::uint64_t rows, std::byte* keys, std::byte* values) const;

  // Frees all rows, which makes the segment's current encoding final.
  void Drop();
  bool dropped() const;
  std::uint64_t bytes() const;

 private:
  struct Chunk {
    ClearedBytes keys;  // of one tile
    ClearedBytes values;
    pool::Charge charge;
  };

  const kernels::DenseTile tile_;
  pool::Account* const budget_;
  mutable Mutex mutex_;
  bool dropped_ TESSERA_GUARDED_BY(mutex_) = false;
  std::vector<Chunk> chunks_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::cache
