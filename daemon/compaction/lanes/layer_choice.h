// A decision about the lanes of one layer of a sequence, and how much of it has been carried out.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "daemon/compaction/lanes/lane_outcome.h"
#include "daemon/policies/channels/key_channels.h"
#include "daemon/policies/token_policy.h"

namespace tessera::compaction {

// Whether choices of this policy cover the whole lane, not only its undecided rows.
bool ChoosesFromAll(const policies::Policy& policy);
// Whether the policy neither packs nor summarizes rows.
bool LeavesRows(const policies::Policy& policy);

// Whether the policy continues while rows are packed or coded. Its choices score rows as they are
// stored, so each of them ends at a fixed token (StopAfter), and rows before that token are encoded
// first: the result does not depend on when a job runs.
bool HasStops(const policies::Policy& policy);
// The next stop after the first `decided` tokens: the end of a prompt, or of 32 tokens that were
// decoded after it.
std::uint64_t StopAfter(std::span<const policies::TokenSpan> prompts, std::uint64_t decided);
// Whether choices cover one prompt at a time, because rows that were decoded before it may be coded
// already.
bool ChoosesByPrompt(const policies::Policy& policy);

// Plain data; owned by the job that carries it out, or kept as ManagedLayer::unfinished. Entry
// indices count from the first entry that the choice considered.
struct LayerChoice {
  policies::LayerDecision lanes;  // by kv head
  // By kv head: the key channels to keep. Empty: as in the previous segment.
  policies::ChannelDecision key_channels;
  std::vector<std::uint64_t> decided;          // by lane: number of entries covered
  std::vector<std::uint64_t> first_positions;  // by lane: position of the first one
  std::vector<std::uint64_t> losses;           // by lane: OpenRun::losses at that time
  std::vector<bool> done;                      // by lane: whether it has been carried out
  policies::LayerMemory memory;                // of the layer when all lanes are done
  std::uint64_t end = 0;                       // after the last position of any lane
  std::uint64_t until = 0;                     // the layer's new decided_until
  bool continued = false;                      // continues earlier decisions while decoding
  // Set only if the choice has begun: the sequence was truncated here, so lanes that are not done
  // have lost later tokens, or have others now.
  std::uint64_t cut_at = kNotCut;
  // No rows were added since the last choice.
  bool idle = false;
  // There were too few tokens to decide about: the choice at the next prompt's end covers them, and
  // needs their queries.
  bool waits = false;
  // Why it waits, for the caller: the policy's budget is too small for so few tokens.
  absl::Status refused;
  // Keeps all covered tokens: they were decoded and can be packed, or they wait only in some lanes.
  bool keeps = false;
  // Another choice follows, about the later tokens.
  bool aligns = false;
  // Likewise, of a choice that has ended at a stop or prompt.
  bool goes_on = false;
  bool begun = false;  // it has been carried out in some lanes

  static constexpr std::uint64_t kNotCut = ~std::uint64_t{0};
  // The sequence was truncated to `tokens`.
  void CutTo(std::uint64_t tokens);
  // Whether a lane keeps all of its entries unmerged.
  bool Untouched(std::uint32_t kv_head) const;
  bool UntouchedAll() const;
  // The chunk boundaries by kv head at this moment: the new ones for lanes that are done, otherwise
  // those of `before`.
  std::vector<policies::ChunkEnds> BoundariesNow(const policies::LayerMemory& before) const;
  // Restricts the choice for a lane to its first `count` entries.
  void KeepFirst(std::uint32_t kv_head, std::uint64_t count);
  // What the choice leaves dense in the layer, and why; nullopt: it says nothing about that.
  std::optional<DenseRows> LeftDense(const policies::Policy& policy) const;
};

}  // namespace tessera::compaction
