// A file mapped read-only. It must not shrink while it is mapped: reading would fault.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/platform/memfd.h"

namespace tessera::llm {

class MappedFile {
 public:
  MappedFile() = default;
  // INVALID_ARGUMENT if it is not a regular file or has fewer than `min_bytes`.
  static absl::StatusOr<MappedFile> Open(const std::string& path, std::uint64_t min_bytes);

  std::span<const std::byte> bytes() const { return {range_.data(), size_}; }

 private:
  AddressRange range_;
  std::size_t size_ = 0;
};

}  // namespace tessera::llm
