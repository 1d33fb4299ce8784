#include "daemon/pool/account.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "absl/strings/cord.h"
#include "daemon/base/bytes.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/pool/guarantees.h"

namespace tessera::pool {

namespace {
constexpr char kShortage[] = "tessera/shortage";
}

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
    case MemoryTag::kOffloaded:
      return "offloaded";
    case MemoryTag::kState:
      return "state";
    case MemoryTag::kModels:
      return "models";
  }
  return "unknown";
}

absl::StatusOr<Charge> Account::Reserve(MemoryTag tag, std::uint64_t bytes) {
  if (absl::Status status = Take(tag, bytes); !status.ok()) return status;
  return Charge(this, tag, bytes);
}

absl::Status Account::TakeFromParents(MemoryTag tag, std::uint64_t bytes) {
  if (guarantees_ != nullptr) return guarantees_->Take(tenant_, tag, bytes);
  if (parent_ == nullptr) return absl::OkStatus();
  absl::Status status = parent_->Take(tag, bytes);
  if (!status.ok() || other_parent_ == nullptr) return status;
  status = other_parent_->Take(tag, bytes);
  if (!status.ok()) parent_->Return(tag, bytes);
  return status;
}

absl::Status Account::Take(MemoryTag tag, std::uint64_t bytes, std::uint64_t kept) {
  // Never exceed the limit, even briefly: an oversized request would make requests fail that fit.
  const std::uint64_t limit = limit_bytes();
  const std::uint64_t allowed = limit - std::min(kept, limit);
  std::uint64_t before = used_.load(std::memory_order_relaxed);
  do {
    if (limit != 0 && (bytes > allowed || before > allowed - bytes)) {
      return Refuse(tag, bytes, before, std::min(kept, limit));
    }
  } while (!used_.compare_exchange_weak(before, before + bytes, std::memory_order_relaxed));
  by_tag_[static_cast<std::size_t>(tag)].fetch_add(bytes, std::memory_order_relaxed);
  absl::Status of_parent = TakeFromParents(tag, bytes);
  if (!of_parent.ok()) {
    ReturnHere(tag, bytes);
    return of_parent;
  }
  PressureHandler* const handler = handler_.load(std::memory_order_acquire);
  if (handler != nullptr && before + bytes >= high_bytes_.load(std::memory_order_relaxed)) {
    handler->Pressed(*this, 0);
  }
  return of_parent;
}

absl::Status Account::Refuse(MemoryTag tag, std::uint64_t bytes, std::uint64_t used,
                             std::uint64_t kept) const {
  if (PressureHandler* const handler = handler_.load(std::memory_order_acquire)) {
    handler->Pressed(*this, bytes);
  }
  const std::uint64_t limit = limit_bytes();
  absl::Status status = absl::ResourceExhaustedError(Concat(
      name_, ": ", FormatBytes(bytes), " requested for ", TagName(tag), ", ", FormatBytes(used),
      " used of a limit of ", FormatBytes(limit),
      kept == 0 ? std::string()
                : Concat(", of which ", FormatBytes(kept), " are reserved for other tenants"),
      "; free sequences and retry, or raise the limit"));
  status.SetPayload(kShortage, absl::Cord(Concat(static_cast<int>(tag), " ", bytes, " ", used, " ",
                                                 limit - kept, " ", name_)));
  return WithCause(std::move(status), cause_);
}

std::optional<Shortage> ShortageOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kShortage);
  if (!payload.has_value()) return std::nullopt;
  std::istringstream words{std::string(*payload)};
  Shortage shortage;
  int tag = 0;
  words >> tag >> shortage.asked >> shortage.used >> shortage.limit;
  words.get();
  std::getline(words, shortage.account);
  shortage.tag = static_cast<MemoryTag>(tag);
  return shortage;
}

void Account::Return(MemoryTag tag, std::uint64_t bytes) {
  if (guarantees_ != nullptr) guarantees_->Return(tenant_, tag, bytes);
  if (other_parent_ != nullptr) other_parent_->Return(tag, bytes);
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

void Charge::ShrinkTo(std::uint64_t bytes) {
  if (account_ == nullptr || bytes >= bytes_) return;
  account_->Return(tag_, bytes_ - bytes);
  bytes_ = bytes;
}

void Charge::Add(Charge other) {
  if (account_ == nullptr) {
    *this = std::move(other);
    return;
  }
  if (other.account_ == nullptr) return;
  TESSERA_CHECK(other.account_ == account_ && other.tag_ == tag_,
                "only charges of the same account and tag can be merged");
  bytes_ += std::exchange(other.bytes_, 0);
}

}  // namespace tessera::pool
