// The tensors of one request on their way to the daemon: through the staging arena where the
// session has one, else inside the message.
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

// Lives until the call has returned: it holds the place in the arena.
class TensorCarrier {
 public:
  explicit TensorCarrier(Session& session) : session_(session) {}

  // Less than this goes inside the message: copying it there costs less than a place.
  static constexpr std::uint64_t kLeastStaged = 16 << 10;

  // `bytes` stay where they are until Carry.
  void Add(v1::Tensor& tensor, std::span<const std::byte> bytes);
  // All that was added, together. RESOURCE_EXHAUSTED where it is more than the arena takes at a
  // time and more than a message, of which `rest` bytes are spoken for; `what` names it there.
  absl::Status Carry(std::string_view what, std::uint64_t rest);

 private:
  struct Load {
    v1::Tensor* tensor;
    std::span<const std::byte> bytes;
    std::uint64_t offset;  // from the beginning of the place
  };
  absl::Status Stage(StagingRing& staging);

  Session& session_;
  std::vector<Load> loads_;
  std::uint64_t bytes_ = 0;  // with what aligns them
  StagingRing::Place place_;
};

}  // namespace tessera::client
