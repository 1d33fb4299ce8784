#include "kernels/cuda/host_adapter.h"

namespace tessera::kernels::cuda {

std::unique_ptr<HostAdapter> HostAdapter::Open(int, std::string* reason) {
  *reason = "this build has no CUDA";
  return nullptr;
}

}  // namespace tessera::kernels::cuda
