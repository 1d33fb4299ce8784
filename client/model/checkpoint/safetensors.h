// Weights in the safetensors format: a JSON header with names, types, shapes and offsets, followed
// by the data. The file is mapped; tensors point into the mapping.
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
  // The file is untrusted. INVALID_ARGUMENT if the header contradicts itself or the file.
  static absl::StatusOr<Safetensors> Open(const std::string& path);

  // The bf16 tensor `name` in row-major order. NOT_FOUND if it does not exist, INVALID_ARGUMENT if
  // its type or shape differs.
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
