// Epoch pins: a pin keeps the memory that a reader uses from being reused. The daemon revokes the
// pin of an overdue reader.
//
// To pin, a reader stores the epoch in its slot and loads the epoch again, until both agree. All
// operations are sequentially consistent. So either the daemon's scan after advancing the epoch
// sees the pin, or the reader's second load sees the new epoch. To unpin, the reader swaps its own
// word for kPinFree. The swap fails only if the daemon has revoked the pin. What was read may then
// be garbage, so the caller must discard it and retry (ABORTED).
//
// A slot is used by one thread of the worker at a time; besides it, only the daemon writes the
// slot.
#pragma once

#include <cstdint>

#include "proto/shm/layout.h"

namespace tessera::shm {

inline constexpr std::uint64_t kPinFree = 0;
inline constexpr std::uint64_t kPinRevoked = 1;

constexpr std::uint64_t PinWord(std::uint64_t epoch) { return (epoch + 1) << 1; }
// `word` must be neither kPinFree nor kPinRevoked.
constexpr std::uint64_t PinnedEpoch(std::uint64_t word) { return (word >> 1) - 1; }

// Pins the current epoch. Returns the word to pass to Unpin.
inline std::uint64_t Pin(Word& slot, const Word& epoch) {
  std::uint64_t seen = epoch.load(std::memory_order_seq_cst);
  for (;;) {
    const std::uint64_t word = PinWord(seen);
    slot.store(word, std::memory_order_seq_cst);
    const std::uint64_t again = epoch.load(std::memory_order_seq_cst);
    if (again == seen) return word;
    seen = again;
  }
}

// Frees the slot. Returns false if the pin was revoked in the meantime.
[[nodiscard]] inline bool Unpin(Word& slot, std::uint64_t word) {
  std::uint64_t expected = word;
  if (slot.compare_exchange_strong(expected, kPinFree, std::memory_order_seq_cst)) return true;
  slot.store(kPinFree, std::memory_order_seq_cst);
  return false;
}

// Daemon side: revokes the pin if the slot still holds `word`. Returns whether it did.
inline bool Revoke(Word& slot, std::uint64_t word) {
  return slot.compare_exchange_strong(word, kPinRevoked, std::memory_order_seq_cst);
}

}  // namespace tessera::shm
