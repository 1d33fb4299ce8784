// What each token policy is told. Plain data, comparable; the meaning of each field stands beside
// its option in the system's file.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>

namespace tessera::policies {

// How many entries stay of a prompt.
struct EntryBudget {
  double share = 0.2;        // of the sequence's tokens, rounded down
  std::uint64_t tokens = 0;  // not 0: so many, whatever the length

  bool operator==(const EntryBudget&) const = default;
};

// Whether one decision is made for all lanes of a layer, or one for each.
enum class Scope : std::uint8_t { kLayer, kHead };

enum class Pooling : std::uint8_t { kAverage, kLargest };

// How the scores of a window's queries are smoothed (SnapKV).
struct WindowScoring {
  std::uint32_t window = 32;
  std::uint32_t kernel = 5;
  Pooling pooling = Pooling::kAverage;

  bool operator==(const WindowScoring&) const = default;
};

struct ChunkKvPolicy {
  bool kvpress = false;  // as kvpress computes it, else as the paper's Algorithm 1
  std::uint32_t chunk = 10;
  std::uint32_t window = 32;
  EntryBudget budget;
  Scope scope = Scope::kLayer;
  bool mean = false;   // a chunk's score is the mean of its tokens', else the sum
  bool logit = false;  // raw logits, else softmax
  std::uint32_t reuse = 1;

  bool operator==(const ChunkKvPolicy&) const = default;
};

struct SemanticKvPolicy {
  enum class Aggregate : std::uint8_t { kMean, kMax, kSum };

  double lambda = 0.01;
  double recent_ratio = 0.01;
  std::uint64_t sink = 256;
  double keep_total = 0.2;
  std::optional<double> keep_middle;  // instead of keep_total
  bool causal = true;
  bool norm_visible = false;  // else by all observers
  Aggregate aggregate = Aggregate::kMean;

  bool operator==(const SemanticKvPolicy&) const = default;
};

// Which keys are compared and merged: as they are stored, or as they were before they were turned
// to their rotary positions.
enum class KeySpace : std::uint8_t { kPost, kPre };

struct SemantiCachePolicy {
  double tau = 0.7;
  std::optional<double> budget;  // a share of the tokens, from which tau follows
  Scope scope = Scope::kHead;
  bool delimiters = true;  // else chunks end by their length alone
  std::uint32_t max_chunk = 256;
  std::uint64_t sink = 4;
  std::uint64_t recent = 32;
  bool leave_open = false;
  KeySpace key_space = KeySpace::kPost;

  bool operator==(const SemantiCachePolicy&) const = default;
};

struct LaCachePolicy {
  std::uint64_t budget = 256;
  std::uint32_t span = 0;  // 0: the default, which depends on the model's layers
  std::uint32_t overlap = 0;
  std::uint64_t sink = 4;
  bool band = false;            // else mod
  bool uniform = false;         // else repeat
  bool slot_positions = false;  // else original ones

  bool operator==(const LaCachePolicy&) const = default;
};

struct StreamingPolicy {
  std::uint64_t sink = 4;
  std::uint64_t recent = 512;
  std::uint64_t budget = 0;     // not 0: sink and recent together
  bool slot_positions = false;  // else original ones

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
