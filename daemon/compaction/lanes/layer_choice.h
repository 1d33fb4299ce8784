// What is to become of the lanes of one layer of a sequence, and how much of it has been done.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "daemon/compaction/lanes/lane_outcome.h"
#include "daemon/policies/channels/key_channels.h"
#include "daemon/policies/token_policy.h"

namespace tessera::compaction {

// Whether a choice is about all of a lane, and not only about what waits in it.
bool ChoosesFromAll(const policies::Policy& policy);
// Whether rows are neither packed nor summed up.
bool LeavesRows(const policies::Policy& policy);

// What is to be done. Entries are counted from the first of the run that was looked at.
struct LayerChoice {
  policies::LayerDecision lanes;  // by kv head
  // By kv head: the channels of keys that stay. Empty: where channels go, those that went before.
  policies::ChannelDecision key_channels;
  std::vector<std::uint64_t> decided;          // entries of each lane that this is about
  std::vector<std::uint64_t> first_positions;  // of these
  std::vector<std::uint64_t> losses;           // of each lane, when it was looked at
  std::vector<bool> done;                      // of each lane, whether nothing is left to be done
  policies::LayerMemory memory;                // of the layer once it is done
  std::uint64_t end = 0;                       // behind the last position of any lane
  std::uint64_t until = 0;                     // tokens before it have been decided about then
  bool continued = false;  // a decision about the whole lane, made before, goes on
  // Only of one that has begun: of the tokens at or behind it the other lanes have lost all, or
  // have others now.
  std::uint64_t cut_at = kNotCut;
  // Nothing has come since the last one.
  bool idle = false;
  // There was too little to decide about: the next prompt's end decides about all of it, and wants
  // these tokens' queries, too.
  bool waits = false;
  // Why it waits, where whoever asked is to know: the policy has no budget for so few tokens.
  absl::Status refused;
  // Of tokens that stay because they were decoded, and need not wait to be packed, or because they
  // wait in some lanes alone. No prompt's end.
  bool keeps = false;
  // Another one is to follow, about what waits behind these.
  bool aligns = false;
  bool begun = false;  // it has been carried out in some lanes

  static constexpr std::uint64_t kNotCut = ~std::uint64_t{0};
  // The sequence was cut to so many tokens.
  void CutTo(std::uint64_t tokens);
  // Whether a lane stays as it is.
  bool Untouched(std::uint32_t kv_head) const;
  bool UntouchedAll() const;
  // By kv head, where chunks of text have ended in the lanes as they are: where this has not been
  // carried out, as it was known before.
  std::vector<policies::ChunkEnds> BoundariesNow(const policies::LayerMemory& before) const;
  // Of a lane: is about its first `count` entries alone.
  void KeepFirst(std::uint32_t kv_head, std::uint64_t count);
  // What it leaves of the layer, and why that is all; nothing: this is no answer to that.
  std::optional<DenseRows> LeftDense(const policies::Policy& policy) const;
};

}  // namespace tessera::compaction
