// The C interface, implemented with the C++ one: workers, models and steps.

#include <chrono>
#include <string_view>
#include <utility>
#include <vector>

#include "client/api/c_handles.h"
#include "client/error/error_info.h"
#include "daemon/base/strings.h"
#include "daemon/base/version.h"
#include "tessera/delimiters.h"

namespace client = tessera::client;
using client::Adopt;
using client::Bytes;
using client::CheckArguments;
using client::Report;
using client::Text;

static_assert(static_cast<int>(client::ErrorCause::kArgument) == TESSERA_CAUSE_ARGUMENT);
static_assert(sizeof(tessera_error) == 1024);  // unchanged since the first release

namespace {

// Adapts the caller's parallel_for to an Executor.
class CallbackExecutor final : public client::Executor {
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
  std::optional<CallbackExecutor> executor;  // declared first: the step uses it
  client::Step step;
};

namespace {

tessera_step_tensors Adopted(const tessera_step_tensors* given) {
  return Adopt(given, tessera_step_tensors TESSERA_STEP_TENSORS_INIT);
}

absl::Status CheckRows(const char* call, const tessera_step_tensors& given) {
  return CheckArguments(call, {{"tensors->key", given.key, given.key_bytes},
                               {"tensors->value", given.value, given.key_bytes}});
}

absl::Status CheckQueries(const char* call, const tessera_step_tensors& given) {
  return CheckArguments(call, {{"tensors->query", given.query, given.query_bytes},
                               {"tensors->output", given.output, given.output_bytes}});
}

client::StepTensors ToStepTensors(const tessera_step_tensors& tensors) {
  return {.key = Bytes(tensors.key, tensors.key_bytes),
          .value = Bytes(tensors.value, tensors.key_bytes),
          .query = Bytes(tensors.query, tensors.query_bytes),
          .output = {static_cast<std::byte*>(tensors.output), tensors.output_bytes},
          .lse = {tensors.lse, tensors.lse == nullptr ? 0 : tensors.lse_count},
          .output_type = client::ToElementType(tensors.output_type),
          .causal = tensors.causal != 0};
}

}  // namespace

namespace tessera::client {

tessera_code Report(const absl::Status& status, tessera_error* error) {
  const auto code = static_cast<tessera_code>(status.code());
  if (error == nullptr) return code;
  error->code = code;
  const std::string_view message = AsStringView(status.message());
  const std::size_t length = std::min(message.size(), sizeof error->message - 1);
  message.copy(error->message, length);
  error->message[length] = '\0';
  const ErrorInfo info = GetErrorInfo(status);
  error->cause = static_cast<std::uint32_t>(info.cause);
  error->retry_after_ms = static_cast<std::uint32_t>(info.retry_after.count());
  return code;
}

absl::Status CheckArguments(const char* call, std::initializer_list<CArgument> arguments) {
  for (const CArgument& argument : arguments) {
    if (argument.pointer == nullptr && argument.elements > 0) {
      return BadArgument(call, Concat(argument.name, " is NULL"));
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera::client

extern "C" {

uint32_t tessera_abi_version(void) { return TESSERA_ABI_VERSION; }

const char* tessera_version(void) { return tessera::Version().data(); }

// ---- worker

tessera_code tessera_attach(const tessera_attach_options* options, tessera_worker** worker,
                            tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"worker", worker}}); !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_attach_options given =
      Adopt(options, tessera_attach_options TESSERA_ATTACH_OPTIONS_INIT);
  client::AttachOptions attach;
  if (given.address != nullptr) attach.address = given.address;
  attach.device = Text(given.device);
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
    attach.on_warning = [callback = given.on_warning,
                         context = given.warning_context](std::string_view warning) {
      callback(std::string(warning).c_str(), context);
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
  if (absl::Status bad = CheckArguments(__func__, {{"worker", worker}}); !bad.ok()) {
    return Report(bad, error);
  }
  return Report(worker->worker->status(), error);
}

tessera_code tessera_reattach(tessera_worker* worker, size_t* gone, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"worker", worker}}); !bad.ok()) {
    return Report(bad, error);
  }
  const absl::StatusOr<client::ReattachReport> report = worker->worker->Reattach();
  if (report.ok() && gone != nullptr) *gone = report->gone.size();
  return Report(report.status(), error);
}

