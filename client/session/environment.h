// Dependencies of a worker that tests replace: time, waiting, GPUs and kernels. One per worker; it
// outlives the worker's sessions.
#pragma once

#include "client/gpu/gpu.h"
#include "daemon/base/clock.h"
#include "kernels/dispatch/attend.h"

namespace tessera::client {

// Waiting as a dependency: tests run other code instead.
class Sleeper {
 public:
  virtual ~Sleeper() = default;
  virtual void Sleep(Clock::Duration duration) = 0;
};

// Not owned. Core replaces null by the system's implementation.
struct Environment {
  const Clock* clock = nullptr;
  Sleeper* sleeper = nullptr;
  const GpuPlatform* gpus = nullptr;
  const kernels::Implementation* implementation = nullptr;
};

}  // namespace tessera::client
