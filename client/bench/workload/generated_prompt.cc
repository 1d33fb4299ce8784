#include "client/bench/workload/generated_prompt.h"

#include <cstring>
#include <span>

#include "client/bench/workload/generated_kv.h"

namespace tessera::cli::bench {

client::AppendTensors GeneratedPrompt::Tensors(std::uint64_t count) const {
  const std::size_t elements = count * kKvHeads * kHeadDim;
  return {.key = std::as_bytes(std::span(key).first(elements)),
          .value = std::as_bytes(std::span(value).first(elements)),
          .tokens = count};
}

GeneratedPrompt MakePrompt(std::uint64_t tokens, std::uint64_t seed) {
  const GeneratedKv kv({.kv_heads = 2,
                        .head_dim = kHeadDim,
                        .tokens = static_cast<std::uint32_t>(tokens),
                        .regions = 4},
                       seed);
  GeneratedPrompt prompt = {.tokens = tokens};
  prompt.key.resize(tokens * kKvHeads * kHeadDim);
  prompt.value.resize(prompt.key.size());
  for (std::uint32_t head = 0; head < kKvHeads; ++head) {
    const kernels::LaneRows rows = kv.Rows(head % 2);
    for (std::uint64_t token = 0; token < tokens; ++token) {
      const std::size_t at = (token * kKvHeads + head) * kHeadDim;
      std::memcpy(&prompt.key[at], rows.keys.row(token), rows.keys.row_bytes());
      std::memcpy(&prompt.value[at], rows.values.row(token), rows.values.row_bytes());
    }
  }
  return prompt;
}

}  // namespace tessera::cli::bench
