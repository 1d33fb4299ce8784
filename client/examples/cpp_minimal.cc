// The smallest worker: prefill a prompt in bulk, decode a few tokens, and check the attention of
// one head against a softmax of our own.   Usage: cpp_minimal [ADDRESS]
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "tessera/worker.h"

namespace client = tessera::client;
constexpr std::uint32_t kLayers = 1, kQueryHeads = 8, kKvHeads = 2, kDim = 64;

// The value of a result; exits with a message if there is none.
template <typename T>
T Must(absl::StatusOr<T> result) {
  if (result.ok()) return *std::move(result);
  std::fprintf(stderr, "%s\n", result.status().ToString().c_str());
  std::exit(1);
}

std::vector<float> RandomRows(std::size_t size) {
  static std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> rows(size);
  for (float& value : rows) value = normal(random);
  return rows;
}

// Channel 0 of what query head 0 attends to. Rows are [token][kv head][channel].
double OwnSoftmax(const std::vector<float>& query, const std::vector<float>& keys,
                  const std::vector<float>& values) {
  double sum = 0, weights = 0;
  for (std::size_t row = 0; row < keys.size(); row += kKvHeads * kDim) {
    double dot = 0;
    for (std::uint32_t c = 0; c < kDim; ++c) dot += double{query[c]} * keys[row + c];
    const double weight = std::exp(dot / std::sqrt(double{kDim}));
    weights += weight;
    sum += weight * values[row];
  }
  return sum / weights;
}

int main(int argc, char** argv) {
  const auto worker =
      Must(client::Worker::Attach({.address = argc > 1 ? argv[1] : client::kDefaultAddress}));
  client::ModelGeometry geometry = {.name = "tiny", .type = client::ElementType::kFp32};
  geometry.layers.assign(kLayers,
                         {.query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kDim});
  client::Sequence sequence = Must(worker->CreateSequence(Must(worker->RegisterModel(geometry))));

  std::vector<float> keys = RandomRows(100 * kKvHeads * kDim), values = RandomRows(keys.size());
  Must(sequence.Append({.key = std::as_bytes(std::span(keys)),
                        .value = std::as_bytes(std::span(values)),
                        .tokens = 100}));
  while (sequence.tokens() < 116) {
    const auto key = RandomRows(kKvHeads * kDim), value = RandomRows(kKvHeads * kDim);
    const auto query = RandomRows(kQueryHeads * kDim);
    std::vector<float> output(query.size());
    client::Sequence* const batch[] = {&sequence};
    client::Step step = Must(worker->BeginStep(batch));
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      (void)step.AppendAndAttend(layer, {.key = std::as_bytes(std::span(key)),
                                         .value = std::as_bytes(std::span(value)),
                                         .query = std::as_bytes(std::span(query)),
                                         .output = std::as_writable_bytes(std::span(output))});
    }
    const absl::Status status = step.End();  // repeats the error of any call before it
    if (absl::IsAborted(status)) continue;   // the daemon needed the memory: nothing has changed
    if (!status.ok()) return std::fprintf(stderr, "%s\n", status.ToString().c_str()), 1;
    keys.insert(keys.end(), key.begin(), key.end());
    values.insert(values.end(), value.begin(), value.end());
    const double own = OwnSoftmax(query, keys, values);
    std::printf("token %zu: attention %9.6f, own softmax %9.6f\n", std::size_t{sequence.tokens()},
                output[0], own);
    if (std::abs(output[0] - own) > 1e-5) return std::fprintf(stderr, "they differ\n"), 1;
  }
}
