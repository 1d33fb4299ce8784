// The life of a worker, made up as it goes: one random operation after another on the sequences it
// holds, each a line of text, and what comes of it judged by a model of its own.
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

// What came of operations. A refusal is for want of memory, or of a place: it changes nothing.
struct Tally {
  std::array<std::uint64_t, kActs> done{};
  std::uint64_t refused = 0;
  std::uint64_t retried = 0;  // steps whose pin was taken back
  std::uint64_t outputs_judged = 0;
};

// What a policy does to the rows that are asked about later.
struct Kind {
  const char* policy;
  // How far attention may be off; nothing: rows are dropped, and any finite number is right.
  std::optional<double> tolerance;
  bool any_head = true;  // a prefix may end anywhere: every token is kept
};
// All that sequences are made with.
std::span<const Kind> Kinds();

// What the workers of one tenant have published, as far as they know.
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
    Shelf* shelf;  // of all stories of a tenant, where one of them runs at a time
    // Another session of the tenant's, which sequences are handed to for a while; null: none.
    client::Worker* colleague = nullptr;
    // Moves sequences, too, and changes policies; null: only the worker moves them.
    v1::TesseraAdmin::Stub* admin = nullptr;
    bool pins = true;  // some prefixes stay until they are freed by name
    std::size_t most_sequences = 6;
    std::uint64_t most_tokens = 1200;  // of a sequence
    // Told of every operation before it runs.
    std::function<void(const std::string& line)> on_line;
  };
  static absl::StatusOr<Story> Begin(const Options& options);
  Story(Story&&) = default;

  // One operation. Not OK: the daemon broke a promise, or went away (UNAVAILABLE).
  absl::Status Next();
  // The last operations, a line each.
  std::string Told() const;

 private:
  struct Known {
    std::uint64_t number;
    client::Sequence sequence;
    cli::SyntheticSequence truth;
    Kind kind;
    bool by_hand = false;  // some of it was packed by a call: it is no prefix
    // It has had another policy: it is no prefix where that has done something.
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

  // others_story.cc
  absl::Status Select(Known& known);
  absl::Status Handover(Known& known);
  absl::Status AttendBy(client::Worker& worker, const client::Sequence& sequence,
                        const Known& known);
  absl::Status SetPolicy(Known& known);

  // prefix_story.cc
  absl::Status Offload(Known& known);
  absl::Status Restore(Known& known);
  absl::Status Publish(Known& known);
  absl::Status Reuse();
  absl::Status Unpublish();
  absl::StatusOr<client::Sequence> ForkWhatWasFound(const client::PrefixMatch& match,
                                                    std::uint64_t tokens);

  absl::Status Observe(Known& known, std::uint64_t first, std::uint64_t count);
  // Where a cut has taken what a policy decides by, all of it is shown once more, and `what` done
  // again.
  absl::Status ShowingAgain(std::span<Known* const> all, const std::function<absl::Status()>& what);
  // The next `count` tokens of each, whose first `accepted` count.
  absl::Status RunStep(std::span<Known* const> batch, std::uint32_t count, std::uint32_t accepted);
  absl::Status TryStep(std::span<Known* const> batch, std::uint32_t count, std::uint32_t accepted,
                       std::vector<std::vector<float>>& outputs);
  absl::Status Judge(const Known& known, std::uint32_t layer, std::uint64_t position,
                     std::span<const float> output);
  // OK where it was refused for want of room.
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

// Of what an operator is told.
absl::Status ToAbsl(const grpc::Status& status);

// What stories have published; sessions that end leave it.
absl::Status FreePrefixes(v1::TesseraAdmin::Stub& admin);

// Of what Stories work with.
inline constexpr cli::SyntheticShape kStoryShape = {
    .layers = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64};

}  // namespace tessera::fuzz
