// Rows of the planes format and their sign index, one element at a time. kernels/format/planes.h
// has the layout.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format/part.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

// One side (K or V) of a quad.
struct SidePlanes {
  bool values;             // V: a word's bytes are the four rows
  std::uint32_t quad;      // bytes of a quad
  std::uint32_t planes;    // 1 or 2
  std::uint32_t channels;  // per plane
  std::uint32_t width[kMaxPlanes];
  std::uint32_t words[kMaxPlanes];  // offset of each plane's words
  std::uint32_t scales;
};
SidePlanes KeyPlanes(const TileShape& shape, const TileLayout& layout);
SidePlanes ValuePlanes(const TileShape& shape, const TileLayout& layout);

std::uint32_t ReadCode(const SidePlanes& side, const std::byte* tile, std::uint32_t row,
                       std::uint32_t plane, std::uint32_t channel);
// The words must be zero where the code goes.
void WriteCode(const SidePlanes& side, std::byte* tile, std::uint32_t row, std::uint32_t plane,
               std::uint32_t channel, std::uint32_t code);
float ReadScale(const SidePlanes& side, const std::byte* tile, std::uint32_t row,
                std::uint32_t plane);
void WriteScale(const SidePlanes& side, std::byte* tile, std::uint32_t row, std::uint32_t plane,
                float scale);

// The row's z, as stored.
void ReadPlanesRow(const SidePlanes& side, const std::byte* tile, std::uint32_t row,
                   double* elements);

// Encodes z. False if an element is not finite or the error is too large: see EncodeJob.
bool WritePlanesRow(const SidePlanes& side, const float* z, float error_limit, std::byte* tile,
                    std::uint32_t row);

// Copies a row, without crumbs if `to` has 4 bits where `from` has 6.
void CopyPlanesRow(const SidePlanes& from, const std::byte* source, std::uint32_t source_row,
                   const SidePlanes& to, std::byte* tile, std::uint32_t row);

// Rounds each plane of a rotated query to int8 codes and a scale, as QueryRow says. Writes scale *
// code.
void RoundQueryToCodes(const float* query, std::uint32_t planes, std::uint32_t channels,
                       double* rounded);

// Writes signs and norm of the key z to the tile's summaries.
void WriteSigns(const TileShape& shape, const TileLayout& layout, const float* z,
                std::byte* summaries, std::uint32_t row);
void CopySigns(const TileShape& shape, const TileLayout& from, const std::byte* source,
               std::uint32_t source_row, const TileLayout& to, std::byte* summaries,
               std::uint32_t row);
// The score of a block over signs: see ScorePart.
double SignScore(const ScorePart& part, const float* query, const std::byte* summaries,
                 std::uint32_t block, std::uint32_t entries);

}  // namespace tessera::kernels
