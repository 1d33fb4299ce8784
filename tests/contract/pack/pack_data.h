// Shapes, rotations and rows for tests of packed tiles, and a reader of tiles that shares no code
// with any implementation.
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
  bool cut = false;    // channels of a side below head_dim, half of the time
  bool dense = false;  // may be dense, too
  bool summary = true;
  bool words = true;  // weights, positions
};
TileShape RandomShape(TestRandom& random, const ShapeWish& wish);
std::string Describe(const TileShape& shape);

// The rows of K and of mean keys, or those of V, in a tile.
enum class Array { kKeys, kValues, kBlocks };
inline const RowShape& RowsOf(const TileShape& shape, Array array) {
  return array == Array::kValues ? shape.value : shape.key;
}

// Orthogonal matrices as a strategy stores them: the first `channels` rows of a side, in `type`.
class Rotations {
 public:
  Rotations(const TileShape& shape, ElementType type, TestRandom& random);
  // R_k chooses these channels of a key, as many as the shape has; values are not rotated.
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

// Without the matrices of some sides that are not cut: there the identity.
RotationView SomeOf(RotationView rotation, const TileShape& shape, TestRandom& random);

// R x in double, from the matrix as it is stored; x itself where there is none.
std::vector<double> RotateExactly(const std::byte* rotation, ElementType type,
                                  std::uint32_t channels, const std::vector<double>& row);

// What numbers rows hold.
enum class Content {
  kNormal,
  kSparse,  // mostly zeros, of both signs
  kTies,    // few magnitudes, of both signs
  kEqual,   // one number in each row
  kHuge,    // up to 2^62
  kTiny,    // around the smallest peak that has a scale, and below
  kSpread,  // exponents all over the range
  kZeros,
};
inline constexpr Content kContents[] = {Content::kNormal, Content::kSparse, Content::kTies,
                                        Content::kEqual,  Content::kHuge,   Content::kTiny,
                                        Content::kSpread, Content::kZeros};

// Rows on their way into a tile; nothing behind the last is readable.
class TileInput {
 public:
  TileInput(const TileShape& shape, ElementType type, std::uint32_t rows, Content content,
            TestRandom& random);
  // Of these keys and values, [rows][head_dim] each.
  TileInput(const TileShape& shape, std::uint32_t rows, const std::vector<float>& keys,
            const std::vector<float>& values);

  std::uint32_t rows() const { return rows_; }
  ElementType type() const { return type_; }
  std::vector<double> Row(bool value, std::uint32_t row) const;
  void Set(bool value, std::uint32_t row, std::uint32_t channel, float element);
  EncodeJob Job(const TileShape& shape) const;  // without `prepared` and `tile`

  std::vector<float> weights;            // empty: none given
  std::vector<std::uint32_t> positions;  // likewise

 private:
  std::uint32_t head_dim_;
  ElementType type_;
  std::uint32_t rows_;
  std::size_t stride_;
  std::unique_ptr<Buffer> key_;
  std::unique_ptr<Buffer> value_;
};

// The tile and, right behind it, its summaries; or nothing where encode refuses.
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

// A row as its bytes define it. Blocks are looked for behind the tile.
struct ReadTileRow {
  std::vector<bool> kept;        // per channel; all of a dense row
  std::vector<double> elements;  // per channel, dropped ones 0; of min/max 2 x channels
  double scale = 0;              // of int8 and fp8
  bool padding_is_zero = true;   // of the bitmap
};
ReadTileRow ReadByDefinition(const TileShape& shape, const std::byte* tile, Array array,
                             std::uint32_t row);
ReadTileRow ReadBlock(const TileShape& shape, const std::byte* summaries, std::uint32_t block);

// Empty where equal; else which array and row of the tile differ first.
std::string FirstDifference(const TileShape& shape, const std::vector<std::byte>& a,
                            const std::vector<std::byte>& b);

// Overwrites all rows from `rows` on, their weights and positions, and the blocks that have no
// entry before, with ones: NaN, and bits for channels that are not stored.
void PoisonDeadRows(const TileShape& shape, std::uint32_t rows, std::byte* tile,
                    std::byte* summaries);
inline void PoisonDeadRows(const TileShape& shape, std::uint32_t rows, std::byte* tile) {
  PoisonDeadRows(shape, rows, tile, SummariesBehind(tile, LayoutOf(shape)));
}

}  // namespace tessera::kernels
