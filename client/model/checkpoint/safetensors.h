// Weights in the safetensors format: a JSON header of names, types, shapes and offsets, then the
// bytes, which stay where they are in the mapped file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/platform/memfd.h"

namespace tessera::llm {

// The file must not shrink while it is open: its mapping would fault.
class Safetensors {
 public:
  // INVALID_ARGUMENT for a header that contradicts itself or the file, whoever wrote it.
  static absl::StatusOr<Safetensors> Open(const std::string& path);

  // A bf16 tensor of exactly this shape, row after row. NOT_FOUND where there is none of the name,
  // INVALID_ARGUMENT where it has another type or shape.
  absl::StatusOr<std::span<const std::uint16_t>> Bf16(
      const std::string& name, const std::vector<std::uint64_t>& shape) const;

 private:
  struct Tensor {
    std::string type;
    std::vector<std::uint64_t> shape;
    std::span<const std::byte> bytes;
  };
  Safetensors() = default;
  absl::Status ReadHeader(std::string_view text, std::span<const std::byte> data);

  std::string path_;
  AddressRange file_;
  std::map<std::string, Tensor> tensors_;
};

}  // namespace tessera::llm
