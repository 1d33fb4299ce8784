// What a worker has said about the ends of a sequence's prompts, and what it should be warned of:
// calls that succeed, and most likely do not do what was meant.
//
// Used by one thread at a time, as the sequence that it belongs to.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/base/ids.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::client {

class PromptEnd {
 public:
  // The prompt of these layers has ended where they hold so many tokens. `compressed`: they have
  // been compressed already, so that nobody need look later what became of it.
  void Ended(std::uint32_t first_layer, std::uint32_t layers, std::uint64_t tokens,
             std::uint32_t of_model, bool compressed);
  // The sequence begins to decode. What to warn of, once for each sequence: the prompt has ended in
  // some layers and in others not, which hold the same tokens.
  std::optional<std::string> BeforeDecoding(SequenceId id, std::uint64_t tokens);
  // Whether to ask the daemon now what its policy has made of the prompt.
  bool WantsLook(std::uint64_t tokens) const { return look_at_ != 0 && tokens >= look_at_; }
  // What to warn of, once for each sequence: the policy has compressed nothing.
  std::optional<std::string> AfterLook(
      SequenceId id, const std::string& policy, std::uint64_t tokens,
      const google::protobuf::RepeatedPtrField<v1::OutcomeGroup>& outcomes);

 private:
  std::vector<std::uint64_t> ended_;  // by layer: tokens held then; empty: nothing to look at
  std::uint64_t look_at_ = 0;         // tokens; 0: never
  std::uint32_t looks_ = 0;
  bool warned_partly_ = false;
  bool warned_no_effect_ = false;
};

}  // namespace tessera::client
