// A source of extents that fails when the test says so.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "daemon/pool/extents.h"

namespace tessera {

// Real shared memory, until `allowed` extents have come.
class FaultyExtents final : public pool::ExtentSource {
 public:
  absl::StatusOr<std::unique_ptr<pool::Extent>> Create(AddressRange& range, std::uint64_t offset,
                                                       std::uint64_t bytes) override {
    if (allowed_ == 0) return absl::ResourceExhaustedError("the device has no memory left");
    --allowed_;
    ++created_;
    return real_.Create(range, offset, bytes);
  }

  void Allow(std::uint64_t extents) { allowed_ = extents; }
  std::uint64_t created() const { return created_; }

 private:
  pool::SharedMemoryExtents real_{"tessera-test"};
  std::uint64_t allowed_ = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t created_ = 0;
};

}  // namespace tessera
