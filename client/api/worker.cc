#include "tessera/worker.h"

#include <string>
#include <utility>
#include <vector>

#include "client/api/answers.h"
#include "client/api/lease_core.h"
#include "client/api/tensor_memory.h"
#include "client/api/worker_access.h"
#include "client/error/error_info.h"
#include "client/rpc/daemon_directory.h"
#include "client/rpc/grpc_transport.h"
#include "client/sequence/bulk_append.h"
#include "client/sequence/compression.h"
#include "client/sequence/policy_compression.h"
#include "client/sequence/sequence_access.h"
#include "client/sequence/sequence_state.h"
#include "client/session/kernel_types.h"
#include "client/session/session.h"
#include "client/step/attend_rpc.h"
#include "client/step/mapped_step.h"
#include "client/step/remote_read.h"
#include "client/step/remote_step.h"
#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

constexpr char kEmptyModel[] = "model is an empty handle; RegisterModel returns a valid one";

std::string EmptySequence(std::string_view argument) {
  return Concat(argument, " is null or an empty handle (default-constructed or moved from)");
}

bool IsEmpty(const Sequence* sequence) { return sequence == nullptr || !sequence->valid(); }

}  // namespace

absl::StatusOr<std::unique_ptr<Worker>> AttachWith(AttachOptions options,
                                                   const Environment& environment,
                                                   std::unique_ptr<Connector> connector) {
  if (connector == nullptr) {
    GrpcTarget target = {.address = options.address, .tls = options.tls, .device = {}};
    // Here, because the current device is that of the calling thread.
    if (!options.device.empty() || IsDirectoryAddress(options.address)) {
      absl::StatusOr<WantedDevice> device = FindWantedDevice(
          environment.gpus == nullptr ? GpuPlatform::System() : *environment.gpus, options.device);
      if (!device.ok()) return device.status();
      target.device = *std::move(device);
    }
    absl::StatusOr<std::unique_ptr<Connector>> grpc = NewGrpcConnector(std::move(target));
    if (!grpc.ok()) return grpc.status();
    connector = *std::move(grpc);
  }
  auto core = std::make_shared<Core>(std::move(options), environment, std::move(connector));
  if (absl::Status status = core->Attach(); !status.ok()) return status;
  return WorkerAccess::Make(std::move(core));
}

absl::StatusOr<std::unique_ptr<Worker>> Worker::Attach(AttachOptions options) {
  return AttachWith(std::move(options), Environment());
}

Worker::~Worker() { core_->Detach(); }

absl::StatusOr<Model> Worker::RegisterModel(const ModelGeometry& geometry) {
  absl::StatusOr<std::shared_ptr<ModelRecord>> record = core_->RegisterModel(geometry);
  if (!record.ok()) return record.status();
  return Model(*std::move(record));
}

absl::StatusOr<Sequence> Worker::CreateSequence(const Model& model, const std::string& policy) {
  if (!model.valid()) return BadArgument("Worker::CreateSequence", kEmptyModel);
  absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  if (!session.ok()) return session.status();
  const std::shared_ptr<const BoundModel> bound = model.record_->bound();
  v1::CreateSequenceRequest request;
  v1::CreateSequenceResponse response;
  request.set_model_id(bound->id().value());
  request.set_policy(policy);
  if (absl::Status status = (*session)->Call(request, response); !status.ok()) return status;
  auto state = std::make_shared<SequenceState>(SequenceId(response.sequence_id()), bound,
                                               response.directory_offset(), 0);
  state->TakePolicy(response);
  core_->AddSequence(state);
  return Sequence(core_, std::move(state));
}

absl::StatusOr<Sequence> Worker::Adopt(const Model& model, SequenceId sequence) {
  if (!model.valid()) return BadArgument("Worker::Adopt", kEmptyModel);
  absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  if (!session.ok()) return session.status();
  v1::DescribeRequest request;
  v1::DescribeResponse response;
  request.set_sequence_id(sequence.value());
  if (absl::Status status = (*session)->Call(request, response); !status.ok()) return status;
  const std::shared_ptr<const BoundModel> bound = model.record_->bound();
  if (response.model_id() != bound->id().value()) {
    return absl::InvalidArgumentError(Concat(sequence.ToString(), " belongs to model ",
                                             response.model_id(), ", not to ",
                                             bound->id().ToString()));
  }
  if (SessionId(response.owner_session_id()) != (*session)->id()) {
    return absl::FailedPreconditionError(Concat(sequence.ToString(), " is owned by session ",
                                                response.owner_session_id(), ", not by this one, ",
                                                (*session)->id().ToString(),
                                                "; its owner must call Handover first"));
  }
  auto state = std::make_shared<SequenceState>(sequence, bound, response.directory_offset(),
                                               response.tokens());
  state->TakePolicy(response);
  state->position_shift = response.position_shift();
  state->compressed_at = response.decided_tokens();
  state->prompt_waits = response.tokens() > response.decided_tokens();
  // The daemon may decide at any time by what the previous worker has observed.
  if (state->observer != nullptr && response.tokens() > 0) {
    state->observer->MarkPrefixDecided();
  }
  core_->AddSequence(state);
  return Sequence(core_, std::move(state));
}

