// The C interface on top of the C++ one.

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/base/version.h"
#include "tessera/delimiters.h"
#include "tessera/tessera.h"
#include "tessera/worker.h"

namespace client = tessera::client;

struct tessera_worker {
  std::unique_ptr<client::Worker> worker;
};
struct tessera_model {
  client::Model model;
};
struct tessera_sequence {
  client::Sequence sequence;
};

namespace {

// The caller's threads, as an executor.
class CallbackExecutor final : public tessera::kernels::Executor {
 public:
  CallbackExecutor(tessera_parallel_for parallel_for, void* context)
      : parallel_for_(parallel_for), context_(context) {}
  void ParallelFor(std::uint32_t tasks, Task task, void* context) override {
    parallel_for_(context_, tasks, task, context);
  }

 private:
  tessera_parallel_for parallel_for_;
  void* context_;
};

}  // namespace

struct tessera_step {
  std::optional<CallbackExecutor> executor;  // before the step, which uses it
  client::Step step;
};

namespace {

tessera_code Report(const absl::Status& status, tessera_error* error) {
  const auto code = static_cast<tessera_code>(status.code());
  if (error == nullptr) return code;
  error->code = code;
  const std::string_view message = tessera::AsStringView(status.message());
  const std::size_t length = std::min(message.size(), sizeof error->message - 1);
  message.copy(error->message, length);
  error->message[length] = '\0';
  return code;
}

// The caller's struct in this library's size: what an older header did not have is as in
// `defaults`.
template <typename Struct>
Struct Adopt(const Struct* given, Struct defaults) {
  if (given == nullptr) return defaults;
  std::memcpy(&defaults, given, std::min(given->struct_size, sizeof(Struct)));
  return defaults;
}

std::string Text(const char* text) { return text == nullptr ? "" : text; }

std::span<const std::byte> Bytes(const void* data, std::size_t size) {
  return {static_cast<const std::byte*>(data), size};
}

client::StepTensors ToStepTensors(const tessera_step_tensors* given) {
  const tessera_step_tensors tensors = Adopt(given, tessera_step_tensors TESSERA_STEP_TENSORS_INIT);
  return {.key = Bytes(tensors.key, tensors.key_bytes),
          .value = Bytes(tensors.value, tensors.key_bytes),
          .query = Bytes(tensors.query, tensors.query_bytes),
          .output = {static_cast<std::byte*>(tensors.output), tensors.output_bytes},
          .lse = {tensors.lse, tensors.lse == nullptr ? 0 : tensors.lse_count},
          .output_type = static_cast<client::ElementType>(tensors.output_type),
          .causal = tensors.causal != 0};
}

tessera_code Hand(absl::StatusOr<client::Sequence> sequence, tessera_sequence** out,
                  tessera_error* error) {
  if (sequence.ok()) *out = new tessera_sequence{*std::move(sequence)};
  return Report(sequence.status(), error);
}

}  // namespace

