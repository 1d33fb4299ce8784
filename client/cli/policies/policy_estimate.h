// What a policy makes of a prompt, computed from its options and the model's geometry, without a
// daemon and without keys: what is kept, in bytes, and what may stop it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/policies/policy.h"
#include "daemon/policies/token_policy.h"
#include "kernels/format/layer_geometry.h"

namespace tessera::cli {

// A model whose layers are alike.
struct ModelShape {
  std::uint32_t layers = 32;
  kernels::LayerGeometry geometry = {.query_heads = 32, .kv_heads = 8, .head_dim = 128};
  bool delimiters = false;  // it will be registered with delimiter token ids

  std::uint64_t lanes() const { return std::uint64_t{layers} * geometry.kv_heads; }
};

struct Range {
  std::uint64_t least = 0;
  std::uint64_t most = 0;
};

struct PolicyEstimate {
  std::string policy;  // canonical text
  std::uint64_t tokens = 0;
  std::uint64_t dense_bytes = 0;  // of the prompt without a policy
  Range bytes;                    // with it, all lanes together, when compression has ended
  Range kept;                     // entries per lane
  std::uint64_t packed = 0;       // of those, at most: entries that are packed
  std::uint64_t read = 0;         // entries of a lane that a decode step reads at most; 0: all
  std::string needs;              // what the worker must observe; "": nothing
  // Sentences: what keeps the policy from doing what it says, or what makes the result uncertain.
  std::vector<std::string> obstacles;
};

// INVALID_ARGUMENT: the model cannot have this policy.
absl::StatusOr<PolicyEstimate> EstimatePolicy(const policies::Policy& policy,
                                              const ModelShape& model, std::uint64_t tokens);

}  // namespace tessera::cli
