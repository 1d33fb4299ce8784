#include "daemon/serving/convert/rotations.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "daemon/base/strings.h"

namespace tessera::serving {

namespace {

float ElementAt(const std::byte* elements, std::size_t index, kernels::ElementType type) {
  if (type == kernels::ElementType::kFp32) {
    float value;
    std::memcpy(&value, elements + index * sizeof value, sizeof value);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, elements + index * sizeof bits, sizeof bits);
  return kernels::Bf16ToFloat(bits);
}

// Products of floats are exact in double. Four independent sums use the CPU's pipelines.
double Dot(const float* a, const float* b, std::uint32_t count) {
  double sums[4] = {};
  for (std::uint32_t i = 0; i < count; i += 4) {
    for (std::uint32_t j = 0; j < 4; ++j) sums[j] += double{a[i + j]} * b[i + j];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

}  // namespace

absl::Status CheckRotation(const std::byte* matrix, kernels::ElementType type,
                           std::uint32_t channels, std::uint32_t head_dim,
                           const MatrixPlace& place) {
  const auto flaw = [&](std::uint32_t row, const auto&... text) {
    return absl::InvalidArgumentError(Concat(place.name, " of layer ", place.layer, ", kv head ",
                                             place.kv_head, ": row ", row, text...));
  };
  std::vector<float> rows(std::size_t{channels} * head_dim);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    rows[i] = ElementAt(matrix, i, type);
    if (std::isfinite(rows[i])) continue;
    return flaw(static_cast<std::uint32_t>(i / head_dim), ", column ", i % head_dim,
                ", is not finite");
  }
  const double bound = OrthonormalBound(type);
  for (std::uint32_t r = 0; r < channels; ++r) {
    for (std::uint32_t s = 0; s <= r; ++s) {
      const double product =
          Dot(&rows[std::size_t{r} * head_dim], &rows[std::size_t{s} * head_dim], head_dim);
      const double deviation = std::fabs(product - (r == s ? 1 : 0));
      if (deviation <= bound) continue;
      return flaw(r, r == s ? " times itself" : Concat(" times row ", s), " is ", product,
                  ", which is ", deviation, " from orthonormal; the limit for ",
                  kernels::ElementName(type), " is ", bound);
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera::serving
