// `MemoryWaiters` orders the calls that wait for pool memory: first come, first served within a
// tenant.
#pragma once

#include <cstdint>
#include <set>
#include <utility>

#include "daemon/base/ids.h"
#include "daemon/base/mutex.h"

namespace tessera::residency {

class MemoryWaiters {
  using Key = std::pair<TenantId, std::uint64_t>;  // tenant, and ticket number

 public:
  // One call's place in the line, kept until destroyed.
  class Place {
   public:
    Place(MemoryWaiters& line, TenantId tenant) : line_(line), key_(line.Take(tenant)) {}
    ~Place() { line_.Leave(key_); }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    bool first() const { return line_.First(key_); }

   private:
    MemoryWaiters& line_;
    const Key key_;
  };

 private:
  Key Take(TenantId tenant) {
    MutexLock lock(mutex_);
    return *places_.emplace(tenant, next_++).first;
  }
  void Leave(const Key& key) {
    MutexLock lock(mutex_);
    places_.erase(key);
  }
  bool First(const Key& key) {
    MutexLock lock(mutex_);
    return *places_.lower_bound({key.first, 0}) == key;
  }

  Mutex mutex_;
  std::uint64_t next_ TESSERA_GUARDED_BY(mutex_) = 0;
  std::set<Key> places_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::residency
