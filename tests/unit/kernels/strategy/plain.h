// A second implementation of strategies, in double and without optimisations. Shares no code with
// the product.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/strategy/strategy.h"
#include "tests/unit/kernels/strategy/rows.h"

namespace tessera::kernels::plain {

Matrix SecondMoments(const Matrix& rows);

// Unit eigenvectors by falling eigenvalue (returned in `values` if not null), by Jacobi's method.
Matrix Eigenvectors(Matrix symmetric, std::vector<double>* values = nullptr);

// Every element rounded to this type.
Matrix Rounded(Matrix rotation, ElementType type);

std::vector<double> Rotate(const Matrix& rotation, const std::vector<double>& row);

// The strongest groups of adjacent channels by the sum of squares, ties to the lower one: which
// channels are kept.
std::vector<bool> Kept(const std::vector<double>& rotated, std::uint32_t kept, std::uint32_t group);

double RowLoss(const Matrix& rotation, const std::vector<double>& row, std::uint32_t kept,
               std::uint32_t group);
double MeanLoss(const Matrix& rotation, const Matrix& rows, std::uint32_t kept,
                std::uint32_t group);

// The rotation's rows, reordered so that rows that are kept together are adjacent.
Matrix Reordered(const Matrix& rotation, const Matrix& rows, std::uint32_t kept);

// The expected strategy of a lane of at most 2048 rows, all of which are sampled.
struct Outcome {
  std::uint32_t kept = 0;
  std::uint32_t group = 0;
  Loss loss;
  bool within_threshold = false;
  double margin = 1;  // the smallest distance between a candidate's loss and its threshold
};
Outcome Choose(const Matrix& keys, const Matrix& values, const StrategyOptions& options);

}  // namespace tessera::kernels::plain
