#include "daemon/serving/descriptor_connection.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "daemon/base/strings.h"

namespace tessera::serving {

using shm::DescriptorCode;
using shm::DescriptorKind;

absl::StatusOr<bool> DescriptorConnection::Fill(std::size_t wanted) {
  while (filled_ < wanted) {
    // No control buffer: descriptors that a peer sends along are dropped by the kernel.
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

absl::Status DescriptorConnection::Answer(const shm::DescriptorAnswer& answer, int fd) {
  // The socket is non-blocking: a peer that does not read gets an error here, and is cut.
  return SendMessage(socket_.get(), std::as_bytes(std::span(&answer, 1)), fd);
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
      return session;
    }
  }
  answer.code = DescriptorCode::kUnknownNonce;
  (void)Answer(answer, -1);
  return absl::PermissionDeniedError("descriptor opening with an unknown or used nonce");
}

absl::Status DescriptorConnection::ServeRequests(cache::Tenant& tenant,
                                                 cache::SessionState& session) {
  for (;;) {
    absl::StatusOr<bool> complete = Fill(sizeof(shm::DescriptorRequest));
    if (!complete.ok()) return complete.status();
    if (!*complete) return absl::OkStatus();
    shm::DescriptorRequest request;
    std::memcpy(&request, buffer_.data(), sizeof request);
    filled_ = 0;
    if (absl::Status status = Serve(request, tenant, session); !status.ok()) return status;
  }
}

absl::Status DescriptorConnection::Serve(const shm::DescriptorRequest& request,
                                         cache::Tenant& tenant, cache::SessionState& session) {
  shm::DescriptorAnswer answer = {.kind = request.kind, .index = request.index};
  Fd owned;
  int fd = -1;
  const auto refuse = [&](DescriptorCode code) {
    answer.code = code;
    return Answer(answer, -1);
  };
  switch (request.kind) {
    case DescriptorKind::kDirectory:
    case DescriptorKind::kPool: {
      pool::Pool& pool =
          request.kind == DescriptorKind::kPool ? tenant.pool() : tenant.directory().pool();
      if (!pool.ExportExtent(request.index, &owned, &answer.generation).ok()) {
        return refuse(DescriptorCode::kNoSuchIndex);
      }
      answer.bytes = pool.extent_bytes();
      fd = owned.get();
      break;
    }
    case DescriptorKind::kControl:
      if (request.index != 0) return refuse(DescriptorCode::kNoSuchIndex);
      answer.bytes = session.control()->memory().bytes();
      fd = session.control()->memory().fd();
      break;
    case DescriptorKind::kStaging: {
      if (request.index != 0) return refuse(DescriptorCode::kNoSuchIndex);
      absl::StatusOr<const cache::Staging*> staging = session.staging();
      if (!staging.ok()) return refuse(DescriptorCode::kExhausted);
      answer.bytes = (*staging)->memory().bytes();
      fd = (*staging)->memory().fd();
      break;
    }
    case DescriptorKind::kTail:
      if (!session.tails().Export(request.index, &owned, &answer.bytes).ok()) {
        return refuse(DescriptorCode::kNoSuchIndex);
      }
      fd = owned.get();
      break;
    default:
      return refuse(DescriptorCode::kBadRequest);
  }
  answer.code = DescriptorCode::kOk;
  return Answer(answer, fd);
}

}  // namespace tessera::serving
