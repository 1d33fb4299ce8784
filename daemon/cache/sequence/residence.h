// A sequence whose rows are in the pool, and stay there for as long as this is held: what whoever
// works on rows asks for, so that nothing else has to know of tiers.
#pragma once

#include <memory>
#include <utility>

namespace tessera::cache {

class Sequence;

// Move-only. Not a lock: others append, fork and free meanwhile.
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
