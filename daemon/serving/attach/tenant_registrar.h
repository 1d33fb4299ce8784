// TenantRegistrar tells the guards of connections which tenant a message comes from, and charges it
// for messages that are arriving.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>

#include "daemon/base/mutex.h"
#include "daemon/cache/tenant/node.h"
#include "daemon/guard/frame_guard.h"
#include "daemon/serving/call/message_budget.h"

namespace tessera::serving {

// Thread-safe.
class TenantRegistrar final : public Registrar {
 public:
  TenantRegistrar(const cache::Node& node, MessageBudget& messages, std::uint32_t max_sessions)
      : node_(node), messages_(messages), most_(kPerSession * max_sessions) {}

  TenantId Recognise(std::string_view begin) override;
  absl::Status Joined(TenantId tenant) override;
  void Left(TenantId tenant) override;
  bool Charge(TenantId tenant, std::uint64_t before, std::uint64_t now) override {
    return messages_.Adjust(tenant, before, now);
  }

 private:
  // A worker needs one connection; some have one per thread, and some try again and again.
  static constexpr std::uint32_t kPerSession = 16;

  const cache::Node& node_;
  MessageBudget& messages_;
  const std::uint32_t most_;  // connections of all tenants
  Mutex mutex_;
  std::uint32_t all_ TESSERA_GUARDED_BY(mutex_) = 0;  // sum over connections_
  std::map<TenantId, std::uint32_t> connections_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::serving
