#include "daemon/pool/arena.h"

#include <utility>

#include "daemon/base/bytes.h"
#include "daemon/base/check.h"
#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"

namespace tessera::pool {

absl::StatusOr<Arena> Arena::Create(const Options& options) {
  TESSERA_CHECK(options.extent_bytes > 0, "an extent is not empty");
  TESSERA_CHECK(options.limit_bytes % options.extent_bytes == 0 && options.limit_bytes > 0,
                "an arena consists of whole extents");
  absl::StatusOr<std::unique_ptr<device::Space>> space =
      options.source->Reserve(options.limit_bytes);
  if (!space.ok()) return space.status();
  return Arena(options, *std::move(space));
}

absl::StatusOr<std::uint32_t> Arena::FreeIndex() const {
  std::uint32_t index = 0;
  while (index < slots_.size() && slots_[index].memory) ++index;
  if (index * options_.extent_bytes >= options_.limit_bytes) {
    return WithCause(absl::ResourceExhaustedError(
                         Concat("the pool's address range is full with ", live_, " extents of ",
                                FormatBytes(options_.extent_bytes), "; its limit is ",
                                FormatBytes(options_.limit_bytes), "; free sequences and retry")),
                     ErrorCause::kPoolFull);
  }
  return index;
}

absl::StatusOr<std::uint32_t> Arena::Grow() {
  // Before the charge: the address range may be full although the account is not.
  const absl::StatusOr<std::uint32_t> index = FreeIndex();
  if (!index.ok()) return index.status();
  absl::StatusOr<Charge> charge = options_.node->Reserve(options_.tag, options_.extent_bytes);
  if (!charge.ok()) return charge.status();
  return Grow(*charge);
}

absl::StatusOr<std::uint32_t> Arena::Grow(Charge& reserved) {
  TESSERA_CHECK(reserved.bytes() == options_.extent_bytes, "the charge is an extent's");
  const absl::StatusOr<std::uint32_t> index = FreeIndex();
  if (!index.ok()) return index.status();
  absl::StatusOr<std::unique_ptr<device::Memory>> memory =
      space_->Create(*index * options_.extent_bytes, options_.extent_bytes);
  if (!memory.ok()) return memory.status();
  if (*index == slots_.size()) slots_.emplace_back();
  Slot& slot = slots_[*index];
  slot.memory = *std::move(memory);
  slot.charge = std::move(reserved);
  ++slot.generation;
  ++live_;
  return index;
}

void Arena::Shrink(std::uint32_t index) {
  TESSERA_CHECK(generation(index) != 0, "only an existing extent can be released");
  Slot& slot = slots_[index];
  slot.memory.reset();
  slot.charge.Reset();
  --live_;
}

}  // namespace tessera::pool
