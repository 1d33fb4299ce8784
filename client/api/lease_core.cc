#include "client/api/lease_core.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <random>
#include <system_error>
#include <thread>
#include <utility>

#include "client/error/error_info.h"
#include "daemon/base/random.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::client {

namespace {

constexpr Clock::Duration kGoodbye = std::chrono::seconds(2);
constexpr Clock::Duration kPauseSlice = std::chrono::milliseconds(50);

class SystemSleeper final : public Sleeper {
 public:
  void Sleep(Clock::Duration duration) override { std::this_thread::sleep_for(duration); }
};

// Whether a retry cannot help.
bool IsPermanent(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) || absl::IsPermissionDenied(status) ||
         absl::IsInvalidArgument(status) || absl::IsUnimplemented(status) ||
         absl::IsUnauthenticated(status);
}

absl::Status Prefixed(const absl::Status& status, const std::string& prefix) {
  return WithMessage(status, Concat(prefix, AsStringView(status.message())));
}

absl::Status LeaseLost(const std::string& message) {
  return WithCause(absl::UnavailableError(message), ErrorCause::kLeaseLost);
}

// Ends the stream of a failed attachment, instead of leaving that to its destructor.
void EndStream(AttachStream& stream) {
  stream.Cancel();
  v1::AttachResponse ignored;
  while (stream.Read(ignored)) {
  }
  (void)stream.Finish();
}

}  // namespace

Core::Core(AttachOptions options, const Environment& environment,
           std::unique_ptr<Connector> connector)
    : options_(std::move(options)),
      connector_(std::move(connector)),
      system_sleeper_(std::make_unique<SystemSleeper>()),
      environment_(environment) {
  if (environment_.clock == nullptr) environment_.clock = &system_clock_;
  if (environment_.sleeper == nullptr) environment_.sleeper = system_sleeper_.get();
  if (environment_.gpus == nullptr) environment_.gpus = &GpuPlatform::System();
  environment_.implementation = options_.implementation.empty()
                                    ? &kernels::BestImplementation()
                                    : kernels::FindImplementation(options_.implementation);
}

Core::~Core() { Detach(); }

absl::Status Core::Attach() {
  const kernels::Implementation* implementation = environment_.implementation;
  if (implementation == nullptr || !kernels::ImplementationSupported(*implementation)) {
    return absl::InvalidArgumentError(Concat("implementation \"", options_.implementation, "\": ",
                                             implementation == nullptr
                                                 ? "no implementation has this name"
                                                 : kernels::ImplementationReason(*implementation)));
  }
  {
    MutexLock lock(join_mutex_);
    lease_ = std::thread([this] { RunLease(); });
  }
  return Place(Order::kOnce, options_.attach_timeout).status;
}

absl::StatusOr<ReattachReport> Core::Reattach() {
  {
    MutexLock lock(mutex_);
    if (session_ != nullptr) return ReattachReport{.same_daemon = true};
    if (stopping_) return lost_;
  }
  Outcome outcome =
      Place(Order::kPersist, options_.reattach.give_up_after + options_.attach_timeout);
  if (!outcome.status.ok()) return outcome.status;
  return std::move(outcome.report);
}

Core::Outcome Core::Place(Order order, Clock::Duration patience) {
  MutexLock lock(mutex_);
  order_ = order;
  const std::uint64_t ticket = ++orders_placed_;
  changed_.NotifyAll();
  Clock::TimePoint deadline = SystemClock().Now() + patience;
  while (orders_done_ < ticket && !stopping_) {
    if (changed_.WaitUntil(mutex_, deadline)) continue;
    if (opening_ != nullptr) opening_->Cancel();
    deadline = SystemClock().Now() + options_.attach_timeout;
  }
  if (orders_done_ < ticket) return {.status = lost_};
  return outcome_;
}

void Core::RunLease() {
  for (;;) {
    Order order = Order::kNone;
    {
      MutexLock lock(mutex_);
      while (order_ == Order::kNone && !stopping_) changed_.Wait(mutex_);
      if (stopping_) return;
      order = order_;
    }
    Outcome outcome = AttachNow(order);
    std::shared_ptr<Session> session;
    {
      MutexLock lock(mutex_);
      // This attempt also answers orders placed in the meantime.
      order_ = Order::kNone;
      orders_done_ = orders_placed_;
      outcome_ = outcome;
      session = session_;
      changed_.NotifyAll();
    }
    if (session == nullptr) continue;
    if (session->serial() > 1 && options_.on_reattached) options_.on_reattached(outcome.report);
    LoseSession(session->ReadUntilEnd());
  }
}

