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
#include "client/model/checkpoint/mapped_file.h"
#include "client/model/checkpoint/tensor.h"

namespace tessera::llm {

// The file must not shrink while it is open: its mapping would fault.
class Safetensors {
 public:
  // The file is untrusted. INVALID_ARGUMENT if the header contradicts itself or the file.
  static absl::StatusOr<Safetensors> Open(const std::string& path);

  // NOT_FOUND if it does not exist, INVALID_ARGUMENT if its type is not F32, F16 or BF16, or its
  // bytes contradict its shape.
  absl::StatusOr<Tensor> FindTensor(const std::string& name) const;

 private:
  struct Entry {
    std::string type;
    std::vector<std::uint64_t> shape;
    std::span<const std::byte> bytes;
  };
  Safetensors() = default;
  absl::Status ReadHeader(std::string_view text, std::span<const std::byte> data);

  std::string path_;
  MappedFile file_;
  std::map<std::string, Entry> tensors_;
};

}  // namespace tessera::llm
