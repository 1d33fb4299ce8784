// The options of each token policy. Plain, comparable data. The system's .cc file documents each
// field with its option.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

namespace tessera::policies {

// How many entries of a prompt are kept.
struct EntryBudget {
  double share = 0.2;        // share of the tokens since the last compression
  std::uint64_t tokens = 0;  // if not 0: this number, whatever the length

  bool operator==(const EntryBudget&) const = default;
};

// Whether all lanes of a layer share one decision, or each has its own.
enum class Scope : std::uint8_t { kLayer, kHead };

enum class Pooling : std::uint8_t { kAverage, kLargest };

// How the scores from a window of queries are smoothed (SnapKV).
struct WindowScoring {
  std::uint32_t window = 32;
  std::uint32_t kernel = 5;
  Pooling pooling = Pooling::kAverage;

  bool operator==(const WindowScoring&) const = default;
};

struct ChunkKvPolicy {
  bool kvpress = false;  // like kvpress, else like the paper's Algorithm 1
  std::uint32_t chunk = 10;
  std::uint32_t window = 32;
  EntryBudget budget;
  Scope scope = Scope::kLayer;
  bool mean = false;   // a chunk's score is the mean of its tokens' scores, else their sum
  bool logit = false;  // scores are raw logits, else softmax attention
  std::uint32_t reuse = 1;

  bool operator==(const ChunkKvPolicy&) const = default;
};

struct SemanticKvPolicy {
  enum class Aggregate : std::uint8_t { kMean, kMax, kSum };

  double lambda = 0.01;
  double recent_ratio = 0.01;
  std::uint64_t sink = 256;
  double keep_total = 0.2;
  std::optional<double> keep_middle;  // replaces keep_total
  bool causal = true;
  bool norm_visible = false;  // divide by the queries after the token, else by all
  Aggregate aggregate = Aggregate::kMean;

  bool operator==(const SemanticKvPolicy&) const = default;
};

// Whether keys are compared and merged as stored (post-RoPE), or with their rotary positions
// removed (pre-RoPE).
enum class KeySpace : std::uint8_t { kPost, kPre };

struct SemantiCachePolicy {
  double tau = 0.7;
  std::optional<double> budget;  // largest share of the entries to keep; determines tau
  Scope scope = Scope::kHead;
  bool delimiters = true;  // else chunks end only when they are full
  std::uint32_t max_chunk = 256;
  std::uint64_t sink = 4;
  std::uint64_t recent = 32;
  bool leave_open = false;
  KeySpace key_space = KeySpace::kPost;

  bool operator==(const SemantiCachePolicy&) const = default;
};

struct LaCachePolicy {
  std::uint64_t budget = 256;
  std::uint32_t span = 0;  // 0: the default for the model's number of layers
  std::uint32_t overlap = 0;
  std::uint64_t sink = 4;
  bool band = false;            // map=band, else mod
  bool uniform = false;         // pass=uniform, else repeat
  bool slot_positions = false;  // pos=slot, else original

  bool operator==(const LaCachePolicy&) const = default;
};

struct StreamingPolicy {
  std::uint64_t sink = 4;
  std::uint64_t recent = 512;
  std::uint64_t budget = 0;     // if not 0: sink plus recent
  bool slot_positions = false;  // pos=slot, else original

  std::uint64_t newest() const { return budget != 0 ? budget - sink : recent; }
  bool operator==(const StreamingPolicy&) const = default;
};

struct H2oPolicy {
  std::uint64_t heavy = 1024;
  std::uint64_t recent = 1024;

  bool operator==(const H2oPolicy&) const = default;
};

struct SnapKvPolicy {
  EntryBudget budget;
  WindowScoring scoring;

  bool operator==(const SnapKvPolicy&) const = default;
};

struct PyramidKvPolicy {
  EntryBudget budget;
  double beta = 20;
  WindowScoring scoring;

  bool operator==(const PyramidKvPolicy&) const = default;
};

struct TovaPolicy {
  std::uint64_t budget = 512;

  bool operator==(const TovaPolicy&) const = default;
};

using TokenPolicy =
    std::variant<ChunkKvPolicy, SemanticKvPolicy, SemantiCachePolicy, LaCachePolicy,
                 StreamingPolicy, H2oPolicy, SnapKvPolicy, PyramidKvPolicy, TovaPolicy>;

}  // namespace tessera::policies
