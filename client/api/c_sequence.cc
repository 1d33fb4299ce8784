// The C interface, implemented with the C++ one: sequences and prefixes.

#include <chrono>
#include <utility>

#include "client/api/c_decode.h"
#include "client/api/c_json.h"

namespace client = tessera::client;
using client::Adopt;
using client::Bytes;
using client::CheckArguments;
using client::Hand;
using client::Report;
using client::RowKind;
using client::Text;

namespace {

// Null while the worker is not attached.
std::shared_ptr<client::Session> SessionOf(const tessera_sequence& sequence) {
  const std::shared_ptr<client::Core>& core = client::SequenceAccess::CoreOf(sequence.sequence);
  return core == nullptr ? nullptr : client::SessionOf(core);
}

client::RowShape ShapeOf(const tessera_sequence& sequence, const tessera_append& append) {
  const auto& state = client::SequenceAccess::State(sequence.sequence);
  if (state == nullptr) return {};
  client::RowShape shape =
      client::ShapeOf(*state->model, append.first_layer, RowKind::kKeyValue, append.tokens);
  shape.layers = append.layers != 0 ? append.layers : state->model->layers() - append.first_layer;
  return shape;
}

// Of rows that have `bytes` in all.
client::RowShape ShapeOf(const tessera_sequence& sequence, std::uint32_t layer, RowKind kind,
                         std::size_t bytes) {
  const auto& state = client::SequenceAccess::State(sequence.sequence);
  if (state == nullptr) return {};
  client::RowShape shape = client::ShapeOf(*state->model, layer, kind, 1);
  shape.tokens = shape.bytes() == 0 ? 0 : bytes / shape.bytes();
  return shape;
}

}  // namespace

extern "C" {

tessera_code tessera_sequence_create(tessera_worker* worker, const tessera_model* model,
                                     const char* policy, tessera_sequence** sequence,
                                     tessera_error* error) {
  if (absl::Status bad =
          CheckArguments(__func__, {{"worker", worker}, {"model", model}, {"sequence", sequence}});
      !bad.ok()) {
    return Report(bad, error);
  }
  return Hand(worker->worker->CreateSequence(model->model, Text(policy)), sequence, error);
}

tessera_code tessera_sequence_adopt(tessera_worker* worker, const tessera_model* model,
                                    uint64_t sequence_id, tessera_sequence** sequence,
                                    tessera_error* error) {
  if (absl::Status bad =
          CheckArguments(__func__, {{"worker", worker}, {"model", model}, {"sequence", sequence}});
      !bad.ok()) {
    return Report(bad, error);
  }
  return Hand(worker->worker->Adopt(model->model, client::SequenceId(sequence_id)), sequence,
              error);
}

void tessera_sequence_destroy(tessera_sequence* sequence) { delete sequence; }

uint64_t tessera_sequence_id(const tessera_sequence* sequence) {
  return sequence == nullptr ? 0 : sequence->sequence.id().value();
}

uint64_t tessera_sequence_tokens(const tessera_sequence* sequence) {
  return sequence == nullptr ? 0 : sequence->sequence.tokens();
}

uint64_t tessera_sequence_next_position(const tessera_sequence* sequence) {
  return sequence == nullptr ? 0 : sequence->sequence.next_position();
}

const char* tessera_sequence_policy(const tessera_sequence* sequence) {
  return sequence == nullptr ? "" : sequence->sequence.policy().c_str();
}

tessera_code tessera_sequence_append(tessera_sequence* sequence, const tessera_append* append,
                                     uint64_t* tokens, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}, {"append", append}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_append given = Adopt(append, tessera_append TESSERA_APPEND_INIT);
  if (absl::Status bad = CheckArguments(__func__, {{"append->key", given.key, given.bytes},
                                                   {"append->value", given.value, given.bytes}});
      !bad.ok()) {
    return Report(bad, error);
  }
  client::RowCopies copies;
  const client::RowShape shape = ShapeOf(*sequence, given);
  const std::shared_ptr<client::Session> session = SessionOf(*sequence);
  const absl::StatusOr<std::span<const std::byte>> key = copies.Gather(
      "append->key", session.get(), Bytes(given.key, given.bytes), shape, given.key_strides);
  if (!key.ok()) return Report(key.status(), error);
  const absl::StatusOr<std::span<const std::byte>> value = copies.Gather(
      "append->value", session.get(), Bytes(given.value, given.bytes), shape, given.value_strides);
  if (!value.ok()) return Report(value.status(), error);
  const absl::StatusOr<std::uint64_t> held =
      sequence->sequence.Append({.key = *key,
                                 .value = *value,
                                 .tokens = given.tokens,
                                 .first_layer = given.first_layer,
                                 .layers = given.layers,
                                 .end_of_prompt = given.end_of_prompt != 0});
  if (held.ok() && tokens != nullptr) *tokens = *held;
  return Report(held.status(), error);
}

