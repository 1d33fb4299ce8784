// The subcommands of `tessera`.
#pragma once

#include <span>
#include <string_view>

#include "client/gpu/gpu.h"

namespace tessera::cli {

struct Command {
  std::string_view name;
  std::string_view summary;
  // Returns the exit status; prints its own errors.
  int (*run)(std::span<const std::string_view> args);
};

int RunStatus(std::span<const std::string_view> args);
int RunTop(std::span<const std::string_view> args);
int RunDescribe(std::span<const std::string_view> args);
int RunPolicies(std::span<const std::string_view> args);
int RunPolicy(std::span<const std::string_view> args);
int RunCompress(std::span<const std::string_view> args);
int RunPrefixes(std::span<const std::string_view> args);
int RunOffload(std::span<const std::string_view> args);
int RunRestore(std::span<const std::string_view> args);
int RunEvict(std::span<const std::string_view> args);
int RunDrain(std::span<const std::string_view> args);
int RunHealth(std::span<const std::string_view> args);
int RunWorker(std::span<const std::string_view> args);
// RunWorker on the given GPUs, for tests.
int RunWorkerOn(const client::GpuPlatform& gpus, std::span<const std::string_view> args);
int RunBench(std::span<const std::string_view> args);
int RunEval(std::span<const std::string_view> args);
int RunGenerate(std::span<const std::string_view> args);

}  // namespace tessera::cli
