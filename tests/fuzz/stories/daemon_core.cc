#include "tests/fuzz/stories/daemon_core.h"

#include <chrono>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "proto/shm/layout.h"
#include "tests/fuzz/stories/wire_form.h"

namespace tessera::fuzz {

namespace {

constexpr std::uint64_t kNodeBytes = 16 << 20;
constexpr char kMyToken[] = "mine";
constexpr char kForeignToken[] = "others";
constexpr int kManyJobs = 10000;

// Four bf16 numbers that occur nowhere else. The rows of the other tenant repeat them, and so does
// attention over such rows.
constexpr std::string_view kForeignRow("\x97\x3e\x1d\x3f\xc3\x3e\x68\x3f", 8);

v1::Tensor ForeignTensor(std::uint64_t tokens, bool query) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_BF16);
  if (!query) tensor.add_shape(1);
  for (const std::uint64_t extent : {tokens, std::uint64_t{1}, std::uint64_t{64}}) {
    tensor.add_shape(extent);
  }
  for (std::uint64_t i = 0; i < tokens * 64 / 4; ++i) tensor.mutable_inline_()->append(kForeignRow);
  return tensor;
}

void MustBeOk(const grpc::Status& status) { TESSERA_CHECK(status.ok(), status.error_message()); }

}  // namespace

// ---- FakeStream

FakeStream::FakeStream(const serving::AttachContext& door)
    : reactor_(serving::NewAttachReactor(door, &context_)) {
  BindReactor(reactor_);
}

FakeStream::~FakeStream() {
  HangUp();
  reactor_->OnDone();
}

bool FakeStream::Send(const v1::AttachRequest& message) {
  grpc::ByteBuffer* const wanted = std::exchange(wanted_, nullptr);
  if (wanted == nullptr || finished_) return false;
  *wanted = ToWire(message);
  reactor_->OnReadDone(true);
  Settle();
  return true;
}

void FakeStream::HangUp() {
  Settle();
  if (!std::exchange(read_ended_, true)) reactor_->OnReadDone(false);
  Settle();
  TESSERA_CHECK(finished_, "a stream ends when the worker hangs up");
}

void FakeStream::Settle() {
  while (std::exchange(writing_, false)) reactor_->OnWriteDone(true);
}

void FakeStream::Finish(grpc::Status) {
  TESSERA_CHECK(!finished_, "a stream ends once");
  finished_ = true;
}

void FakeStream::Write(const grpc::ByteBuffer* message, grpc::WriteOptions) {
  TESSERA_CHECK(!writing_ && !finished_, "one write at a time, and none after the end");
  written_.push_back(FromWire<v1::AttachResponse>(*message));
  writing_ = true;
}

void FakeStream::WriteAndFinish(const grpc::ByteBuffer* message, grpc::WriteOptions options,
                                grpc::Status status) {
  Write(message, options);
  Finish(std::move(status));
}

// ---- FakeMatch

FakeMatch::FakeMatch(serving::WorkerService& service, const v1::MatchRequest& request)
    : request_(request), reactor_(service.Match(&context_, &request_, &response_)) {
  BindReactor(reactor_);
}

FakeMatch::~FakeMatch() {
  if (!finished_) reactor_->OnCancel();
  TESSERA_CHECK(finished_, "a call that is cancelled is answered");
  reactor_->OnDone();
}

void FakeMatch::Finish(grpc::Status status) {
  TESSERA_CHECK(!finished_, "a call is answered once");
  status_ = std::move(status);
  finished_ = true;
}

// ---- Neighbour

