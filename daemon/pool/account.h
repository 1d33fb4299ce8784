// Who holds how many bytes, and what for. An Account counts; a Charge is a move-only claim on it
// that is given back by its destructor, so no path can forget to.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "daemon/base/error_cause.h"

namespace tessera::pool {

// What the bytes are for. Names are metric labels.
enum class MemoryTag : std::uint8_t {
  kTiles,
  kTables,     // tile tables
  kRotations,  // of packed segments
  kSnapshots,
  kSequences,  // sequence blocks
  kTails,
  kStaging,
  kPoolExtents,       // physical, charged to the node
  kDirectoryExtents,  // physical, charged to the node
  kRawCopies,         // of rows encoded provisionally; host memory with a budget of its own
  kObservations,      // what workers show for token policies; likewise
  kPrefixIndex,       // token ids: of published prefixes, and of calls that ask for one
  kOffloaded,         // of sequences whose memory went to the host tier; a budget of its own
};
inline constexpr std::size_t kMemoryTags = 13;
std::string_view TagName(MemoryTag tag);

class Account;
class Charge;

// What a refused request was about, carried by its status: for whoever can make room. It is lost
// where a status is made anew from its message.
struct Shortage {
  std::string account;  // its name
  MemoryTag tag = MemoryTag::kTiles;
  std::uint64_t asked = 0;
  std::uint64_t used = 0;
  std::uint64_t limit = 0;
};
std::optional<Shortage> ShortageOf(const absl::Status& status);

// Told of accounts that run full.
class PressureHandler {
 public:
  virtual ~PressureHandler() = default;
  // Called by whoever reserves, under whatever locks it holds: signal, do not act. `missing`: what
  // was refused; 0: it was granted, and left the account above its watermark.
  virtual void Pressed(const Account& account, std::uint64_t missing) = 0;
};

// Thread-safe. Outlives every Charge on it.
class Account {
 public:
  // `limit_bytes` 0: unlimited. What is charged here is charged to `parent`, too; it outlives this.
  Account(std::string name, std::uint64_t limit_bytes, Account* parent = nullptr,
          ErrorCause cause = ErrorCause::kQuota)
      : name_(std::move(name)), limit_bytes_(limit_bytes), parent_(parent), cause_(cause) {}
  Account(const Account&) = delete;
  Account& operator=(const Account&) = delete;

  // RESOURCE_EXHAUSTED with asked, used, limit and what would help.
  absl::StatusOr<Charge> Reserve(MemoryTag tag, std::uint64_t bytes);

  // From now on `handler`, which outlives the account or is taken back by null, hears of every
  // request that is refused, or that leaves at least so much used. Once, before the account is
  // used by more than one thread.
  void Watch(PressureHandler* handler, std::uint64_t high_bytes) {
    high_bytes_.store(high_bytes, std::memory_order_relaxed);
    handler_.store(handler, std::memory_order_release);
  }

  const std::string& name() const { return name_; }
  std::uint64_t limit_bytes() const { return limit_bytes_; }
  std::uint64_t used_bytes() const { return used_.load(std::memory_order_relaxed); }
  std::uint64_t used_bytes(MemoryTag tag) const {
    return by_tag_[static_cast<std::size_t>(tag)].load(std::memory_order_relaxed);
  }

 private:
  friend class Charge;
  absl::Status Take(MemoryTag tag, std::uint64_t bytes);
  void Return(MemoryTag tag, std::uint64_t bytes);
  void ReturnHere(MemoryTag tag, std::uint64_t bytes);
  absl::Status Refuse(MemoryTag tag, std::uint64_t bytes, std::uint64_t used) const;

  const std::string name_;
  const std::uint64_t limit_bytes_;
  Account* const parent_;
  const ErrorCause cause_;  // of a refusal
  // used_ == sum of by_tag_ == sum of live Charges, whenever nobody is in a call.
  std::atomic<std::uint64_t> used_{0};
  std::array<std::atomic<std::uint64_t>, kMemoryTags> by_tag_{};
  std::atomic<PressureHandler*> handler_{nullptr};
  std::atomic<std::uint64_t> high_bytes_{0};
};

class Charge {
 public:
  Charge() = default;
  Charge(Charge&& other) noexcept;
  Charge& operator=(Charge&& other) noexcept;
  Charge(const Charge&) = delete;
  Charge& operator=(const Charge&) = delete;
  ~Charge() { Reset(); }

  std::uint64_t bytes() const { return bytes_; }
  void Reset();
  // Gives back what is beyond so many bytes.
  void ShrinkTo(std::uint64_t bytes);
  // Takes over another one, of the same tag on the same account.
  void Add(Charge other);

 private:
  friend class Account;
  Charge(Account* account, MemoryTag tag, std::uint64_t bytes)
      : account_(account), bytes_(bytes), tag_(tag) {}

  Account* account_ = nullptr;
  std::uint64_t bytes_ = 0;
  MemoryTag tag_ = MemoryTag::kTiles;
};

}  // namespace tessera::pool
