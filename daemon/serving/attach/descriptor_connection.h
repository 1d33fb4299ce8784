// One peer on the descriptor socket. Everything it sends is hostile until the nonce has proved that
// it is an attached session; a peer that breaks the protocol is cut. One that does not read its
// answers is not served until it does: descriptors under way count against the whole daemon.
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

class DescriptorConnection {
 public:
  explicit DescriptorConnection(Fd socket);

  int fd() const { return socket_.get(); }

  // Reads what there is. After the opening is complete and right, returns the session (once). Null:
  // not yet. An error: cut the connection.
  absl::StatusOr<std::shared_ptr<cache::SessionState>> ReadOpening(const cache::Node& node);
  // What the connection is watched for next.
  enum class Next { kRequests, kRoom };
  // Reads and answers requests of an opened connection: a few, so that nobody keeps others waiting.
  absl::StatusOr<Next> ServeRequests(cache::Tenant& tenant, cache::SessionState& session);
  // Reads and forgets some: the session has ended. An error once the peer has hung up.
  absl::Status Discard();

 private:
  // True where `bytes_` holds `wanted` bytes now.
  absl::StatusOr<bool> Fill(std::size_t wanted);
  // Where there are too many descriptors to send one, the answer is changed to say so.
  absl::Status Answer(shm::DescriptorAnswer& answer, int fd);
  absl::Status Hand(shm::DescriptorAnswer answer, const device::Export& share);
  absl::Status Serve(const shm::DescriptorRequest& request, cache::Tenant& tenant,
                     cache::SessionState& session);

  Fd socket_;
  std::array<std::byte, sizeof(shm::DescriptorOpening)> buffer_{};
  std::size_t filled_ = 0;
};

}  // namespace tessera::serving