int tessera_is_mapped(const tessera_worker* worker) {
  return worker != nullptr && worker->worker->mapped();
}

int tessera_is_draining(const tessera_worker* worker) {
  return worker != nullptr && worker->worker->draining();
}

uint64_t tessera_session_id(const tessera_worker* worker) {
  return worker == nullptr ? 0 : worker->worker->session_id().value();
}

// ---- models

size_t tessera_delimiters(const char* const* texts, size_t count, uint32_t* ids) {
  size_t found = 0;
  if (texts == nullptr) return 0;
  for (size_t i = 0; i < count; ++i) {
    if (texts[i] == nullptr || !client::IsDelimiter(texts[i])) continue;
    if (ids != nullptr) ids[found] = static_cast<uint32_t>(i);
    ++found;
  }
  return found;
}

tessera_code tessera_register_model(tessera_worker* worker, const tessera_model_options* options,
                                    tessera_model** model, tessera_error* error) {
  if (absl::Status bad =
          CheckArguments(__func__, {{"worker", worker}, {"options", options}, {"model", model}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_model_options given =
      Adopt(options, tessera_model_options TESSERA_MODEL_OPTIONS_INIT);
  if (absl::Status bad =
          CheckArguments(__func__, {{"options->layers", given.layers, given.layer_count}});
      !bad.ok()) {
    return Report(bad, error);
  }
  client::ModelGeometry geometry;
  geometry.name = Text(given.name);
  geometry.type = client::ToElementType(given.type);
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

// ---- decode

tessera_code tessera_step_begin(tessera_worker* worker, tessera_sequence* const* sequences,
                                size_t count, const tessera_step_options* options,
                                tessera_step** step, tessera_error* error) {
  if (absl::Status bad = CheckArguments(
          __func__, {{"worker", worker}, {"sequences", sequences, count}, {"step", step}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_step_options given = Adopt(options, tessera_step_options TESSERA_STEP_OPTIONS_INIT);
  std::vector<client::Sequence*> batch;
  for (std::size_t i = 0; i < count; ++i) {
    // BeginStep refuses null and names the index.
    batch.push_back(sequences[i] == nullptr ? nullptr : &sequences[i]->sequence);
  }
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
  if (absl::Status bad = CheckArguments(__func__, {{"step", step}, {"tensors", tensors}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_step_tensors given = Adopted(tensors);
  if (absl::Status bad = CheckRows(__func__, given); !bad.ok()) return Report(bad, error);
  return Report(step->step.Append(layer, Bytes(given.key, given.key_bytes),
                                  Bytes(given.value, given.key_bytes)),
                error);
}

tessera_code tessera_step_attend(tessera_step* step, uint32_t layer,
                                 const tessera_step_tensors* tensors, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"step", step}, {"tensors", tensors}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_step_tensors given = Adopted(tensors);
  if (absl::Status bad = CheckQueries(__func__, given); !bad.ok()) return Report(bad, error);
  return Report(step->step.Attend(layer, ToStepTensors(given)), error);
}

tessera_code tessera_step_append_and_attend(tessera_step* step, uint32_t layer,
                                            const tessera_step_tensors* tensors,
                                            tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"step", step}, {"tensors", tensors}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_step_tensors given = Adopted(tensors);
  absl::Status bad = CheckRows(__func__, given);
  if (bad.ok()) bad = CheckQueries(__func__, given);
  if (!bad.ok()) return Report(bad, error);
  return Report(step->step.AppendAndAttend(layer, ToStepTensors(given)), error);
}

tessera_code tessera_step_end(tessera_step* step, const uint32_t* accepted, size_t count,
                              tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"step", step}}); !bad.ok()) {
    return Report(bad, error);
  }
  if (accepted == nullptr) return Report(step->step.End(), error);
  return Report(step->step.End({accepted, count}), error);
}

void tessera_step_destroy(tessera_step* step) { delete step; }

}  // extern "C"
