#include "tests/unit/kernels/strategy/plain.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tessera::kernels::plain {
namespace {

double Squares(const std::vector<double>& row) {
  return std::inner_product(row.begin(), row.end(), row.begin(), 0.0);
}

// Applies a plane rotation that zeroes a[p][q], to `vectors` as well.
void Annihilate(Matrix& a, Matrix& vectors, std::size_t p, std::size_t q) {
  if (a[p][q] == 0) return;
  const double theta = (a[q][q] - a[p][p]) / (2 * a[p][q]);
  const double t = (theta >= 0 ? 1 : -1) / (std::fabs(theta) + std::hypot(theta, 1.0));
  const double c = 1 / std::hypot(t, 1.0);
  const double s = t * c;
  const std::size_t n = a.size();
  for (std::size_t k = 0; k < n; ++k) {
    const double x = a[k][p];
    const double y = a[k][q];
    a[k][p] = c * x - s * y;
    a[k][q] = s * x + c * y;
  }
  for (std::size_t k = 0; k < n; ++k) {
    const double x = a[p][k];
    const double y = a[q][k];
    a[p][k] = c * x - s * y;
    a[q][k] = s * x + c * y;
    const double v = vectors[p][k];
    const double w = vectors[q][k];
    vectors[p][k] = c * v - s * w;
    vectors[q][k] = s * v + c * w;
  }
}

// Alternating tiles; with fewer than two tiles, halves.
void Split(const Matrix& rows, Matrix& made_from, Matrix& judged_on) {
  const std::size_t length = rows.size() >= 64 ? 32 : (rows.size() + 1) / 2;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    (r / length % 2 == 0 ? made_from : judged_on).push_back(rows[r]);
  }
  if (judged_on.empty()) judged_on = made_from;
}

std::uint32_t CountOf(double share, std::uint32_t group, std::size_t channels) {
  const auto count = static_cast<std::uint32_t>(share * static_cast<double>(channels) + 1e-6);
  return std::max(count - count % group, group);
}

double CandidateLoss(const Matrix& rows, double share, std::uint32_t group,
                     const StrategyOptions& options) {
  Matrix made_from;
  Matrix judged_on;
  Split(rows, made_from, judged_on);
  const Matrix rotation = Rounded(Eigenvectors(SecondMoments(made_from)), options.rotation_type);
  const std::uint32_t kept = CountOf(share, group, rotation.size());
  const double loss = MeanLoss(rotation, judged_on, kept, group);
  if (!options.reorder || group == 1) return loss;
  const Matrix reordered = Reordered(rotation, made_from, CountOf(share, 1, rotation.size()));
  return std::min(loss, MeanLoss(reordered, judged_on, kept, group));
}

}  // namespace

Matrix SecondMoments(const Matrix& rows) {
  const std::size_t n = rows.at(0).size();
  Matrix sums(n, std::vector<double>(n));
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < n; ++i) {
      for (std::size_t j = 0; j < n; ++j) sums[i][j] += row[i] * row[j];
    }
  }
  return sums;
}

Matrix Eigenvectors(Matrix a, std::vector<double>* values) {
  const std::size_t n = a.size();
  Matrix vectors(n, std::vector<double>(n));
  for (std::size_t i = 0; i < n; ++i) vectors[i][i] = 1;
  for (int sweep = 0; sweep < 12; ++sweep) {
    for (std::size_t p = 0; p < n; ++p) {
      for (std::size_t q = p + 1; q < n; ++q) Annihilate(a, vectors, p, q);
    }
  }
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t x, std::size_t y) { return a[x][x] > a[y][y]; });
  Matrix sorted;
  for (const std::size_t i : order) {
    sorted.push_back(vectors[i]);
    if (values != nullptr) values->push_back(a[i][i]);
    const double largest =
        *std::max_element(vectors[i].begin(), vectors[i].end(),
                          [](double x, double y) { return std::fabs(x) < std::fabs(y); });
    if (largest < 0) {
      for (double& x : sorted.back()) x = -x;
    }
  }
  return sorted;
}

Matrix Rounded(Matrix rotation, ElementType type) { return StoredRows(rotation, type).all(); }

std::vector<double> Rotate(const Matrix& rotation, const std::vector<double>& row) {
  std::vector<double> rotated;
  for (const auto& vector : rotation) {
    rotated.push_back(std::inner_product(vector.begin(), vector.end(), row.begin(), 0.0));
  }
  return rotated;
}

