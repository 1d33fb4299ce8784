#include "client/sequence/policy_compression.h"

#include <algorithm>
#include <utility>

#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

void AddOutcome(const v1::OutcomeGroup& group, v1::CompressResponse& all) {
  const auto same = std::ranges::find_if(*all.mutable_outcomes(), [&](const auto& other) {
    return other.worst().state() == group.worst().state() &&
           other.worst().reason() == group.worst().reason();
  });
  if (same == all.mutable_outcomes()->end()) {
    *all.add_outcomes() = group;
    return;
  }
  const std::uint32_t lanes = same->lanes() + group.lanes();
  if (group.worst().loss() > same->worst().loss()) *same = group;
  same->set_lanes(lanes);
}

// Adds up the answers of calls for some layers each.
void AddPart(const v1::CompressResponse& part, bool first, v1::CompressResponse& all) {
  if (first) {
    all = part;
    return;
  }
  all.set_entries_packed(all.entries_packed() + part.entries_packed());
  all.set_entries_dropped(all.entries_dropped() + part.entries_dropped());
  all.set_tile_bytes_after(part.tile_bytes_after());
  all.set_rotation_bytes(part.rotation_bytes());
  all.set_position_shift(part.position_shift());
  all.mutable_decided_tokens()->MergeFrom(part.decided_tokens());
  for (const v1::OutcomeGroup& group : part.outcomes()) AddOutcome(group, all);
}

}  // namespace

absl::StatusOr<v1::CompressResponse> CompressByPolicy(Session& session, SequenceState& sequence,
                                                      std::uint32_t first_layer,
                                                      std::uint32_t layers, CompressMode mode) {
  Observer* const observer = sequence.observer.get();
  v1::CompressRequest request;
  v1::CompressResponse response;
  request.set_sequence_id(sequence.id.value());
  request.set_first_layer(first_layer);
  request.set_layers(layers);
  const std::uint32_t end = layers == 0 ? sequence.model->layers() : first_layer + layers;
  for (std::uint32_t layer = first_layer; layer < end && observer != nullptr; ++layer) {
    observer->TruncateLayer(sequence.TokensOf(layer), layer);
  }
  for (std::uint32_t begin = first_layer;;) {
    std::uint32_t sent = end;
    if (observer != nullptr) {
      // If the daemon has no room for all observations, it decides about the first ones before it
      // receives the rest.
      const auto until = observer->Show(session, sequence.id, begin, end, sequence.TokensOf(0),
                                        /*to_another=*/mode == CompressMode::kToAnother);
      if (!until.ok()) return until.status();
      sent = *until;
    }
    if (begin != first_layer || sent != end) {
      request.set_first_layer(begin);
      request.set_layers(sent - begin);
    }
    v1::CompressResponse part;
    request.set_end_prompt(mode == CompressMode::kMarkEnd && sent == end);
    if (absl::Status status = session.Call(request, part); !status.ok()) return status;
    if (request.end_prompt()) return part;
    for (std::uint32_t layer = begin; observer != nullptr && layer < sent; ++layer) {
      const std::uint64_t tokens = sequence.TokensOf(layer);
      const auto at = static_cast<int>(layer - begin);
      if (tokens == 0) continue;
      observer->Decided(layer, at < part.decided_tokens_size() ? part.decided_tokens(at) : tokens);
    }
    AddPart(part, begin == first_layer, response);
    if (sent == end) break;
    begin = sent;
  }
  if (first_layer == 0 && end == sequence.model->layers()) {
    // A policy that acts while decoding begins when its budget is full.
    const bool acts_later = observer != nullptr && observer->needs().acts_while_decoding();
    sequence.prompt_end.SkipCheck();
    if (sequence.prompt_waits && !acts_later) {
      sequence.warning = sequence.prompt_end.WarnAfterCheck(sequence.id, sequence.policy,
                                                            sequence.tokens, response.outcomes());
    }
    sequence.compressed_at = sequence.tokens;
    sequence.prompt_waits = false;
  }
  sequence.position_shift = response.position_shift();
  return response;
}

absl::Status SendObservations(Session& session, SequenceState& sequence) {
  Observer* const observer = sequence.observer.get();
  if (observer == nullptr) return absl::OkStatus();
  const std::uint32_t layers = sequence.model->layers();
  for (std::uint32_t layer = 0; layer < layers; ++layer) {
    observer->TruncateLayer(sequence.TokensOf(layer), layer);
  }
  const auto until = observer->Show(session, sequence.id, 0, layers, sequence.TokensOf(0),
                                    /*to_another=*/true);
  if (!until.ok() || *until == layers) return until.status();
  return absl::ResourceExhaustedError(Concat("the daemon has room for the observations of ", *until,
                                             " of ", layers, " layers of ", sequence.id.ToString(),
                                             "; compress it and retry"));
}

bool DueForCompression(const SequenceState& sequence) {
  return sequence.observer != nullptr && sequence.observer->needs().acts_while_decoding() &&
         (sequence.prompt_waits ||
          sequence.tokens >= sequence.compressed_at + kernels::kTileEntries);
}

std::vector<std::string> WarningsBeforeStep(Session& session, SequenceState& sequence) {
  std::vector<std::string> warnings;
  PromptEnd& end = sequence.prompt_end;
  if (auto partly = end.BeforeDecoding(sequence.id, sequence.tokens)) {
    warnings.push_back(*std::move(partly));
  }
  if (!end.IsCheckDue(sequence.tokens)) return warnings;
  v1::DescribeRequest request;
  v1::DescribeResponse response;
  request.set_sequence_id(sequence.id.value());
  if (!session.Call(request, response).ok()) response.Clear();
  auto none =
      end.WarnAfterCheck(sequence.id, sequence.policy, sequence.tokens, response.outcomes());
  if (none.has_value()) warnings.push_back(*std::move(none));
  return warnings;
}

}  // namespace tessera::client
