// The Attach stream: Hello and Welcome, then tail requests. The lease ends with the stream.
#pragma once

#include <functional>
#include <string>

#include "daemon/base/rate_limit.h"
#include "daemon/serving/attach/attach_stream.h"
#include "daemon/serving/attach/connections.h"
#include "daemon/serving/attach/token_delay.h"
#include "daemon/serving/call/call_deadlines.h"
#include "daemon/serving/call/services.h"

namespace tessera::serving {

// The environment of an Attach stream.
struct AttachContext {
  Services* services;
  Connections* connections;
  std::string descriptor_socket;  // path for Welcome; empty: no Unix socket is served
  // Runs work that may wait for memory on another thread: all tenants' streams share few threads.
  std::function<void(std::function<void()>)> aside;
  metrics::RpcMethod* rpc;             // counts the answers to Hello
  CallDeadlines* ungreeted = nullptr;  // streams that have not said Hello
  TokenDelay* token_delay = nullptr;   // nullptr: wrong tokens are refused at once
  LogRateLimit* refusal_lines = nullptr;
};

// Creates the reactor of one stream, which deletes itself when the stream is done.
AttachReactor* NewAttachReactor(const AttachContext& door, grpc::CallbackServerContext* context);

}  // namespace tessera::serving
