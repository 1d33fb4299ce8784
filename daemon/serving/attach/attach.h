// The Attach stream: Hello and Welcome, then tails on request, until it ends and the lease with it.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <functional>
#include <string>

#include "daemon/serving/attach/connections.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

// What Welcome tells of one listening address.
struct AttachDoor {
  Services* services;
  Connections* connections;
  std::string descriptor_socket;  // empty: no Unix socket is served
  // Does what may wait for memory, elsewhere and soon: the threads of streams are few, and all
  // tenants'.
  std::function<void(std::function<void()>)> aside;
};

// A reactor for one stream; owns itself.
grpc::ServerBidiReactor<v1::AttachRequest, v1::AttachResponse>* NewAttachReactor(
    const AttachDoor& door, grpc::CallbackServerContext* context);

}  // namespace tessera::serving
