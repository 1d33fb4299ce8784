// AdminRefusal answers calls of methods that the workers' addresses do not serve. It reads nothing
// of them.
#pragma once

#include <grpcpp/generic/async_generic_service.h>

#include <string>

#include "daemon/base/strings.h"

namespace tessera::serving {

// Owned by the Server. Thread-safe.
class AdminRefusal final : public grpc::CallbackGenericService {
 public:
  grpc::ServerGenericBidiReactor* CreateReactor(
      grpc::GenericCallbackServerContext* context) override {
    return new Reactor(
        context->method().starts_with(kAdminPrefix)
            ? grpc::Status(grpc::StatusCode::PERMISSION_DENIED,
                           "operators' calls are served on the daemon's admin socket "
                           "only (admin_listen)")
            : grpc::Status(grpc::StatusCode::UNIMPLEMENTED,
                           Concat("no method ", context->method(), " here")));
  }

 private:
  static constexpr std::string_view kAdminPrefix = "/tessera.v1.TesseraAdmin/";
  class Reactor final : public grpc::ServerGenericBidiReactor {
   public:
    explicit Reactor(const grpc::Status& status) { Finish(status); }
    void OnDone() override { delete this; }
  };
};

}  // namespace tessera::serving
