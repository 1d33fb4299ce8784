// BookShelf: the books of a tenant, one for each lane of each of its models. A segment in planes
// keeps the book that it was coded with; the shelf keeps the one for new rows.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
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

// Owned by the tenant. Thread-safe.
class BookShelf {
 public:
  struct Key {
    ModelId model;
    std::uint32_t lane;
    kernels::BookPlanes planes;

    bool operator<(const Key& other) const { return Tie() < other.Tie(); }

   private:
    std::tuple<std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t> Tie() const {
      return {model.value(), lane, planes.key, planes.value};
    }
  };

  // nullptr: there is none.
  std::shared_ptr<const LaneBook> Find(const Key& key) const {
    MutexLock lock(mutex_);
    const auto found = books_.find(key);
    return found == books_.end() ? nullptr : found->second;
  }
  // Returns the book that is used from now on: an earlier one, if another sequence was first.
  std::shared_ptr<const LaneBook> Add(const Key& key, LaneBook book) {
    auto made = std::make_shared<const LaneBook>(std::move(book));
    MutexLock lock(mutex_);
    return books_.try_emplace(key, std::move(made)).first->second;
  }
  // The model is gone.
  void Drop(ModelId model) {
    MutexLock lock(mutex_);
    std::erase_if(books_, [model](const auto& entry) { return entry.first.model == model; });
  }

 private:
  mutable Mutex mutex_;
  std::map<Key, std::shared_ptr<const LaneBook>> books_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::cache
