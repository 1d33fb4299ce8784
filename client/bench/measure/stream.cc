#include "client/bench/measure/stream.h"

#include <immintrin.h>

namespace tessera::cli::bench {

namespace {

// Four independent sums. Prefetches as far ahead as the attention kernels do, so that both use the
// memory system alike.
constexpr std::size_t kAhead = 4096;

__attribute__((target("avx512f"))) std::uint64_t ReadAvx512(const std::byte* data,
                                                            std::size_t bytes) {
  __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                    _mm512_setzero_si512()};
  for (std::size_t at = 0; at + 256 <= bytes; at += 256) {
    for (int i = 0; i < 4; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(data + at + kAhead + 64 * i), _MM_HINT_T0);
      sum[i] = _mm512_xor_si512(sum[i], _mm512_load_si512(data + at + 64 * i));
    }
  }
  alignas(64) std::uint64_t words[8];
  _mm512_store_si512(
      words, _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3])));
  std::uint64_t all = 0;
  for (std::uint64_t word : words) all |= word;
  return all;
}

__attribute__((target("avx2"))) std::uint64_t ReadAvx2(const std::byte* data, std::size_t bytes) {
  __m256i sum[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                    _mm256_setzero_si256()};
  for (std::size_t at = 0; at + 128 <= bytes; at += 128) {
    _mm_prefetch(reinterpret_cast<const char*>(data + at + kAhead), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(data + at + kAhead + 64), _MM_HINT_T0);
    for (int i = 0; i < 4; ++i) {
      sum[i] = _mm256_xor_si256(
          sum[i], _mm256_load_si256(reinterpret_cast<const __m256i*>(data + at + 32 * i)));
    }
  }
  const __m256i all =
      _mm256_xor_si256(_mm256_xor_si256(sum[0], sum[1]), _mm256_xor_si256(sum[2], sum[3]));
  alignas(32) std::uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), all);
  return words[0] | words[1] | words[2] | words[3];
}

std::uint64_t ReadScalar(const std::byte* data, std::size_t bytes) {
  const auto* words = reinterpret_cast<const std::uint64_t*>(data);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < bytes / 8; ++i) sum ^= words[i];
  return sum;
}

}  // namespace

std::uint64_t StreamRead(const std::byte* data, std::size_t bytes) {
  if (__builtin_cpu_supports("avx512f")) return ReadAvx512(data, bytes);
  if (__builtin_cpu_supports("avx2")) return ReadAvx2(data, bytes);
  return ReadScalar(data, bytes);
}

}  // namespace tessera::cli::bench
