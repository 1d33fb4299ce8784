// Keys, values and queries with the structure that a language model's have, from a seed: what
// benchmarks and tests of fidelity measure on. All rows are bf16.
//
//   content   each row is a mixture of directions whose strength falls by a power law, keys faster
//             than values. The directions are random, and those of a later region are others.
//   chunks    tokens come in chunks, some of which are repeated far more often than others
//             (Zipf); tokens of a chunk have a topic in common.
//   keys      a few channels are large in every key; every key has a common part that turns quickly
//             with its position, by which queries find what is recent. Then RoPE.
//   values    the first tokens' are small, those of sinks.
//   outliers  single elements of keys and values, few and large.
//   planted   sinks that every query sees, heavy hitters, and needles of a few tokens.
//
// What is planted lies in those planes of RoPE that hardly turn within the context, as retrieval
// heads have it. A query's strength is such that it gives a stated share of its attention to what
// it seeks, whatever the length and the head_dim; few do not reach it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/strategy/loss.h"

namespace tessera::cli::bench {

struct GeneratedShape {
  std::uint32_t kv_heads = 2;
  std::uint32_t group = 4;  // query heads of a kv head
  std::uint32_t head_dim = 128;
  std::uint32_t tokens = 8192;

  // The second moment along the i-th direction falls as i^-exponent. Those of a head in a region
  // are up to 2^exponent_spread times larger or smaller.
  double key_exponent = 0.7;
  double value_exponent = 0.35;
  double exponent_spread = 0.5;
  // Stretches of equal length. `drift` 0: the directions are the same in all; 1: nothing in common.
  std::uint32_t regions = 1;
  double drift = 0.7;

  // Sizes are in units of a content element's root mean square.
  std::uint32_t large_channels = 4;
  double large_size = 4;
  double outlier_rate = 0.001;
  double outlier_size = 6;
  double recency_size = 0.8;
  double planted_size = 1.5;  // of the part that makes a token findable
  double sink_size = 2;       // likewise

  std::uint32_t sinks = 4;
  std::uint32_t heavy_hitters = 32;
  std::uint32_t needles = 8;
  std::uint32_t needle_tokens = 4;
  std::uint32_t recent = 64;  // the newest tokens, of the queries that seek them

  std::uint32_t chunk_types = 256;
  std::uint32_t chunk_tokens = 16;
  double zipf_exponent = 1;    // 0: all types are equally frequent
  double rope_base = 500'000;  // 0: no RoPE
  // How readily the strong directions of keys use channels that RoPE turns within the context,
  // against those that it hardly does. 1: as readily.
  double turning = 0.3;

  // Shares of a query's attention.
  double sink_mass = 0.3;
  double sought_mass = 0.4;
};

// Nothing but content of one spectrum, in which tokens have nothing to do with each other.
GeneratedShape ContentOnly(GeneratedShape shape);

enum class Seeks : std::uint8_t { kNeedle, kHeavyHitters, kRecent, kNothing };

struct GeneratedQuery {
  Seeks seeks = Seeks::kNothing;
  std::vector<std::uint32_t> sought;  // tokens, rising; none: nothing in particular
  std::vector<std::uint16_t> row;     // head_dim, at the last token's position
};

class GeneratedKv {
 public:
  // The same shape and seed give the same rows in every process of one build. Layers of one seed
  // have heads of their own and the same text: what is planted is planted at the same tokens.
  GeneratedKv(const GeneratedShape& shape, std::uint64_t seed, std::uint32_t layer = 0);

  const GeneratedShape& shape() const { return shape_; }
  // K and V of tokens [first, first + count).
  kernels::LaneRows Rows(std::uint32_t kv_head, std::uint64_t first, std::uint64_t count) const;
  kernels::LaneRows Rows(std::uint32_t kv_head) const { return Rows(kv_head, 0, shape_.tokens); }
  // What a query head of the group asks at the last token's position. Any index; heads of a group
  // mostly seek different things.
  GeneratedQuery Query(std::uint32_t kv_head, std::uint32_t head, std::uint64_t index) const;

  // First tokens of the needles, and the heavy hitters; the same in all heads.
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
  // Of a query before scaling, after RoPE.
  std::vector<double> Logits(const Head& head, const std::vector<float>& query) const;

  GeneratedShape shape_;
  std::uint64_t seed_;                 // of the text
  std::uint64_t head_seed_;            // of what the layer makes of it
  std::vector<std::uint32_t> chunks_;  // the type of each
  std::vector<std::uint32_t> needles_;
  std::vector<std::uint32_t> heavy_hitters_;
  std::vector<Head> heads_;
};

}  // namespace tessera::cli::bench
