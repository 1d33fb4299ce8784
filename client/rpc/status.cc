#include "client/rpc/status.h"

#include <optional>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "tessera/v1/error.pb.h"

namespace tessera::client {

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  absl::Status converted(static_cast<absl::StatusCode>(status.error_code()),
                         status.error_message());
  v1::StatusDetails details;
  if (status.error_details().empty() || !details.ParseFromString(status.error_details())) {
    return converted;
  }
  for (const google::protobuf::Any& any : details.details()) {
    v1::ErrorInfo error;
    if (!any.UnpackTo(&error)) continue;
    const std::optional<ErrorInfo> info =
        ParseErrorInfo(Concat("cause=", error.cause(), " retry_after_ms=", error.retry_after_ms()));
    if (info.has_value()) return WithCause(std::move(converted), *info);
  }
  return converted;
}

}  // namespace tessera::client
