// Reproduces Python's random.Random(seed).random(), which is stable across Python versions:
// MT19937, seeded with the 32-bit words of an integer, two outputs per double.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace tessera::cli::eval {

class PythonRandom {
 public:
  explicit PythonRandom(std::uint64_t seed);

  // In [0, 1), a multiple of 2^-53.
  double Next();
  // Python's int(random() * bound), including its slight bias.
  std::size_t Below(std::size_t bound) {
    return static_cast<std::size_t>(Next() * static_cast<double>(bound));
  }

 private:
  static constexpr std::size_t kWords = 624;
  std::uint32_t Word();
  void Renew();

  std::array<std::uint32_t, kWords> state_;
  std::size_t next_ = kWords;
};

}  // namespace tessera::cli::eval
