// The C interface, implemented with the C++ one: attention over committed tokens.

#include <chrono>
#include <numeric>
#include <utility>

#include "client/api/c_decode.h"
#include "client/api/c_json.h"

namespace client = tessera::client;
using client::Adopt;
using client::Bytes;
using client::CheckArguments;
using client::Report;
using client::RowKind;
using client::RowShape;

struct tessera_read {
  std::optional<client::CallbackExecutor> executor;  // declared first: the read uses it
  client::Read read;
  std::shared_ptr<client::Session> session;
  std::shared_ptr<const client::BoundModel> model;
  std::size_t sequences = 0;
  client::RowCopies copies;
};

namespace {

tessera_read_tensors Adopted(const tessera_read_tensors* given) {
  return Adopt(given, tessera_read_tensors TESSERA_READ_TENSORS_INIT);
}

// The tensors of a call, with dense rows in place of strided ones.
struct Given {
  client::ReadTensors rows;
  RowShape output;
};

absl::StatusOr<Given> TakeTensors(const char* call, const tessera_read_tensors& given,
                                  std::size_t sequences, std::uint32_t layer,
                                  const client::BoundModel& model, client::Session* session,
                                  client::RowCopies& copies) {
  absl::Status bad = CheckArguments(call, {{"tensors->query", given.query, given.query_bytes},
                                           {"tensors->output", given.output, given.output_bytes}});
  if (!bad.ok()) return bad;
  copies.Clear();
  Given taken;
  client::ReadTensors& rows = taken.rows;
  rows.queries = given.queries;
  std::uint64_t queries = std::uint64_t{given.queries} * sequences;
  if (given.queries_each != nullptr) {
    rows.queries_each = {given.queries_each, sequences};
    queries = std::accumulate(rows.queries_each.begin(), rows.queries_each.end(), std::uint64_t{0});
  }
  if (given.first_query_positions != nullptr) {
    rows.first_query_positions = {given.first_query_positions, sequences};
  }
  const absl::StatusOr<std::span<const std::byte>> query =
      copies.Gather("tensors->query", session, Bytes(given.query, given.query_bytes),
                    ShapeOf(model, layer, RowKind::kQuery, queries), given.query_strides);
  if (!query.ok()) return query.status();
  rows.query = *query;
  taken.output = ShapeOf(model, layer, RowKind::kQuery, queries,
                         client::OutputElementBytes(given.output_type));
  const absl::StatusOr<std::span<std::byte>> output = copies.Reserve(
      "tensors->output", session, {static_cast<std::byte*>(given.output), given.output_bytes},
      taken.output, given.output_strides);
  if (!output.ok()) return output.status();
  rows.output = *output;
  rows.lse = {given.lse, given.lse == nullptr ? 0 : given.lse_count};
  rows.output_type = client::ToElementType(given.output_type);
  rows.causal = given.causal != 0;
  rows.selection = client::ToSelection(given.selection);
  return taken;
}

void PlaceOutput(const tessera_read_tensors& given, const Given& taken) {
  client::RowCopies::Scatter(taken.rows.output,
                             {static_cast<std::byte*>(given.output), given.output_bytes},
                             taken.output, given.output_strides);
}

// The rows of a read's tensors that belong to each sequence, for AttendRpc.
std::vector<client::AttendQuery> QueriesOf(const std::vector<client::Sequence*>& batch,
                                           const client::ReadTensors& rows,
                                           const client::BoundModel& model, std::uint32_t layer) {
  const std::size_t heads = layer < model.layers() ? model.geometry(layer).query_heads : 0;
  const std::size_t query_token = heads * (heads == 0 ? 0 : model.row_bytes(layer));
  const std::size_t elements = heads == 0 ? 0 : model.geometry(layer).head_dim;
  const std::size_t output_token = heads * elements * client::ElementBytes(rows.output_type);
  std::vector<client::AttendQuery> queries;
  std::size_t first = 0;
  const auto part = [&](auto span, std::size_t per_query, std::size_t count) {
    const std::size_t from = std::min(span.size(), first * per_query);
    return span.subspan(from, std::min(span.size() - from, count * per_query));
  };
  for (std::size_t i = 0; i < batch.size(); ++i) {
    const std::uint32_t count = rows.queries_each.empty() ? rows.queries : rows.queries_each[i];
    client::AttendQuery query = {.sequence = batch[i],
                                 .queries = count,
                                 .query = part(rows.query, query_token, count),
                                 .output = part(rows.output, output_token, count),
                                 .lse = part(rows.lse, heads, count),
                                 .first_query_position = {}};
    if (!rows.first_query_positions.empty()) {
      query.first_query_position = rows.first_query_positions[i];
    }
    queries.push_back(query);
    first += count;
  }
  return queries;
}

}  // namespace

