// TenantRegistrar tells the guards of connections which tenant a message comes from, and charges it
// for messages that are arriving.
#pragma once

#include <string_view>

#include "daemon/cache/tenant/node.h"
#include "daemon/guard/frame_guard.h"
#include "daemon/serving/call/message_budget.h"

namespace tessera::serving {

// Thread-safe.
class TenantRegistrar final : public Registrar {
 public:
  TenantRegistrar(const cache::Node& node, MessageBudget& messages)
      : node_(node), messages_(messages) {}

  TenantId Recognise(std::string_view begin) override;
  bool Charge(TenantId tenant, std::uint64_t before, std::uint64_t now) override {
    return messages_.Adjust(tenant, before, now);
  }

 private:
  const cache::Node& node_;
  MessageBudget& messages_;
};

}  // namespace tessera::serving
