#include "client/mapped/descriptors.h"

#include <sys/socket.h>

#include <cstring>
#include <span>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/platform/event_loop.h"
#include "daemon/platform/unix_socket.h"
#include "proto/shm/layout.h"

namespace tessera::client {

using shm::DescriptorCode;
using shm::DescriptorKind;

namespace {

const char* KindName(DescriptorKind kind) {
  switch (kind) {
    case DescriptorKind::kOpening:
      return "wake event";
    case DescriptorKind::kDirectory:
      return "directory extent";
    case DescriptorKind::kPool:
      return "pool extent";
    case DescriptorKind::kControl:
      return "control page";
    case DescriptorKind::kStaging:
      return "staging arena";
    case DescriptorKind::kTail:
      return "tail extent";
  }
  return "object";
}

absl::Status RefusalOf(const shm::DescriptorRequest& request, DescriptorCode code) {
  const std::string what = Concat(KindName(request.kind), " ", request.index);
  switch (code) {
    case DescriptorCode::kOk:
      return absl::OkStatus();
    case DescriptorCode::kBadOpening:
      return absl::FailedPreconditionError(
          Concat("the descriptor socket does not speak protocol version ", shm::kProtocolVersion,
                 " with layout ", shm::kLayoutFingerprint));
    case DescriptorCode::kUnknownNonce:
      return absl::PermissionDeniedError(
          "the descriptor socket does not know this session's nonce");
    case DescriptorCode::kNoSuchIndex:
      return absl::NotFoundError(Concat("the daemon has no ", what));
    case DescriptorCode::kBadRequest:
      return absl::InvalidArgumentError(Concat("the daemon refuses to hand out ", what));
    case DescriptorCode::kExhausted:
      return absl::ResourceExhaustedError(Concat("the daemon has no memory for ", what));
  }
  return absl::InternalError(Concat("the descriptor socket answered with unknown code ",
                                    static_cast<std::uint32_t>(code)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DescriptorSocket>> DescriptorSocket::Open(const std::string& path,
                                                                         std::uint64_t session_id,
                                                                         std::uint64_t nonce) {
  absl::StatusOr<Fd> connected = ConnectUnix(path);
  if (!connected.ok()) return connected.status();
  std::unique_ptr<DescriptorSocket> source(new DescriptorSocket(*std::move(connected)));
  const shm::DescriptorOpening opening = {.magic = shm::kDescriptorMagic,
                                          .protocol_version = shm::kProtocolVersion,
                                          .reserved = 0,
                                          .layout_fingerprint = shm::kLayoutFingerprint,
                                          .session_id = session_id,
                                          .nonce = nonce};
  MutexLock lock(source->mutex_);
  absl::Status sent = SendMessage(source->socket_.get(), std::as_bytes(std::span(&opening, 1)));
  if (!sent.ok()) return sent;
  absl::StatusOr<Descriptor> wake = source->Receive({.kind = DescriptorKind::kOpening, .index = 0});
  if (!wake.ok()) return wake.status();
  source->wake_ = std::move(wake->fd);
  return source;
}

absl::StatusOr<Descriptor> DescriptorSocket::Fetch(DescriptorKind kind, std::uint32_t index) {
  const shm::DescriptorRequest request = {.kind = kind, .index = index};
  MutexLock lock(mutex_);
  absl::Status sent = SendMessage(socket_.get(), std::as_bytes(std::span(&request, 1)));
  if (!sent.ok()) return sent;
  return Receive(request);
}

absl::StatusOr<Descriptor> DescriptorSocket::Receive(const shm::DescriptorRequest& request) {
  shm::DescriptorAnswer answer;
  Descriptor descriptor;
  absl::Status received =
      ReceiveMessage(socket_.get(), std::as_writable_bytes(std::span(&answer, 1)), &descriptor.fd);
  if (!received.ok()) return received;
  if (absl::Status refused = RefusalOf(request, answer.code); !refused.ok()) return refused;
  const bool by_handle = answer.memory == shm::MemoryKind::kCudaIpc;
  if (answer.kind != request.kind || answer.index != request.index ||
      descriptor.fd.valid() == by_handle) {
    return absl::InternalError(Concat("the descriptor socket sent ", KindName(answer.kind), " ",
                                      answer.index, " in answer to a request for ",
                                      KindName(request.kind), " ", request.index));
  }
  descriptor.bytes = answer.bytes;
  descriptor.generation = answer.generation;
  descriptor.memory = answer.memory;
  static_assert(sizeof answer.ipc_handle == sizeof descriptor.ipc_handle);
  std::memcpy(descriptor.ipc_handle.data(), answer.ipc_handle, sizeof answer.ipc_handle);
  return descriptor;
}

void DescriptorSocket::SignalWake() { SignalEvent(wake_.get()); }

void DescriptorSocket::Shutdown() { ::shutdown(socket_.get(), SHUT_RDWR); }

}  // namespace tessera::client
