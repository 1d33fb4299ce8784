// Records where a sequence's prompts have ended, and produces warnings about calls that succeed but
// probably do not do what was meant: a prompt ended in some layers only, or not compressed at all.
//
// Owned by SequenceState; used by one thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/ids.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::client {

class PromptEnd {
 public:
  // The prompt of these layers has ended at `tokens` tokens. `compressed`: they have been
  // compressed already, so the outcome need not be checked later.
  void MarkEnded(std::uint32_t first_layer, std::uint32_t layers, std::uint64_t tokens,
                 std::uint32_t of_model, bool compressed);
  // Called when the sequence begins to decode. Returns a warning, once per sequence, if the prompt
  // has ended in some layers but not in others.
  std::optional<std::string> BeforeDecoding(SequenceId id, std::uint64_t tokens);
  // The outcome is known, so IsCheckDue is false from now on.
  void SkipCheck() { next_check_at_ = 0; }
  // Whether to ask the daemon now for the outcome of the prompt.
  bool IsCheckDue(std::uint64_t tokens) const {
    return next_check_at_ != 0 && tokens >= next_check_at_;
  }
  // Returns a warning, once per sequence, if the policy has compressed nothing.
  std::optional<std::string> WarnAfterCheck(
      SequenceId id, const std::string& policy, std::uint64_t tokens,
      const google::protobuf::RepeatedPtrField<v1::OutcomeGroup>& outcomes);

 private:
  std::vector<std::uint64_t>
      ended_;  // by layer: tokens at the end of its prompt; empty: no prompt has ended
  std::uint64_t next_check_at_ = 0;  // tokens; 0: never
  std::uint32_t checks_ = 0;
  bool warned_partly_ = false;
  bool warned_no_effect_ = false;
};

}  // namespace tessera::client
