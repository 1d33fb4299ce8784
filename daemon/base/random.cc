#include "daemon/base/random.h"

#include <sys/random.h>

#include <cerrno>
#include <cstddef>

#include "daemon/base/check.h"

namespace tessera {
namespace {

void Fill(void* out, std::size_t size) {
  std::byte* next = static_cast<std::byte*>(out);
  while (size > 0) {
    const ssize_t got = getrandom(next, size, 0);
    if (got < 0) {
      TESSERA_CHECK(errno == EINTR, "getrandom failed");
      continue;
    }
    next += got;
    size -= static_cast<std::size_t>(got);
  }
}

}  // namespace

std::uint64_t NewSecret64() {
  std::uint64_t secret = 0;
  while (secret == 0) Fill(&secret, sizeof(secret));
  return secret;
}

Secret128 NewSecret128() {
  Secret128 secret;
  while (secret == Secret128{}) Fill(&secret, sizeof(secret));
  return secret;
}

bool SecretsEqual(std::string_view presented, std::string_view expected) {
  // If `expected` is empty, the loop compares with '\0' instead of reading past its end.
  unsigned difference = presented.size() == expected.size() ? 0u : 1u;
  for (std::size_t i = 0; i < presented.size(); ++i) {
    const char other = expected.empty() ? '\0' : expected[i % expected.size()];
    difference |= static_cast<unsigned char>(presented[i] ^ other);
  }
  // The barrier keeps the compiler from leaving the loop early.
  asm volatile("" : "+r"(difference));
  return difference == 0;
}

}  // namespace tessera
