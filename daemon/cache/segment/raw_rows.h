// What provisional tiles were encoded from: the rows as they came, in the daemon's own memory, so
// that a strategy that fits badly loses nothing. Kept until the segment is encoded for good.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/mutex.h"
#include "daemon/pool/account.h"
#include "kernels/format/dense_tile.h"

namespace tessera::cache {

// Thread-safe: sequences that share a segment may read while one of them appends. Rows that were
// appended never change.
class RawRows {
 public:
  // Charges what it holds to `budget`.
  RawRows(const kernels::DenseTile& tile, pool::Account* budget) : tile_(tile), budget_(budget) {}

  // `tiles` full tiles of rows, K and V each [rows][head_dim], behind the first `first_tile`. What
  // was there is left over from a change that came to nothing, and goes. All of them or none:
  // RESOURCE_EXHAUSTED where the budget is spent, ABORTED where the rows have been dropped: a fork
  // that shares them may do so at any time.
  absl::Status Put(std::size_t first_tile, const std::byte* keys, const std::byte* values,
                   std::size_t tiles);
  // The first `rows` of them. False where they have been dropped.
  bool CopyTo(std::uint64_t rows, std::byte* keys, std::byte* values) const;

  // Gives everything back: the segment stays as it is encoded now.
  void Drop();
  bool dropped() const;
  std::uint64_t bytes() const;

 private:
  struct Chunk {
    std::unique_ptr<std::byte[]> keys;  // one tile's
    std::unique_ptr<std::byte[]> values;
    pool::Charge charge;
  };

  const kernels::DenseTile tile_;
  pool::Account* const budget_;
  mutable Mutex mutex_;
  bool dropped_ TESSERA_GUARDED_BY(mutex_) = false;
  std::vector<Chunk> chunks_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::cache
