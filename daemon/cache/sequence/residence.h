// A `Residence` keeps a sequence's rows in the pool for as long as it is held. Code that works on
// rows obtains one and needs to know nothing about tiers.
#pragma once

#include <memory>
#include <utility>

namespace tessera::cache {

class Sequence;

// Move-only. Not a lock: other threads may append, fork and free in the meantime.
class Residence {
 public:
  Residence() = default;
  Residence(Residence&& other) noexcept = default;
  Residence& operator=(Residence&& other) noexcept {
    if (this != &other) {
      Reset();
      sequence_ = std::move(other.sequence_);
    }
    return *this;
  }
  Residence(const Residence&) = delete;
  Residence& operator=(const Residence&) = delete;
  ~Residence() { Reset(); }

  const std::shared_ptr<Sequence>& sequence() const { return sequence_; }
  Sequence& operator*() const { return *sequence_; }
  Sequence* operator->() const { return sequence_.get(); }
  void Reset();

 private:
  friend class Sequence;
  explicit Residence(std::shared_ptr<Sequence> sequence) : sequence_(std::move(sequence)) {}
  std::shared_ptr<Sequence> sequence_;
};

}  // namespace tessera::cache
