// BookShelf: the books of a tenant, one for each lane of each of its models and each source. A
// segment in planes keeps the book that it was coded with; the shelf keeps the one for new rows.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"
#include "daemon/cache/segment/segment.h"
#include "kernels/strategy/book.h"

namespace tessera::cache {

// What one side of a book costs in accuracy. `errors` has no eigenvalues: they would be
// uncharged.
struct SideOfBook {
  kernels::BookSide errors;
  double energy = 0;  // mean squared length of the rows that it was made from
  double spread = 0;  // the same about their mean
};

// A book in the pool.
struct LaneBook {
  std::shared_ptr<const Rotations> rotations;
  SideOfBook key;
  SideOfBook value;
};

// How far rows are from their codes, as multiples of the mean error of the book they were coded
// with: sums over `rows` rows.
struct DriftSums {
  double key = 0;
  double value = 0;
  std::uint64_t rows = 0;
};

// A book has drifted if the mean error of this many rows exceeds its own by this much.
inline constexpr std::uint64_t kDriftRows = 4096;
inline constexpr double kDriftGrowth = 1.25;

// Owned by the tenant. Thread-safe.
class BookShelf {
 public:
  struct Key {
    ModelId model;
    std::uint32_t lane;
    kernels::BookPlanes planes;
    std::string_view source;  // as in policies::PlanesPolicy::book; outlives the call
  };
  struct Held {
    std::shared_ptr<const LaneBook> book;  // null: there is none
    bool has_drifted = false;              // its rows have changed: it needs a new version
  };

  Held Find(const Key& key) const {
    MutexLock lock(mutex_);
    const auto found = books_.find(NameOf(key));
    if (found == books_.end()) return {};
    return {found->second.book, found->second.has_drifted};
  }
  // Puts a book in place of `before` (null: of none). Returns the book that is used from now on:
  // another one, if another sequence was first.
  std::shared_ptr<const LaneBook> Put(const Key& key, const LaneBook* before, LaneBook book) {
    auto made = std::make_shared<const LaneBook>(std::move(book));
    MutexLock lock(mutex_);
    Entry& entry = books_[NameOf(key)];
    if (entry.book.get() == before) entry = {.book = std::move(made)};
    return entry.book;
  }
  // Adds errors of rows that were coded with `book`. True if it has drifted.
  bool Observe(const Key& key, const LaneBook* book, const DriftSums& sums) {
    MutexLock lock(mutex_);
    const auto found = books_.find(NameOf(key));
    if (found == books_.end() || found->second.book.get() != book) return false;
    Entry& entry = found->second;
    entry.sums.key += sums.key;
    entry.sums.value += sums.value;
    entry.sums.rows += sums.rows;
    if (entry.sums.rows >= kDriftRows) {
      const double most = kDriftGrowth * static_cast<double>(entry.sums.rows);
      if (entry.sums.key > most || entry.sums.value > most) entry.has_drifted = true;
      entry.sums = {};
    }
    return entry.has_drifted;
  }
  // The model is gone.
  void Drop(ModelId model) {
    MutexLock lock(mutex_);
    std::erase_if(books_,
                  [model](const auto& entry) { return std::get<0>(entry.first) == model.value(); });
  }

 private:
  struct Entry {
    std::shared_ptr<const LaneBook> book;
    DriftSums sums = {};
    bool has_drifted = false;
  };
  using Name = std::tuple<std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t, std::string>;
  static Name NameOf(const Key& key) {
    return {key.model.value(), key.lane, key.planes.key, key.planes.value, std::string(key.source)};
  }

  mutable Mutex mutex_;
  std::map<Name, Entry> books_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::cache
