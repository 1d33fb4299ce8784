// Counts the users of a prefix: the sequences forked from it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace tessera::cache {

// Number of live sequences derived from a prefix, directly or through other forks.
class PrefixForks {
 public:
  // `on_last` runs when the last of them is gone, on that sequence's thread and without locks.
  explicit PrefixForks(std::function<void()> on_last) : on_last_(std::move(on_last)) {}
  std::uint32_t count() const { return count_.load(); }

 private:
  friend class ForkHold;
  const std::function<void()> on_last_;
  std::atomic<std::uint32_t> count_{0};
};

// Held by a sequence that derives from a prefix. Every copy counts as a user while it lives.
class ForkHold {
 public:
  ForkHold() = default;
  explicit ForkHold(std::shared_ptr<PrefixForks> forks) : forks_(std::move(forks)) {
    if (forks_ != nullptr) forks_->count_.fetch_add(1);
  }
  ForkHold(const ForkHold& other) : ForkHold(other.forks_) {}
  ForkHold(ForkHold&&) noexcept = default;
  ForkHold& operator=(ForkHold other) noexcept {
    std::swap(forks_, other.forks_);
    return *this;
  }
  ~ForkHold() {
    if (forks_ != nullptr && forks_->count_.fetch_sub(1) == 1) forks_->on_last_();
  }

 private:
  std::shared_ptr<PrefixForks> forks_;
};

}  // namespace tessera::cache
