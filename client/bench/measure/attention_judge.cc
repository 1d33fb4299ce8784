#include "client/bench/measure/attention_judge.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "daemon/base/check.h"
#include "kernels/format/element.h"

namespace tessera::cli::bench {

namespace {

// `size` is a multiple of 16, as every head_dim is.
float Dot(const float* a, const float* b, std::size_t size) {
  constexpr std::size_t kSums = 16;  // independent sums, so that the compiler can vectorise
  float sums[kSums] = {};
  for (std::size_t i = 0; i < size; i += kSums) {
    for (std::size_t j = 0; j < kSums; ++j) sums[j] += a[i + j] * b[i + j];
  }
  float sum = 0;
  for (const float each : sums) sum += each;
  return sum;
}

std::vector<float> WidenRows(const kernels::RowSpan& rows) {
  TESSERA_CHECK(rows.type == kernels::ElementType::kBf16, "generated rows are bf16");
  std::vector<float> wide(rows.count * rows.head_dim);
  for (std::size_t i = 0; i < wide.size(); ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, rows.data + i * sizeof bits, sizeof bits);
    wide[i] = kernels::Bf16ToFloat(bits);
  }
  return wide;
}

}  // namespace

void FloatLane::Append(const FloatLane& more) {
  head_dim = more.head_dim;
  keys.insert(keys.end(), more.keys.begin(), more.keys.end());
  values.insert(values.end(), more.values.begin(), more.values.end());
}

FloatLane Widen(const kernels::LaneRows& rows) {
  return {.head_dim = rows.keys.head_dim,
          .keys = WidenRows(rows.keys),
          .values = WidenRows(rows.values)};
}

Attention Attend(std::span<const std::uint16_t> query, const FloatLane& lane,
                 std::span<const std::uint8_t> taken) {
  const std::size_t dim = lane.head_dim;
  std::vector<float> wide;
  for (const std::uint16_t bits : query) wide.push_back(kernels::Bf16ToFloat(bits));
  const double scale = 1 / std::sqrt(static_cast<double>(dim));
  Attention attention = {
      .weights = std::vector<double>(lane.tokens(), -std::numeric_limits<double>::infinity()),
      .output = std::vector<double>(dim)};
  double top = -std::numeric_limits<double>::infinity();
  for (std::size_t t = 0; t < attention.weights.size(); ++t) {
    if (!taken.empty() && taken[t] == 0) continue;
    attention.weights[t] = scale * double{Dot(wide.data(), lane.keys.data() + t * dim, dim)};
    top = std::max(top, attention.weights[t]);
  }
  double sum = 0;
  for (double& weight : attention.weights) sum += weight = std::exp(weight - top);
  for (std::size_t t = 0; t < attention.weights.size(); ++t) {
    const double weight = attention.weights[t] /= sum;
    if (weight == 0) continue;
    const float* const value = lane.values.data() + t * dim;
    for (std::size_t d = 0; d < dim; ++d) attention.output[d] += weight * double{value[d]};
  }
  return attention;
}

Fidelity Compare(const Attention& answer, const Attention& truth) {
  Fidelity fidelity;
  for (std::size_t t = 0; t < truth.weights.size(); ++t) {
    fidelity.kept_mass += std::min(answer.weights[t], truth.weights[t]);
  }
  double distance = 0;
  double length = 0;
  for (std::size_t d = 0; d < truth.output.size(); ++d) {
    const double difference = answer.output[d] - truth.output[d];
    distance += difference * difference;
    length += truth.output[d] * truth.output[d];
  }
  fidelity.error = std::sqrt(distance / length);
  return fidelity;
}

}  // namespace tessera::cli::bench
