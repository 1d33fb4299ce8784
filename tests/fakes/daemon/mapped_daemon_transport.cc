#include "tests/fakes/daemon/mapped_daemon_transport.h"

#include <algorithm>
#include <new>
#include <utility>

#include "daemon/base/strings.h"

namespace tessera::fakes {

using shm::DescriptorKind;

// ---- The stream

void MappedDaemon::Pipe::Push(const v1::AttachResponse& message) {
  std::lock_guard lock(mutex);
  if (ended) return;
  messages.push_back(message);
  changed.notify_all();
}

void MappedDaemon::Pipe::End(const absl::Status& reason) {
  std::lock_guard lock(mutex);
  if (ended) return;
  ended = true;
  why = reason;
  changed.notify_all();
}

bool MappedDaemon::FakeStream::Write(const v1::AttachRequest& message) {
  {
    std::lock_guard lock(pipe_->mutex);
    if (pipe_->ended) return false;
  }
  std::lock_guard lock(daemon_.mutex_);
  if (message.has_leave()) return true;  // FinishWriting follows and ends the session
  if (!message.has_hello()) {
    if (!session_->lost) daemon_.Answer(*session_, message);
    return true;
  }
  daemon_.last_hello_ = message.hello();
  if (!daemon_.refuse_attach_.ok()) {
    pipe_->End(daemon_.refuse_attach_);
    return true;
  }
  v1::AttachResponse response;
  session_ = daemon_.NewSession(message.hello(), *response.mutable_welcome());
  session_->pipe = pipe_;
  pipe_->Push(response);
  return true;
}

bool MappedDaemon::FakeStream::Read(v1::AttachResponse& message) {
  std::unique_lock lock(pipe_->mutex);
  pipe_->changed.wait(lock, [this] { return pipe_->ended || !pipe_->messages.empty(); });
  if (pipe_->messages.empty()) return false;
  message = std::move(pipe_->messages.front());
  pipe_->messages.pop_front();
  return true;
}

// Ends the session of a worker that leaves, as if its lease were lost.
void MappedDaemon::FakeStream::FinishWriting() {
  if (daemon_.stall_goodbyes_.load()) {
    std::unique_lock lock(pipe_->mutex);
    pipe_->changed.wait(lock, [this] { return pipe_->ended; });
    return;
  }
  std::lock_guard lock(daemon_.mutex_);
  if (session_ != nullptr) daemon_.EndSession(*session_, absl::OkStatus());
}

absl::Status MappedDaemon::FakeStream::Finish() {
  std::lock_guard lock(pipe_->mutex);
  return pipe_->why;
}

void MappedDaemon::Push(Session& session, const v1::AttachResponse& message) {
  session.pipe->Push(message);
}

void MappedDaemon::AnnounceDrain(std::uint64_t limit_ms) {
  std::lock_guard lock(mutex_);
  v1::AttachResponse message;
  message.mutable_draining()->set_limit_ms(limit_ms);
  for (const std::shared_ptr<Session>& session : sessions_) Push(*session, message);
}

// ---- Sessions

std::shared_ptr<MappedDaemon::Session> MappedDaemon::NewSession(const v1::Hello& hello,
                                                                v1::Welcome& welcome) {
  auto session = std::make_shared<Session>();
  session->id = next_id_++;
  session->secret = random_();
  const std::uint64_t page = PageBytes();
  const std::uint64_t bytes = (sizeof(shm::ControlPage) + page - 1) / page * page;
  session->control_memory = *Memfd::Create("fake-control", bytes);
  TESSERA_CHECK(session->control_memory.Seal(SealFor::kWorkerWrites).ok(), "sealing");
  session->control_mapping =
      *AddressRange::Map(session->control_memory.fd(), bytes, Access::kReadWrite);
  session->control = new (session->control_mapping.data()) shm::ControlPage;
  session->control->magic = shm::kControlMagic;
  session->control->protocol_version = shm::kProtocolVersion;
  session->control->layout_fingerprint = shm::kLayoutFingerprint;
  if (options_.has_staging) {
    session->staging_memory = *Memfd::Create("fake-staging", options_.staging_bytes);
    session->staging_mapping =
        *AddressRange::Map(session->staging_memory.fd(), options_.staging_bytes, Access::kReadOnly);
  }
  sessions_.push_back(session);

  welcome.mutable_session()->set_session_id(session->id);
  welcome.mutable_session()->set_secret(session->secret);
  welcome.set_instance(instance_);
  if (options_.offer_mapping) welcome.set_descriptor_socket("fake");
  welcome.set_tenant("default");
  welcome.set_device("cpu");
  welcome.set_staging_bytes(options_.staging_bytes);
  welcome.set_tail_ring_tiles(options_.ring_tiles);
  welcome.set_directory_extent_bytes(options_.directory_extent_bytes);
  welcome.set_pool_extent_bytes(options_.pool_extent_bytes);
  welcome.set_protocol_version(shm::kProtocolVersion);
  welcome.set_layout_fingerprint(shm::kLayoutFingerprint);
  welcome.set_max_message_bytes(options_.max_message_bytes);
  for (std::uint64_t id : hello.sequence_ids()) {
    if (hello.previous_instance() != instance_ || !sequences_.contains(id)) {
      welcome.add_gone_sequence_ids(id);
    }
  }
  return session;
}

void MappedDaemon::EndSession(Session& session, const absl::Status& why) {
  if (std::exchange(session.lost, true)) return;
  session.pipe->End(why);
  std::vector<std::uint64_t> owned;
  for (const auto& [id, sequence] : sequences_) {
    if (sequence->owner == session.id) owned.push_back(id);
  }
  std::erase_if(sessions_, [&](const auto& other) { return other.get() == &session; });
  for (std::uint64_t id : owned) FreeLocked(id);
  CollectLocked();
}

void MappedDaemon::EndLeases(const absl::Status& why, bool restart) {
  std::lock_guard lock(mutex_);
  while (!sessions_.empty()) EndSession(*std::shared_ptr<Session>(sessions_.back()), why);
  if (!restart) return;
  ++instance_;
  sequences_.clear();
  models_.clear();
  retired_.clear();
  MakeMemory();
}

absl::StatusOr<std::shared_ptr<MappedDaemon::Session>> MappedDaemon::Find(
    const v1::SessionKey& key) {
  for (const std::shared_ptr<Session>& session : sessions_) {
    if (session->id == key.session_id() && session->secret == key.secret()) return session;
  }
  return absl::UnauthenticatedError(Concat("session ", key.session_id(), " is not attached here"));
}

void MappedDaemon::Answer(Session& session, const v1::AttachRequest& request) {
  v1::AttachResponse response;
  if (request.has_open_tails()) {
    v1::TailsOpened& opened = *response.mutable_tails_opened();
    opened.set_request_id(request.open_tails().request_id());
    for (std::uint64_t id : request.open_tails().sequence_ids()) {
      const absl::Status status = OpenOne(session, id, *opened.add_tails());
      if (status.ok()) continue;
      opened.set_code(static_cast<int>(status.code()));
      opened.set_error(std::string(AsStringView(status.message())));
    }
  } else {
    v1::TailsClosed& closed = *response.mutable_tails_closed();
    closed.set_request_id(request.close_tails().request_id());
    for (std::uint64_t id : request.close_tails().sequence_ids()) {
      CloseTail(*sequences_.at(id));
      session.commit_slots.erase(id);
      closed.add_tokens(TokensLocked(*sequences_.at(id)));
    }
    for (std::uint32_t i = 0; i < session.tails.size(); ++i) {
      TailExtent& extent = session.tails[i];
      if (!extent.present() ||
          std::find(extent.taken.begin(), extent.taken.end(), true) != extent.taken.end()) {
        continue;
      }
      extent = TailExtent();
      closed.add_released_extents(i);
    }
  }
  Push(session, response);
}

absl::Status MappedDaemon::OpenOne(Session& session, std::uint64_t id, v1::TailPlace& place) {
  absl::StatusOr<Sequence*> found = FindSequence(id);
  if (!found.ok()) return found.status();
  Sequence& sequence = **found;
  if (!sequence.failure.empty()) {
    return absl::FailedPreconditionError(
        Concat("sequence ", id, " has failed: ", sequence.failure));
  }
  CloseTail(sequence);
  if (block(sequence).state.load() == shm::kSequenceOffloaded) {
    Publish(sequence);
    block(sequence).state.store(shm::kSequenceLive);
  }
  const std::uint64_t bytes = sequence.model->layout.tail_bytes();
  std::uint32_t index = 0;
  std::size_t region = 0;
  for (;; ++index) {
    if (index == session.tails.size()) session.tails.emplace_back();
    TailExtent& extent = session.tails[index];
    if (!extent.present()) {
      constexpr std::uint32_t kRegions = 2;
      const std::uint64_t page = PageBytes();
      const std::uint64_t size = (kRegions * bytes + page - 1) / page * page;
      extent.memory = *Memfd::Create("fake-tails", size);
      TESSERA_CHECK(extent.memory.Seal(SealFor::kWorkerWrites).ok(), "sealing");
      extent.mapping = *AddressRange::Map(extent.memory.fd(), size, Access::kReadOnly);
      extent.region_bytes = bytes;
      extent.taken.assign(kRegions, false);
    }
    if (extent.region_bytes != bytes) continue;
    const auto free = std::find(extent.taken.begin(), extent.taken.end(), false);
    if (free == extent.taken.end()) continue;
    *free = true;
    region = static_cast<std::size_t>(free - extent.taken.begin());
    break;
  }
  // Takes the lowest free slot, so that slots are reused as soon as possible.
  if (!session.commit_slots.contains(id)) {
    std::uint32_t lowest = 0;
    while (std::any_of(session.commit_slots.begin(), session.commit_slots.end(),
                       [&](const auto& taken) { return taken.second == lowest; })) {
      ++lowest;
    }
    session.commit_slots[id] = lowest;
  }
  const std::uint32_t slot = session.commit_slots[id];
  session.control->commits[slot].store(0);
  sequence.tail = OpenTail{index, region * bytes, slot, ++sequence.last_generation};
  const std::uint64_t tokens = TokensLocked(sequence);
  block(sequence).ring_start.store(tokens);
  block(sequence).tail_generation.store(sequence.tail->generation);
  block(sequence).version.fetch_add(1);
  place.set_sequence_id(id);
  place.set_extent(index);
  place.set_extent_bytes(session.tails[index].memory.bytes());
  place.set_offset(sequence.tail->offset);
  place.set_commit_slot(slot);
  place.set_generation(sequence.tail->generation);
  place.set_tokens(tokens);
  return absl::OkStatus();
}

// ---- Descriptors

absl::StatusOr<client::Descriptor> MappedDaemon::FakeSource::Fetch(DescriptorKind kind,
                                                                   std::uint32_t index) {
  std::lock_guard lock(daemon_.mutex_);
  if (down_ || session_->lost) return absl::UnavailableError("the descriptor socket is closed");
  client::Descriptor descriptor;
  const Memfd* memory = nullptr;
  switch (kind) {
    case DescriptorKind::kDirectory:
      memory = &daemon_.directory_->memory(index);
      break;
    case DescriptorKind::kPool:
      descriptor.generation = daemon_.pool_->generation(index);
      if (descriptor.generation == 0) return absl::NotFoundError("no such extent");
      memory = &daemon_.pool_->memory(index);
      break;
    case DescriptorKind::kControl:
      memory = &session_->control_memory;
      break;
    case DescriptorKind::kStaging:
      if (!daemon_.options_.has_staging) return absl::ResourceExhaustedError("no staging");
      memory = &session_->staging_memory;
      break;
    default:
      memory = &session_->tails[index].memory;
  }
  absl::Status duplicated = DuplicateFd(memory->fd(), &descriptor.fd);
  if (!duplicated.ok()) return duplicated;
  descriptor.bytes = memory->bytes();
  return descriptor;
}

std::unique_ptr<client::Connector> MappedDaemon::NewConnector(bool local) {
  return std::make_unique<FakeConnector>(*this, local);
}

absl::StatusOr<std::unique_ptr<client::AttachStream>> MappedDaemon::FakeTransport::OpenAttach(
    Clock::Duration) {
  return std::unique_ptr<client::AttachStream>(std::make_unique<FakeStream>(daemon_));
}

absl::StatusOr<std::unique_ptr<client::DescriptorSource>>
MappedDaemon::FakeTransport::OpenDescriptors(const v1::Welcome& welcome) {
  std::lock_guard lock(daemon_.mutex_);
  absl::StatusOr<std::shared_ptr<Session>> session = daemon_.Find(welcome.session());
  if (!session.ok()) return session.status();
  return std::unique_ptr<client::DescriptorSource>(std::make_unique<FakeSource>(daemon_, *session));
}

// ---- RPCs

absl::Status MappedDaemon::FakeTransport::Call(const v1::RegisterModelRequest& request,
                                               v1::RegisterModelResponse& response,
                                               Clock::Duration) {
  std::lock_guard lock(daemon_.mutex_);
  absl::StatusOr<std::shared_ptr<Session>> session = daemon_.Find(request.session());
  if (!session.ok()) return session.status();
  for (const auto& [id, model] : daemon_.models_) {
    if (model->geometry.SerializeAsString() != request.model().SerializeAsString()) continue;
    response.set_model_id(id);
    return absl::OkStatus();
  }
  std::vector<shm::LayerShape> shapes;
  for (const v1::LayerGeometry& layer : request.model().layers()) {
    shapes.push_back({layer.kv_heads(), layer.head_dim()});
  }
  auto model = std::make_unique<Model>();
  model->id = daemon_.next_id_++;
  model->geometry = request.model();
  model->layout = shm::LaneLayout(static_cast<kernels::ElementType>(request.model().dtype()),
                                  daemon_.options_.ring_tiles, shapes);
  response.set_model_id(model->id);
  daemon_.models_[model->id] = std::move(model);
  return absl::OkStatus();
}

absl::Status MappedDaemon::FakeTransport::Call(const v1::CreateSequenceRequest& request,
                                               v1::CreateSequenceResponse& response,
                                               Clock::Duration) {
  std::lock_guard lock(daemon_.mutex_);
  absl::StatusOr<std::shared_ptr<Session>> session = daemon_.Find(request.session());
  if (!session.ok()) return session.status();
  const auto model = daemon_.models_.find(request.model_id());
  if (model == daemon_.models_.end()) return absl::NotFoundError("no such model");
  auto sequence = std::make_unique<Sequence>();
  sequence->id = daemon_.next_id_++;
  sequence->model = model->second.get();
  sequence->lanes.resize(sequence->model->layout.lanes());
  sequence->owner = (*session)->id;
  response.set_directory_offset(daemon_.NewBlock(*sequence));
  response.set_sequence_id(sequence->id);
  if (daemon_.options_.needs.has_value()) *response.mutable_needs() = *daemon_.options_.needs;
  daemon_.sequences_[sequence->id] = std::move(sequence);
  return absl::OkStatus();
}

absl::Status MappedDaemon::FakeTransport::Call(const v1::ForkRequest& request,
                                               v1::ForkResponse& response, Clock::Duration) {
  std::lock_guard lock(daemon_.mutex_);
  absl::StatusOr<Sequence*> parent = daemon_.FindSequence(request.parent_id());
  if (!parent.ok()) return parent.status();
  auto child = std::make_unique<Sequence>();
  child->id = daemon_.next_id_++;
  child->model = (*parent)->model;
  child->owner = (*parent)->owner;
  daemon_.CloseTail(**parent);
  child->lanes = (*parent)->lanes;
  for (Lane& lane : child->lanes) {
    lane.pool_blocks.clear();
    lane.snapshot = 0;
  }
  response.set_directory_offset(daemon_.NewBlock(*child));
  response.set_sequence_id(child->id);
  response.set_tokens(daemon_.TokensLocked(*child));
  daemon_.Publish(*child);
  daemon_.sequences_[child->id] = std::move(child);
  return absl::OkStatus();
}

absl::Status MappedDaemon::FakeTransport::Call(const v1::TruncateRequest& request,
                                               v1::TruncateResponse&, Clock::Duration) {
  std::lock_guard lock(daemon_.mutex_);
  absl::StatusOr<Sequence*> sequence = daemon_.FindSequence(request.sequence_id());
  if (!sequence.ok()) return sequence.status();
  if (daemon_.truncates_to_fail_ > 0) {
    --daemon_.truncates_to_fail_;
    return daemon_.fail_truncate_;
  }
  daemon_.CloseTail(**sequence);
  if (request.tokens() > daemon_.TokensLocked(**sequence)) {
    return absl::OutOfRangeError("the sequence is shorter");
  }
  daemon_.Cut(**sequence, request.tokens());
  return absl::OkStatus();
}

absl::Status MappedDaemon::FakeTransport::Call(const v1::OffloadRequest& request,
                                               v1::OffloadResponse& response, Clock::Duration) {
  response.set_moved_bytes(daemon_.OffloadAsDaemon(request.sequence_id()) ? 1 : 0);
  return absl::OkStatus();
}

absl::Status MappedDaemon::FakeTransport::Call(const v1::RestoreRequest&, v1::RestoreResponse&,
                                               Clock::Duration) {
  return absl::OkStatus();  // restored when its tail is opened
}

absl::Status MappedDaemon::FakeTransport::Call(const v1::HandoverRequest& request,
                                               v1::HandoverResponse&, Clock::Duration) {
  std::lock_guard lock(daemon_.mutex_);
  absl::StatusOr<Sequence*> sequence = daemon_.FindSequence(request.sequence_id());
  if (!sequence.ok()) return sequence.status();
  daemon_.CloseTail(**sequence);
  (*sequence)->owner = request.to_session_id();
  return absl::OkStatus();
}

absl::Status MappedDaemon::FakeTransport::Call(const v1::FreeRequest& request,
                                               v1::FreeResponse& response, Clock::Duration) {
  std::lock_guard lock(daemon_.mutex_);
  absl::StatusOr<std::shared_ptr<Session>> session = daemon_.Find(request.session());
  if (!session.ok()) return session.status();
  for (std::uint64_t id : request.sequence_ids()) {
    daemon_.sequences_.contains(id) ? response.set_freed(response.freed() + 1)
                                    : response.set_unknown(response.unknown() + 1);
    if (daemon_.sequences_.contains(id)) daemon_.CloseTail(*daemon_.sequences_.at(id));
    daemon_.FreeLocked(id);
  }
  return absl::OkStatus();
}

absl::Status MappedDaemon::FakeTransport::Call(const v1::AppendRequest& request,
                                               v1::AppendResponse& response, Clock::Duration) {
  std::lock_guard lock(daemon_.mutex_);
  return daemon_.Append(request, response);
}

// Only keeps dense rows: end-to-end tests cover compression and selection.
absl::Status MappedDaemon::FakeTransport::Call(const v1::CompressRequest&, v1::CompressResponse&,
                                               Clock::Duration) {
  if (daemon_.options_.needs.has_value()) return absl::OkStatus();
  return absl::UnimplementedError("the fake daemon keeps every row as it came");
}

absl::Status MappedDaemon::FakeTransport::Call(const v1::ObserveRequest& request,
                                               v1::ObserveResponse& response, Clock::Duration) {
  std::lock_guard lock(daemon_.mutex_);
  return daemon_.Observe(request, response);
}

absl::Status MappedDaemon::FakeTransport::Call(const v1::SelectRequest&, v1::SelectResponse&,
                                               Clock::Duration) {
  return absl::UnimplementedError("the fake daemon has no block summaries");
}

absl::Status MappedDaemon::FakeTransport::Call(const v1::AttendRequest& request,
                                               v1::AttendResponse& response, Clock::Duration) {
  std::lock_guard lock(daemon_.mutex_);
  return daemon_.Attend(request, response);
}

absl::Status MappedDaemon::FakeTransport::Call(const v1::DescribeRequest& request,
                                               v1::DescribeResponse& response, Clock::Duration) {
  std::lock_guard lock(daemon_.mutex_);
  return daemon_.Describe(request, response);
}

absl::Status MappedDaemon::FakeTransport::Call(const v1::StatsRequest& request,
                                               v1::StatsResponse& response, Clock::Duration) {
  std::lock_guard lock(daemon_.mutex_);
  absl::StatusOr<std::shared_ptr<Session>> session = daemon_.Find(request.session());
  if (!session.ok()) return session.status();
  response.set_instance(daemon_.instance_);
  return absl::OkStatus();
}

}  // namespace tessera::fakes