void Core::LoseSession(const absl::Status& why) {
  std::shared_ptr<Session> session;
  absl::Status reason;
  bool detached = false;
  {
    MutexLock lock(mutex_);
    session = std::exchange(session_, nullptr);
    detached = stopping_;
    changed_.NotifyAll();
    if (!detached) {
      const std::string cause =
          why.ok() ? "the daemon ended the session" : std::string(AsStringView(why.message()));
      lost_ = LeaseLost(Concat("the lease of ", session->id().ToString(), " at ", options_.address,
                               " is lost: ", cause));
    }
    reason = lost_;
  }
  session->Lose(reason);
  if (detached) return;
  if (options_.on_lease_lost) options_.on_lease_lost(reason);
  MutexLock lock(mutex_);
  if (options_.reattach.automatic && order_ == Order::kNone) {
    order_ = Order::kPersist;
    ++orders_placed_;
  }
}

Core::Outcome Core::AttachNow(Order order) {
  const Clock::TimePoint begun = environment_.clock->Now();
  std::mt19937_64 random(NewSecret64());
  std::uniform_real_distribution<double> jitter(0.5, 1.0);
  Clock::Duration backoff = options_.reattach.first_backoff;
  Outcome outcome;
  for (;;) {
    ++outcome.report.attempts;
    outcome.status = OpenSession(outcome.report);
    if (outcome.status.ok() || order == Order::kOnce || IsPermanent(outcome.status)) {
      return outcome;
    }
    const Clock::Duration pause =
        std::chrono::duration_cast<Clock::Duration>(backoff * jitter(random));
    if (environment_.clock->Now() + pause - begun > options_.reattach.give_up_after) {
      outcome.status = Prefixed(
          outcome.status,
          Concat("gave up after ", outcome.report.attempts, " attempts in ",
                 std::chrono::duration<double>(options_.reattach.give_up_after).count(), " s: "));
      return outcome;
    }
    if (!Pause(pause)) {
      outcome.status = absl::UnavailableError("the worker has detached");
      return outcome;
    }
    backoff = std::min(2 * backoff, options_.reattach.max_backoff);
  }
}

// Sleeps in slices, so that Detach need not wait. Returns false if the worker has detached.
bool Core::Pause(Clock::Duration duration) {
  while (duration > Clock::Duration::zero()) {
    {
      MutexLock lock(mutex_);
      if (stopping_) return false;
    }
    const Clock::Duration slice = std::min(duration, kPauseSlice);
    environment_.sleeper->Sleep(slice);
    duration -= slice;
  }
  return true;
}

v1::Hello Core::MakeHello() {
  v1::Hello hello;
  hello.set_protocol_version(shm::kProtocolVersion);
  const bool maps = options_.map_memory && connector_->local();
  hello.set_layout_fingerprint(maps ? shm::kLayoutFingerprint : 0);
  hello.set_tenant_token(options_.tenant_token);
  hello.set_worker_name(options_.worker_name);
  hello.set_group(options_.group);
  hello.set_rank(options_.rank);
  hello.set_group_size(options_.group_size);
  if (options_.prefix_hash.has_value()) hello.set_prefix_hash(*options_.prefix_hash);
  if (options_.prefix_hash_seed.has_value()) {
    hello.set_prefix_hash_seed(*options_.prefix_hash_seed);
  }
  hello.set_cache_salt(options_.cache_salt);
  // The daemon refuses what lies outside its limits, so nothing may become 0, its default.
  hello.set_pin_limit_ms(static_cast<std::uint32_t>(
      std::clamp<std::int64_t>(options_.pin_limit.count(), options_.pin_limit.count() != 0,
                               std::numeric_limits<std::uint32_t>::max())));
  MutexLock lock(mutex_);
  hello.set_previous_instance(instance_);
  for (const std::weak_ptr<SequenceState>& weak : sequences_) {
    const std::shared_ptr<SequenceState> sequence = weak.lock();
    if (sequence != nullptr && !sequence->gone && !sequence->ended) {
      hello.add_sequence_ids(sequence->id.value());
    }
  }
  return hello;
}

