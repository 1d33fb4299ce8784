// Memory accounting. An `Account` counts bytes by purpose. A `Charge` is a move-only claim on an
// account whose destructor returns the bytes, so no code path can forget to.
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

// What the bytes are used for. The names are metric labels.
enum class MemoryTag : std::uint8_t {
  kTiles,
  kTables,     // tile tables
  kRotations,  // rotations of packed segments
  kSnapshots,
  kSequences,  // sequence blocks
  kTails,
  kStaging,
  kPoolExtents,       // physical memory, charged to the node
  kDirectoryExtents,  // physical memory, charged to the node
  kRawCopies,         // host copies of provisionally encoded rows; separate budget
  kObservations,      // host memory for what workers observed; same budget
  kPrefixIndex,       // token ids of published prefixes and of Match calls
  kOffloaded,         // offloaded sequences in the host tier; separate budget
  kState,             // heap memory of sequences: lanes, and what compaction keeps about them
  kModels,            // heap memory of registered models
};
inline constexpr std::size_t kMemoryTags = 15;
std::string_view TagName(MemoryTag tag);

class Account;
class Charge;
class Guarantees;

// Describes a refused request. Attached to the status as a payload, for code that can free memory;
// lost if the status is rebuilt from its message.
struct Shortage {
  std::string account;  // the account's name
  MemoryTag tag = MemoryTag::kTiles;
  std::uint64_t asked = 0;
  std::uint64_t used = 0;
  std::uint64_t limit = 0;
};
std::optional<Shortage> ShortageOf(const absl::Status& status);

// Notified when accounts run full.
class PressureHandler {
 public:
  virtual ~PressureHandler() = default;
  // Called by the reserving thread under whatever locks it holds: signal, do not act. `missing` is
  // the refused size; 0 means that the request was granted but left the account above its
  // watermark.
  virtual void Pressed(const Account& account, std::uint64_t missing) = 0;
};

// Thread-safe. Outlives all its Charges.
class Account {
 public:
  // `limit_bytes` 0 means unlimited. Everything is also charged to `parent`, which must outlive
  // this.
  Account(std::string name, std::uint64_t limit_bytes, Account* parent = nullptr,
          ErrorCause cause = ErrorCause::kQuota)
      : name_(std::move(name)), limit_bytes_(limit_bytes), parent_(parent), cause_(cause) {}
  // An unlimited account whose bytes are charged to both parents, which outlive it.
  Account(std::string name, Account* parent, Account* other_parent)
      : name_(std::move(name)),
        limit_bytes_(0),
        parent_(parent),
        cause_(ErrorCause::kQuota),
        other_parent_(other_parent) {}
  // An unlimited account of a tenant whose bytes are charged on by `guarantees`, which outlive it.
  Account(std::string name, Guarantees* guarantees, std::size_t tenant)
      : name_(std::move(name)),
        limit_bytes_(0),
        parent_(nullptr),
        cause_(ErrorCause::kQuota),
        guarantees_(guarantees),
        tenant_(tenant) {}
  Account(const Account&) = delete;
  Account& operator=(const Account&) = delete;

  // Returns RESOURCE_EXHAUSTED with requested, used and limit bytes, and what would help.
  absl::StatusOr<Charge> Reserve(MemoryTag tag, std::uint64_t bytes);

  // From now on `handler` is notified of every request that is refused or leaves at least
  // `high_bytes` used. It must outlive the account or be removed with null.
  void Watch(PressureHandler* handler, std::uint64_t high_bytes) {
    high_bytes_.store(high_bytes, std::memory_order_relaxed);
    handler_.store(handler, std::memory_order_release);
  }

  const std::string& name() const { return name_; }
  std::uint64_t limit_bytes() const { return limit_bytes_.load(std::memory_order_relaxed); }
  // Charges beyond a smaller limit stay; further ones are refused until enough is returned.
  void SetLimit(std::uint64_t limit_bytes) {
    limit_bytes_.store(limit_bytes, std::memory_order_relaxed);
  }
  std::uint64_t used_bytes() const { return used_.load(std::memory_order_relaxed); }
  std::uint64_t used_bytes(MemoryTag tag) const {
    return by_tag_[static_cast<std::size_t>(tag)].load(std::memory_order_relaxed);
  }

 private:
  friend class Charge;
  friend class Guarantees;
  // `kept`: bytes of the limit that this request may not use.
  absl::Status Take(MemoryTag tag, std::uint64_t bytes, std::uint64_t kept = 0);
  absl::Status TakeFromParents(MemoryTag tag, std::uint64_t bytes);
  void Return(MemoryTag tag, std::uint64_t bytes);
  void ReturnHere(MemoryTag tag, std::uint64_t bytes);
  absl::Status Refuse(MemoryTag tag, std::uint64_t bytes, std::uint64_t used,
                      std::uint64_t kept) const;

  const std::string name_;
  std::atomic<std::uint64_t> limit_bytes_;
  Account* const parent_;
  const ErrorCause cause_;  // of a refusal
  Account* const other_parent_ = nullptr;
  Guarantees* const guarantees_ = nullptr;
  const std::size_t tenant_ = 0;  // for guarantees_
  // Whenever no call is in progress: used_ == sum of by_tag_ == sum of live Charges.
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
  // Returns the bytes beyond this size.
  void ShrinkTo(std::uint64_t bytes);
  // Merges another charge of the same tag and account.
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
