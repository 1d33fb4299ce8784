// The implementation of a read by one transport.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "tessera/read.h"

namespace tessera::client {

class ReadEngine {
 public:
  virtual ~ReadEngine() = default;
  virtual absl::Status AttendRead(std::uint32_t layer, const ReadTensors& tensors) = 0;
  virtual absl::Status EndRead() = 0;
  virtual bool open() const = 0;
  virtual void Abandon() = 0;
  // Called when the read is over and the caller has dropped it: any thread may then reuse the
  // engine.
  virtual void Release() = 0;
};

}  // namespace tessera::client
