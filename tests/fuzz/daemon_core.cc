#include "tests/fuzz/daemon_core.h"

#include <chrono>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/device/cpu_device.h"
#include "daemon/metrics/metrics.h"
#include "daemon/residency/drop_prefixes.h"
#include "daemon/residency/offload_idle.h"
#include "kernels/dispatch/implementation.h"
#include "proto/shm/layout.h"

namespace tessera::fuzz {

namespace {

constexpr std::uint64_t kNodeBytes = 16 << 20;
constexpr char kMyToken[] = "mine";
constexpr char kForeignToken[] = "others";
constexpr int kManyJobs = 10000;

// Four bf16 numbers that nothing else consists of: a row of the other tenant is these, again and
// again, and so is what attention makes of such rows.
constexpr std::string_view kForeignRow("\x97\x3e\x1d\x3f\xc3\x3e\x68\x3f", 8);

device::Device& Cpu() {
  static device::CpuDevice device(kernels::BestImplementation());
  return device;
}

metrics::Metrics& AllMetrics() {
  static metrics::Metrics metrics({.version = "fuzz", .device = "cpu", .isa = "any"});
  return metrics;
}

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

FakeStream::FakeStream(const serving::AttachDoor& door)
    : reactor_(serving::NewAttachReactor(door, &context_)) {
  BindReactor(reactor_);
}

FakeStream::~FakeStream() {
  HangUp();
  reactor_->OnDone();
}

bool FakeStream::Send(const v1::AttachRequest& message) {
  v1::AttachRequest* const wanted = std::exchange(wanted_, nullptr);
  if (wanted == nullptr || finished_) return false;
  *wanted = message;
  reactor_->OnReadDone(true);
  Settle();
  return true;
}

void FakeStream::HangUp() {
  Settle();
  if (!std::exchange(read_ended_, true)) reactor_->OnReadDone(false);
  Settle();
  TESSERA_CHECK(finished_, "a stream that has hung up ends");
}

void FakeStream::Settle() {
  while (std::exchange(writing_, false)) reactor_->OnWriteDone(true);
}

void FakeStream::Finish(grpc::Status) {
  TESSERA_CHECK(!finished_, "a stream ends once");
  finished_ = true;
}

void FakeStream::Write(const v1::AttachResponse* message, grpc::WriteOptions) {
  TESSERA_CHECK(!writing_ && !finished_, "one write at a time, and none behind the end");
  written_.push_back(*message);
  writing_ = true;
}

void FakeStream::WriteAndFinish(const v1::AttachResponse* message, grpc::WriteOptions options,
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

Neighbour::~Neighbour() {
  TESSERA_CHECK(Attend() == output_, "a neighbour's rows are what they were");
}

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

DaemonCore::DaemonCore(bool crowded) : services_{} {
  cache::Node::Options options = {
      .memory_bytes = kNodeBytes,
      .raw_copy_bytes = 1 << 20,
      .host_tier_bytes = 4 << 20,
      .device = &Cpu(),
      .tenants = {{.name = "mine", .token = kMyToken}, {.name = "others", .token = kForeignToken}},
      .max_sessions = 8};
  options.tenant_template.pool_extent_bytes = kPoolExtent;
  options.tenant_template.directory_extent_bytes = kDirectoryExtent;
  options.tenant_template.ring_tiles = 2;
  options.tenant_template.staging_bytes = kStaging;
  options.tenant_template.tail_extent_bytes = 64 << 10;
  options.tenant_template.max_models = 4;
  options.tenant_template.max_sequences = 24;
  options.tenant_template.max_prefixes = 4;
  options.tenant_template.pin_limit = std::chrono::seconds(5);
  options.tenant_template.clock = &clock_;
  absl::StatusOr<std::unique_ptr<cache::Node>> node = cache::Node::Create(options);
  TESSERA_CHECK(node.ok(), node.status().ToString());
  node_ = *std::move(node);
  MakeServices();
  foreign_ = std::make_unique<Neighbour>(*this, kForeignToken);
  if (crowded) honest_ = std::make_unique<Neighbour>(*this, kMyToken);
}

void DaemonCore::MakeServices() {
  compactor_ = std::make_unique<compaction::Compactor>(compaction::Compactor::Options{
      .scheduler = &scheduler_,
      .logger = &logger_,
      .clock = &clock_,
      .operations = &kernels::OperationsOf(kernels::BestImplementation())});
  absorber_ = std::make_unique<compaction::TailAbsorber>(
      compaction::TailAbsorber::Options{.scheduler = &scheduler_,
                                        .logger = &logger_,
                                        .clock = &clock_,
                                        .compactor = compactor_.get()});
  residency::Pressure::Options pressure = {.node = node_.get(),
                                           .scheduler = &scheduler_,
                                           .logger = &logger_,
                                           .clock = &clock_,
                                           .pause = [this](Clock::Duration time) { Pass(time); }};
  pressure.ladder.push_back(std::make_unique<residency::DropPrefixes>());
  pressure.ladder.push_back(
      std::make_unique<residency::OffloadIdle>(residency::OffloadIdle::Options{
          .clock = &clock_, .tier = &node_->host_tier(), .idle = std::chrono::seconds(1)}));
  pressure_ = std::make_unique<residency::Pressure>(std::move(pressure));
  services_.node = node_.get();
  services_.absorber = absorber_.get();
  services_.compactor = compactor_.get();
  services_.pressure = pressure_.get();
  services_.scheduler = &scheduler_;
  services_.metrics = &AllMetrics();
  services_.logger = &logger_;
  services_.clock = &clock_;
  services_.device = &Cpu();
  services_.started = clock_.Now();
  services_.max_message_bytes = 1 << 20;
  services_.admin_over_tcp = true;
  absl::StatusOr<std::unique_ptr<serving::Watcher>> watcher =
      serving::Watcher::Create(services_, connections_);
  TESSERA_CHECK(watcher.ok(), watcher.status().ToString());
  watcher_ = *std::move(watcher);
  connections_.set_watcher(watcher_.get());
  door_ = {.services = &services_, .connections = &connections_, .descriptor_socket = "/x.fd"};
  worker_ = std::make_unique<serving::WorkerService>(door_);
  admin_ = std::make_unique<serving::AdminService>(
      services_, connections_, [this](std::uint64_t) { services_.draining.store(true); });
}

bool DaemonCore::HoldsForeign(std::string_view bytes) {
  return bytes.find(kForeignRow) != std::string_view::npos;
}

void DaemonCore::Pass(Clock::Duration time) {
  clock_.Advance(time);
  scheduler_.Run(1);
  for (const std::unique_ptr<cache::Tenant>& tenant : node_->tenants()) {
    tenant->epochs().Collect();
    tenant->prefixes().Sweep();
  }
}

// The workers of the input have gone by now.
DaemonCore::~DaemonCore() {
  scheduler_.Run(kManyJobs);
  services_.draining.store(false);
  honest_.reset();
  foreign_.reset();
  scheduler_.Run(kManyJobs);
  TESSERA_CHECK(connections_.size() == 0, "every stream has ended");
  watcher_.reset();  // it still knows the sessions
  Pass(std::chrono::seconds(60));
  for (const std::unique_ptr<cache::Tenant>& tenant : node_->tenants()) ExpectNothingLeft(*tenant);
  TESSERA_CHECK(node_->host_tier().used_bytes() == 0, "the host tier is empty");
  TESSERA_CHECK(node_->raw_copies().used_bytes() == 0, "no raw copies");
  TESSERA_CHECK(node_->sessions() == 0, "no session is counted");
  std::uint64_t extents = 0;
  for (const std::unique_ptr<cache::Tenant>& tenant : node_->tenants()) {
    extents += tenant->pool().extents() * kPoolExtent +
               tenant->directory().pool().extents() * kDirectoryExtent;
  }
  TESSERA_CHECK(node_->account().used_bytes() == extents,
                Concat(node_->account().used_bytes(), " bytes of ", extents, " in extents"));
}

void DaemonCore::ExpectNothingLeft(cache::Tenant& tenant) {
  for (const auto& prefix : tenant.prefixes().List()) tenant.prefixes().Free(prefix.prefix->id());
  TESSERA_CHECK(!tenant.epochs().Collect().has_value(), "no reader is waited for");
  TESSERA_CHECK(tenant.session_count() == 0 && tenant.sequence_count() == 0, tenant.name());
  for (std::size_t i = 0; i < pool::kMemoryTags; ++i) {
    const auto tag = static_cast<pool::MemoryTag>(i);
    TESSERA_CHECK(tenant.account().used_bytes(tag) == 0,
                  Concat(tenant.account().used_bytes(tag), " bytes of ", pool::TagName(tag)));
  }
  TESSERA_CHECK(tenant.account().used_bytes() == 0, "nothing is charged");
  TESSERA_CHECK(tenant.pool().used_bytes() == 0, "the pool is empty");
  TESSERA_CHECK(tenant.directory().pool().used_bytes() == 0, "the directory is empty");
  TESSERA_CHECK(tenant.offloaded().used_bytes() == 0, "nothing is offloaded");
  TESSERA_CHECK(tenant.raw_copies().used_bytes() == 0, "no raw copies");
  tenant.pool().Validate();
  tenant.directory().pool().Validate();
}

}  // namespace tessera::fuzz