extern "C" {

uint32_t tessera_abi_version(void) { return TESSERA_ABI_VERSION; }

const char* tessera_version(void) { return tessera::Version().data(); }

// ---- worker

tessera_code tessera_attach(const tessera_attach_options* options, tessera_worker** worker,
                            tessera_error* error) {
  const tessera_attach_options given =
      Adopt(options, tessera_attach_options TESSERA_ATTACH_OPTIONS_INIT);
  client::AttachOptions attach;
  if (given.address != nullptr) attach.address = given.address;
  attach.tenant_token = Text(given.tenant_token);
  attach.worker_name = Text(given.worker_name);
  attach.group = Text(given.group);
  attach.rank = given.rank;
  attach.group_size = given.group_size;
  attach.map_memory = given.map_memory != 0;
  attach.reattach.automatic = given.reattach_automatic != 0;
  attach.attach_timeout = std::chrono::milliseconds(given.attach_timeout_ms);
  attach.rpc_timeout = std::chrono::milliseconds(given.rpc_timeout_ms);
  attach.reattach.give_up_after = std::chrono::milliseconds(given.reattach_timeout_ms);
  const client::TlsOptions tls = {.ca_file = Text(given.tls_ca_file),
                                  .certificate_file = Text(given.tls_certificate_file),
                                  .key_file = Text(given.tls_key_file),
                                  .server_name = Text(given.tls_server_name)};
  if (given.on_warning != nullptr) {
    attach.on_warning = [told = given.on_warning,
                         context = given.warning_context](std::string_view warning) {
      told(std::string(warning).c_str(), context);
    };
  }
  if (given.tls != 0 || tls != client::TlsOptions()) attach.tls = tls;
  absl::StatusOr<std::unique_ptr<client::Worker>> attached =
      client::Worker::Attach(std::move(attach));
  if (attached.ok()) *worker = new tessera_worker{*std::move(attached)};
  return Report(attached.status(), error);
}

void tessera_detach(tessera_worker* worker) { delete worker; }

tessera_code tessera_status(const tessera_worker* worker, tessera_error* error) {
  return Report(worker->worker->status(), error);
}

tessera_code tessera_reattach(tessera_worker* worker, size_t* gone, tessera_error* error) {
  const absl::StatusOr<client::ReattachReport> report = worker->worker->Reattach();
  if (report.ok() && gone != nullptr) *gone = report->gone.size();
  return Report(report.status(), error);
}

int tessera_is_mapped(const tessera_worker* worker) { return worker->worker->mapped(); }

int tessera_is_draining(const tessera_worker* worker) { return worker->worker->draining(); }

uint64_t tessera_session_id(const tessera_worker* worker) {
  return worker->worker->session_id().value();
}

// ---- models

size_t tessera_delimiters(const char* const* texts, size_t count, uint32_t* ids) {
  size_t found = 0;
  for (size_t i = 0; i < count; ++i) {
    if (texts[i] == nullptr || !tessera::client::IsDelimiter(texts[i])) continue;
    if (ids != nullptr) ids[found] = static_cast<uint32_t>(i);
    ++found;
  }
  return found;
}

tessera_code tessera_register_model(tessera_worker* worker, const tessera_model_options* options,
                                    tessera_model** model, tessera_error* error) {
  const tessera_model_options given =
      Adopt(options, tessera_model_options TESSERA_MODEL_OPTIONS_INIT);
  client::ModelGeometry geometry;
  geometry.name = Text(given.name);
  geometry.type = static_cast<client::ElementType>(given.type);
  geometry.rope.theta = given.rope_theta;
  geometry.rope.interleaved = given.rope_interleaved != 0;
  if (given.rope_frequencies != nullptr) {
    geometry.rope.frequencies.assign(given.rope_frequencies,
                                     given.rope_frequencies + given.rope_frequency_count);
  }
  if (given.delimiter_token_ids != nullptr) {
    geometry.delimiter_token_ids.assign(given.delimiter_token_ids,
                                        given.delimiter_token_ids + given.delimiter_count);
  }
  for (std::size_t i = 0; i < given.layer_count; ++i) {
    const tessera_layer& layer = given.layers[i];
    geometry.layers.push_back({.query_heads = layer.query_heads,
                               .kv_heads = layer.kv_heads,
                               .head_dim = layer.head_dim,
                               .scale = layer.scale,
                               .sliding_window = layer.sliding_window,
                               .logit_softcap = layer.logit_softcap});
    if (layer.sinks != nullptr) {
      geometry.layers.back().sinks.assign(layer.sinks, layer.sinks + layer.query_heads);
    }
  }
  absl::StatusOr<client::Model> registered = worker->worker->RegisterModel(geometry);
  if (registered.ok()) *model = new tessera_model{*std::move(registered)};
  return Report(registered.status(), error);
}

void tessera_model_destroy(tessera_model* model) { delete model; }

// ---- sequences

tessera_code tessera_sequence_create(tessera_worker* worker, const tessera_model* model,
                                     const char* policy, tessera_sequence** sequence,
                                     tessera_error* error) {
  return Hand(worker->worker->CreateSequence(model->model, Text(policy)), sequence, error);
}

tessera_code tessera_sequence_adopt(tessera_worker* worker, const tessera_model* model,
                                    uint64_t sequence_id, tessera_sequence** sequence,
                                    tessera_error* error) {
  return Hand(worker->worker->Adopt(model->model, tessera::SequenceId(sequence_id)), sequence,
              error);
}

void tessera_sequence_destroy(tessera_sequence* sequence) { delete sequence; }

uint64_t tessera_sequence_id(const tessera_sequence* sequence) {
  return sequence->sequence.id().value();
}

uint64_t tessera_sequence_tokens(const tessera_sequence* sequence) {
  return sequence->sequence.tokens();
}

uint64_t tessera_sequence_next_position(const tessera_sequence* sequence) {
  return sequence->sequence.next_position();
}

const char* tessera_sequence_policy(const tessera_sequence* sequence) {
  return sequence->sequence.policy().c_str();
}

tessera_code tessera_sequence_append(tessera_sequence* sequence, const tessera_append* append,
                                     uint64_t* tokens, tessera_error* error) {
  const tessera_append given = Adopt(append, tessera_append TESSERA_APPEND_INIT);
  const absl::StatusOr<std::uint64_t> held =
      sequence->sequence.Append({.key = Bytes(given.key, given.bytes),
                                 .value = Bytes(given.value, given.bytes),
                                 .tokens = given.tokens,
                                 .first_layer = given.first_layer,
                                 .layers = given.layers,
                                 .end_of_prompt = given.end_of_prompt != 0});
  if (held.ok() && tokens != nullptr) *tokens = *held;
  return Report(held.status(), error);
}

tessera_code tessera_sequence_fork(tessera_sequence* sequence, tessera_sequence** child,
                                   tessera_error* error) {
  return Hand(sequence->sequence.Fork(), child, error);
}

tessera_code tessera_sequence_fork_as(tessera_sequence* sequence, const char* policy,
                                      tessera_sequence** child, tessera_error* error) {
  return Hand(sequence->sequence.Fork(Text(policy)), child, error);
}

tessera_code tessera_sequence_offload(tessera_sequence* sequence, uint64_t* moved_bytes,
                                      tessera_error* error) {
  const absl::StatusOr<std::uint64_t> moved = sequence->sequence.Offload();
  if (moved.ok() && moved_bytes != nullptr) *moved_bytes = *moved;
  return Report(moved.status(), error);
}

tessera_code tessera_sequence_restore(tessera_sequence* sequence, tessera_error* error) {
  return Report(sequence->sequence.Restore(), error);
}

tessera_code tessera_sequence_truncate(tessera_sequence* sequence, uint64_t tokens,
                                       tessera_error* error) {
  return Report(sequence->sequence.Truncate(tokens), error);
}

tessera_code tessera_sequence_park(tessera_sequence* sequence, tessera_error* error) {
  return Report(sequence->sequence.Park(), error);
}

tessera_code tessera_sequence_handover(tessera_sequence* sequence, uint64_t to_session_id,
                                       tessera_error* error) {
  return Report(sequence->sequence.Handover(tessera::SessionId(to_session_id)), error);
}

tessera_code tessera_sequence_describe(const tessera_sequence* sequence,
                                       tessera_sequence_info* info, tessera_error* error) {
  const absl::StatusOr<tessera::v1::DescribeResponse> found = sequence->sequence.Describe();
  if (found.ok()) {
    const tessera_sequence_info full = {
        .struct_size = info->struct_size,
        .tokens = found->tokens(),
        .tile_bytes = found->tile_bytes(),
        .shared_tile_bytes = found->shared_tile_bytes(),
        .decoding = found->decoding(),
        .failed = found->state() == tessera::v1::SEQUENCE_STATE_FAILED,
        .rotation_bytes = found->rotation_bytes(),
        .offloaded_bytes = found->offloaded_bytes()};
    std::memcpy(info, &full, std::min(info->struct_size, sizeof full));
  }
  return Report(found.status(), error);
}

// ---- compression

tessera_code tessera_sequence_needs(const tessera_sequence* sequence, tessera_needs* needs,
                                    tessera_error* error) {
  const tessera::v1::PolicyNeeds& asked = sequence->sequence.needs();
  const bool sums = asked.attention_sums();
  const tessera_needs told = {.struct_size = needs->struct_size,
                              .queries = sums || asked.last_queries() > 0 ||
                                         asked.last_share() > 0 || asked.norm_share() > 0,
                              .keys = sums,
                              .token_ids = asked.token_ids(),
                              .while_decoding = asked.acts_while_decoding()};
  std::memcpy(needs, &told, std::min(needs->struct_size, sizeof told));
  return Report(absl::OkStatus(), error);
}

tessera_code tessera_sequence_observe(tessera_sequence* sequence,
                                      const tessera_observation* observation,
                                      tessera_error* error) {
  const tessera_observation given =
      Adopt(observation, tessera_observation TESSERA_OBSERVATION_INIT);
  return Report(sequence->sequence.Observe({.layer = given.layer,
                                            .first_token = given.first_token,
                                            .query = Bytes(given.query, given.query_bytes),
                                            .key = Bytes(given.key, given.key_bytes),
                                            .prompt_tokens = given.prompt_tokens}),
                error);
}

tessera_code tessera_sequence_observe_tokens(tessera_sequence* sequence, uint64_t first_token,
                                             const uint32_t* ids, size_t count,
                                             tessera_error* error) {
  return Report(sequence->sequence.ObserveTokens(first_token, {ids, count}), error);
}

tessera_code tessera_sequence_end_prompt(tessera_sequence* sequence, tessera_error* error) {
  return Report(sequence->sequence.EndPrompt(), error);
}

tessera_code tessera_sequence_compress(tessera_sequence* sequence, tessera_error* error) {
  return Report(sequence->sequence.Compress().status(), error);
}

// ---- published prefixes

tessera_code tessera_sequence_publish(tessera_sequence* sequence, const uint32_t* token_ids,
                                      size_t count, const tessera_publish_options* options,
                                      uint64_t* prefix_id, int* deduplicated,
                                      tessera_error* error) {
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
  const tessera_match_options given =
      Adopt(options, tessera_match_options TESSERA_MATCH_OPTIONS_INIT);
  const absl::StatusOr<client::PrefixMatch> found =
      worker->worker->Match(model->model, {.policy = Text(given.policy),
                                           .tokens = {given.token_ids, given.token_count},
                                           .wait = std::chrono::milliseconds(given.wait_ms),
                                           .will_compute = given.will_compute != 0});
  if (found.ok()) {
    tessera_prefix_match told = {match->struct_size, found->prefix.value(), found->tokens,
                                 found->computing, found->computation.value()};
    std::memcpy(match, &told, std::min(match->struct_size, sizeof told));
  }
  return Report(found.status(), error);
}

tessera_code tessera_fork_prefix(tessera_worker* worker, const tessera_model* model,
                                 const tessera_prefix_match* match, uint64_t tokens,
                                 tessera_sequence** sequence, tessera_error* error) {
  const tessera_prefix_match given = Adopt(match, tessera_prefix_match TESSERA_PREFIX_MATCH_INIT);
  return Hand(worker->worker->Fork({.model = model->model,
                                    .prefix = tessera::PrefixId(given.prefix_id),
                                    .tokens = given.tokens},
                                   tokens),
              sequence, error);
}

tessera_code tessera_free_id(tessera_worker* worker, uint64_t id, tessera_error* error) {
  return Report(worker->worker->Free(tessera::PrefixId(id)), error);
}

// ---- decode

tessera_code tessera_step_begin(tessera_worker* worker, tessera_sequence* const* sequences,
                                size_t count, const tessera_step_options* options,
                                tessera_step** step, tessera_error* error) {
  const tessera_step_options given = Adopt(options, tessera_step_options TESSERA_STEP_OPTIONS_INIT);
  std::vector<client::Sequence*> batch;
  for (std::size_t i = 0; i < count; ++i) batch.push_back(&sequences[i]->sequence);
  auto begun = std::make_unique<tessera_step>();
  if (given.parallel_for != nullptr) {
    begun->executor.emplace(given.parallel_for, given.parallel_context);
  }
  client::StepOptions step_options;
  step_options.new_tokens = given.new_tokens;
  if (given.new_tokens_each != nullptr) {
    step_options.new_tokens_each = {given.new_tokens_each, count};
  }
  step_options.timeout = std::chrono::milliseconds(given.timeout_ms);
  step_options.executor = begun->executor.has_value() ? &*begun->executor : nullptr;
  step_options.cuda_stream = given.cuda_stream;
  absl::StatusOr<client::Step> opened = worker->worker->BeginStep(batch, step_options);
  if (opened.ok()) {
    begun->step = *std::move(opened);
    *step = begun.release();
  }
  return Report(opened.status(), error);
}

tessera_code tessera_step_append(tessera_step* step, uint32_t layer,
                                 const tessera_step_tensors* tensors, tessera_error* error) {
  const client::StepTensors given = ToStepTensors(tensors);
  return Report(step->step.Append(layer, given.key, given.value), error);
}

tessera_code tessera_step_attend(tessera_step* step, uint32_t layer,
                                 const tessera_step_tensors* tensors, tessera_error* error) {
  return Report(step->step.Attend(layer, ToStepTensors(tensors)), error);
}

tessera_code tessera_step_append_and_attend(tessera_step* step, uint32_t layer,
                                            const tessera_step_tensors* tensors,
                                            tessera_error* error) {
  return Report(step->step.AppendAndAttend(layer, ToStepTensors(tensors)), error);
}

tessera_code tessera_step_end(tessera_step* step, const uint32_t* accepted, size_t count,
                              tessera_error* error) {
  if (accepted == nullptr) return Report(step->step.End(), error);
  return Report(step->step.End({accepted, count}), error);
}

void tessera_step_destroy(tessera_step* step) { delete step; }

}  // extern "C"
