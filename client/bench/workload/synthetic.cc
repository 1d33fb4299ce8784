#include "client/bench/workload/synthetic.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

std::uint64_t Mix(std::uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Roughly normal: the sum of four uniform 16-bit numbers, centred and scaled to unit variance.
float Normal(std::uint64_t bits) {
  float sum = 0;
  for (int i = 0; i < 4; ++i) sum += static_cast<float>((bits >> (16 * i)) & 0xffff) / 65535.0f;
  return (sum - 2.0f) * 1.7320508f;
}

}  // namespace

client::ModelGeometry SyntheticShape::Geometry() const {
  client::ModelGeometry geometry;
  geometry.name = Concat("synthetic-", layers, "x", query_heads, "x", kv_heads, "x", head_dim);
  geometry.type = client::ElementType::kBf16;
  geometry.layers.assign(layers,
                         {.query_heads = query_heads, .kv_heads = kv_heads, .head_dim = head_dim});
  geometry.delimiter_token_ids = {kDelimiter};
  return geometry;
}

void SyntheticSequence::Fill(std::uint64_t kind, std::uint32_t layer, std::uint64_t token,
                             std::span<std::uint16_t> row) const {
  std::uint64_t state = Mix(Mix(Mix(seed_ ^ (kind << 56)) ^ layer) ^ token);
  for (std::uint16_t& value : row) {
    state = Mix(state);
    value = kernels::FloatToBf16(Normal(state));
  }
}

void SyntheticSequence::Grow(std::uint64_t count) {
  keys_.resize(shape_.layers);
  values_.resize(shape_.layers);
  const std::size_t row = shape_.kv_row();
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    keys_[layer].resize((tokens_ + count) * row);
    values_[layer].resize((tokens_ + count) * row);
    for (std::uint64_t token = tokens_; token < tokens_ + count; ++token) {
      Fill(1, layer, token, std::span(keys_[layer]).subspan(token * row, row));
      Fill(2, layer, token, std::span(values_[layer]).subspan(token * row, row));
    }
  }
  tokens_ += count;
}

void SyntheticSequence::Truncate(std::uint64_t tokens) {
  tokens_ = std::min(tokens_, tokens);
  for (std::uint32_t layer = 0; layer < keys_.size(); ++layer) {
    keys_[layer].resize(tokens_ * shape_.kv_row());
    values_[layer].resize(tokens_ * shape_.kv_row());
  }
}

SyntheticSequence SyntheticSequence::Fork(std::uint64_t seed) const {
  SyntheticSequence child = *this;
  child.seed_ = seed;
  return child;
}

std::span<const std::uint16_t> SyntheticSequence::Key(std::uint32_t layer, std::uint64_t first,
                                                      std::uint64_t count) const {
  return std::span(keys_[layer]).subspan(first * shape_.kv_row(), count * shape_.kv_row());
}

std::span<const std::uint16_t> SyntheticSequence::Value(std::uint32_t layer, std::uint64_t first,
                                                        std::uint64_t count) const {
  return std::span(values_[layer]).subspan(first * shape_.kv_row(), count * shape_.kv_row());
}

std::vector<std::uint16_t> SyntheticSequence::OfAllLayers(
    const std::vector<std::vector<std::uint16_t>>& rows, std::uint64_t first,
    std::uint64_t count) const {
  std::vector<std::uint16_t> all;
  all.reserve(shape_.layers * count * shape_.kv_row());
  for (const std::vector<std::uint16_t>& layer : rows) {
    all.insert(all.end(), layer.begin() + static_cast<std::ptrdiff_t>(first * shape_.kv_row()),
               layer.begin() + static_cast<std::ptrdiff_t>((first + count) * shape_.kv_row()));
  }
  return all;
}

std::vector<std::uint16_t> SyntheticSequence::KeysOfAllLayers(std::uint64_t first,
                                                              std::uint64_t count) const {
  return OfAllLayers(keys_, first, count);
}

std::vector<std::uint16_t> SyntheticSequence::ValuesOfAllLayers(std::uint64_t first,
                                                                std::uint64_t count) const {
  return OfAllLayers(values_, first, count);
}

std::vector<std::uint16_t> SyntheticSequence::Query(std::uint32_t layer,
                                                    std::uint64_t position) const {
  std::vector<std::uint16_t> query(shape_.query_row());
  Fill(3, layer, position, query);
  return query;
}

double SyntheticSequence::Error(std::uint32_t layer, std::uint64_t position,
                                std::span<const float> output) const {
  const std::uint32_t dim = shape_.head_dim;
  const std::vector<std::uint16_t> query = Query(layer, position);
  double worst = 0;
  double largest = 0;
  std::vector<double> weights(position + 1);
  for (std::uint32_t head = 0; head < shape_.query_heads; ++head) {
    const std::size_t kv = std::size_t{head / shape_.group()} * dim;
    double top = -std::numeric_limits<double>::infinity();
    for (std::uint64_t t = 0; t <= position; ++t) {
      double dot = 0;
      for (std::uint32_t c = 0; c < dim; ++c) {
        dot += double{kernels::Bf16ToFloat(query[head * dim + c])} *
               double{kernels::Bf16ToFloat(keys_[layer][t * shape_.kv_row() + kv + c])};
      }
      weights[t] = dot / std::sqrt(static_cast<double>(dim));
      top = std::max(top, weights[t]);
    }
    double sum = 0;
    for (double& weight : weights) sum += weight = std::exp(weight - top);
    for (std::uint32_t c = 0; c < dim; ++c) {
      double truth = 0;
      for (std::uint64_t t = 0; t <= position; ++t) {
        truth +=
            weights[t] * double{kernels::Bf16ToFloat(values_[layer][t * shape_.kv_row() + kv + c])};
      }
      truth /= sum;
      const double distance = std::fabs(truth - double{output[head * dim + c]});
      // Written so that NaN counts as an error.
      worst = distance <= worst ? worst : distance;
      largest = std::max(largest, std::fabs(truth));
    }
  }
  return worst / largest;
}

}  // namespace tessera::cli
