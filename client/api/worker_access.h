// For this tree's tests and tools, not installed: workers with injected dependencies, and the
// daemon's answers as protobuf messages.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "client/rpc/transport.h"
#include "client/session/environment.h"
#include "tessera/v1/tessera.pb.h"
#include "tessera/worker.h"

namespace tessera::client {

// Like Worker::Attach, with another environment, and with another transport than gRPC if
// `connector` is not null.
absl::StatusOr<std::unique_ptr<Worker>> AttachWith(AttachOptions options,
                                                   const Environment& environment,
                                                   std::unique_ptr<Connector> connector = nullptr);

// Empty while the worker is not attached.
v1::Welcome WelcomeMessage(const Worker& worker);
absl::StatusOr<v1::StatsResponse> StatsMessage(const Worker& worker);
absl::StatusOr<v1::SelectResponse> SelectMessage(const Worker& worker, std::uint32_t layer,
                                                 const SelectQuery& query,
                                                 const SelectionRule& rule);

enum class Detail : std::uint8_t { kSequence, kLanes, kEntries };
absl::StatusOr<v1::DescribeResponse> DescribeMessage(const Sequence& sequence,
                                                     Detail detail = Detail::kSequence);

struct WorkerAccess {
  static const std::shared_ptr<Core>& CoreOf(const Worker& worker) { return worker.core_; }
  static std::unique_ptr<Worker> Make(std::shared_ptr<Core> core) {
    return std::unique_ptr<Worker>(new Worker(std::move(core)));
  }
};

}  // namespace tessera::client
