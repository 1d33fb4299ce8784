#include <algorithm>

#include "kernels/reference/packed.h"
#include "kernels/reference/scalar.h"

namespace tessera::kernels {
namespace {

// The identity copies elements unchanged, including the sign of zeros.
void CopyRow(const RotateJob& job, const std::byte* row, float* output) {
  for (std::uint32_t c = 0; c < job.channels; ++c) {
    output[c] = static_cast<float>(ElementAt(row, c, job.row_type));
  }
}

// R[channel][dim]; null is the identity.
double RotationAt(const std::byte* rotation, ElementType type, std::uint32_t head_dim,
                  std::uint32_t channel, std::uint32_t dim) {
  if (rotation == nullptr) return channel == dim ? 1.0 : 0.0;
  return ElementAt(rotation, std::size_t{channel} * head_dim + dim, type);
}

}  // namespace

const char* RotateReference(const RotateJob& job) {
  for (std::uint32_t r = 0; r < job.row_count; ++r) {
    float* output = job.output + std::size_t{r} * job.padded_channels;
    if (job.mean != nullptr) {
      double product = 0;
      for (std::uint32_t d = 0; d < job.head_dim; ++d) {
        product +=
            ElementAt(job.mean, d, ElementType::kBf16) * ElementAt(job.rows[r], d, job.row_type);
      }
      job.mean_products[r] = static_cast<float>(product);
    }
    std::fill_n(output, job.padded_channels, 0.0f);
    if (job.rotation == nullptr) {
      CopyRow(job, job.rows[r], output);
      continue;
    }
    for (std::uint32_t c = 0; c < job.channels; ++c) {
      double sum = 0;
      for (std::uint32_t d = 0; d < job.head_dim; ++d) {
        sum += RotationAt(job.rotation, job.rotation_type, job.head_dim, c, d) *
               ElementAt(job.rows[r], d, job.row_type);
      }
      output[c] = static_cast<float>(sum);
    }
  }
  return "reference";
}

const char* UnrotateReference(const UnrotateJob& job) {
  for (std::uint32_t r = 0; r < job.row_count; ++r) {
    const float* row = job.rows + std::size_t{r} * job.padded_channels;
    for (std::uint32_t d = 0; d < job.head_dim; ++d) {
      double sum = 0;
      if (job.mean != nullptr) {
        const double weight = job.weights == nullptr ? 1 : job.weights[r];
        sum = weight * ElementAt(job.mean, d, ElementType::kBf16);
      }
      for (std::uint32_t c = 0; c < job.channels; ++c) {
        sum += RotationAt(job.rotation, job.rotation_type, job.head_dim, c, d) * row[c];
      }
      job.output[std::size_t{r} * job.head_dim + d] = static_cast<float>(sum);
    }
  }
  return "reference";
}

const char* MomentsReference(const MomentsJob& job) {
  for (std::uint32_t r = 0; r < job.row_count; ++r) {
    const std::byte* row = job.rows + r * job.stride;
    for (std::uint32_t i = 0; i < job.head_dim; ++i) {
      for (std::uint32_t j = i; j < job.head_dim; ++j) {
        job.sums[std::size_t{i} * job.head_dim + j] +=
            ElementAt(row, i, job.type) * ElementAt(row, j, job.type);
      }
    }
  }
  return "reference";
}

}  // namespace tessera::kernels