absl::StatusOr<Step> Worker::BeginStep(std::span<Sequence* const> sequences,
                                       const StepOptions& options) {
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (!IsEmpty(sequences[i])) continue;
    return BadArgument("Worker::BeginStep", EmptySequence(Concat("sequences[", i, "]")));
  }
  absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  if (!session.ok()) return session.status();
  for (Sequence* sequence : sequences) {
    if (DueForCompression(*sequence->state_)) {
      if (absl::Status status = sequence->Compress().status(); !status.ok()) return status;
    }
    std::vector<std::string> warnings;
    // A busy sequence refuses the step below.
    if (const auto use = SequenceUse::Take(sequence->state_); use.ok()) {
      warnings = WarningsBeforeStep(**session, *sequence->state_);
    }
    for (const std::string& warning : warnings) core_->Warn(warning);
  }
  absl::Status status;
  std::shared_ptr<StepEngine> engine;
  if (MappedMemory* mapped = (*session)->mapped_memory()) {
    absl::StatusOr<MappedStep*> step = MappedStep::Take(*mapped, (*session)->environment());
    status = step.status();
    if (step.ok()) {
      status = (*step)->Begin(**session, sequences, options);
      engine = std::shared_ptr<StepEngine>(*session, *step);  // the session keeps it alive
    }
  } else {
    auto step = std::make_shared<RemoteStep>(*session);
    status = step->Begin(sequences, options);
    engine = std::move(step);
  }
  if (!status.ok()) return status;
  return Step(std::move(engine));
}

absl::StatusOr<Read> Worker::BeginRead(std::span<Sequence* const> sequences,
                                       const ReadOptions& options) {
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (!IsEmpty(sequences[i])) continue;
    return BadArgument("Worker::BeginRead", EmptySequence(Concat("sequences[", i, "]")));
  }
  absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  if (!session.ok()) return session.status();
  MappedMemory* const mapped = (*session)->mapped_memory();
  if (mapped == nullptr) {
    auto read = std::make_shared<RemoteRead>(*session);
    if (absl::Status status = read->Begin(sequences); !status.ok()) return status;
    return Read(std::move(read));
  }
  absl::StatusOr<MappedStep*> read = MappedStep::Take(*mapped, (*session)->environment());
  if (!read.ok()) return read.status();
  absl::Status status = (*read)->BeginRead(**session, sequences, options);
  if (!status.ok()) return status;
  return Read(std::shared_ptr<ReadEngine>(*session, *read));  // the session keeps it alive
}

absl::Status Worker::AttendRpc(std::uint32_t layer, std::span<const AttendQuery> queries,
                               const AttendOptions& options) {
  absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  if (!session.ok()) return session.status();
  if (queries.empty()) {
    return absl::InvalidArgumentError("the batch has no queries; pass at least one");
  }
  for (std::size_t i = 0; i < queries.size(); ++i) {
    if (!IsEmpty(queries[i].sequence)) continue;
    return BadArgument("Worker::AttendRpc", EmptySequence(Concat("queries[", i, "].sequence")));
  }
  const BoundModel& model = *queries.front().sequence->state_->model;
  if (layer >= model.layers()) {
    return absl::InvalidArgumentError(
        Concat("layer is ", layer, "; the model has ", model.layers(), " layers"));
  }
  if (absl::Status status = CheckOutputType(options.output_type, model); !status.ok()) {
    return status;
  }
  if (options.selection.has_value()) {
    absl::Status status = CheckRule(*options.selection);
    if (!status.ok()) return status;
  }
  const kernels::LayerGeometry& geometry = model.geometry(layer);
  std::vector<AttendRow> rows;
  for (const AttendQuery& query : queries) {
    const std::uint64_t heads = std::uint64_t{query.queries} * geometry.query_heads;
    const std::uint64_t elements = heads * geometry.head_dim;
    const std::uint64_t query_bytes = elements * kernels::ElementBytes(model.type());
    const std::uint64_t output_bytes = elements * ElementBytes(options.output_type);
    if (query.queries == 0 || query.query.size() != query_bytes ||
        query.output.size() != output_bytes || (!query.lse.empty() && query.lse.size() != heads)) {
      return absl::InvalidArgumentError(
          Concat("query of ", query.sequence->id().ToString(), ": query has ", query.query.size(),
                 " bytes, output ", query.output.size(), " bytes, lse ", query.lse.size(),
                 " values; [", query.queries, "][", geometry.query_heads, "][", geometry.head_dim,
                 "] needs ", query_bytes, ", ", output_bytes, " and ", heads, " (or no lse)"));
    }
    absl::Status cut = CutBeforeReading(**session, SequenceAccess::State(*query.sequence));
    if (!cut.ok()) return cut;
    rows.push_back({.sequence = query.sequence->id(),
                    .queries = query.queries,
                    .query = query.query,
                    .output = query.output,
                    .lse = query.lse,
                    .first_query_position = query.first_query_position});
  }
  AttendCall call = {.model = &model,
                     .layer = layer,
                     .output_type = ToKernels(options.output_type),
                     .causal = options.causal,
                     .rows = rows};
  if (options.selection.has_value()) call.selection = ToKernels(*options.selection);
  return AttendByRpc(**session, call);
}

