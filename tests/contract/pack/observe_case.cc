#include "tests/contract/pack/observe_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numbers>

#include "tests/contract/attend/attend_batch.h"

namespace tessera::kernels {
namespace {

std::vector<double> RowOf(ElementType type, const std::byte* row, std::uint32_t head_dim) {
  std::vector<double> elements(head_dim);
  for (std::uint32_t c = 0; c < head_dim; ++c) elements[c] = OutputElement(type, row, c);
  return elements;
}

struct Product {
  double value = 0;
  double mass = 0;  // sum of the products' magnitudes
};

Product ProductOf(const std::vector<double>& a, const std::vector<double>& b) {
  Product product;
  for (std::size_t c = 0; c < a.size(); ++c) {
    product.value += a[c] * b[c];
    product.mass += std::fabs(a[c] * b[c]);
  }
  return product;
}

}  // namespace

double ObserveExpected::Tolerance(const ErrorBound& bound, std::uint64_t key) const {
  // Weights below fp32's range may be 0.
  return bound.base * shares[key] + bound.per_logit_mass * weighted_shares[key] + 0x1p-110;
}

ObserveCase::ObserveCase(const ObserveWish& wish, TestRandom& random)
    : head_dim(static_cast<std::uint32_t>(64u << random.Below(3))),
      type(static_cast<ElementType>(random.Between(1, 3))),
      key_count(random.OneIn(8) ? random.Below(3) : random.Between(1, wish.max_keys)),
      query_count(static_cast<std::uint32_t>(random.Between(1, wish.max_queries))),
      key_stride((head_dim + random.Below(3) * wish.stride_unit) * ElementBytes(type)),
      query_stride((head_dim + random.Below(3) * wish.stride_unit) * ElementBytes(type)),
      scale(static_cast<float>(1 / std::sqrt(static_cast<double>(head_dim)))),
      logit_softcap(random.OneIn(3) ? 2.5f : 0.0f),
      logits(random.OneIn(4)),
      no_begins(random.OneIn(3)) {
  DrawVisibility(wish.all_visible, random);
  const auto bytes = [&](std::uint64_t count, std::uint64_t stride) {
    return count == 0 ? 0 : (count - 1) * stride + head_dim * ElementBytes(type);
  };
  keys = std::make_unique<Buffer>(bytes(key_count, key_stride));
  queries = std::make_unique<Buffer>(bytes(query_count, query_stride));
  const float size = random.OneIn(4) ? 64.0f : 1.0f;
  for (std::uint64_t t = 0; t < key_count; ++t) {
    if (!Seen(t)) continue;
    for (std::uint32_t c = 0; c < head_dim; ++c) {
      StoreElement(type, keys->data() + t * key_stride, c, size * NormalNumber(random));
    }
  }
  for (std::uint32_t r = 0; r < query_count; ++r) {
    for (std::uint32_t c = 0; c < head_dim; ++c) SetQuery(r, c, NormalNumber(random));
  }
  for (std::uint64_t t = 0, weighed = random.OneIn(3) ? key_count : 0; t < weighed; ++t) {
    log2_weights.push_back(std::log2(static_cast<float>(random.Between(1, 5000))));
  }
  if (!log2_weights.empty() && random.OneIn(2)) LeaveSomeOut(random);
}

// Gives some keys weight 0, but leaves each query a visible key with a weight.
void ObserveCase::LeaveSomeOut(TestRandom& random) {
  constexpr float kNothing = -std::numeric_limits<float>::infinity();
  const std::uint64_t one_in = random.Between(1, 4);
  for (float& weight : log2_weights) {
    if (random.OneIn(one_in)) weight = kNothing;
  }
  for (std::uint32_t r = 0; r < query_count; ++r) {
    if (visible_begin[r] >= visible_end[r]) continue;
    log2_weights[random.Between(visible_begin[r], visible_end[r] - 1)] = 1;
  }
}

void ObserveCase::DrawVisibility(bool all, TestRandom& random) {
  const bool causal = random.OneIn(2);
  for (std::uint32_t r = 0; r < query_count; ++r) {
    std::uint64_t begin = no_begins || all ? 0 : random.Between(0, key_count);
    std::uint64_t end = all ? key_count : random.Between(0, key_count);  // 0: no visible key
    if (!all && causal) {
      begin = no_begins ? 0 : std::min<std::uint64_t>(r, key_count);
      end = key_count - std::min<std::uint64_t>(query_count - 1 - r, key_count);
    }
    visible_begin.push_back(begin);
    visible_end.push_back(end);
  }
}

bool ObserveCase::Seen(std::uint64_t key) const {
  for (std::uint32_t r = 0; r < query_count; ++r) {
    if (visible_begin[r] <= key && key < visible_end[r]) return true;
  }
  return false;
}

void ObserveCase::SetQuery(std::uint32_t row, std::uint32_t channel, float value) {
  StoreElement(type, queries->data() + row * query_stride, channel, value);
}

ObserveJob ObserveCase::Job() const {
  return {.keys = keys->data(),
          .key_stride = key_stride,
          .key_count = key_count,
          .queries = queries->data(),
          .query_stride = query_stride,
          .query_count = query_count,
          .visible_begin = no_begins ? nullptr : visible_begin.data(),
          .visible_end = visible_end.data(),
          .log2_weights = log2_weights.empty() ? nullptr : log2_weights.data(),
          .head_dim = head_dim,
          .type = type,
          .scale = scale,
          .logit_softcap = logit_softcap,
          .logits = logits,
          .scratch = nullptr,
          .sums = nullptr};
}

std::vector<double> ObserveCase::Observe(const Operations& operations, std::vector<double> before,
                                         std::uint32_t first, std::uint32_t count,
                                         const char** ran) const {
  const Buffer scratch(kObserveRows * key_count * sizeof(float));
  const Buffer sums(key_count * sizeof(double));
  ObserveJob job = Job();
  job.queries += first * query_stride;
  job.query_count = count;
  if (job.visible_begin != nullptr) job.visible_begin += first;
  job.visible_end += first;
  job.scratch = reinterpret_cast<float*>(scratch.data());
  job.sums = reinterpret_cast<double*>(sums.data());
  std::copy(before.begin(), before.end(), job.sums);
  *ran = operations.observe(job);
  std::copy_n(job.sums, key_count, before.begin());
  return before;
}

ObserveExpected ObserveCase::Expected() const {
  ObserveExpected expected;
  for (std::vector<double>* each :
       {&expected.sums, &expected.shares, &expected.weighted_shares, &expected.mass}) {
    each->assign(key_count, 0.0);
  }
  std::vector<std::vector<double>> rows;
  for (std::uint64_t t = 0; t < key_count; ++t) {
    rows.push_back(RowOf(type, keys->data() + t * key_stride, head_dim));
  }
  for (std::uint32_t r = 0; r < query_count; ++r) {
    const std::vector<double> query = RowOf(type, queries->data() + r * query_stride, head_dim);
    std::vector<double> x(key_count, -std::numeric_limits<double>::infinity());
    double logit_mass = logit_softcap;
    for (std::uint64_t t = visible_begin[r]; t < visible_end[r]; ++t) {
      const Product product = ProductOf(query, rows[t]);
      x[t] = product.value * scale;
      if (logit_softcap != 0) x[t] = logit_softcap * std::tanh(x[t] / logit_softcap);
      const double weight = log2_weights.empty() ? 0 : std::numbers::ln2 * log2_weights[t];
      x[t] += weight;
      logit_mass = std::max(logit_mass, scale * product.mass + logit_softcap + weight);
      expected.mass[t] += product.mass;
      if (logits) expected.sums[t] += product.value;
    }
    if (logits || visible_begin[r] >= visible_end[r]) continue;
    const double max = *std::max_element(x.begin(), x.end());
    double sum = 0;
    for (const double each : x) sum += std::exp(each - max);
    for (std::uint64_t t = visible_begin[r]; t < visible_end[r]; ++t) {
      const double share = std::exp(x[t] - max) / sum;
      expected.sums[t] += share;
      expected.shares[t] += share;
      expected.weighted_shares[t] += share * logit_mass;
    }
  }
  return expected;
}

std::uint32_t ObserveCase::SeeingRows() const {
  std::uint32_t rows = 0;
  for (std::uint32_t r = 0; r < query_count; ++r) rows += visible_begin[r] < visible_end[r] ? 1 : 0;
  return rows;
}

void ObserveCase::Permute(const std::vector<std::uint64_t>& order) {
  auto moved = std::make_unique<Buffer>(keys->size());
  for (std::uint64_t t = 0; t < key_count; ++t) {
    std::memcpy(moved->data() + t * key_stride, keys->data() + order[t] * key_stride,
                head_dim * ElementBytes(type));
  }
  keys = std::move(moved);
  const std::vector<float> weights = log2_weights;
  for (std::uint64_t t = 0; t < weights.size(); ++t) log2_weights[t] = weights[order[t]];
}

}  // namespace tessera::kernels
