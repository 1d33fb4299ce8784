// AttachStream: the messages of one Attach stream. Each is small, and is parsed only if it is.
#pragma once

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/server_callback.h>

#include <cstdint>

#include "absl/status/status.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/serving/call/wire.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

using AttachReactor = grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>;

class AttachStream : public AttachReactor {
 public:
  // 4,096 ids of sequences, or 8,000 in Hello.
  static constexpr std::uint64_t kMostBytes = 64 << 10;

 protected:
  // What StartRead and OnReadDone are for other streams. CANCELLED: there are no more messages.
  void ReadNext() { StartRead(&arriving_); }
  virtual void OnMessage(const absl::Status& status) = 0;
  const v1::AttachRequest& message() const { return message_; }

  // What StartWrite is for other streams. The message may change after it returns.
  void WriteNext(const v1::AttachResponse& message) {
    leaving_.Clear();  // gRPC writes to empty buffers only
    bool own = false;
    const grpc::Status status =
        grpc::SerializationTraits<v1::AttachResponse>::Serialize(message, &leaving_, &own);
    TESSERA_CHECK(status.ok(), status.error_message());
    StartWrite(&leaving_);
  }

 private:
  void OnReadDone(bool ok) final {
    OnMessage(ok ? ParseArriving() : absl::CancelledError("the stream has ended"));
  }

  absl::Status ParseArriving() {
    message_.Clear();
    if (arriving_.Length() > kMostBytes) {
      return absl::ResourceExhaustedError(Concat("an Attach message has ", arriving_.Length(),
                                                 " bytes; the limit is ", kMostBytes));
    }
    const absl::Status status = ParseBounded(
        arriving_, 4 * kMostBytes, [](std::uint64_t) { return absl::OkStatus(); }, message_);
    arriving_.Clear();
    return status;
  }

  grpc::ByteBuffer arriving_;
  grpc::ByteBuffer leaving_;
  v1::AttachRequest message_;
};

}  // namespace tessera::serving
