// Epoch pins: how a reader keeps what it reads from being reused, and how the daemon takes a pin
// back from a reader that is overdue.
//
// To pin: store the epoch, re-load it, repeat until both agree. All operations are sequentially
// consistent, so either the daemon's scan after it advanced the epoch sees the pin, or the reader's
// re-load sees the new epoch. To unpin: compare-and-swap of the reader's own value; it fails only
// where the daemon has revoked the pin, and then what was read may be garbage: the caller discards
// it, answers ABORTED and tries again.
//
// A slot is used by one thread at a time; two processes touch it: its worker and the daemon.
#pragma once

#include <cstdint>

#include "proto/shm/layout.h"

namespace tessera::shm {

inline constexpr std::uint64_t kPinFree = 0;
inline constexpr std::uint64_t kPinRevoked = 1;

constexpr std::uint64_t PinWord(std::uint64_t epoch) { return (epoch + 1) << 1; }
// Only for words that are neither free nor revoked.
constexpr std::uint64_t PinnedEpoch(std::uint64_t word) { return (word >> 1) - 1; }

// Returns the word that Unpin wants back.
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

// True where the pin held all along. False: revoked; the slot is free again either way.
[[nodiscard]] inline bool Unpin(Word& slot, std::uint64_t word) {
  std::uint64_t expected = word;
  if (slot.compare_exchange_strong(expected, kPinFree, std::memory_order_seq_cst)) return true;
  slot.store(kPinFree, std::memory_order_seq_cst);
  return false;
}

// Daemon side. True where the slot held exactly `word` and no longer does.
inline bool Revoke(Word& slot, std::uint64_t word) {
  return slot.compare_exchange_strong(word, kPinRevoked, std::memory_order_seq_cst);
}

}  // namespace tessera::shm
