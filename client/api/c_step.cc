// The C interface, implemented with the C++ one: decode steps.

#include <chrono>
#include <numeric>
#include <utility>

#include "client/api/c_decode.h"

namespace client = tessera::client;
using client::Adopt;
using client::Bytes;
using client::CheckArguments;
using client::Report;
using client::RowKind;
using client::RowShape;

struct tessera_step {
  std::optional<client::CallbackExecutor> executor;  // declared first: the step uses it
  client::Step step;
  std::shared_ptr<client::Session> session;
  std::shared_ptr<const client::BoundModel> model;
  std::uint64_t tokens = 0;  // new ones, of all sequences
  client::RowCopies copies;
};

namespace {

tessera_step_tensors Adopted(const tessera_step_tensors* given) {
  return Adopt(given, tessera_step_tensors TESSERA_STEP_TENSORS_INIT);
}

// Fills `to` with dense key and value rows.
absl::Status TakeRows(const char* call, tessera_step& step, std::uint32_t layer,
                      const tessera_step_tensors& given, client::StepTensors& to) {
  absl::Status bad = CheckArguments(call, {{"tensors->key", given.key, given.key_bytes},
                                           {"tensors->value", given.value, given.key_bytes}});
  if (!bad.ok()) return bad;
  const RowShape shape = ShapeOf(*step.model, layer, RowKind::kKeyValue, step.tokens);
  absl::StatusOr<std::span<const std::byte>> rows =
      step.copies.Gather("tensors->key", step.session.get(), Bytes(given.key, given.key_bytes),
                         shape, given.key_strides);
  if (!rows.ok()) return rows.status();
  to.key = *rows;
  rows = step.copies.Gather("tensors->value", step.session.get(),
                            Bytes(given.value, given.key_bytes), shape, given.value_strides);
  if (!rows.ok()) return rows.status();
  to.value = *rows;
  return absl::OkStatus();
}

// Fills `to` with dense queries, and with dense memory for outputs.
absl::Status TakeQueries(const char* call, tessera_step& step, std::uint32_t layer,
                         const tessera_step_tensors& given, client::StepTensors& to) {
  absl::Status bad = CheckArguments(call, {{"tensors->query", given.query, given.query_bytes},
                                           {"tensors->output", given.output, given.output_bytes}});
  if (!bad.ok()) return bad;
  const absl::StatusOr<std::span<const std::byte>> query = step.copies.Gather(
      "tensors->query", step.session.get(), Bytes(given.query, given.query_bytes),
      ShapeOf(*step.model, layer, RowKind::kQuery, step.tokens), given.query_strides);
  if (!query.ok()) return query.status();
  const absl::StatusOr<std::span<std::byte>> output =
      step.copies.Reserve("tensors->output", step.session.get(),
                          {static_cast<std::byte*>(given.output), given.output_bytes},
                          ShapeOf(*step.model, layer, RowKind::kQuery, step.tokens,
                                  client::OutputElementBytes(given.output_type)),
                          given.output_strides);
  if (!output.ok()) return output.status();
  to.query = *query;
  to.output = *output;
  to.lse = {given.lse, given.lse == nullptr ? 0 : given.lse_count};
  to.output_type = client::ToElementType(given.output_type);
  to.causal = given.causal != 0;
  to.selection = client::ToSelection(given.selection);
  return absl::OkStatus();
}

void PlaceOutput(const tessera_step& step, std::uint32_t layer, const tessera_step_tensors& given,
                 const client::StepTensors& computed) {
  client::RowCopies::Scatter(computed.output,
                             {static_cast<std::byte*>(given.output), given.output_bytes},
                             ShapeOf(*step.model, layer, RowKind::kQuery, step.tokens,
                                     client::OutputElementBytes(given.output_type)),
                             given.output_strides);
}

}  // namespace

extern "C" {

tessera_code tessera_step_begin(tessera_worker* worker, tessera_sequence* const* sequences,
                                size_t count, const tessera_step_options* options,
                                tessera_step** step, tessera_error* error) {
  if (absl::Status bad = CheckArguments(
          __func__, {{"worker", worker}, {"sequences", sequences, count}, {"step", step}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_step_options given = Adopt(options, tessera_step_options TESSERA_STEP_OPTIONS_INIT);
  const std::vector<client::Sequence*> batch = client::BatchOf(sequences, count);
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
    const std::span<const std::uint32_t> each = step_options.new_tokens_each;
    begun->tokens = each.empty() ? std::uint64_t{given.new_tokens} * count
                                 : std::accumulate(each.begin(), each.end(), std::uint64_t{0});
    begun->model = client::SequenceAccess::State(*batch.front())->model;
    begun->session = client::SessionOf(client::WorkerAccess::CoreOf(*worker->worker));
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
  step->copies.Clear();
  client::StepTensors rows;
  absl::Status status = TakeRows(__func__, *step, layer, Adopted(tensors), rows);
  if (status.ok()) status = step->step.Append(layer, rows.key, rows.value);
  return Report(status, error);
}

tessera_code tessera_step_attend(tessera_step* step, uint32_t layer,
                                 const tessera_step_tensors* tensors, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"step", step}, {"tensors", tensors}});
      !bad.ok()) {
    return Report(bad, error);
  }
  step->copies.Clear();
  const tessera_step_tensors given = Adopted(tensors);
  client::StepTensors rows;
  absl::Status status = TakeQueries(__func__, *step, layer, given, rows);
  if (status.ok()) status = step->step.Attend(layer, rows);
  if (status.ok()) PlaceOutput(*step, layer, given, rows);
  return Report(status, error);
}

tessera_code tessera_step_append_and_attend(tessera_step* step, uint32_t layer,
                                            const tessera_step_tensors* tensors,
                                            tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"step", step}, {"tensors", tensors}});
      !bad.ok()) {
    return Report(bad, error);
  }
  step->copies.Clear();
  const tessera_step_tensors given = Adopted(tensors);
  client::StepTensors rows;
  absl::Status status = TakeRows(__func__, *step, layer, given, rows);
  if (status.ok()) status = TakeQueries(__func__, *step, layer, given, rows);
  if (status.ok()) status = step->step.AppendAndAttend(layer, rows);
  if (status.ok()) PlaceOutput(*step, layer, given, rows);
  return Report(status, error);
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
