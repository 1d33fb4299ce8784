// Strategies once more, in double and without care for speed; shares no code with the real ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/strategy/strategy.h"
#include "tests/unit/kernels/strategy/rows.h"

namespace tessera::kernels::plain {

Matrix SecondMoments(const Matrix& rows);

// Unit eigenvectors by falling eigenvalue (of `values` where wanted), by Jacobi's method.
Matrix Eigenvectors(Matrix symmetric, std::vector<double>* values = nullptr);

// Every element as this type holds it.
Matrix Rounded(Matrix rotation, ElementType type);

std::vector<double> Rotate(const Matrix& rotation, const std::vector<double>& row);

// The strongest groups of adjacent channels, by the sum of squares, ties to the lower: which
// channels stay.
std::vector<bool> Kept(const std::vector<double>& rotated, std::uint32_t kept, std::uint32_t group);

double RowLoss(const Matrix& rotation, const std::vector<double>& row, std::uint32_t kept,
               std::uint32_t group);
double MeanLoss(const Matrix& rotation, const Matrix& rows, std::uint32_t kept,
                std::uint32_t group);

// The rotation's rows, reordered so that those that rows keep together are neighbours.
Matrix Reordered(const Matrix& rotation, const Matrix& rows, std::uint32_t kept);

// What must come of a lane of at most 2048 rows, so that each is looked at.
struct Outcome {
  std::uint32_t kept = 0;
  std::uint32_t group = 0;
  Loss loss;
  bool within_threshold = false;
  double margin = 1;  // the least distance of a candidate's loss from its threshold
};
Outcome Choose(const Matrix& keys, const Matrix& values, const StrategyOptions& options);

}  // namespace tessera::kernels::plain
