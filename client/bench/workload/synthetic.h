// A synthetic model: K, V and Q that any process can regenerate from a seed, and their exact
// attention in double precision.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/format/element.h"
#include "tessera/model.h"

namespace tessera::cli {

// All layers have the same shape; bf16.
struct SyntheticShape {
  static constexpr std::uint32_t kDelimiter = 1'000'000;  // the token id that ends a chunk of text

  std::uint32_t layers = 4;
  std::uint32_t query_heads = 8;
  std::uint32_t kv_heads = 2;
  std::uint32_t head_dim = 128;

  std::size_t kv_row() const { return std::size_t{kv_heads} * head_dim; }  // elements
  std::size_t query_row() const { return std::size_t{query_heads} * head_dim; }
  std::uint32_t group() const { return query_heads / kv_heads; }
  client::ModelGeometry Geometry() const;
};

// K and V of one sequence, and queries on demand. Token t of a seed is the same in every process. A
// fork continues with another seed.
class SyntheticSequence {
 public:
  SyntheticSequence(const SyntheticShape& shape, std::uint64_t seed) : shape_(shape), seed_(seed) {}

  const SyntheticShape& shape() const { return shape_; }
  std::uint64_t tokens() const { return tokens_; }

  // Generates the next `count` tokens.
  void Grow(std::uint64_t count);
  void Truncate(std::uint64_t tokens);
  SyntheticSequence Fork(std::uint64_t seed) const;

  // [tokens][kv_heads][head_dim] of one layer, tokens [first, first + count).
  std::span<const std::uint16_t> Key(std::uint32_t layer, std::uint64_t first,
                                     std::uint64_t count) const;
  std::span<const std::uint16_t> Value(std::uint32_t layer, std::uint64_t first,
                                       std::uint64_t count) const;
  // [layers][count][kv_heads][head_dim], for a bulk append.
  std::vector<std::uint16_t> KeysOfAllLayers(std::uint64_t first, std::uint64_t count) const;
  std::vector<std::uint16_t> ValuesOfAllLayers(std::uint64_t first, std::uint64_t count) const;
  // [query_heads][head_dim] of the token at `position`.
  std::vector<std::uint16_t> Query(std::uint32_t layer, std::uint64_t position) const;

  // The largest difference of `output` ([query_heads][head_dim], fp32) from exact causal attention
  // at `position`, relative to the largest magnitude of the exact output.
  double Error(std::uint32_t layer, std::uint64_t position, std::span<const float> output) const;

 private:
  void Fill(std::uint64_t kind, std::uint32_t layer, std::uint64_t token,
            std::span<std::uint16_t> row) const;
  std::vector<std::uint16_t> OfAllLayers(const std::vector<std::vector<std::uint16_t>>& rows,
                                         std::uint64_t first, std::uint64_t count) const;

  SyntheticShape shape_;
  std::uint64_t seed_;
  std::uint64_t tokens_ = 0;
  std::vector<std::vector<std::uint16_t>> keys_;    // per layer
  std::vector<std::vector<std::uint16_t>> values_;  // per layer
};

template <typename T>
std::span<const std::byte> BytesOf(const T& values) {
  return std::as_bytes(std::span(values.data(), values.size()));
}
template <typename T>
std::span<std::byte> WritableBytesOf(T& values) {
  return std::as_writable_bytes(std::span(values.data(), values.size()));
}

}  // namespace tessera::cli
