// HealthService answers probes (proto/tessera/v1/health.proto).
#pragma once

#include "daemon/base/strings.h"
#include "daemon/serving/call/readiness.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/health.grpc.pb.h"

namespace tessera::serving {

// Owned by the Server. Thread-safe.
class HealthService final
    : public v1::TesseraHealth::WithRawCallbackMethod_Check<v1::TesseraHealth::Service> {
 public:
  explicit HealthService(const Services& services) : services_(services) {}

  // The request is empty, so it is not parsed.
  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context, const grpc::ByteBuffer*,
                                  grpc::ByteBuffer* answer) override {
    v1::HealthResponse response;
    response.set_hung(services_.heartbeats->Hung(services_.clock->Now()).value_or(""));
    const absl::Status ready = Readiness(services_);
    if (!ready.ok()) response.set_not_ready(std::string(AsStringView(ready.message())));
    grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
    bool own = false;
    reactor->Finish(
        grpc::SerializationTraits<v1::HealthResponse>::Serialize(response, answer, &own));
    return reactor;
  }

 private:
  const Services& services_;
};

}  // namespace tessera::serving
