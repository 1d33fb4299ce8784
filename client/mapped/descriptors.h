// The source of the file descriptors that a session maps: the descriptor socket, or a test's fake.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/base/mutex.h"
#include "daemon/platform/cuda_calls.h"
#include "daemon/platform/fd.h"
#include "proto/shm/descriptors.h"

namespace tessera::client {

struct Descriptor {
  Fd fd;                         // invalid for kCudaIpc
  std::uint64_t bytes = 0;       // size of the mapping
  std::uint32_t generation = 0;  // of a pool extent
  shm::MemoryKind memory = shm::MemoryKind::kHost;
  CudaIpcHandle ipc_handle = {};  // only for kCudaIpc
};

// Thread-safe.
class DescriptorSource {
 public:
  virtual ~DescriptorSource() = default;
  // NOT_FOUND if the extent does not exist or no longer exists.
  virtual absl::StatusOr<Descriptor> Fetch(shm::DescriptorKind kind, std::uint32_t index) = 0;
  // Signals the session's wake event: one system call.
  virtual void SignalWake() = 0;
  // Fails fetches in flight and all later ones. Idempotent.
  virtual void Shutdown() = 0;
};

// A connection to the daemon's descriptor socket. It stays open: like the Attach stream, it shows
// the daemon that the session is alive.
class DescriptorSocket final : public DescriptorSource {
 public:
  static absl::StatusOr<std::unique_ptr<DescriptorSocket>> Open(const std::string& path,
                                                                std::uint64_t session_id,
                                                                std::uint64_t nonce);

  absl::StatusOr<Descriptor> Fetch(shm::DescriptorKind kind, std::uint32_t index) override;
  void SignalWake() override;
  void Shutdown() override;

 private:
  explicit DescriptorSocket(Fd socket) : socket_(std::move(socket)) {}
  absl::StatusOr<Descriptor> Receive(const shm::DescriptorRequest& request)
      TESSERA_REQUIRES(mutex_);

  const Fd socket_;
  Fd wake_;
  Mutex mutex_;  // one request and its answer at a time
};

}  // namespace tessera::client