tessera_code tessera_sequence_fork(tessera_sequence* sequence, tessera_sequence** child,
                                   tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}, {"child", child}});
      !bad.ok()) {
    return Report(bad, error);
  }
  return Hand(sequence->sequence.Fork(), child, error);
}

tessera_code tessera_sequence_fork_as(tessera_sequence* sequence, const char* policy,
                                      tessera_sequence** child, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}, {"child", child}});
      !bad.ok()) {
    return Report(bad, error);
  }
  return Hand(sequence->sequence.Fork(Text(policy)), child, error);
}

tessera_code tessera_sequence_offload(tessera_sequence* sequence, uint64_t* moved_bytes,
                                      tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}}); !bad.ok()) {
    return Report(bad, error);
  }
  const absl::StatusOr<std::uint64_t> moved = sequence->sequence.Offload();
  if (moved.ok() && moved_bytes != nullptr) *moved_bytes = *moved;
  return Report(moved.status(), error);
}

tessera_code tessera_sequence_restore(tessera_sequence* sequence, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}}); !bad.ok()) {
    return Report(bad, error);
  }
  return Report(sequence->sequence.Restore(), error);
}

tessera_code tessera_sequence_truncate(tessera_sequence* sequence, uint64_t tokens,
                                       tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}}); !bad.ok()) {
    return Report(bad, error);
  }
  return Report(sequence->sequence.Truncate(tokens), error);
}

tessera_code tessera_sequence_park(tessera_sequence* sequence, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}}); !bad.ok()) {
    return Report(bad, error);
  }
  return Report(sequence->sequence.Park(), error);
}

tessera_code tessera_sequence_handover(tessera_sequence* sequence, uint64_t to_session_id,
                                       tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}}); !bad.ok()) {
    return Report(bad, error);
  }
  return Report(sequence->sequence.Handover(client::SessionId(to_session_id)), error);
}

tessera_code tessera_sequence_describe(const tessera_sequence* sequence,
                                       tessera_sequence_info* info, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}, {"info", info}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const absl::StatusOr<client::SequenceDescription> found = sequence->sequence.Describe();
  if (found.ok()) {
    const tessera_sequence_info full = {.struct_size = info->struct_size,
                                        .tokens = found->tokens,
                                        .tile_bytes = found->tile_bytes,
                                        .shared_tile_bytes = found->shared_tile_bytes,
                                        .decoding = found->decoding,
                                        .failed = found->status == client::SequenceStatus::kFailed,
                                        .rotation_bytes = found->rotation_bytes,
                                        .offloaded_bytes = found->offloaded_bytes};
    std::memcpy(info, &full, std::min(info->struct_size, sizeof full));
  }
  return Report(found.status(), error);
}

tessera_code tessera_sequence_describe_json(const tessera_sequence* sequence, tessera_detail detail,
                                            tessera_text* json, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}, {"json", json}});
      !bad.ok()) {
    return Report(bad, error);
  }
  if (detail < TESSERA_DETAIL_SEQUENCE || detail > TESSERA_DETAIL_ENTRIES) {
    return Report(
        client::BadArgument(
            __func__, tessera::Concat("detail is ", static_cast<int>(detail), "; the largest is ",
                                      static_cast<int>(TESSERA_DETAIL_ENTRIES))),
        error);
  }
  return client::HandJson(
      client::DescribeMessage(sequence->sequence, static_cast<client::Detail>(detail)), json,
      error);
}

