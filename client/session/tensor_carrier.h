// Carries the tensors of one request to the daemon: through the staging arena if the session has
// one, else inside the message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "client/mapped/staging.h"
#include "client/session/session.h"
#include "tessera/v1/common.pb.h"

namespace tessera::client {

// Bytes of a message besides those of its tensors, at most.
inline constexpr std::uint64_t kMessageOverhead = 4096;

// Must live until the call has returned, because it holds the place in the arena.
class TensorCarrier {
 public:
  explicit TensorCarrier(Session& session) : session_(session) {}

  // Smaller tensors travel inside the message: copying them costs less than a place.
  static constexpr std::uint64_t kMinStagedBytes = 16 << 10;

  // `bytes` must stay valid until Carry.
  void Add(v1::Tensor& tensor, std::span<const std::byte> bytes);
  // Places everything that was added. RESOURCE_EXHAUSTED if it fits neither into half of the arena
  // nor into a message, of which `rest` bytes are in use already. `what` names it in the message.
  absl::Status Carry(std::string_view what, std::uint64_t rest);

 private:
  struct Load {
    v1::Tensor* tensor;
    std::span<const std::byte> bytes;
    std::uint64_t offset;  // from the start of the place
  };
  absl::Status Stage(StagingRing& staging);

  Session& session_;
  std::vector<Load> loads_;
  std::uint64_t bytes_ = 0;  // including alignment
  StagingRing::Place place_;
};

}  // namespace tessera::client
