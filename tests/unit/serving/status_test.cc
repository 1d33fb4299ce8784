// Errors cross gRPC with code, message and cause.
#include "daemon/serving/call/status.h"

#include <gtest/gtest.h>

#include "client/rpc/status.h"
#include "daemon/base/error_cause.h"
#include "tessera/error.h"

namespace tessera {
namespace {

TEST(Status, TheCauseOfAnErrorReachesTheClient) {
  const ErrorInfo info = {.cause = ErrorCause::kPoolFull,
                          .retry_after = std::chrono::milliseconds(2001)};
  const absl::Status sent = WithCause(absl::ResourceExhaustedError("the pool is full"), info);
  const absl::Status received = client::FromGrpc(serving::ToGrpc(sent));
  EXPECT_EQ(received.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(received.message(), "the pool is full");
  EXPECT_EQ(CauseOf(received), info);
  EXPECT_EQ(client::GetErrorInfo(received).cause, client::ErrorCause::kPoolFull);
  EXPECT_EQ(client::GetErrorInfo(received).retry_after, info.retry_after);
}

TEST(Status, TheClientKnowsEveryCause) {
  for (int i = 0; i <= static_cast<int>(ErrorCause::kArgument); ++i) {
    const auto cause = static_cast<ErrorCause>(i);
    const absl::Status status = WithCause(absl::InternalError("an error"), cause);
    EXPECT_NE(client::GetErrorInfo(status).cause, client::ErrorCause::kUnspecified)
        << CauseName(cause);
  }
}

TEST(Status, WithoutACauseNothingIsAdded) {
  EXPECT_TRUE(client::FromGrpc(serving::ToGrpc(absl::OkStatus())).ok());
  const grpc::Status sent = serving::ToGrpc(absl::NotFoundError("no sequence 1"));
  EXPECT_TRUE(sent.error_details().empty());
  EXPECT_EQ(client::FromGrpc(sent), absl::NotFoundError("no sequence 1"));
}

TEST(Status, MalformedDetailsAreIgnored) {
  for (const std::string& details :
       {std::string("\xff\xff\xff"), std::string("\x1a\x03\x0a\x01x")}) {
    const absl::Status received =
        client::FromGrpc(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "full", details));
    EXPECT_EQ(received, absl::ResourceExhaustedError("full"));
  }
}

}  // namespace
}  // namespace tessera
