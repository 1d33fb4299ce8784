#include "daemon/platform/cuda_calls.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<CudaCalls>> LoadCuda() {
  return absl::FailedPreconditionError("this build has no CUDA");
}

}  // namespace tessera
