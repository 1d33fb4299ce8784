// Books of the planes format: the mean and rotation of each side (K and V) of a lane, and what they
// cost in accuracy.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/format/operations.h"
#include "kernels/format/rotation.h"
#include "kernels/format/tile_shape.h"
#include "kernels/strategy/aligned_bytes.h"
#include "kernels/strategy/loss.h"

namespace tessera::kernels {

// Empty if kernels support tiles of this planes shape; otherwise the reason, naming the values.
std::string PlanesProblem(const TileShape& shape);

// One side of a book.
struct BookSide {
  std::uint32_t planes = 0;
  std::vector<float> eigenvalues;  // of the centred second moments per row, falling
  // The mean squared error of a row by plane and width (2, 4, 6, 8 bits).
  std::array<std::array<float, 4>, kMaxPlanes> errors = {};

  // The mean squared error of a row with these widths, which have as many planes as the side.
  float Error(const PlaneWidths& widths) const;
};

struct Book {
  std::uint32_t head_dim = 0;
  BookSide key;
  BookSide value;
  AlignedBytes bytes;  // laid out as BookLayout: mu and R of both sides in bf16

  RotationView view() const { return BookAt(bytes.data(), head_dim); }
  // Whether tiles of this shape can be coded with the book.
  bool Fits(const TileShape& shape) const;
};

// `encode` refuses rows whose squared error exceeds this many times the book's mean.
inline constexpr float kRefusedErrors = 3;

// The number of planes of each side.
struct BookPlanes {
  std::uint32_t key = 2;
  std::uint32_t value = 1;
};

// Why no book can be made of these rows: the numbers of rows differ, there are none, or one is not
// finite. Names the values. Empty if one can.
std::string BookProblem(const LaneRows& rows, const BookPlanes& planes,
                        const Operations& operations);

// Makes a book from the rows of a lane, or of several lanes of one layer and head, which must have
// no BookProblem. R is made of the eigenvectors of the centred second moments by falling
// eigenvalue. Each plane is then mixed by a Hadamard matrix with a fixed pattern of signs, which
// spreads the energy of a channel over its plane, so that one scale fits. The result depends on the
// rows and the implementation only.
Book MakeBook(const LaneRows& rows, const BookPlanes& planes, const Operations& operations);

// Sums over the rows of a tile of their squared errors, as BookSide::errors has them per row.
struct CodeErrors {
  double key = 0;
  double value = 0;
};
// Of at most 32 rows that are stored in `tile`, coded with this book.
CodeErrors ErrorsOfTile(const LaneRows& rows, const TileShape& shape, const RotationView& book,
                        const std::byte* tile, const Operations& operations);

}  // namespace tessera::kernels