absl::StatusOr<SelectResult> Worker::Select(std::uint32_t layer, const SelectQuery& query,
                                            const SelectionRule& rule) {
  const absl::StatusOr<v1::SelectResponse> response = SelectMessage(*this, layer, query, rule);
  if (!response.ok()) return response.status();
  return FromProto(*response);
}

absl::StatusOr<v1::SelectResponse> SelectMessage(const Worker& worker, std::uint32_t layer,
                                                 const SelectQuery& query,
                                                 const SelectionRule& rule) {
  if (IsEmpty(query.sequence)) {
    return BadArgument("Worker::Select", EmptySequence("query.sequence"));
  }
  absl::StatusOr<std::shared_ptr<Session>> session = WorkerAccess::CoreOf(worker)->session();
  if (!session.ok()) return session.status();
  if (absl::Status status = CheckRule(rule); !status.ok()) return status;
  const BoundModel& model = *SequenceAccess::State(*query.sequence)->model;
  if (layer >= model.layers()) {
    return absl::InvalidArgumentError(
        Concat("layer is ", layer, "; the model has ", model.layers(), " layers"));
  }
  if (absl::Status cut = CutBeforeReading(**session, SequenceAccess::State(*query.sequence));
      !cut.ok()) {
    return cut;
  }
  v1::SelectRequest request;
  request.set_sequence_id(query.sequence->id().value());
  request.set_layer(layer);
  request.set_non_causal(!query.causal);
  if (query.first_query_position.has_value()) {
    request.set_first_query_position(*query.first_query_position);
  }
  ToProto(ToKernels(rule), *request.mutable_selection());
  v1::Tensor& tensor = *request.mutable_query();
  tensor.set_dtype(ToDType(model.type()));
  tensor.add_shape(query.queries);
  tensor.add_shape(model.geometry(layer).query_heads);
  tensor.add_shape(model.geometry(layer).head_dim);
  tensor.set_inline_(query.query.data(), query.query.size());
  v1::SelectResponse response;
  if (absl::Status status = (*session)->Call(request, response); !status.ok()) return status;
  return response;
}

absl::StatusOr<Tensor> Worker::NewTensor(std::uint64_t bytes) {
  absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  if (!session.ok()) return session.status();
  absl::StatusOr<std::unique_ptr<TensorMemory>> memory =
      TensorMemory::New(*std::move(session), bytes);
  if (!memory.ok()) return memory.status();
  std::byte* const data = (*memory)->data();
  return Tensor(*std::move(memory), data, bytes);
}

absl::StatusOr<DaemonStats> Worker::Stats() {
  const absl::StatusOr<v1::StatsResponse> response = StatsMessage(*this);
  if (!response.ok()) return response.status();
  return FromProto(*response);
}

absl::StatusOr<v1::StatsResponse> StatsMessage(const Worker& worker) {
  absl::StatusOr<std::shared_ptr<Session>> session = WorkerAccess::CoreOf(worker)->session();
  if (!session.ok()) return session.status();
  v1::StatsRequest request;
  v1::StatsResponse response;
  if (absl::Status status = (*session)->Call(request, response); !status.ok()) return status;
  return response;
}

absl::StatusOr<ReattachReport> Worker::Reattach() { return core_->Reattach(); }

absl::Status Worker::status() const { return core_->session().status(); }

bool Worker::mapped() const {
  const absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  return session.ok() && (*session)->mapped_memory() != nullptr;
}

bool Worker::draining() const {
  const absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  return session.ok() && (*session)->draining();
}

SessionId Worker::session_id() const {
  const absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  return session.ok() ? (*session)->id() : SessionId();
}

DaemonInfo Worker::daemon() const { return FromProto(WelcomeMessage(*this)); }

v1::Welcome WelcomeMessage(const Worker& worker) {
  const absl::StatusOr<std::shared_ptr<Session>> session = WorkerAccess::CoreOf(worker)->session();
  return session.ok() ? (*session)->welcome() : v1::Welcome();
}

}  // namespace tessera::client