absl::StatusOr<v1::Welcome> Core::Greet(Transport& transport,
                                        std::shared_ptr<AttachStream>& stream) {
  absl::StatusOr<std::unique_ptr<AttachStream>> opened =
      transport.OpenAttach(options_.attach_timeout);
  if (!opened.ok()) return opened.status();
  stream = *std::move(opened);
  {
    MutexLock lock(mutex_);
    opening_ = stream;
    if (stopping_) stream->Cancel();
  }
  v1::AttachRequest request;
  *request.mutable_hello() = MakeHello();
  v1::AttachResponse response;
  const bool answered = stream->Write(request) && stream->Read(response);
  if (!answered) {
    absl::Status status = stream->Finish();
    stream = nullptr;
    if (absl::IsCancelled(status)) {
      status = absl::UnavailableError("the daemon did not answer Hello in time");
    } else if (status.ok()) {
      status = absl::UnavailableError("the daemon ended the stream before sending Welcome");
    }
    return status;
  }
  if (!response.has_welcome()) {
    return absl::InternalError(Concat("the daemon answered Hello with unexpected message kind ",
                                      static_cast<int>(response.message_case())));
  }
  return std::move(*response.mutable_welcome());
}

absl::StatusOr<std::unique_ptr<MappedMemory>> Core::OpenMappedMemory(Transport& transport,
                                                                     const v1::Welcome& welcome) {
  std::unique_ptr<Gpu> gpu;
  if (!welcome.device_uuid().empty()) {
    absl::StatusOr<std::unique_ptr<Gpu>> opened =
        Gpu::Open(*environment_.gpus, welcome.device_uuid());
    if (!opened.ok()) return opened.status();
    gpu = *std::move(opened);
  }
  absl::StatusOr<std::unique_ptr<DescriptorSource>> source = transport.OpenDescriptors(welcome);
  if (!source.ok()) return source.status();
  return MappedMemory::Open(
      {.source = *std::move(source),
       .gpu = std::move(gpu),
       .expected = {.instance = welcome.instance(),
                    .directory_extent_bytes = welcome.directory_extent_bytes(),
                    .pool_extent_bytes = welcome.pool_extent_bytes()},
       .staging_bytes = welcome.staging_bytes()});
}

absl::Status Core::OpenSession(ReattachReport& report) {
  std::shared_ptr<AttachStream> stream;
  const auto failed = [&](const absl::Status& status) {
    {
      MutexLock lock(mutex_);
      opening_ = nullptr;
    }
    if (stream != nullptr) EndStream(*stream);
    return Prefixed(status, Concat("attaching to ", options_.address, ": "));
  };
  absl::StatusOr<std::unique_ptr<Transport>> opened_transport = connector_->NewTransport();
  if (!opened_transport.ok()) return failed(opened_transport.status());
  std::unique_ptr<Transport> transport = *std::move(opened_transport);
  absl::StatusOr<v1::Welcome> welcome = Greet(*transport, stream);
  if (!welcome.ok()) return failed(welcome.status());
  if (absl::Status status = connector_->Check(*welcome); !status.ok()) return failed(status);

  std::unique_ptr<MappedMemory> mapped;
  if (options_.map_memory && connector_->local() && !welcome->descriptor_socket().empty()) {
    absl::StatusOr<std::unique_ptr<MappedMemory>> opened = OpenMappedMemory(*transport, *welcome);
    if (!opened.ok()) return failed(opened.status());
    mapped = *std::move(opened);
  }
  std::uint64_t serial = 0;
  {
    MutexLock lock(mutex_);
    serial = next_serial_++;
  }
  auto session =
      std::make_shared<Session>(Session::Options{.serial = serial,
                                                 .address = options_.address,
                                                 .rpc_timeout = options_.rpc_timeout,
                                                 .environment = &environment_,
                                                 .on_draining = options_.on_draining},
                                *welcome, std::move(transport), stream, std::move(mapped));
  absl::Status bound = BindModels(*session);
  if (!bound.ok()) return failed(bound);
  MarkGone(*welcome, report);
  MutexLock lock(mutex_);
  opening_ = nullptr;
  instance_ = welcome->instance();
  session_ = std::move(session);
  lost_ = absl::OkStatus();
  if (stopping_) session_->Cancel();
  return absl::OkStatus();
}