tessera_code tessera_sequence_read(tessera_sequence* sequence, tessera_lane_rows* rows,
                                   tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}, {"rows", rows}});
      !bad.ok()) {
    return Report(bad, error);
  }
  tessera_lane_rows asked = Adopt(rows, tessera_lane_rows TESSERA_LANE_ROWS_INIT);
  // Nothing lies behind the last entry, so this asks for counts alone.
  const bool counts = asked.entries == 0;
  const absl::StatusOr<client::SequenceRows> read =
      sequence->sequence.Read({.layer = asked.layer,
                               .first_kv_head = asked.kv_head,
                               .kv_heads = 1,
                               .first_entry = counts ? ~std::uint64_t{0} : asked.first_entry,
                               .entries = counts ? 1 : asked.entries,
                               .type = client::ToElementType(asked.type)});
  if (!read.ok()) return Report(read.status(), error);
  const client::LaneRows& lane = read->lanes.front();
  asked.entries = lane.positions.size();
  asked.lane_entries = lane.lane_entries;
  asked.tokens = read->tokens;
  const auto hand = [](const auto& from, void* to) {
    if (to != nullptr && !from.empty()) std::memcpy(to, from.data(), from.size() * sizeof from[0]);
  };
  hand(lane.key, asked.key);
  hand(lane.value, asked.value);
  hand(lane.positions, asked.position);
  hand(lane.weights, asked.weight);
  if (asked.weight != nullptr && lane.weights.empty()) {
    std::fill_n(asked.weight, asked.entries, 1.0f);
  }
  asked.struct_size = rows->struct_size;
  std::memcpy(rows, &asked, std::min(rows->struct_size, sizeof asked));
  return Report(absl::OkStatus(), error);
}

// ---- compression

tessera_code tessera_sequence_needs(const tessera_sequence* sequence, tessera_needs* needs,
                                    tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}, {"needs", needs}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const client::PolicyNeeds asked = sequence->sequence.needs();
  const tessera_needs answer = {.struct_size = needs->struct_size,
                                .queries = asked.queries(),
                                .keys = asked.attention_sums,
                                .token_ids = asked.token_ids,
                                .while_decoding = asked.acts_while_decoding};
  std::memcpy(needs, &answer, std::min(needs->struct_size, sizeof answer));
  return Report(absl::OkStatus(), error);
}

tessera_code tessera_sequence_observe(tessera_sequence* sequence,
                                      const tessera_observation* observation,
                                      tessera_error* error) {
  if (absl::Status bad =
          CheckArguments(__func__, {{"sequence", sequence}, {"observation", observation}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_observation given =
      Adopt(observation, tessera_observation TESSERA_OBSERVATION_INIT);
  if (absl::Status bad =
          CheckArguments(__func__, {{"observation->query", given.query, given.query_bytes},
                                    {"observation->key", given.key, given.key_bytes}});
      !bad.ok()) {
    return Report(bad, error);
  }
  client::RowCopies copies;
  const std::shared_ptr<client::Session> session = SessionOf(*sequence);
  const absl::StatusOr<std::span<const std::byte>> query = copies.Gather(
      "observation->query", session.get(), Bytes(given.query, given.query_bytes),
      ShapeOf(*sequence, given.layer, RowKind::kQuery, given.query_bytes), given.query_strides);
  if (!query.ok()) return Report(query.status(), error);
  const absl::StatusOr<std::span<const std::byte>> key = copies.Gather(
      "observation->key", session.get(), Bytes(given.key, given.key_bytes),
      ShapeOf(*sequence, given.layer, RowKind::kKeyValue, given.key_bytes), given.key_strides);
  if (!key.ok()) return Report(key.status(), error);
  return Report(sequence->sequence.Observe({.layer = given.layer,
                                            .first_token = given.first_token,
                                            .query = *query,
                                            .key = *key,
                                            .prompt_tokens = given.prompt_tokens}),
                error);
}

tessera_code tessera_sequence_observe_tokens(tessera_sequence* sequence, uint64_t first_token,
                                             const uint32_t* ids, size_t count,
                                             tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}, {"ids", ids, count}});
      !bad.ok()) {
    return Report(bad, error);
  }
  return Report(sequence->sequence.ObserveTokens(first_token, {ids, count}), error);
}

