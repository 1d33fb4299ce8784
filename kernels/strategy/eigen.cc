#include "kernels/strategy/eigen.h"

#include <Eigen/Core>
#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>
#include <numeric>

namespace tessera::kernels {
namespace {

void MakeLargestPositive(double* vector, std::uint32_t size) {
  const double* const largest = std::max_element(
      vector, vector + size, [](double a, double b) { return std::fabs(a) < std::fabs(b); });
  if (*largest >= 0) return;
  for (std::uint32_t i = 0; i < size; ++i) vector[i] = -vector[i];
}

}  // namespace

Eigenbasis Decompose(const Moments& moments) {
  const std::uint32_t n = moments.head_dim();
  // The sums are row-major with zeros below the diagonal. Eigen reads them column-major, as a lower
  // triangle, the only part the solver uses.
  const Eigen::Map<const Eigen::MatrixXd> sums(moments.sums(), n, n);
  // The vectors are products of plane rotations, so they are orthonormal even if the solver does
  // not converge. The rotation then compresses badly but is still valid.
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(sums);
  const auto& values = solver.eigenvalues();

  std::vector<std::uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return values[a] > values[b]; });
  Eigenbasis basis = {.head_dim = n,
                      .vectors = std::vector<double>(std::size_t{n} * n),
                      .values = std::vector<double>(n)};
  for (std::uint32_t i = 0; i < n; ++i) {
    double* const vector = basis.vectors.data() + std::size_t{i} * n;
    std::copy_n(solver.eigenvectors().col(order[i]).data(), n, vector);
    MakeLargestPositive(vector, n);
    basis.values[i] = std::max(values[order[i]], 0.0);
  }
  return basis;
}

}  // namespace tessera::kernels
