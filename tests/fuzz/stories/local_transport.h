// A worker's transport to a daemon in the same process. Calls are function calls on the caller's
// thread, and the Attach stream is two queues. Memory is mapped over the real descriptor socket.
#pragma once

#include <memory>
#include <string>

#include "client/rpc/transport.h"
#include "daemon/serving/attach/attach.h"
#include "daemon/serving/rpc/worker_service.h"

namespace tessera::fuzz {

class LocalConnector final : public client::Connector {
 public:
  // The service must outlive everything created here.
  LocalConnector(serving::WorkerService& service, const serving::AttachContext& door)
      : service_(service), door_(door) {}

  absl::StatusOr<std::unique_ptr<client::Transport>> NewTransport() override;
  bool local() const override { return true; }
  const std::string& address() const override { return address_; }

 private:
  serving::WorkerService& service_;
  const serving::AttachContext door_;
  const std::string address_ = "in this process";
};

}  // namespace tessera::fuzz
