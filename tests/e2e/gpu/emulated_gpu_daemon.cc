// tesserad on a machine with an emulated GPU. Two additional flags: --gpu-shares-by-ipc, for a GPU
// that exports no descriptors, and --gpu-fails-after=N, for one that fails after N calls.
#include <cstdlib>
#include <memory>
#include <string_view>
#include <vector>

#include "daemon/wiring.h"
#include "tests/fakes/gpu/emulated_runtime.h"
#include "tests/fakes/gpu/shared_gpu.h"

int main(int argc, char** argv) {
  using tessera::tests::SharedGpu;
  SharedGpu::Options memory;
  tessera::tests::EmulatedGpus gpus;
  std::vector<std::string_view> args;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    constexpr std::string_view kFailAfter = "--gpu-fails-after=";
    if (arg == "--gpu-shares-by-ipc") {
      memory.exports_fds = false;
    } else if (arg.starts_with(kFailAfter)) {
      gpus.options.fails_after = std::atoi(argv[i] + kFailAfter.size());
    } else {
      args.push_back(arg);
    }
  }
  return tessera::RunDaemon(
      args, {.load_cuda = [&memory]() -> absl::StatusOr<std::unique_ptr<tessera::CudaCalls>> {
               return std::make_unique<SharedGpu>(memory);
             },
             .gpus = &gpus});
}
