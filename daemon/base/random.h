// Secrets from the kernel: session nonces and other values that a peer must not guess. Not for
// sampling: tests with random inputs use a seeded std::mt19937_64.
#pragma once

#include <cstdint>
#include <string_view>

namespace tessera {

struct Secret128 {
  std::uint64_t high = 0;
  std::uint64_t low = 0;

  friend bool operator==(const Secret128&, const Secret128&) = default;
};

// From getrandom(2), never zero. Thread-safe. Aborts if the kernel has no getrandom.
std::uint64_t NewSecret64();
Secret128 NewSecret128();

// Compares a presented token with the true one. The time taken depends only on the length of the
// presented one.
bool SecretsEqual(std::string_view presented, std::string_view expected);

}  // namespace tessera
