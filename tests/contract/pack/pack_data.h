// Shapes, rotations and rows for tests of packed tiles, and a tile reader that shares no code with
// any implementation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/format/operations.h"
#include "kernels/format/tile_shape.h"
#include "tests/contract/attend/attend_lanes.h"
#include "tests/fakes/seed.h"

namespace tessera::kernels {

struct ShapeWish {
  bool cut = false;    // half of the time a side has fewer channels than head_dim
  bool dense = false;  // may also be dense
  bool summary = true;
  bool words = true;  // may have weights and positions
};
TileShape RandomShape(TestRandom& random, const ShapeWish& wish);
std::string Describe(const TileShape& shape);

// The array of K and mean-key rows, or of V rows, in a tile.
enum class Array { kKeys, kValues, kBlocks };
inline const RowShape& RowsOf(const TileShape& shape, Array array) {
  return array == Array::kValues ? shape.value : shape.key;
}

// Orthogonal matrices as a strategy stores them: the first `channels` rows per side, in `type`.
class Rotations {
 public:
  Rotations(const TileShape& shape, ElementType type, TestRandom& random);
  // R_k selects these channels of a key, as many as the shape has. Values are not rotated.
  Rotations(const TileShape& shape, ElementType type, const std::vector<std::uint32_t>& channels);
  RotationView view() const {
    return {.key = key_.data(), .value = turns_values_ ? value_.data() : nullptr, .type = type_};
  }

 private:
  ElementType type_;
  bool turns_values_ = true;
  Buffer key_;
  Buffer value_;
};

// Removes at random the matrices of sides that keep all channels, which means identity.
RotationView SomeOf(RotationView rotation, const TileShape& shape, TestRandom& random);

// R x in double, with the stored matrix. Returns x if there is none.
std::vector<double> RotateExactly(const std::byte* rotation, ElementType type,
                                  std::uint32_t channels, const std::vector<double>& row);

// Kinds of numbers in rows.
enum class Content {
  kNormal,
  kSparse,  // mostly zeros, of both signs
  kTies,    // few magnitudes, of both signs
  kEqual,   // all numbers of a row are equal
  kHuge,    // up to 2^62
  kTiny,    // around the smallest peak that has a scale, and below
  kSpread,  // exponents over the whole range
  kZeros,
};
inline constexpr Content kContents[] = {Content::kNormal, Content::kSparse, Content::kTies,
                                        Content::kEqual,  Content::kHuge,   Content::kTiny,
                                        Content::kSpread, Content::kZeros};

// Rows to encode into a tile. The memory after the last row is not readable.
class TileInput {
 public:
  TileInput(const TileShape& shape, ElementType type, std::uint32_t rows, Content content,
            TestRandom& random);
  // Uses these keys and values, each [rows][head_dim].
  TileInput(const TileShape& shape, std::uint32_t rows, const std::vector<float>& keys,
            const std::vector<float>& values);

  std::uint32_t rows() const { return rows_; }
  ElementType type() const { return type_; }
  std::vector<double> Row(bool value, std::uint32_t row) const;
  void Set(bool value, std::uint32_t row, std::uint32_t channel, float element);
  EncodeJob Job(const TileShape& shape) const;  // without `prepared` and `tile`

  std::vector<float> weights;            // empty: not passed
  std::vector<std::uint32_t> positions;  // empty: not passed

 private:
  std::uint32_t head_dim_;
  ElementType type_;
  std::uint32_t rows_;
  std::size_t stride_;
  std::unique_ptr<Buffer> key_;
  std::unique_ptr<Buffer> value_;
};

// The tile, directly followed by its summaries. nullopt if encode refuses the rows.
std::optional<std::vector<std::byte>> EncodeTile(const Operations& operations,
                                                 const TileShape& shape, const TileInput& input,
                                                 const RotationView& rotation);

struct DecodedRows {
  std::uint32_t channels;  // padded
  std::vector<float> keys;
  std::vector<float> values;
};
DecodedRows DecodeTile(const Operations& operations, const TileShape& shape,
                       const std::vector<std::byte>& tile, std::uint32_t rows);

// A row as read from its bytes by definition. Blocks are expected directly after the tile.
struct ReadTileRow {
  std::vector<bool> kept;        // per channel; all true in a dense row
  std::vector<double> elements;  // per channel, 0 if dropped; 2 x channels for min/max
  double scale = 0;              // for int8 and fp8
  bool padding_is_zero = true;   // unused bits of the bitmap
};
ReadTileRow ReadByDefinition(const TileShape& shape, const std::byte* tile, Array array,
                             std::uint32_t row);
ReadTileRow ReadBlock(const TileShape& shape, const std::byte* summaries, std::uint32_t block);

// Empty if equal; else describes the first array and row that differ.
std::string FirstDifference(const TileShape& shape, const std::vector<std::byte>& a,
                            const std::vector<std::byte>& b);

// Fills rows from `rows` on, with their weights and positions, and blocks without entries with
// ones: NaN, and mask bits of channels that are not stored.
void PoisonDeadRows(const TileShape& shape, std::uint32_t rows, std::byte* tile,
                    std::byte* summaries);
inline void PoisonDeadRows(const TileShape& shape, std::uint32_t rows, std::byte* tile) {
  PoisonDeadRows(shape, rows, tile, SummariesAfter(tile, LayoutOf(shape)));
}

}  // namespace tessera::kernels
