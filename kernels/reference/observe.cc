#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/reference/packed.h"
#include "kernels/reference/scalar.h"

namespace tessera::kernels {
namespace {

constexpr double kLog2E = 1.4426950408889634;

// One query and its visible keys.
struct Observer {
  const ObserveJob& job;
  const std::byte* query;
  std::uint64_t begin;
  std::uint64_t end;

  double Product(std::uint64_t key) const {
    return Dot(query, job.keys + key * job.key_stride, job.head_dim, job.type);
  }
  // The logit in log2 units, so that weights are powers of two. Saturates like the fp32 kernels.
  double Logit(std::uint64_t key) const {
    double logit = Product(key) * job.scale;
    if (job.logit_softcap != 0) {
      logit = job.logit_softcap * std::tanh(logit / job.logit_softcap);
    }
    constexpr double kLimit = std::numeric_limits<float>::max();
    const double weight = job.log2_weights == nullptr ? 0 : job.log2_weights[key];
    return std::clamp(logit * kLog2E, -kLimit, kLimit) + weight;
  }
};

void AddShares(const Observer& observer) {
  double max = -std::numeric_limits<double>::infinity();
  for (std::uint64_t t = observer.begin; t < observer.end; ++t) {
    max = std::max(max, observer.Logit(t));
  }
  double sum = 0;
  for (std::uint64_t t = observer.begin; t < observer.end; ++t) {
    sum += std::exp2(observer.Logit(t) - max);
  }
  for (std::uint64_t t = observer.begin; t < observer.end; ++t) {
    observer.job.sums[t] += std::exp2(observer.Logit(t) - max) / sum;
  }
}

}  // namespace

// Does not use the fp32 scratch; computes every logit three times instead.
const char* ObserveReference(const ObserveJob& job) {
  for (std::uint32_t r = 0; r < job.query_count; ++r) {
    const Observer observer = {.job = job,
                               .query = job.queries + r * job.query_stride,
                               .begin = job.visible_begin == nullptr ? 0 : job.visible_begin[r],
                               .end = job.visible_end[r]};
    if (!job.logits) {
      AddShares(observer);
      continue;
    }
    for (std::uint64_t t = observer.begin; t < observer.end; ++t) {
      job.sums[t] += observer.Product(t);
    }
  }
  return "reference";
}

}  // namespace tessera::kernels
