#include "daemon/serving/attach/hello.h"

#include <string>

#include "daemon/base/strings.h"
#include "daemon/cache/prefix/prefix_store.h"
#include "daemon/config/limits.h"
#include "proto/shm/layout.h"

namespace tessera::serving {

namespace {

// What the worker asks for its session.
absl::Status CheckOptions(const v1::Hello& hello) {
  constexpr std::size_t kMaxSalt = 64;
  if (hello.cache_salt().size() > kMaxSalt) {
    return absl::InvalidArgumentError(Concat("cache_salt has ", hello.cache_salt().size(),
                                             " bytes; the limit is ", kMaxSalt, "; use a hash"));
  }
  const config::Range limits = config::kPinLimitMs;
  if (hello.pin_limit_ms() != 0 &&
      (hello.pin_limit_ms() < limits.min || hello.pin_limit_ms() > limits.max)) {
    return absl::InvalidArgumentError(Concat("pin_limit_ms is ", hello.pin_limit_ms(),
                                             "; it is 0 or from ", limits.min, " to ", limits.max));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckHello(const v1::Hello& hello) {
  if (hello.protocol_version() != shm::kProtocolVersion) {
    return absl::FailedPreconditionError(
        Concat("the client has protocol version ", hello.protocol_version(),
               ", this daemon has version ", shm::kProtocolVersion, "; install matching versions"));
  }
  if (hello.layout_fingerprint() != 0 && hello.layout_fingerprint() != shm::kLayoutFingerprint) {
    return absl::FailedPreconditionError(
        Concat("the client has layout ", hello.layout_fingerprint(), ", this daemon has layout ",
               shm::kLayoutFingerprint, "; rebuild the client, or attach without mapping"));
  }
  constexpr std::size_t kMaxName = 128;
  for (const std::string* name : {&hello.worker_name(), &hello.group()}) {
    if (name->size() > kMaxName) {
      return absl::InvalidArgumentError(
          Concat("a worker or group name has ", name->size(), " bytes; the limit is ", kMaxName));
    }
  }
  if (absl::Status status = CheckOptions(hello); !status.ok()) return status;
  if (hello.group_size() <= 1) return absl::OkStatus();
  if (hello.group_size() > cache::PrefixStore::kMaxRanks) {
    return absl::InvalidArgumentError(Concat("group_size is ", hello.group_size(),
                                             "; the limit is ", cache::PrefixStore::kMaxRanks));
  }
  if (hello.rank() >= hello.group_size()) {
    return absl::InvalidArgumentError(
        Concat("rank is ", hello.rank(), "; the limit is below group_size, ", hello.group_size()));
  }
  if (hello.group().empty()) {
    return absl::InvalidArgumentError(
        Concat("group_size is ", hello.group_size(), " and group is empty; set group"));
  }
  return absl::OkStatus();
}

absl::Status CheckPrefixHash(const v1::Hello& hello, std::uint64_t seed) {
  if (hello.has_prefix_hash() && hello.prefix_hash() != cache::kPrefixHashName) {
    return absl::FailedPreconditionError(Concat("the client hashes prefixes with ",
                                                Quoted(hello.prefix_hash()), ", this daemon with ",
                                                Quoted(cache::kPrefixHashName)));
  }
  if (hello.has_prefix_hash_seed() && hello.prefix_hash_seed() != seed) {
    return absl::FailedPreconditionError(Concat("the client hashes prefixes from seed ",
                                                hello.prefix_hash_seed(), ", this daemon from ",
                                                seed, " (prefix_hash_seed)"));
  }
  return absl::OkStatus();
}

}  // namespace tessera::serving
