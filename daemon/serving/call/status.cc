#include "daemon/serving/call/status.h"

#include <optional>
#include <string>

#include "daemon/base/error_cause.h"
#include "tessera/v1/error.pb.h"

namespace tessera::serving {

namespace {

std::string Details(const absl::Status& status, const std::string& message) {
  const std::optional<ErrorInfo> info = CauseOf(status);
  if (!info.has_value()) return {};
  v1::ErrorInfo error;
  error.set_cause(std::string(CauseName(info->cause)));
  error.set_retry_after_ms(static_cast<std::uint32_t>(info->retry_after.count()));
  v1::StatusDetails details;
  details.set_code(static_cast<std::int32_t>(status.code()));
  details.set_message(message);
  details.add_details()->PackFrom(error);
  return details.SerializeAsString();
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message(status.message().data(), status.message().size());
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message,
                      Details(status, message));
}

}  // namespace tessera::serving
