// Rows of lanes for tests of strategies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/dispatch/implementation.h"
#include "kernels/strategy/strategy.h"
#include "tests/fakes/seed.h"

namespace tessera::kernels {

using Matrix = std::vector<std::vector<double>>;

inline const Operations& BestOperations() { return OperationsOf(BestImplementation()); }

// Rows as a lane stores them: rounded to its element type, without further alignment.
class StoredRows {
 public:
  StoredRows(const Matrix& rows, ElementType type);

  RowSpan span() const;
  std::vector<double> row(std::uint64_t index) const;  // rounded
  Matrix all() const;

 private:
  std::uint32_t head_dim_;
  std::uint64_t count_;
  ElementType type_;
  std::vector<std::byte> bytes_;
};

// K and V of a lane with their moments.
struct TestLane {
  TestLane(const Matrix& k, const Matrix& v, ElementType type);
  LaneRows rows() const { return {keys.span(), values.span()}; }
  Strategy Make(const StrategyOptions& options) const;

  StoredRows keys;
  StoredRows values;
};

Matrix Normal(TestRandom& random, std::size_t rows, std::uint32_t head_dim);
// Channel c of a row is normally distributed with standard deviation deviations[c].
Matrix Scaled(TestRandom& random, std::size_t rows, const std::vector<double>& deviations);
// Applies the same random reflections to each row: keeps the spectrum and changes its axes.
Matrix Mixed(TestRandom& random, Matrix rows);
// Rows like real keys and values: standard deviations (c + 1)^-exponent, mixed.
Matrix PowerLaw(TestRandom& random, std::size_t rows, std::uint32_t head_dim, double exponent);

}  // namespace tessera::kernels
