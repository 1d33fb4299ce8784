#include "tests/unit/kernels/strategy/rows.h"

#include <cmath>
#include <cstring>
#include <random>

namespace tessera::kernels {

StoredRows::StoredRows(const Matrix& rows, ElementType type)
    : head_dim_(static_cast<std::uint32_t>(rows.at(0).size())), count_(rows.size()), type_(type) {
  const std::size_t size = ElementBytes(type);
  bytes_.resize(rows.size() * head_dim_ * size);
  std::byte* to = bytes_.data();
  for (const auto& row : rows) {
    for (const double element : row) {
      const auto value = static_cast<float>(element);
      const std::uint16_t bits =
          type == ElementType::kBf16 ? FloatToBf16(value) : FloatToFp16(value);
      std::memcpy(to, type == ElementType::kFp32 ? static_cast<const void*>(&value) : &bits, size);
      to += size;
    }
  }
}

RowSpan StoredRows::span() const {
  return {.data = bytes_.data(), .count = count_, .head_dim = head_dim_, .type = type_};
}

std::vector<double> StoredRows::row(std::uint64_t index) const {
  std::vector<double> row;
  const std::byte* from = span().row(index);
  for (std::uint32_t d = 0; d < head_dim_; ++d, from += ElementBytes(type_)) {
    float value;
    std::uint16_t bits;
    std::memcpy(&bits, from, sizeof(bits));
    if (type_ == ElementType::kFp32) {
      std::memcpy(&value, from, sizeof(value));
    } else {
      value = type_ == ElementType::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
    }
    row.push_back(value);
  }
  return row;
}

Matrix StoredRows::all() const {
  Matrix rows;
  for (std::uint64_t r = 0; r < count_; ++r) rows.push_back(row(r));
  return rows;
}

TestLane::TestLane(const Matrix& k, const Matrix& v, ElementType type)
    : keys(k, type), values(v, type) {}

Strategy TestLane::Make(const StrategyOptions& options) const {
  Moments key(keys.span().head_dim);
  Moments value(keys.span().head_dim);
  key.Add(keys.span(), BestOperations());
  value.Add(values.span(), BestOperations());
  return MakeStrategy(rows(), key, value, options, BestOperations());
}

Matrix Scaled(TestRandom& random, std::size_t rows, const std::vector<double>& deviations) {
  std::mt19937_64 engine(random.Bits());
  std::normal_distribution<double> normal;
  Matrix matrix(rows, std::vector<double>(deviations.size()));
  for (auto& row : matrix) {
    for (std::size_t c = 0; c < row.size(); ++c) row[c] = normal(engine) * deviations[c];
  }
  return matrix;
}

Matrix Normal(TestRandom& random, std::size_t rows, std::uint32_t head_dim) {
  return Scaled(random, rows, std::vector<double>(head_dim, 1.0));
}

Matrix Mixed(TestRandom& random, Matrix rows) {
  const std::size_t head_dim = rows.at(0).size();
  for (std::vector<double>& mirror : Normal(random, 6, static_cast<std::uint32_t>(head_dim))) {
    double norm = 0;
    for (const double x : mirror) norm += x * x;
    for (auto& row : rows) {
      double dot = 0;
      for (std::size_t d = 0; d < head_dim; ++d) dot += row[d] * mirror[d];
      for (std::size_t d = 0; d < head_dim; ++d) row[d] -= 2 * dot / norm * mirror[d];
    }
  }
  return rows;
}

Matrix PowerLaw(TestRandom& random, std::size_t rows, std::uint32_t head_dim, double exponent) {
  std::vector<double> deviations;
  for (std::uint32_t c = 0; c < head_dim; ++c) deviations.push_back(std::pow(c + 1, -exponent));
  return Mixed(random, Scaled(random, rows, deviations));
}

}  // namespace tessera::kernels
