#include "daemon/serving/attach/descriptor_connection.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "daemon/base/strings.h"

namespace tessera::serving {

using shm::DescriptorCode;
using shm::DescriptorKind;

namespace {
// Requests of one connection that are served before the others get their turn.
constexpr int kRequestsPerTurn = 16;
// Room for a few answers, in the kernel's accounting. A client waits for each before the next
// request.
constexpr int kSendBufferBytes = 4096;
}  // namespace

DescriptorConnection::DescriptorConnection(Fd socket) : socket_(std::move(socket)) {
  // If it fails, the connection just has a larger buffer.
  (void)::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDBUF, &kSendBufferBytes,
                     sizeof kSendBufferBytes);
}

absl::StatusOr<bool> DescriptorConnection::Fill(std::size_t wanted) {
  while (filled_ < wanted) {
    // Without a control buffer, the kernel drops descriptors that the peer sends.
    const ssize_t n =
        ::recv(socket_.get(), buffer_.data() + filled_, wanted - filled_, MSG_DONTWAIT);
    if (n == 0) return absl::UnavailableError("the peer closed its descriptor socket");
    if (n < 0) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return false;
      if (errno == EINTR) continue;
      return ErrnoStatus("reading the descriptor socket");
    }
    filled_ += static_cast<std::size_t>(n);
  }
  return true;
}

absl::Status DescriptorConnection::Answer(shm::DescriptorAnswer& answer, int fd) {
  const absl::Status sent = SendMessage(socket_.get(), std::as_bytes(std::span(&answer, 1)), fd);
  if (fd < 0 || !absl::IsResourceExhausted(sent)) return sent;
  answer = {.code = DescriptorCode::kExhausted, .kind = answer.kind, .index = answer.index};
  return SendMessage(socket_.get(), std::as_bytes(std::span(&answer, 1)));
}

absl::StatusOr<std::shared_ptr<cache::SessionState>> DescriptorConnection::ReadOpening(
    const cache::Node& node) {
  absl::StatusOr<bool> complete = Fill(sizeof(shm::DescriptorOpening));
  if (!complete.ok()) return complete.status();
  if (!*complete) return nullptr;
  shm::DescriptorOpening opening;
  std::memcpy(&opening, buffer_.data(), sizeof opening);
  filled_ = 0;
  shm::DescriptorAnswer answer = {.kind = DescriptorKind::kOpening};
  if (opening.magic != shm::kDescriptorMagic || opening.protocol_version != shm::kProtocolVersion ||
      opening.layout_fingerprint != shm::kLayoutFingerprint) {
    answer.code = DescriptorCode::kBadOpening;
    (void)Answer(answer, -1);
    return absl::FailedPreconditionError(
        Concat("descriptor opening with protocol version ", opening.protocol_version,
               " and layout ", opening.layout_fingerprint, "; this daemon has ",
               shm::kProtocolVersion, " and ", shm::kLayoutFingerprint));
  }
  if (cache::Tenant* tenant = node.TenantOf(opening.session_id)) {
    for (const std::shared_ptr<cache::SessionState>& session : tenant->Sessions()) {
      if (session->id().value() != opening.session_id) continue;
      if (!session->TakeNonce(opening.nonce)) break;
      absl::Status sent = Answer(answer, session->control()->wake_event().fd());
      if (!sent.ok()) return sent;
      // The session continues without mapped memory.
      if (answer.code != DescriptorCode::kOk) {
        return absl::ResourceExhaustedError("too many open descriptors to send the wake event");
      }
      return session;
    }
  }
  answer.code = DescriptorCode::kUnknownNonce;
  (void)Answer(answer, -1);
  return absl::PermissionDeniedError("descriptor opening with an unknown or used nonce");
}

