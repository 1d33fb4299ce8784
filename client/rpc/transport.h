// The interface through which a session talks to its daemon. grpc_transport.h implements it; tests
// inject their own.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "client/mapped/descriptors.h"
#include "daemon/base/clock.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::client {

// The open Attach stream, which is the lease. One thread reads. The caller serialises writes, which
// may run concurrently with the read.
class AttachStream {
 public:
  virtual ~AttachStream() = default;
  // Returns false if the stream has ended.
  virtual bool Write(const v1::AttachRequest& message) = 0;
  virtual bool Read(v1::AttachResponse& message) = 0;
  // Ends the writing side; a live daemon then ends the stream.
  virtual void FinishWriting() = 0;
  // Returns why the stream ended. Call it once, after Read has returned false.
  virtual absl::Status Finish() = 0;
  // Ends the stream from any thread: Read returns false.
  virtual void Cancel() = 0;
};

// One connection. Unary calls are thread-safe; `timeout` limits each of them.
class Transport {
 public:
  virtual ~Transport() = default;

  virtual absl::StatusOr<std::unique_ptr<AttachStream>> OpenAttach(Clock::Duration timeout) = 0;
  virtual absl::StatusOr<std::unique_ptr<DescriptorSource>> OpenDescriptors(
      const v1::Welcome& welcome) = 0;

  virtual absl::Status Call(const v1::RegisterModelRequest& request,
                            v1::RegisterModelResponse& response, Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::CreateSequenceRequest& request,
                            v1::CreateSequenceResponse& response, Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::ForkRequest& request, v1::ForkResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::TruncateRequest& request, v1::TruncateResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::HandoverRequest& request, v1::HandoverResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::FreeRequest& request, v1::FreeResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::AppendRequest& request, v1::AppendResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::CompressRequest& request, v1::CompressResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::ObserveRequest& request, v1::ObserveResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::SelectRequest& request, v1::SelectResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::AttendRequest& request, v1::AttendResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::ReadRequest& request, v1::ReadResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::PublishRequest& request, v1::PublishResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::MatchRequest& request, v1::MatchResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::OffloadRequest& request, v1::OffloadResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::RestoreRequest& request, v1::RestoreResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::DescribeRequest& request, v1::DescribeResponse& response,
                            Clock::Duration timeout) = 0;
  virtual absl::Status Call(const v1::StatsRequest& request, v1::StatsResponse& response,
                            Clock::Duration timeout) = 0;
};

// Makes a new connection for each attachment, so that no state of a lost one is reused.
class Connector {
 public:
  virtual ~Connector() = default;
  virtual absl::StatusOr<std::unique_ptr<Transport>> NewTransport() = 0;
  // Whether the daemon that answered is the one that was meant; if not, the error says why.
  virtual absl::Status Check(const v1::Welcome&) const { return absl::OkStatus(); }
  // Whether the daemon runs on this machine, so that memory can be mapped.
  virtual bool local() const = 0;
  virtual const std::string& address() const = 0;
};

}  // namespace tessera::client
