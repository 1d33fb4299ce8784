// Reads tile shapes from an input and fills memory from it.
#pragma once

#include <algorithm>
#include <cstring>
#include <random>
#include <span>
#include <string_view>

#include "kernels/format/tile_shape.h"
#include "tests/fuzz/input.h"

namespace tessera::fuzz {

inline constexpr std::uint32_t kWidths[] = {64, 128, 256};

// Reads each field as is, except the width: otherwise most random shapes would be unsupported. In
// shapes of planes, the bytes of `kept` are the widths of the planes.
inline kernels::TileShape TakeShape(Input& input) {
  kernels::TileShape shape;
  shape.format = static_cast<kernels::TileFormat>(input.Byte());
  shape.head_dim = static_cast<std::uint16_t>(kWidths[input.Byte() % 3]);
  shape.key = {.channels = input.Take<std::uint16_t>(), .kept = input.Take<std::uint16_t>()};
  shape.value = {.channels = input.Take<std::uint16_t>(), .kept = input.Take<std::uint16_t>()};
  shape.group = input.Byte();
  shape.summary = static_cast<kernels::Summary>(input.Byte());
  shape.block = input.Byte();
  const std::uint8_t flags = input.Byte();
  shape.weights = (flags & 1) != 0;
  shape.positions = (flags & 2) != 0;
  if (shape.planes()) {
    const auto widths = [](std::uint16_t bytes) {
      return kernels::PlaneWidths{static_cast<std::uint8_t>(bytes),
                                  static_cast<std::uint8_t>(bytes >> 8)};
    };
    shape.key_planes = widths(shape.key.kept);
    shape.value_planes = widths(shape.value.kept);
    shape.key = shape.value = {shape.head_dim, shape.head_dim};
    shape.group = 1;
  }
  return shape;
}

inline void AddShape(const kernels::TileShape& shape, Output& output) {
  output.Add(static_cast<std::uint8_t>(shape.format));
  for (std::uint8_t i = 0; i < 3; ++i) {
    if (kWidths[i] == shape.head_dim) output.Byte(i);
  }
  const auto kept = [&](const kernels::RowShape& row, const kernels::PlaneWidths& widths) {
    return shape.planes() ? static_cast<std::uint16_t>(widths.first | widths.second << 8)
                          : row.kept;
  };
  output.Add(shape.key.channels).Add(kept(shape.key, shape.key_planes));
  output.Add(shape.value.channels).Add(kept(shape.value, shape.value_planes));
  output.Byte(shape.group).Add(static_cast<std::uint8_t>(shape.summary)).Byte(shape.block);
  output.Byte(static_cast<std::uint8_t>((shape.weights ? 1 : 0) | (shape.positions ? 2 : 0)));
}

// Writes `bytes` in front, then noise from the seed.
inline void Fill(std::span<std::byte> memory, std::string_view bytes, std::uint32_t seed) {
  std::minstd_rand noise(seed);
  for (std::size_t i = 0; i + 2 <= memory.size(); i += 2) {
    const auto word = static_cast<std::uint16_t>(noise() >> 8);
    std::memcpy(&memory[i], &word, sizeof word);
  }
  std::copy_n(reinterpret_cast<const std::byte*>(bytes.data()),
              std::min(memory.size(), bytes.size()), memory.data());
}

}  // namespace tessera::fuzz
