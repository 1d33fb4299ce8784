// tesserad on a machine with emulated GPUs. Additional flags: --gpu-uuids=UUID,..., for one GPU per
// UUID; --gpu-shares-by-ipc, for GPUs that export no descriptors; --gpu-fails-after=N, for GPUs
// that fail after N calls.
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
    constexpr std::string_view kUuids = "--gpu-uuids=";
    if (arg == "--gpu-shares-by-ipc") {
      memory.exports_fds = false;
    } else if (arg.starts_with(kFailAfter)) {
      gpus.options.fails_after = std::atoi(argv[i] + kFailAfter.size());
    } else if (arg.starts_with(kUuids)) {
      memory.uuids.clear();
      for (std::size_t at = kUuids.size(); at < arg.size(); at += tessera::kDeviceUuidLength + 1) {
        memory.uuids.push_back(
            tessera::ParseDeviceUuid(arg.substr(at, tessera::kDeviceUuidLength)).value());
      }
      gpus.devices = static_cast<int>(memory.uuids.size());
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
