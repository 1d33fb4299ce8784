// Reads GGUF files (version 2 and 3): key-value metadata, a table of tensors, and their data.
//
// Layout, little-endian: "GGUF", version u32, tensors u64, values u64, the values (key, type u32,
// value), the table (name, dimensions u32, extents u64, type u32, offset u64), and from the next
// multiple of `general.alignment` the data. Strings are a length u64 and bytes. Extents are listed
// innermost first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "client/model/checkpoint/mapped_file.h"
#include "client/model/checkpoint/tensor.h"

namespace tessera::llm {

class Gguf {
 public:
  // Integers and booleans are std::int64_t. Text points into the mapped file.
  using Value = std::variant<std::int64_t, double, std::string_view, std::vector<std::int64_t>,
                             std::vector<double>, std::vector<std::string_view>>;

  // The file is untrusted. INVALID_ARGUMENT if the header contradicts itself or the file.
  static absl::StatusOr<Gguf> Open(const std::string& path);

  // nullptr: there is none.
  const Value* FindValue(const std::string& key) const;
  const Tensor* FindTensor(const std::string& name) const;
  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }

  // INVALID_ARGUMENT names the key if it is missing or of another kind.
  absl::StatusOr<std::uint64_t> Count(const std::string& key) const;
  absl::StatusOr<double> Number(const std::string& key) const;
  absl::StatusOr<std::string_view> Text(const std::string& key) const;

 private:
  class Reader;
  absl::Status Read(std::span<const std::byte> bytes);
  absl::Status ReadTensors(Reader& reader, std::uint64_t count);

  MappedFile file_;
  std::map<std::string, Value, std::less<>> values_;
  std::map<std::string, Tensor, std::less<>> tensors_;
};

}  // namespace tessera::llm
