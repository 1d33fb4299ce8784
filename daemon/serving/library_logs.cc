#include "daemon/serving/library_logs.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>

#include <atomic>
#include <optional>
#include <string>

#include "daemon/base/check.h"

namespace tessera::serving {

namespace {

// The hooks take no argument that could lead to it.
std::atomic<LibraryLogs*> g_logs{nullptr};

void WriteOfGrpc(gpr_log_func_args* args) {
  LibraryLogs* const logs = g_logs.load();
  if (logs != nullptr && args->severity == GPR_LOG_SEVERITY_ERROR) {
    logs->Write("gRPC", args->message);
  }
}

void WriteOfProtobuf(google::protobuf::LogLevel, const char*, int, const std::string& message) {
  if (LibraryLogs* const logs = g_logs.load(); logs != nullptr) logs->Write("protobuf", message);
}

}  // namespace

LibraryLogs::LibraryLogs(Logger& logger, const Clock& clock) : logger_(logger), clock_(clock) {
  TESSERA_CHECK(g_logs.exchange(this) == nullptr, "there is one LibraryLogs");
  gpr_set_log_function(WriteOfGrpc);
  google::protobuf::SetLogHandler(WriteOfProtobuf);
}

// The hooks remain, and write nothing: a thread may be in one of them.
LibraryLogs::~LibraryLogs() { g_logs.store(nullptr); }

void LibraryLogs::Write(std::string_view library, std::string_view message) {
  const std::optional<std::uint64_t> unsaid = lines_.Say(clock_.Now());
  if (!unsaid.has_value()) return;
  logger_.Log(LogLevel::kWarning, "library error",
              {{"library", library}, {"error", message}, {"like_this_before", *unsaid}});
}

}  // namespace tessera::serving
