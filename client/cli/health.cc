// tessera health: an exit code for probes that run a command.

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <chrono>
#include <memory>
#include <string>

#include "client/cli/command.h"
#include "client/rpc/channel.h"
#include "client/tools/connection.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "daemon/base/strings.h"
#include "tessera/v1/health.grpc.pb.h"

namespace tessera::cli {

namespace {

absl::Status Check(const Flags& flags) {
  const Door door = ConnectionOf(flags);
  const absl::StatusOr<std::uint64_t> limit_ms = flags.Number("timeout-ms", 1, 600'000);
  if (!limit_ms.ok()) return limit_ms.status();
  const absl::StatusOr<std::string> address = AddressOf(door);
  if (!address.ok()) return address.status();
  const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel =
      client::OpenChannel(*address, door.tls, grpc::ChannelArguments());
  if (!channel.ok()) return channel.status();
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(*limit_ms));
  v1::HealthResponse health;
  const grpc::Status status = v1::TesseraHealth::NewStub(*channel)->Check(&context, {}, &health);
  if (!status.ok()) {
    const std::string& why = status.error_message();
    const std::string hint = client::TlsHint(*address, door.tls.has_value(), why);
    return absl::UnavailableError(
        Concat("unhealthy: no answer from ", *address, ": ", hint.empty() ? why : hint));
  }
  if (!health.hung().empty()) return absl::UnavailableError(Concat("unhealthy: ", health.hung()));
  if (flags.Has("ready") && !health.not_ready().empty()) {
    return absl::UnavailableError(Concat("not ready: ", health.not_ready()));
  }
  return Print(flags.Has("ready") ? "ready\n" : "ok\n");
}

}  // namespace

CommandSpec HealthSpec() {
  return {
      .name = "health",
      .summary = "exit with 0 if a daemon is healthy, for probes",
      .description =
          "Exits with 0 if the daemon's threads run, else with 1 and the reason. For probes on\n"
          "nodes where the daemon serves no HTTP address.\n",
      .examples = {"tessera health", "tessera health --ready --timeout-ms=1000"},
      .flags = {{"ready", "", "Exit with 0 only if workers can attach, too.", ""},
                {"timeout-ms", "MS", "Time to wait for the answer.", "2000"}}};
}

int RunHealth(std::span<const std::string_view> args) {
  return RunCommand(HealthSpec(), args, Check);
}

}  // namespace tessera::cli
