// The C interface, implemented with the C++ one: workers and models.

#include <chrono>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "client/api/c_handles.h"
#include "client/api/c_json.h"
#include "client/api/worker_access.h"
#include "client/error/error_info.h"
#include "daemon/base/strings.h"
#include "daemon/base/version.h"
#include "tessera/delimiters.h"

namespace client = tessera::client;
using client::Adopt;
using client::CheckArguments;
using client::Report;
using client::Text;

static_assert(static_cast<int>(client::ErrorCause::kArgument) == TESSERA_CAUSE_ARGUMENT);
static_assert(sizeof(tessera_error) == 1024);  // unchanged since the first release

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

namespace {

// Of a model or a layer.
client::Rope RopeOf(const auto& given) {
  client::Rope rope = {.theta = given.rope_theta, .interleaved = given.rope_interleaved != 0};
  if (given.rope_frequencies != nullptr) {
    rope.frequencies.assign(given.rope_frequencies,
                            given.rope_frequencies + given.rope_frequency_count);
  }
  return rope;
}

}  // namespace

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
  if (absl::Status bad = CheckArguments(
          __func__, {{"options->cache_salt", given.cache_salt, given.cache_salt_bytes}});
      !bad.ok()) {
    return Report(bad, error);
  }
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
  attach.implementation = Text(given.implementation);
  if (given.prefix_hash != nullptr) attach.prefix_hash = given.prefix_hash;
  attach.cache_salt = client::ByteString(given.cache_salt, given.cache_salt_bytes);
  attach.pin_limit = std::chrono::milliseconds(given.pin_limit_ms);
  auto made = std::make_unique<tessera_worker>();
  made->events = std::make_unique<client::CEvents>();
  made->events->Listen(attach);
  absl::StatusOr<std::unique_ptr<client::Worker>> attached =
      client::Worker::Attach(std::move(attach));
  if (attached.ok()) {
    made->worker = *std::move(attached);
    *worker = made.release();
  }
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

tessera_code tessera_stats_json(tessera_worker* worker, tessera_text* json, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"worker", worker}, {"json", json}});
      !bad.ok()) {
    return Report(bad, error);
  }
  return client::HandJson(client::StatsMessage(*worker->worker), json, error);
}

tessera_code tessera_welcome_json(const tessera_worker* worker, tessera_text* json,
                                  tessera_error* error) {
  absl::Status bad = CheckArguments(__func__, {{"worker", worker}, {"json", json}});
  if (bad.ok()) bad = worker->worker->status();
  if (!bad.ok()) return Report(bad, error);
  tessera::v1::Welcome welcome = client::WelcomeMessage(*worker->worker);
  // Secrets of the session, and bytes that are no text.
  welcome.clear_session();
  welcome.clear_nonce();
  welcome.clear_device_uuid();
  return client::HandJson(absl::StatusOr<tessera::v1::Welcome>(std::move(welcome)), json, error);
}

void tessera_free_text(tessera_text text) { std::free(text); }

int tessera_events_fd(const tessera_worker* worker) {
  return worker == nullptr || worker->events == nullptr ? -1 : worker->events->fd();
}

tessera_code tessera_next_event(tessera_worker* worker, tessera_event* event,
                                tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"worker", worker}, {"event", event}});
      !bad.ok()) {
    return Report(bad, error);
  }
  tessera_event next = TESSERA_EVENT_INIT;
  if (worker->events != nullptr) next = worker->events->Take();
  next.struct_size = event->struct_size;
  std::memcpy(event, &next, std::min(event->struct_size, sizeof next));
  return Report(absl::OkStatus(), error);
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
  if (absl::Status bad = CheckArguments(
          __func__, {{"options->layers", given.layers, given.layer_count},
                     {"options->weights_id", given.weights_id, given.weights_id_bytes},
                     {"options->adapter_id", given.adapter_id, given.adapter_id_bytes}});
      !bad.ok()) {
    return Report(bad, error);
  }
  client::ModelGeometry geometry;
  geometry.weights_id = client::ByteString(given.weights_id, given.weights_id_bytes);
  geometry.adapter_id = client::ByteString(given.adapter_id, given.adapter_id_bytes);
  geometry.name = Text(given.name);
  geometry.type = client::ToElementType(given.type);
  geometry.rope = RopeOf(given);
  if (given.delimiter_token_ids != nullptr) {
    geometry.delimiter_token_ids.assign(given.delimiter_token_ids,
                                        given.delimiter_token_ids + given.delimiter_count);
  }
  const std::size_t layer_bytes = given.layer_count == 0 ? 0 : given.layers->struct_size;
  if (given.layer_count != 0 && layer_bytes < sizeof(std::size_t)) {
    return Report(
        client::BadArgument(__func__, tessera::Concat("options->layers[0].struct_size is ",
                                                      layer_bytes, "; use TESSERA_LAYER_INIT")),
        error);
  }
  for (std::size_t i = 0; i < given.layer_count; ++i) {
    const auto* const at = reinterpret_cast<const tessera_layer*>(
        reinterpret_cast<const std::byte*>(given.layers) + i * layer_bytes);
    if (at->struct_size != layer_bytes) {
      return Report(
          client::BadArgument(__func__, tessera::Concat("options->layers[", i, "].struct_size is ",
                                                        at->struct_size, ", that of the first is ",
                                                        layer_bytes, "; use TESSERA_LAYER_INIT")),
          error);
    }
    const tessera_layer layer = Adopt(at, tessera_layer TESSERA_LAYER_INIT);
    geometry.layers.push_back({.query_heads = layer.query_heads,
                               .kv_heads = layer.kv_heads,
                               .head_dim = layer.head_dim,
                               .scale = layer.scale,
                               .sliding_window = layer.sliding_window,
                               .logit_softcap = layer.logit_softcap});
    if (layer.sinks != nullptr) {
      geometry.layers.back().sinks.assign(layer.sinks, layer.sinks + layer.query_heads);
    }
    if (layer.has_rope != 0) geometry.layers.back().rope = RopeOf(layer);
  }
  absl::StatusOr<client::Model> registered = worker->worker->RegisterModel(geometry);
  if (registered.ok()) *model = new tessera_model{*std::move(registered)};
  return Report(registered.status(), error);
}

void tessera_model_destroy(tessera_model* model) { delete model; }

}  // extern "C"
