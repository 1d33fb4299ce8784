// Writes a text's tokens and logits to a file, for the comparison with another implementation:
// model_logits MODEL TEXT OUTPUT. The output is the number of tokens, the tokens (u32 each), and
// the logits after each token (fp32) without any rounding to bf16.

#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

#include "client/model/checkpoint/tokenizer.h"
#include "client/model/model.h"

namespace tessera::llm {
namespace {

// Causal attention of one pass over the rows as the model computed them.
class ExactAttention final : public Attention {
 public:
  explicit ExactAttention(const Config& config) : config_(config) {}

  absl::Status Attend(const LayerRows& rows, std::span<float> output) override {
    const std::size_t tokens = rows.exact_key.size() / config_.kv_row();
    for (std::size_t token = 0; token < tokens; ++token) {
      for (std::size_t head = 0; head < config_.query_heads; ++head) {
        Attend(rows, token, head, output);
      }
    }
    return absl::OkStatus();
  }

 private:
  void Attend(const LayerRows& rows, std::size_t token, std::size_t head,
              std::span<float> output) const {
    const std::size_t dim = config_.head_dim;
    const std::size_t lane = head / (config_.query_heads / config_.kv_heads) * dim;
    const std::size_t query = token * config_.query_row() + head * dim;
    std::vector<double> shares;
    double most = -INFINITY, sum = 0;
    for (std::size_t other = 0; other <= token; ++other) {
      double logit = 0;
      for (std::size_t i = 0; i < dim; ++i) {
        logit += double{rows.exact_query[query + i]} *
                 rows.exact_key[other * config_.kv_row() + lane + i];
      }
      shares.push_back(logit / std::sqrt(static_cast<double>(dim)));
      most = std::max(most, shares.back());
    }
    for (double& share : shares) sum += share = std::exp(share - most);
    for (std::size_t i = 0; i < dim; ++i) {
      double value = 0;
      for (std::size_t other = 0; other <= token; ++other) {
        value += shares[other] * rows.exact_value[other * config_.kv_row() + lane + i];
      }
      output[query + i] = static_cast<float>(value / sum);
    }
  }

  const Config config_;
};

int Fail(const absl::Status& status) {
  std::fprintf(stderr, "model_logits: %s\n", status.ToString().c_str());
  return 1;
}

int Run(const std::string& path, const std::string& text_file, const std::string& output) {
  const auto model = Model::Load(path);
  if (!model.ok()) return Fail(model.status());
  const auto tokenizer = ReadTokenizer(path);
  if (!tokenizer.ok()) return Fail(tokenizer.status());
  std::ifstream file(text_file, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const auto tokens = (*tokenizer)->Encode(text);
  if (!tokens.ok()) return Fail(tokens.status());
  std::vector<std::uint32_t> positions(tokens->size());
  std::iota(positions.begin(), positions.end(), 0);
  ExactAttention attention((*model)->config());
  const auto logits = (*model)->Forward(
      {.tokens = *tokens, .positions = positions, .logits_of = positions}, attention);
  if (!logits.ok()) return Fail(logits.status());
  std::ofstream out(output, std::ios::binary);
  const auto write = [&](const auto* data, std::size_t count) {
    out.write(reinterpret_cast<const char*>(data),
              static_cast<std::streamsize>(count * sizeof *data));
  };
  const auto count = static_cast<std::uint32_t>(tokens->size());
  write(&count, 1);
  write(tokens->data(), tokens->size());
  write(logits->data(), logits->size());
  return out.good() ? 0 : 1;
}

}  // namespace
}  // namespace tessera::llm

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  return tessera::llm::Run(argv[1], argv[2], argv[3]);
}
