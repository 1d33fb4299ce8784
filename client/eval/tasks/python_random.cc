#include "client/eval/tasks/python_random.h"

#include <algorithm>

namespace tessera::cli::eval {

namespace {

constexpr std::size_t kMiddle = 397;

}  // namespace

// init_by_array of the MT19937 reference code, with a key of one or two words.
PythonRandom::PythonRandom(std::uint64_t seed) {
  state_[0] = 19650218;
  for (std::uint32_t i = 1; i < kWords; ++i) {
    state_[i] = 1812433253u * (state_[i - 1] ^ (state_[i - 1] >> 30)) + i;
  }
  const std::uint32_t key[] = {static_cast<std::uint32_t>(seed),
                               static_cast<std::uint32_t>(seed >> 32)};
  const std::uint32_t keys = key[1] == 0 ? 1 : 2;
  std::size_t at = 1;
  const auto step = [&] {
    if (++at < kWords) return;
    state_[0] = state_[kWords - 1];
    at = 1;
  };
  const auto mixed = [&] { return state_[at - 1] ^ (state_[at - 1] >> 30); };
  for (std::size_t i = 0; i < kWords; ++i) {
    const std::uint32_t word = static_cast<std::uint32_t>(i) % keys;
    state_[at] = (state_[at] ^ (mixed() * 1664525u)) + key[word] + word;
    step();
  }
  for (std::size_t i = 0; i + 1 < kWords; ++i) {
    state_[at] = (state_[at] ^ (mixed() * 1566083941u)) - static_cast<std::uint32_t>(at);
    step();
  }
  state_[0] = 0x80000000u;
}

void PythonRandom::Renew() {
  for (std::size_t i = 0; i < kWords; ++i) {
    const std::uint32_t joined =
        (state_[i] & 0x80000000u) | (state_[(i + 1) % kWords] & 0x7fffffffu);
    state_[i] =
        state_[(i + kMiddle) % kWords] ^ (joined >> 1) ^ ((joined & 1) != 0 ? 0x9908b0dfu : 0u);
  }
  next_ = 0;
}

std::uint32_t PythonRandom::Word() {
  if (next_ == kWords) Renew();
  std::uint32_t word = state_[next_++];
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680u;
  word ^= (word << 15) & 0xefc60000u;
  return word ^ (word >> 18);
}

double PythonRandom::Next() {
  const std::uint32_t high = Word() >> 5;
  const std::uint32_t low = Word() >> 6;
  return (high * 0x1p26 + low) * 0x1p-53;
}

}  // namespace tessera::cli::eval