std::vector<bool> Kept(const std::vector<double>& rotated, std::uint32_t kept,
                       std::uint32_t group) {
  std::vector<double> squares;
  for (std::size_t c = 0; c < rotated.size(); c += group) {
    double sum = 0;
    for (std::size_t i = c; i < c + group; ++i) sum += rotated[i] * rotated[i];
    squares.push_back(sum);
  }
  std::vector<std::size_t> order(squares.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return squares[a] > squares[b]; });
  std::vector<bool> stays(rotated.size());
  for (std::size_t i = 0; i < kept / group; ++i) {
    for (std::size_t c = 0; c < group; ++c) stays[order[i] * group + c] = true;
  }
  return stays;
}

double RowLoss(const Matrix& rotation, const std::vector<double>& row, std::uint32_t kept,
               std::uint32_t group) {
  const double energy = Squares(row);
  if (energy == 0) return 0;
  const std::vector<double> rotated = Rotate(rotation, row);
  const std::vector<bool> stays = Kept(rotated, kept, group);
  double left = 0;
  for (std::size_t c = 0; c < rotated.size(); ++c) left += stays[c] ? rotated[c] * rotated[c] : 0;
  return 1 - left / energy;
}

double MeanLoss(const Matrix& rotation, const Matrix& rows, std::uint32_t kept,
                std::uint32_t group) {
  double sum = 0;
  for (const auto& row : rows) sum += RowLoss(rotation, row, kept, group);
  return sum / static_cast<double>(rows.size());
}

Matrix Reordered(const Matrix& rotation, const Matrix& rows, std::uint32_t kept) {
  const std::size_t n = rotation.size();
  Matrix counts(n, std::vector<double>(n));
  for (const auto& row : rows) {
    const std::vector<bool> stays = Kept(Rotate(rotation, row), kept, 1);
    for (std::size_t a = 0; a < n; ++a) {
      for (std::size_t b = 0; b < n; ++b) counts[a][b] += a != b && stays[a] && stays[b] ? 1 : 0;
    }
  }
  // Twice: channels become pairs, and pairs become groups of four.
  std::vector<std::vector<std::size_t>> sets;
  for (std::size_t c = 0; c < n; ++c) sets.push_back({c});
  for (int round = 0; round < 2; ++round) {
    std::vector<std::vector<std::size_t>> joined;
    std::vector<bool> taken(sets.size());
    while (2 * joined.size() < sets.size()) {
      double most = -1;
      std::size_t first = 0;
      std::size_t second = 0;
      for (std::size_t a = 0; a < sets.size(); ++a) {
        for (std::size_t b = a + 1; b < sets.size(); ++b) {
          if (taken[a] || taken[b]) continue;
          double count = 0;
          for (const std::size_t x : sets[a]) {
            for (const std::size_t y : sets[b]) count += counts[x][y];
          }
          if (count > most) {
            most = count;
            first = a;
            second = b;
          }
        }
      }
      taken[first] = taken[second] = true;
      joined.push_back(sets[first]);
      joined.back().insert(joined.back().end(), sets[second].begin(), sets[second].end());
    }
    std::sort(joined.begin(), joined.end());
    sets = joined;
  }
  Matrix reordered;
  for (const auto& set : sets) {
    for (const std::size_t c : set) reordered.push_back(rotation[c]);
  }
  return reordered;
}

Outcome Choose(const Matrix& keys, const Matrix& values, const StrategyOptions& options) {
  const auto head_dim = static_cast<std::uint32_t>(keys.at(0).size());
  Outcome best;
  Outcome last;  // the largest share with the smallest group size
  double fewest = 1e300;
  for (const double share : options.kept) {
    for (const std::uint32_t group : options.groups) {
      const std::uint32_t kept = CountOf(share, group, head_dim);
      const Loss loss = {.key = CandidateLoss(keys, share, group, options),
                         .value = CandidateLoss(values, share, group, options)};
      // K and V of an entry; summaries and rotations are the same for every candidate.
      const double bytes = 2.0 * (kept * 2 + std::ceil(head_dim / group / 8.0));
      const bool within =
          loss.key <= options.threshold.key && loss.value <= options.threshold.value;
      best.margin = std::min({best.margin, std::fabs(loss.key - options.threshold.key),
                              std::fabs(loss.value - options.threshold.value)});
      if (within && (bytes < fewest || (bytes == fewest && group > best.group))) {
        fewest = bytes;
        best = {kept, group, loss, true, best.margin};
      }
      if (kept > last.kept || (kept == last.kept && group < last.group)) {
        last = {kept, group, loss, false};
      }
    }
  }
  if (best.within_threshold) return best;
  last.margin = best.margin;
  return last;
}

}  // namespace tessera::kernels::plain
