// The device whose daemon a client wants, where a node has one daemon per device.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "client/gpu/gpu.h"

namespace tessera::client {

struct WantedDevice {
  // A device UUID as text, or the beginning of one; empty: unknown, any will do.
  std::string uuid;
  // Where the UUID comes from, or why it is unknown. For messages.
  std::string source;
  // The caller named the device. If not, it is the device that the calling thread uses.
  bool is_explicit = false;
};

// `device`, as in AttachOptions::device, is a UUID or its beginning, "cuda:N" for device N of this
// process, or empty for the device that the calling thread uses. INVALID_ARGUMENT for other text;
// FAILED_PRECONDITION if this process has no such device.
absl::StatusOr<WantedDevice> FindWantedDevice(const GpuPlatform& platform,
                                              const std::string& device);

}  // namespace tessera::client
