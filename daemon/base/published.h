// Published: a value that one thread replaces while others read it, such as settings that a reload
// changes.
#pragma once

#include <memory>
#include <utility>

#include "daemon/base/mutex.h"

namespace tessera {

// Readers get the value as it was when they asked, and may keep it. Thread-safe.
template <typename T>
class Published {
 public:
  explicit Published(T value) : value_(std::make_shared<const T>(std::move(value))) {}
  Published(const Published&) = delete;
  Published& operator=(const Published&) = delete;

  std::shared_ptr<const T> Get() const {
    MutexLock lock(mutex_);
    return value_;
  }
  void Set(T value) {
    auto next = std::make_shared<const T>(std::move(value));
    MutexLock lock(mutex_);
    value_.swap(next);  // the old value is destroyed after the lock is released, or by a reader
  }

 private:
  mutable Mutex mutex_;
  std::shared_ptr<const T> value_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
