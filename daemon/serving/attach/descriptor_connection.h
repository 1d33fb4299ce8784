// One peer on the descriptor socket. It is untrusted until its nonce proves that it is an attached
// session. The watcher disconnects a peer that breaks the protocol. A peer that does not read its
// answers is not served, because descriptors in flight count against the limit of the whole daemon.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "daemon/cache/tenant/node.h"
#include "daemon/platform/fd.h"
#include "daemon/platform/unix_socket.h"
#include "proto/shm/descriptors.h"

namespace tessera::serving {

// Owned and used by the watcher's thread. Never blocks.
class DescriptorConnection {
 public:
  explicit DescriptorConnection(Fd socket);

  int fd() const { return socket_.get(); }

  // Reads available bytes. Returns the session once the opening is complete and valid, and null
  // while it is incomplete. After an error the caller must close the connection.
  absl::StatusOr<std::shared_ptr<cache::SessionState>> ReadOpening(const cache::Node& node);
  // What to wait for next: requests, room to send, or the session's staging memory. The caller
  // creates the latter (SessionState::CreateStaging), which takes too long for this thread, and
  // calls AnswerStaging with the outcome.
  enum class Next { kRequests, kRoom, kStaging };
  // Serves a few requests of an opened connection, so that other peers get their turn.
  absl::StatusOr<Next> ServeRequests(cache::Tenant& tenant, cache::SessionState& session);
  absl::Status AnswerStaging(const absl::Status& created, cache::SessionState& session);
  // Reads and drops input after the session has ended. Returns an error once the peer has closed.
  absl::Status Discard();

 private:
  // Reads until `buffer_` has `wanted` bytes. Returns false if more must arrive first.
  absl::StatusOr<bool> Fill(std::size_t wanted);
  // Sends the answer. If no more descriptors can be sent, it sends kExhausted instead and sets it
  // in `answer`.
  absl::Status Answer(shm::DescriptorAnswer& answer, int fd);
  absl::Status Hand(shm::DescriptorAnswer answer, const device::Export& share);
  absl::Status HandControl(shm::DescriptorAnswer answer, const Memfd& page);
  absl::StatusOr<Next> Serve(const shm::DescriptorRequest& request, cache::Tenant& tenant,
                             cache::SessionState& session);
  absl::Status HandOrRefuse(const shm::DescriptorAnswer& answer,
                            const absl::StatusOr<device::Export>& share);
  absl::Status Refuse(shm::DescriptorAnswer answer, shm::DescriptorCode code);

  Fd socket_;
  std::array<std::byte, sizeof(shm::DescriptorOpening)> buffer_{};
  std::size_t filled_ = 0;
};

}  // namespace tessera::serving