Neighbour::Neighbour(DaemonCore& core, const std::string& token)
    : core_(core), stream_(core.Attach()) {
  v1::AttachRequest attach;
  attach.mutable_hello()->set_protocol_version(shm::kProtocolVersion);
  attach.mutable_hello()->set_tenant_token(token);
  TESSERA_CHECK(stream_->Send(attach), "it reads");
  key_ = stream_->Take().at(0).welcome().session();
  grpc::ServerContext context;
  v1::RegisterModelRequest model;
  *model.mutable_session() = key_;
  model.mutable_model()->set_name("a neighbour's");
  model.mutable_model()->set_dtype(v1::DTYPE_BF16);
  v1::LayerGeometry& layer = *model.mutable_model()->add_layers();
  layer.set_query_heads(1);
  layer.set_kv_heads(1);
  layer.set_head_dim(64);
  v1::RegisterModelResponse registered;
  MustBeOk(core.worker().RegisterModel(&context, &model, &registered));
  v1::CreateSequenceRequest create;
  *create.mutable_session() = key_;
  create.set_model_id(registered.model_id());
  v1::CreateSequenceResponse created;
  MustBeOk(core.worker().CreateSequence(&context, &create, &created));
  sequence_ = created.sequence_id();
  v1::AppendRequest append;
  *append.mutable_session() = key_;
  append.set_sequence_id(sequence_);
  *append.mutable_key() = ForeignTensor(40, false);
  *append.mutable_value() = ForeignTensor(40, false);
  v1::AppendResponse appended;
  MustBeOk(core.worker().Append(&context, &append, &appended));
  output_ = Attend();
}

Neighbour::~Neighbour() { TESSERA_CHECK(Attend() == output_, "a neighbour's rows are unchanged"); }

std::string Neighbour::Attend() {
  grpc::ServerContext context;
  v1::AttendRequest request;
  *request.mutable_session() = key_;
  v1::AttendItem& item = *request.add_items();
  item.set_sequence_id(sequence_);
  *item.mutable_query() = ForeignTensor(1, true);
  v1::AttendResponse response;
  MustBeOk(core_.worker().Attend(&context, &request, &response));
  return response.SerializeAsString();
}

// ---- DaemonCore

DaemonCore::DaemonCore(bool crowded) : parts_(PartsOptions()) {
  serving::AdminService::Actions actions = {
      .drain = [this](std::uint64_t) { services().draining.store(true); },
      .reload = []() -> absl::StatusOr<serving::AdminService::Reloaded> {
        return absl::InvalidArgumentError("there is no configuration to read");
      }};
  admin_ =
      std::make_unique<serving::AdminService>(services(), parts_.connections(), std::move(actions));
  foreign_ = std::make_unique<Neighbour>(*this, kForeignToken);
  if (crowded) honest_ = std::make_unique<Neighbour>(*this, kMyToken);
}

DaemonParts::Options DaemonCore::PartsOptions() {
  DaemonParts::Options options = {.node = {.memory_bytes = kNodeBytes,
                                           .raw_copy_bytes = 1 << 20,
                                           .host_tier_bytes = 4 << 20,
                                           .tenants = {{.name = "mine", .token = kMyToken},
                                                       {.name = "others", .token = kForeignToken}},
                                           .max_sessions = 8},
                                  .clock = &clock_,
                                  .scheduler = &scheduler_,
                                  .pause = [this](Clock::Duration time) { Pass(time); }};
  cache::Tenant::Options& each = options.node.tenant_template;
  each.pool_extent_bytes = kPoolExtent;
  each.directory_extent_bytes = kDirectoryExtent;
  each.ring_tiles = 2;
  each.staging_bytes = kStaging;
  each.tail_extent_bytes = 64 << 10;
  each.max_models = 4;
  each.max_sequences = 24;
  each.max_prefixes = 4;
  each.pin_limit = std::chrono::seconds(5);
  return options;
}

bool DaemonCore::HoldsForeign(std::string_view bytes) {
  return bytes.find(kForeignRow) != std::string_view::npos;
}

void DaemonCore::Pass(Clock::Duration time) {
  clock_.Advance(time);
  scheduler_.Run(1);
  for (const std::unique_ptr<cache::Tenant>& tenant : node().tenants()) {
    tenant->epochs().Collect();
    tenant->prefixes().Sweep();
  }
}

// The workers of the input are gone by now.
DaemonCore::~DaemonCore() {
  scheduler_.Run(kManyJobs);
  services().draining.store(false);
  honest_.reset();
  foreign_.reset();
  scheduler_.Run(kManyJobs);
  TESSERA_CHECK(parts_.connections().size() == 0, "every stream has ended");
  parts_.StopWatching();
  Pass(std::chrono::seconds(60));
  parts_.ExpectNothingLeft();
}

}  // namespace tessera::fuzz