// Steps that began in an earlier session keep their binding.
absl::Status Core::BindModels(Session& session) {
  std::vector<std::shared_ptr<ModelRecord>> models;
  {
    MutexLock lock(mutex_);
    models = models_;
  }
  for (const std::shared_ptr<ModelRecord>& model : models) {
    v1::RegisterModelRequest request;
    v1::RegisterModelResponse response;
    *request.mutable_model() = ToProto(model->geometry);
    absl::Status status = session.Call(request, response);
    if (!status.ok()) {
      return Prefixed(status, Concat("registering model ", model->geometry.name, " again: "));
    }
    const ModelId id(response.model_id());
    const std::uint32_t ring_tiles = session.welcome().tail_ring_tiles();
    MutexLock lock(model->mutex);
    if (model->current->id() == id && model->current->layout().ring_tiles() == ring_tiles) continue;
    model->current = std::make_shared<BoundModel>(id, model->geometry, ring_tiles);
  }
  return absl::OkStatus();
}

void Core::MarkGone(const v1::Welcome& welcome, ReattachReport& report) {
  MutexLock lock(mutex_);
  report.same_daemon = welcome.instance() == instance_;
  for (const std::weak_ptr<SequenceState>& weak : sequences_) {
    const std::shared_ptr<SequenceState> sequence = weak.lock();
    if (sequence == nullptr || sequence->gone || sequence->ended) continue;
    const auto& gone = welcome.gone_sequence_ids();
    if (!report.same_daemon ||
        std::find(gone.begin(), gone.end(), sequence->id.value()) != gone.end()) {
      sequence->gone = true;
      report.gone.push_back(sequence->id);
    }
  }
}

absl::StatusOr<std::shared_ptr<ModelRecord>> Core::RegisterModel(const ModelGeometry& geometry) {
  if (absl::Status status = BoundModel::Check(geometry); !status.ok()) return status;
  absl::StatusOr<std::shared_ptr<Session>> session = this->session();
  if (!session.ok()) return session.status();
  v1::RegisterModelRequest request;
  v1::RegisterModelResponse response;
  *request.mutable_model() = ToProto(geometry);
  if (absl::Status status = (*session)->Call(request, response); !status.ok()) return status;
  const ModelId id(response.model_id());
  MutexLock lock(mutex_);
  for (const std::shared_ptr<ModelRecord>& known : models_) {
    if (known->bound()->id() == id) return known;
  }
  auto record = std::make_shared<ModelRecord>(geometry);
  {
    MutexLock record_lock(record->mutex);
    record->current =
        std::make_shared<BoundModel>(id, geometry, (*session)->welcome().tail_ring_tiles());
  }
  models_.push_back(record);
  return record;
}

void Core::AddSequence(const std::shared_ptr<SequenceState>& sequence) {
  MutexLock lock(mutex_);
  if (sequences_.size() >= 2 * sequences_at_last_sweep_ + 64) {
    std::erase_if(sequences_, [](const std::weak_ptr<SequenceState>& s) { return s.expired(); });
    sequences_at_last_sweep_ = sequences_.size();
  }
  sequences_.push_back(sequence);
}

absl::StatusOr<std::shared_ptr<Session>> Core::session() const {
  MutexLock lock(mutex_);
  if (session_ == nullptr) return lost_;
  return session_;
}

void Core::Warn(std::string_view warning) {
  if (options_.on_warning) return options_.on_warning(warning);
  if (!warnings_.Say(environment_.clock->Now()).has_value()) return;
  std::fprintf(stderr, "tessera: %.*s\n", static_cast<int>(warning.size()), warning.data());
}

void Core::SayGoodbye(const std::shared_ptr<Session>& session) {
  // Writing waits for a daemon that does not read, until Cancel.
  std::thread writer;
  try {
    writer = std::thread([session] { session->FinishWriting(); });
  } catch (const std::system_error&) {
    session->FinishWriting();  // no more threads
  }
  {
    const Clock::TimePoint deadline = SystemClock().Now() + kGoodbye;
    MutexLock lock(mutex_);
    while (session_ == session) {
      if (changed_.WaitUntil(mutex_, deadline)) continue;
      session->Cancel();  // the daemon does not answer: detach anyway
      break;
    }
  }
  if (writer.joinable()) writer.join();
}

void Core::Detach() {
  MutexLock join_lock(join_mutex_);
  std::shared_ptr<Session> session;
  {
    MutexLock lock(mutex_);
    if (!stopping_) lost_ = LeaseLost("the worker has detached");
    stopping_ = true;
    session = session_;
    if (opening_ != nullptr) opening_->Cancel();
    changed_.NotifyAll();
  }
  if (!lease_.joinable()) return;
  if (session != nullptr) SayGoodbye(session);
  lease_.join();
}

}  // namespace tessera::client
