// Tensors as model files store them: floating-point numbers, or blocks of small integers with a
// scale and an offset.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace tessera::llm {

enum class TensorType : std::uint8_t {
  kF32,
  kF16,
  kBf16,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4K,
  kQ5K,
  kQ6K,
};

// As GGUF and safetensors files name it: "Q4_K".
std::string_view NameOf(TensorType type);
// From the number in a GGUF file. nullopt: not supported.
std::optional<TensorType> TypeOfGguf(std::uint32_t number);
// From the name in a safetensors file. nullopt: not supported.
std::optional<TensorType> TypeOfSafetensors(std::string_view name);

bool IsQuantised(TensorType type);
// Elements and bytes of a block. A block of a floating-point type is one element.
std::size_t BlockElements(TensorType type);
std::size_t BlockBytes(TensorType type);

// Elements of a quantised type that share a scale: 16 or 32.
std::size_t GroupElements(TensorType type);

// A block of a quantised tensor: element i is codes[i] *
// scales[i / group] +
// offsets[i / group], with the type's group.
struct QuantisedBlock {
  std::uint8_t codes[256];
  float scales[16], offsets[16];
};
// `bytes` is one block.
void Unpack(TensorType type, std::span<const std::byte> bytes, QuantisedBlock& block);

// A tensor in a mapped file, in row-major order.
struct Tensor {
  TensorType type = TensorType::kF32;
  std::vector<std::uint64_t> shape;  // the last extent is a row's length
  std::span<const std::byte> bytes;

  std::uint64_t row_elements() const { return shape.empty() ? 1 : shape.back(); }
  std::size_t row_bytes() const;
  std::span<const std::byte> Row(std::uint64_t row) const {
    return bytes.subspan(row * row_bytes(), row_bytes());
  }
  // Writes a row as fp32. `values` has row_elements().
  void ReadRow(std::uint64_t row, std::span<float> values) const;
};

// INVALID_ARGUMENT unless the rows consist of whole blocks and take exactly `bytes.size()` bytes.
// Everything above is safe for a tensor that this accepts.
absl::Status CheckTensor(const Tensor& tensor);

// "576 x 49152"
std::string ShapeText(std::span<const std::uint64_t> shape);

}  // namespace tessera::llm
