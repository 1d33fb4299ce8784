#include "client/model/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/status/status.h"
#include "client/model/matrix.h"
#include "daemon/base/check.h"
#include "kernels/format/element.h"

namespace tessera::llm {

namespace {

constexpr std::size_t kBlockQueries = 96;
constexpr float kSmallestNormal = std::numeric_limits<float>::min();

// In place. Entries after the first `visible` become 0. So do subnormal results, since Intel cores
// multiply subnormals in microcode, at about a hundred cycles each.
void Softmax(std::span<float> logits, std::size_t visible) {
  const float most = *std::max_element(logits.begin(), logits.begin() + visible);
  float sum = 0;
  for (std::size_t i = 0; i < visible; ++i) sum += logits[i] = std::exp(logits[i] - most);
  for (std::size_t i = 0; i < visible; ++i) {
    logits[i] = logits[i] < kSmallestNormal ? 0 : logits[i] / sum;
  }
  std::fill(logits.begin() + visible, logits.end(), 0.0f);
}

}  // namespace

void AttendDense(const Config& config, const LayerRows& rows, std::span<float> output) {
  const std::size_t kv_row = config.kv_row(), query_row = config.query_row(), dim = config.head_dim;
  const std::size_t tokens = rows.key.size() / kv_row, queries = rows.query.size() / query_row;
  TESSERA_CHECK(queries <= tokens && output.size() == rows.query.size(), "row counts match");
  const std::size_t group = config.query_heads / config.kv_heads;
  const float scale = 1 / std::sqrt(static_cast<float>(dim));
  std::vector<float> scaled(kBlockQueries * dim);
  std::vector<float> logits(kBlockQueries * tokens);
  Panels keys, values;
  for (std::size_t head = 0; head < config.query_heads; ++head) {
    if (head % group == 0) {  // shared by the heads of a group
      const std::size_t lane = head / group * dim;
      keys = Panels::OfColumns(&rows.key[lane], kv_row, dim, tokens);
      values = Panels::OfRows(&rows.value[lane], kv_row, tokens, dim);
    }
    for (std::size_t first = 0; first < queries; first += kBlockQueries) {
      const std::size_t count = std::min(kBlockQueries, queries - first);
      for (std::size_t i = 0; i < count * dim; ++i) {
        const std::size_t at = (first + i / dim) * query_row + head * dim + i % dim;
        scaled[i] = kernels::Bf16ToFloat(rows.query[at]) * scale;
      }
      // Tokens visible to the block's last query; earlier queries see fewer.
      const std::size_t seen = tokens - queries + first + count;
      Multiply(scaled.data(), dim, keys, {count, dim, seen}, logits.data(), seen);
      for (std::size_t i = 0; i < count; ++i) {
        Softmax(std::span(logits).subspan(i * seen, seen), seen - count + i + 1);
      }
      Multiply(logits.data(), seen, values, {count, seen, dim},
               &output[first * query_row + head * dim], query_row);
    }
  }
}

absl::Status LocalAttention::Attend(const LayerRows& rows, std::span<float> output) {
  std::vector<std::uint16_t>& keys = keys_[rows.layer];
  std::vector<std::uint16_t>& values = values_[rows.layer];
  keys.insert(keys.end(), rows.key.begin(), rows.key.end());
  values.insert(values.end(), rows.value.begin(), rows.value.end());
  AttendDense(config_, {.layer = rows.layer, .key = keys, .value = values, .query = rows.query},
              output);
  return absl::OkStatus();
}

absl::Status PromptAttention::Attend(const LayerRows& rows, std::span<float> output) {
  AttendDense(config_, rows, output);
  const std::uint64_t tokens = rows.key.size() / config_.kv_row();
  const absl::Status status = sequence_.Observe({.layer = rows.layer,
                                                 .query = std::as_bytes(rows.query),
                                                 .key = std::as_bytes(rows.key),
                                                 .prompt_tokens = tokens});
  if (!status.ok()) return status;
  return sequence_
      .Append({.key = std::as_bytes(rows.key),
               .value = std::as_bytes(rows.value),
               .tokens = tokens,
               .first_layer = rows.layer,
               .layers = 1,
               .end_of_prompt = true})
      .status();
}

}  // namespace tessera::llm
