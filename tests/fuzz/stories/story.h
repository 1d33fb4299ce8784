// The random life of a worker: one operation after another on its sequences, each logged as a line.
// A model in the test checks every result.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "client/bench/workload/synthetic.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tessera/worker.h"
#include "tests/fakes/seed.h"

namespace tessera::fuzz {

enum class Act : std::uint8_t {
  kCreate,
  kAppend,
  kStep,
  kSpeculate,
  kAbandon,
  kAttend,
  kSelect,
  kFork,
  kTruncate,
  kCompress,
  kPack,
  kPark,
  kOffload,
  kRestore,
  kPublish,
  kReuse,
  kUnpublish,
  kHandover,
  kSetPolicy,
  kDescribe,
  kFree,
};
inline constexpr std::size_t kActs = 21;
std::string_view NameOf(Act act);

// Counts of operations and outcomes. A refusal is for lack of memory or of a slot, and changes
// nothing.
struct Tally {
  std::array<std::uint64_t, kActs> done{};
  std::uint64_t refused = 0;
  std::uint64_t retried = 0;  // steps whose pin was revoked
  std::uint64_t outputs_judged = 0;
};

// A policy and its effect on attention.
struct Kind {
  const char* policy;
  // Allowed error of attention. nullopt: rows are dropped, so any finite number is right.
  std::optional<double> tolerance;
  bool any_head = true;  // keeps every token, so that a prefix may end anywhere
};
// The policies that sequences are created with.
std::span<const Kind> Kinds();

// The prefixes that workers of one tenant have published, as far as they know.
struct Shelf {
  struct Entry {
    client::PrefixId prefix;
    cli::SyntheticSequence truth;
    Kind kind;
    bool pinned;
  };
  std::vector<Entry> entries;
};

class Story {
 public:
  struct Options {
    client::Worker* worker;
    TestRandom* random;
    Tally* tally;
    Shelf* shelf;  // shared by stories of a tenant that run one at a time
    // Another session of the tenant, which adopts sequences for a while; null: none.
    client::Worker* colleague = nullptr;
    // Also moves sequences and changes policies; null: only the worker moves sequences.
    v1::TesseraAdmin::Stub* admin = nullptr;
    bool pins = true;  // some prefixes are pinned until freed by name
    std::size_t most_sequences = 6;
    std::uint64_t most_tokens = 1200;  // per sequence
    // Called with every operation before it runs.
    std::function<void(const std::string& line)> on_line;
  };
  static absl::StatusOr<Story> Begin(const Options& options);
  Story(Story&&) = default;

  // Runs one operation. An error means that the daemon broke a promise, or that it is gone
  // (UNAVAILABLE).
  absl::Status Next();
  // The last operations, one per line.
  std::string Told() const;

 private:
  struct Known {
    std::uint64_t number;
    client::Sequence sequence;
    cli::SyntheticSequence truth;
    Kind kind;
    bool by_hand = false;  // partly packed by a call, so it cannot be published
    // Had another policy before. It cannot be published if that policy changed rows.
    bool repolicied = false;
  };

  Story(const Options& options, client::Model model)
      : options_(options), model_(std::move(model)) {}

  absl::Status Perform(Act act);
  absl::Status Create();
  absl::Status Append(Known& known);
  absl::Status Step();
  absl::Status Speculate(Known& known);
  absl::Status Abandon(Known& known);
  absl::Status Attend(Known& known);
  absl::Status Fork(Known& known);
  absl::Status Truncate(Known& known);
  absl::Status Compress(Known& known);
  absl::Status Pack(Known& known);
  absl::Status Describe(Known& known);

  // Defined in others_story.cc.
  absl::Status Select(Known& known);
  absl::Status Handover(Known& known);
  absl::Status AttendBy(client::Worker& worker, const client::Sequence& sequence,
                        const Known& known);
  absl::Status SetPolicy(Known& known);

  // Defined in prefix_story.cc.
  absl::Status Offload(Known& known);
  absl::Status Restore(Known& known);
  absl::Status Publish(Known& known);
  absl::Status Reuse();
  absl::Status Unpublish();
  absl::StatusOr<client::Sequence> ForkMatch(const client::PrefixMatch& match,
                                             std::uint64_t tokens);

  absl::Status Observe(Known& known, std::uint64_t first, std::uint64_t count);
  // Runs `what`. If a cut has removed observations that a policy needs, observes everything again
  // and retries.
  absl::Status RetryAfterObserving(std::span<Known* const> all,
                                   const std::function<absl::Status()>& what);
  // Runs a step of `count` tokens for each sequence, of which the first `accepted` are kept.
  absl::Status RunStep(std::span<Known* const> batch, std::uint32_t count, std::uint32_t accepted);
  absl::Status TryStep(std::span<Known* const> batch, std::uint32_t count, std::uint32_t accepted,
                       std::vector<std::vector<float>>& outputs);
  absl::Status Judge(const Known& known, std::uint32_t layer, std::uint64_t position,
                     std::span<const float> output);
  // Returns OK for a refusal for lack of room.
  absl::Status Allow(const absl::Status& status);
  void Say(const std::string& line);
  Known& Any() { return known_[options_.random->Below(known_.size())]; }

  Options options_;
  client::Model model_;
  std::vector<Known> known_;
  std::deque<std::string> told_;
  std::uint64_t operations_ = 0;
  std::uint64_t created_ = 0;
};

// Converts the status of an admin call.
absl::Status ToAbsl(const grpc::Status& status);

// Frees the prefixes that stories have published; they outlive their sessions.
absl::Status FreePrefixes(v1::TesseraAdmin::Stub& admin);

// The shape of a Story's sequences.
inline constexpr cli::SyntheticShape kStoryShape = {
    .layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64};

}  // namespace tessera::fuzz
