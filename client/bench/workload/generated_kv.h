// Generates keys, values and queries with the structure of a language model's, from a seed. Used by
// fidelity benchmarks and tests. All rows are bf16.
//
//   content   each row is a mixture of random directions whose strength falls by a power law, for
//             keys faster than for values. Regions of the text have different directions.
//   chunks    tokens come in chunks with Zipf-distributed repetition; tokens of a chunk share a
//             topic.
//   keys      a few channels are large in every key; a common part rotates fast with the position,
//             so that queries can find recent tokens. RoPE is applied last.
//   values    values of sinks are small.
//   outliers  few, large single elements of keys and values.
//   planted   sinks that every query attends to, heavy hitters, and needles of a few tokens.
//
// Planted tokens use RoPE planes that hardly rotate within the context, as in retrieval heads.
// Query strengths are set so that the sought tokens get a given share of the attention at any
// length and head_dim; a few queries do not reach it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/strategy/loss.h"

namespace tessera::cli::bench {

struct GeneratedShape {
  std::uint32_t kv_heads = 2;
  std::uint32_t group = 4;  // query heads per kv head
  std::uint32_t head_dim = 128;
  std::uint32_t tokens = 8192;

  // The second moment along the i-th direction falls as i^-exponent. Per head and region the
  // exponent is scaled by a random factor of up to 2^exponent_spread either way.
  double key_exponent = 0.7;
  double value_exponent = 0.35;
  double exponent_spread = 0.5;
  // Regions of equal length. `drift` 0: all have the same directions; 1: independent directions.
  std::uint32_t regions = 1;
  double drift = 0.7;

  // Sizes relative to the root mean square of a content element.
  std::uint32_t large_channels = 4;
  double large_size = 4;
  double outlier_rate = 0.001;
  double outlier_size = 6;
  double recency_size = 0.8;
  double planted_size = 1.5;  // part of a needle's or heavy hitter's key that queries find
  double sink_size = 2;       // the same part of a sink's key

  std::uint32_t sinks = 4;
  std::uint32_t heavy_hitters = 32;
  std::uint32_t needles = 8;
  std::uint32_t needle_tokens = 4;
  std::uint32_t recent = 64;  // newest tokens, sought by some queries

  std::uint32_t chunk_types = 256;
  std::uint32_t chunk_tokens = 16;
  double zipf_exponent = 1;    // 0: all types are equally frequent
  double rope_base = 500'000;  // 0: no RoPE
  // Weight of channels that RoPE rotates within the context in the strong directions of keys,
  // relative to channels that hardly rotate. 1: equal.
  double turning = 0.3;

  // Shares of a query's attention.
  double sink_mass = 0.3;
  double sought_mass = 0.4;
};

// Only content with one spectrum and independent tokens.
GeneratedShape ContentOnly(GeneratedShape shape);

enum class Seeks : std::uint8_t { kNeedle, kHeavyHitters, kRecent, kNothing };

struct GeneratedQuery {
  Seeks seeks = Seeks::kNothing;
  std::vector<std::uint32_t> sought;  // tokens, ascending; empty: no particular tokens
  std::vector<std::uint16_t> row;     // head_dim elements, at the last token's position
};

class GeneratedKv {
 public:
  // Equal shape and seed give equal rows in every process of one build. Layers of one seed have
  // different heads but the same text: planted tokens are at the same positions.
  GeneratedKv(const GeneratedShape& shape, std::uint64_t seed, std::uint32_t layer = 0);

  const GeneratedShape& shape() const { return shape_; }
  // K and V of tokens [first, first + count).
  kernels::LaneRows Rows(std::uint32_t kv_head, std::uint64_t first, std::uint64_t count) const;
  kernels::LaneRows Rows(std::uint32_t kv_head) const { return Rows(kv_head, 0, shape_.tokens); }
  // Query number `index` of a query head of the group, at the last token's position. Heads of a
  // group mostly seek different tokens.
  GeneratedQuery Query(std::uint32_t kv_head, std::uint32_t head, std::uint64_t index) const;

  // First tokens of the needles, and the heavy hitters. The same in all heads.
  const std::vector<std::uint32_t>& needles() const { return needles_; }
  const std::vector<std::uint32_t>& heavy_hitters() const { return heavy_hitters_; }

 private:
  struct Head {
    std::vector<std::uint16_t> keys;  // [tokens][head_dim]
    std::vector<std::uint16_t> values;
    std::vector<std::vector<float>> content;  // directions of the newest keys, before RoPE
    // Unit vectors before RoPE.
    std::vector<float> sink;
    std::vector<float> heavy;
    std::vector<float> recency;
    std::vector<std::vector<float>> needles;
  };

  struct Goal {
    Seeks seeks = Seeks::kNothing;
    std::vector<std::uint32_t> tokens;
    std::vector<float> direction;
  };

  void PlaceTokens();
  Head MakeHead(std::uint32_t kv_head) const;
  Goal DrawGoal(const Head& head, std::uint32_t drawn, std::uint32_t needle) const;
  // Logits of a query after RoPE, before its strength is set.
  std::vector<double> Logits(const Head& head, const std::vector<float>& query) const;

  GeneratedShape shape_;
  std::uint64_t seed_;                 // of the text
  std::uint64_t head_seed_;            // of the layer's heads
  std::vector<std::uint32_t> chunks_;  // type of each chunk
  std::vector<std::uint32_t> needles_;
  std::vector<std::uint32_t> heavy_hitters_;
  std::vector<Head> heads_;
};

}  // namespace tessera::cli::bench