absl::StatusOr<DescriptorConnection::Next> DescriptorConnection::ServeRequests(
    cache::Tenant& tenant, cache::SessionState& session) {
  for (int i = 0; i < kRequestsPerTurn; ++i) {
    // Checked first, so that every request that is read can be answered.
    if (!HasRoom(socket_.get())) return Next::kRoom;
    absl::StatusOr<bool> complete = Fill(sizeof(shm::DescriptorRequest));
    if (!complete.ok()) return complete.status();
    if (!*complete) break;
    shm::DescriptorRequest request;
    std::memcpy(&request, buffer_.data(), sizeof request);
    filled_ = 0;
    const absl::StatusOr<Next> next = Serve(request, tenant, session);
    if (!next.ok() || *next != Next::kRequests) return next;
  }
  return Next::kRequests;
}

absl::Status DescriptorConnection::Discard() {
  filled_ = 0;
  return Fill(buffer_.size()).status();
}

absl::Status DescriptorConnection::Hand(shm::DescriptorAnswer answer, const device::Export& share) {
  answer.code = DescriptorCode::kOk;
  answer.bytes = share.bytes;
  answer.memory = share.kind;
  static_assert(sizeof answer.ipc_handle == sizeof share.ipc_handle);
  std::memcpy(answer.ipc_handle, share.ipc_handle.data(), sizeof answer.ipc_handle);
  return Answer(answer, share.fd.get());
}

absl::Status DescriptorConnection::HandControl(shm::DescriptorAnswer answer, const Memfd& page) {
  answer.code = DescriptorCode::kOk;
  answer.bytes = page.bytes();
  return Answer(answer, page.fd());
}

absl::Status DescriptorConnection::Refuse(shm::DescriptorAnswer answer, DescriptorCode code) {
  answer.code = code;
  return Answer(answer, -1);
}

absl::Status DescriptorConnection::HandOrRefuse(const shm::DescriptorAnswer& answer,
                                                const absl::StatusOr<device::Export>& share) {
  if (share.ok()) return Hand(answer, *share);
  return Refuse(answer, absl::IsNotFound(share.status())
                            ? DescriptorCode::kNoSuchIndex
                            : DescriptorCode::kExhausted);  // no file descriptors left
}

absl::Status DescriptorConnection::AnswerStaging(const absl::Status& created,
                                                 cache::SessionState& session) {
  const shm::DescriptorAnswer answer = {.kind = DescriptorKind::kStaging};
  if (!created.ok()) return Refuse(answer, DescriptorCode::kExhausted);
  return HandOrRefuse(answer, session.staging()->memory().Share());
}

absl::StatusOr<DescriptorConnection::Next> DescriptorConnection::Serve(
    const shm::DescriptorRequest& request, cache::Tenant& tenant, cache::SessionState& session) {
  const shm::DescriptorAnswer answer = {.kind = request.kind, .index = request.index};
  absl::Status answered;
  switch (request.kind) {
    case DescriptorKind::kDirectory:
    case DescriptorKind::kPool: {
      pool::Pool& pool =
          request.kind == DescriptorKind::kPool ? tenant.pool() : tenant.directory().pool();
      shm::DescriptorAnswer filled = answer;
      const absl::StatusOr<device::Export> share =
          pool.ShareExtent(request.index, session.id(), &filled.generation);
      answered = HandOrRefuse(filled, share);
      break;
    }
    case DescriptorKind::kControl:
      answered = request.index == 0 ? HandControl(answer, session.control()->memory())
                                    : Refuse(answer, DescriptorCode::kNoSuchIndex);
      break;
    case DescriptorKind::kStaging:
      if (request.index == 0 && session.staging() == nullptr) return Next::kStaging;
      answered = request.index == 0 ? AnswerStaging(absl::OkStatus(), session)
                                    : Refuse(answer, DescriptorCode::kNoSuchIndex);
      break;
    case DescriptorKind::kTail:
      answered = HandOrRefuse(answer, session.tails().Share(request.index));
      break;
    default:
      answered = Refuse(answer, DescriptorCode::kBadRequest);
  }
  if (!answered.ok()) return answered;
  return Next::kRequests;
}

}  // namespace tessera::serving
