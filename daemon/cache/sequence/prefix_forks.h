// Who counts as using a prefix: the sequences that were forked from it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

namespace tessera::cache {

// How many live sequences came from a prefix, by way of other forks included.
class PrefixForks {
 public:
  // `on_last` is called when the last of them has gone, on its thread and under no lock.
  explicit PrefixForks(std::function<void()> on_last) : on_last_(std::move(on_last)) {}
  std::uint32_t count() const { return count_.load(); }

 private:
  friend class ForkHold;
  const std::function<void()> on_last_;
  std::atomic<std::uint32_t> count_{0};
};

// What a sequence has of the prefix that it came from: each copy is counted there while it lives.
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
