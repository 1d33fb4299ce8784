#include "kernels/cuda/host/runtime.h"

namespace tessera::kernels::cuda {
namespace {

class NoGpus final : public RuntimeSource {
 public:
  std::unique_ptr<Runtime> Open(int, std::string* reason) override {
    *reason = "this build has no CUDA";
    return nullptr;
  }
};

}  // namespace

RuntimeSource& SystemGpus() {
  static NoGpus gpus;
  return gpus;
}

}  // namespace tessera::kernels::cuda
