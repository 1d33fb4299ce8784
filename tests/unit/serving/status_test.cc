// Errors cross gRPC with code, message and cause.
#include "daemon/serving/call/status.h"

#include <gtest/gtest.h>

#include "client/rpc/status.h"
#include "daemon/base/error_cause.h"

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
}

TEST(Status, WithoutACauseNothingIsAdded) {
  EXPECT_TRUE(client::FromGrpc(serving::ToGrpc(absl::OkStatus())).ok());
  const grpc::Status sent = serving::ToGrpc(absl::NotFoundError("no sequence 1"));
  EXPECT_TRUE(sent.error_details().empty());
  EXPECT_EQ(client::FromGrpc(sent), absl::NotFoundError("no sequence 1"));
}

TEST(Status, MalformedDetailsAreIgnored) {
  for (const std::string details :
       {std::string("\xff\xff\xff"), std::string("\x1a\x03\x0a\x01x")}) {
    const absl::Status received =
        client::FromGrpc(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "full", details));
    EXPECT_EQ(received, absl::ResourceExhaustedError("full"));
  }
}

}  // namespace
}  // namespace tessera
