// What steps and waits work with; made once per worker, outlives its sessions.
#pragma once

#include "client/gpu/gpu.h"
#include "daemon/base/clock.h"
#include "kernels/dispatch/attend.h"

namespace tessera::client {

// Waiting as a dependency: tests do something else meanwhile.
class Sleeper {
 public:
  virtual ~Sleeper() = default;
  virtual void Sleep(Clock::Duration duration) = 0;
};

struct Environment {
  const Clock* clock = nullptr;
  Sleeper* sleeper = nullptr;
  const kernels::Implementation* implementation = nullptr;
  const GpuPlatform* gpus = nullptr;
};

}  // namespace tessera::client
