#include "client/sequence/prompt_end.h"

#include <algorithm>
#include <utility>

#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

constexpr std::uint64_t kNotEnded = ~std::uint64_t{0};
// The daemon compresses in the background. This client asks for the outcome after 32 decoded
// tokens, and again after twice as many, up to four times.
constexpr std::uint64_t kFirstLook = 32;
constexpr std::uint32_t kLooks = 4;

}  // namespace

void PromptEnd::MarkEnded(std::uint32_t first_layer, std::uint32_t layers, std::uint64_t tokens,
                          std::uint32_t of_model, bool compressed) {
  if (ended_.empty()) ended_.assign(of_model, kNotEnded);
  const std::uint32_t end = layers == 0 ? of_model : std::min(of_model, first_layer + layers);
  for (std::uint32_t layer = first_layer; layer < end; ++layer) ended_[layer] = tokens;
  checks_ = 0;
  next_check_at_ = compressed || warned_no_effect_ ? 0 : tokens + kFirstLook;
}

std::optional<std::string> PromptEnd::BeforeDecoding(SequenceId id, std::uint64_t tokens) {
  if (ended_.empty()) return std::nullopt;
  const std::vector<std::uint64_t> ended = std::exchange(ended_, {});
  const auto left = ended.size() - static_cast<std::size_t>(std::ranges::count(ended, tokens));
  if (left == 0 || left == ended.size() || warned_partly_) return std::nullopt;
  warned_partly_ = true;
  const auto first = std::ranges::find_if(ended, [&](auto at) { return at != tokens; });
  return Concat(id.ToString(), " begins to decode, but the prompt of ", left, " of its ",
                ended.size(), " layers has not ended: layer ", first - ended.begin(),
                ", for example, remains uncompressed. Set end_of_prompt for every layer, or call "
                "EndPrompt");
}

std::optional<std::string> PromptEnd::WarnAfterCheck(
    SequenceId id, const std::string& policy, std::uint64_t tokens,
    const google::protobuf::RepeatedPtrField<v1::OutcomeGroup>& outcomes) {
  next_check_at_ = 0;
  bool waits = false;
  for (const v1::OutcomeGroup& group : outcomes) {
    if (group.worst().state() != v1::LANE_STATE_DENSE) return std::nullopt;
    if (group.worst().reason() == v1::COMPRESSION_REASON_POLICY_DENSE) return std::nullopt;
    if (group.worst().reason() == v1::COMPRESSION_REASON_NEWEST) return std::nullopt;
    waits = waits || group.worst().reason() == v1::COMPRESSION_REASON_WAITING;
  }
  if (outcomes.empty() || warned_no_effect_) return std::nullopt;
  if (waits) {
    if (++checks_ < kLooks) next_check_at_ = tokens + (kFirstLook << checks_);
    return std::nullopt;
  }
  warned_no_effect_ = true;
  const v1::OutcomeGroup& group = outcomes.Get(0);
  return Concat("the policy ", policy, " has compressed nothing of the prompt of ", id.ToString(),
                ": layer ", group.layer(), ", head ", group.kv_head(), ": ", group.worst().text());
}

}  // namespace tessera::client