tessera_code tessera_sequence_end_prompt(tessera_sequence* sequence, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}}); !bad.ok()) {
    return Report(bad, error);
  }
  return Report(sequence->sequence.EndPrompt(), error);
}

tessera_code tessera_sequence_compress(tessera_sequence* sequence, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"sequence", sequence}}); !bad.ok()) {
    return Report(bad, error);
  }
  return Report(sequence->sequence.Compress().status(), error);
}

// ---- published prefixes

tessera_code tessera_sequence_publish(tessera_sequence* sequence, const uint32_t* token_ids,
                                      size_t count, const tessera_publish_options* options,
                                      uint64_t* prefix_id, int* deduplicated,
                                      tessera_error* error) {
  if (absl::Status bad =
          CheckArguments(__func__, {{"sequence", sequence}, {"token_ids", token_ids, count}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_publish_options given =
      Adopt(options, tessera_publish_options TESSERA_PUBLISH_OPTIONS_INIT);
  const absl::StatusOr<client::PublishedPrefix> published = sequence->sequence.Publish(
      {token_ids, count},
      {.ttl = std::chrono::milliseconds(given.ttl_ms), .pinned = given.pinned != 0});
  if (published.ok() && prefix_id != nullptr) *prefix_id = published->prefix.value();
  if (published.ok() && deduplicated != nullptr) *deduplicated = published->deduplicated;
  return Report(published.status(), error);
}

tessera_code tessera_match(tessera_worker* worker, const tessera_model* model,
                           const tessera_match_options* options, tessera_prefix_match* match,
                           tessera_error* error) {
  if (absl::Status bad = CheckArguments(
          __func__, {{"worker", worker}, {"model", model}, {"options", options}, {"match", match}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_match_options given =
      Adopt(options, tessera_match_options TESSERA_MATCH_OPTIONS_INIT);
  if (absl::Status bad =
          CheckArguments(__func__, {{"options->token_ids", given.token_ids, given.token_count}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const absl::StatusOr<client::PrefixMatch> found =
      worker->worker->Match(model->model, {.policy = Text(given.policy),
                                           .tokens = {given.token_ids, given.token_count},
                                           .wait = std::chrono::milliseconds(given.wait_ms),
                                           .will_compute = given.will_compute != 0});
  if (found.ok()) {
    tessera_prefix_match answer = {match->struct_size, found->prefix.value(), found->tokens,
                                   found->computing, found->computation.value()};
    std::memcpy(match, &answer, std::min(match->struct_size, sizeof answer));
  }
  return Report(found.status(), error);
}

tessera_code tessera_fork_prefix(tessera_worker* worker, const tessera_model* model,
                                 const tessera_prefix_match* match, uint64_t tokens,
                                 tessera_sequence** sequence, tessera_error* error) {
  if (absl::Status bad = CheckArguments(
          __func__,
          {{"worker", worker}, {"model", model}, {"match", match}, {"sequence", sequence}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_prefix_match given = Adopt(match, tessera_prefix_match TESSERA_PREFIX_MATCH_INIT);
  return Hand(worker->worker->Fork({.model = model->model,
                                    .prefix = client::PrefixId(given.prefix_id),
                                    .tokens = given.tokens},
                                   tokens),
              sequence, error);
}

tessera_code tessera_free_id(tessera_worker* worker, uint64_t id, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"worker", worker}}); !bad.ok()) {
    return Report(bad, error);
  }
  return Report(worker->worker->Free(client::PrefixId(id)), error);
}
}  // extern "C"