extern "C" {

tessera_code tessera_read_begin(tessera_worker* worker, tessera_sequence* const* sequences,
                                size_t count, const tessera_read_options* options,
                                tessera_read** read, tessera_error* error) {
  if (absl::Status bad = CheckArguments(
          __func__, {{"worker", worker}, {"sequences", sequences, count}, {"read", read}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_read_options given = Adopt(options, tessera_read_options TESSERA_READ_OPTIONS_INIT);
  const std::vector<client::Sequence*> batch = client::BatchOf(sequences, count);
  auto begun = std::make_unique<tessera_read>();
  if (given.parallel_for != nullptr) {
    begun->executor.emplace(given.parallel_for, given.parallel_context);
  }
  absl::StatusOr<client::Read> opened = worker->worker->BeginRead(
      batch, {.timeout = std::chrono::milliseconds(given.timeout_ms),
              .executor = begun->executor.has_value() ? &*begun->executor : nullptr,
              .cuda_stream = given.cuda_stream});
  if (opened.ok()) {
    begun->sequences = count;
    begun->model = client::SequenceAccess::State(*batch.front())->model;
    begun->session = client::SessionOf(client::WorkerAccess::CoreOf(*worker->worker));
    begun->read = *std::move(opened);
    *read = begun.release();
  }
  return Report(opened.status(), error);
}

tessera_code tessera_read_attend(tessera_read* read, uint32_t layer,
                                 const tessera_read_tensors* tensors, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"read", read}, {"tensors", tensors}});
      !bad.ok()) {
    return Report(bad, error);
  }
  const tessera_read_tensors given = Adopted(tensors);
  const absl::StatusOr<Given> taken = TakeTensors(__func__, given, read->sequences, layer,
                                                  *read->model, read->session.get(), read->copies);
  if (!taken.ok()) return Report(taken.status(), error);
  const absl::Status status = read->read.Attend(layer, taken->rows);
  if (status.ok()) PlaceOutput(given, *taken);
  return Report(status, error);
}

tessera_code tessera_read_end(tessera_read* read, tessera_error* error) {
  if (absl::Status bad = CheckArguments(__func__, {{"read", read}}); !bad.ok()) {
    return Report(bad, error);
  }
  return Report(read->read.End(), error);
}

void tessera_read_destroy(tessera_read* read) { delete read; }

tessera_code tessera_attend_rpc(tessera_worker* worker, tessera_sequence* const* sequences,
                                size_t count, uint32_t layer, const tessera_read_tensors* tensors,
                                tessera_error* error) {
  absl::Status bad = CheckArguments(
      __func__, {{"worker", worker}, {"sequences", sequences, count}, {"tensors", tensors}});
  const std::vector<client::Sequence*> batch =
      bad.ok() ? client::BatchOf(sequences, count) : std::vector<client::Sequence*>();
  for (std::size_t i = 0; i < batch.size() && bad.ok(); ++i) {
    if (batch[i] == nullptr || !batch[i]->valid()) {
      bad = client::BadArgument(__func__, tessera::Concat("sequences[", i, "] is NULL or empty"));
    }
  }
  if (bad.ok() && batch.empty()) bad = client::BadArgument(__func__, "count is 0; at least 1");
  if (!bad.ok()) return Report(bad, error);
  const tessera_read_tensors given = Adopted(tensors);
  const client::BoundModel& model = *client::SequenceAccess::State(*batch.front())->model;
  const std::shared_ptr<client::Session> session =
      client::SessionOf(client::WorkerAccess::CoreOf(*worker->worker));
  client::RowCopies copies;
  const absl::StatusOr<Given> taken =
      TakeTensors(__func__, given, count, layer, model, session.get(), copies);
  if (!taken.ok()) return Report(taken.status(), error);
  const absl::Status status =
      worker->worker->AttendRpc(layer, QueriesOf(batch, taken->rows, model, layer),
                                {.output_type = taken->rows.output_type,
                                 .causal = taken->rows.causal,
                                 .selection = taken->rows.selection});
  if (status.ok()) PlaceOutput(given, *taken);
  return Report(status, error);
}

tessera_code tessera_select_json(tessera_worker* worker, const tessera_sequence* sequence,
                                 uint32_t layer, const tessera_read_tensors* tensors,
                                 tessera_text* json, tessera_error* error) {
  absl::Status bad = CheckArguments(
      __func__, {{"worker", worker}, {"sequence", sequence}, {"tensors", tensors}, {"json", json}});
  if (!bad.ok()) return Report(bad, error);
  const tessera_read_tensors given = Adopted(tensors);
  bad = CheckArguments(__func__, {{"tensors->query", given.query, given.query_bytes},
                                  {"tensors->selection", given.selection}});
  if (bad.ok() && !sequence->sequence.valid()) {
    bad = client::BadArgument(__func__, "sequence is an empty handle");
  }
  if (!bad.ok()) return Report(bad, error);
  client::RowCopies copies;
  const absl::StatusOr<std::span<const std::byte>> query = copies.Gather(
      "tensors->query", client::SessionOf(client::WorkerAccess::CoreOf(*worker->worker)).get(),
      Bytes(given.query, given.query_bytes),
      ShapeOf(*client::SequenceAccess::State(sequence->sequence)->model, layer, RowKind::kQuery,
              given.queries),
      given.query_strides);
  if (!query.ok()) return Report(query.status(), error);
  client::SelectQuery asked = {.sequence = &sequence->sequence,
                               .queries = given.queries,
                               .query = *query,
                               .first_query_position = {},
                               .causal = given.causal != 0};
  if (given.first_query_positions != nullptr) {
    asked.first_query_position = *given.first_query_positions;
  }
  return client::HandJson(
      client::SelectMessage(*worker->worker, layer, asked, *client::ToSelection(given.selection)),
      json, error);
}

}  // extern "C"
