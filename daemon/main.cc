#include <string_view>
#include <vector>

#include "daemon/wiring.h"
#include "kernels/cuda/host/runtime.h"

int main(int argc, char** argv) {
  const std::vector<std::string_view> args(argv + 1, argv + argc);
  return tessera::RunDaemon(
      args, {.load_cuda = tessera::LoadCuda, .gpus = &tessera::kernels::cuda::SystemGpus()});
}
