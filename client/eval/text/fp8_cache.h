// The yardstick of a text evaluation: the model's own cache, rounded to fp8 (e4m3) as engines offer
// it. It is computed in this process; it is no policy, and the daemon has no part in it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/eval/compressed_fork.h"
#include "client/model/attention.h"

namespace tessera::cli::eval {

// Copies, such as for each question, do not affect each other.
class Fp8Cache final : public llm::Attention {
 public:
  // With the prompt's rows. Both sides of a lane have one scale each, with which their largest
  // element becomes 448; larger elements of later rows are clamped.
  Fp8Cache(const llm::Config& config, const PromptRows& prompt);

  // Rounds the rows, too, before it attends over them and those before them.
  absl::Status Attend(const llm::LayerRows& rows, std::span<float> output) override;

  // Share of the bytes of a bf16 cache with as many tokens: a byte per element, and the scales.
  double bytes_kept() const;
  // As stored values read, in bf16: [tokens][kv_heads][head_dim].
  std::span<const std::uint16_t> key(std::uint32_t layer) const { return layers_[layer].key.rows; }
  std::span<const std::uint16_t> value(std::uint32_t layer) const {
    return layers_[layer].value.rows;
  }

 private:
  struct Side {
    std::vector<float> scales;  // [kv_heads]
    std::vector<std::uint16_t> rows;
  };
  struct Layer {
    Side key, value;
  };
  void Scale(std::span<const std::uint16_t> rows, Side& side) const;
  void Append(std::span<const std::uint16_t> rows, Side& side) const;

  const llm::Config config_;
  std::vector<Layer> layers_;
};

}  // namespace tessera::cli::eval
