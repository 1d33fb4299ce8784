#include "daemon/pool/account.h"

#include <utility>

#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"

namespace tessera::pool {

std::string_view TagName(MemoryTag tag) {
  switch (tag) {
    case MemoryTag::kTiles:
      return "tiles";
    case MemoryTag::kTables:
      return "tables";
    case MemoryTag::kRotations:
      return "rotations";
    case MemoryTag::kSnapshots:
      return "snapshots";
    case MemoryTag::kSequences:
      return "sequences";
    case MemoryTag::kTails:
      return "tails";
    case MemoryTag::kStaging:
      return "staging";
    case MemoryTag::kPoolExtents:
      return "pool_extents";
    case MemoryTag::kDirectoryExtents:
      return "directory_extents";
    case MemoryTag::kRawCopies:
      return "raw_copies";
    case MemoryTag::kObservations:
      return "observations";
    case MemoryTag::kPrefixIndex:
      return "prefix_index";
  }
  return "unknown";
}

absl::StatusOr<Charge> Account::Reserve(MemoryTag tag, std::uint64_t bytes) {
  if (absl::Status status = Take(tag, bytes); !status.ok()) return status;
  return Charge(this, tag, bytes);
}

absl::Status Account::Take(MemoryTag tag, std::uint64_t bytes) {
  // Never above the limit, not even for a moment: a request that cannot fit would make others fail
  // that do.
  std::uint64_t before = used_.load(std::memory_order_relaxed);
  do {
    if (limit_bytes_ != 0 && (bytes > limit_bytes_ || before > limit_bytes_ - bytes)) {
      return absl::ResourceExhaustedError(Concat(name_, ": ", FormatBytes(bytes), " asked for ",
                                                 TagName(tag), ", ", FormatBytes(before),
                                                 " used of a limit of ", FormatBytes(limit_bytes_),
                                                 "; free sequences, or raise the limit"));
    }
  } while (!used_.compare_exchange_weak(before, before + bytes, std::memory_order_relaxed));
  by_tag_[static_cast<std::size_t>(tag)].fetch_add(bytes, std::memory_order_relaxed);
  absl::Status of_parent = absl::OkStatus();
  if (parent_ != nullptr) of_parent = parent_->Take(tag, bytes);
  if (!of_parent.ok()) ReturnHere(tag, bytes);
  return of_parent;
}

void Account::Return(MemoryTag tag, std::uint64_t bytes) {
  if (parent_ != nullptr) parent_->Return(tag, bytes);
  ReturnHere(tag, bytes);
}

void Account::ReturnHere(MemoryTag tag, std::uint64_t bytes) {
  by_tag_[static_cast<std::size_t>(tag)].fetch_sub(bytes, std::memory_order_relaxed);
  used_.fetch_sub(bytes, std::memory_order_relaxed);
}

Charge::Charge(Charge&& other) noexcept
    : account_(std::exchange(other.account_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      tag_(other.tag_) {}

Charge& Charge::operator=(Charge&& other) noexcept {
  if (this != &other) {
    Reset();
    account_ = std::exchange(other.account_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    tag_ = other.tag_;
  }
  return *this;
}

void Charge::Reset() {
  if (account_ != nullptr) account_->Return(tag_, bytes_);
  account_ = nullptr;
  bytes_ = 0;
}

}  // namespace tessera::pool
