#include "daemon/serving/call/call_log.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/serving/call/peer.h"

namespace tessera::serving {

namespace {

LogLevel LevelOf(const absl::Status& status) {
  const bool our_fault =
      absl::IsInternal(status) || absl::IsUnknown(status) || absl::IsDataLoss(status);
  return our_fault ? LogLevel::kError : LogLevel::kDebug;
}

// Adds the fields that every line about a call ends with. The strings outlive the fields.
void AddEnd(const absl::Status& status, std::string_view trace_id, std::vector<LogField>& fields) {
  if (!status.ok()) fields.push_back({"error", AsStringView(status.message())});
  if (!trace_id.empty()) fields.push_back({"trace_id", trace_id});
}

}  // namespace

void CallLog::Write(std::string_view method, const grpc::ServerContextBase& context,
                    const absl::Status& status, Clock::Duration duration, bool is_slow) {
  const LogLevel level = is_slow ? LogLevel::kWarning : LevelOf(status);
  if (!logger_.Enabled(level)) return;
  const std::optional<std::uint64_t> left_out =
      (is_slow ? slow_lines_ : failed_lines_).Say(clock_.Now());
  if (!left_out.has_value()) return;
  const std::string code = absl::StatusCodeToString(status.code());
  const std::string trace_id = TraceIdOf(context);
  std::vector<LogField> fields = {{"method", method},
                                  {"seconds", std::chrono::duration<double>(duration).count()},
                                  {"outcome", code},
                                  {"like_this_before", *left_out}};
  AddEnd(status, trace_id, fields);
  logger_.Log(level, is_slow ? "slow call" : "call failed", fields);
}

void CallLog::Audit(std::string_view method, std::string_view object,
                    const grpc::ServerContextBase& context, const absl::Status& status) {
  std::optional<std::uint64_t> left_out;
  if (!status.ok()) {
    left_out = failed_audits_.Say(clock_.Now());
    if (!left_out.has_value()) return;
  }
  const std::string code = absl::StatusCodeToString(status.code());
  const std::string trace_id = TraceIdOf(context);
  const std::string peer = context.peer();
  const std::optional<PeerCredentials> process = CallerProcess(context);
  std::vector<LogField> fields = {
      {"audit", true}, {"method", method}, {"object", object}, {"outcome", code}};
  if (process.has_value()) {
    fields.push_back({"uid", process->uid});
    fields.push_back({"gid", process->gid});
    fields.push_back({"pid", process->pid});
    // The kernel has no number for a process that this pid namespace does not see.
    if (process->pid == 0) fields.push_back({"pid_namespace", "other"});
  } else {
    fields.push_back({"peer", IsLocal(context) ? std::string_view("disconnected") : peer});
  }
  if (left_out.has_value()) fields.push_back({"like_this_before", *left_out});
  AddEnd(status, trace_id, fields);
  logger_.Log(LogLevel::kInfo, "admin call", fields);
}

}  // namespace tessera::serving
