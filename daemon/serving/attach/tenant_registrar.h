// TenantRegistrar tells the guards of connections which tenant a message comes from, and charges it
// for messages that are arriving.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "daemon/base/clock.h"
#include "daemon/base/mutex.h"
#include "daemon/cache/tenant/node.h"
#include "daemon/guard/frame_guard.h"
#include "daemon/serving/attach/reading_turns.h"
#include "daemon/serving/call/shares.h"

namespace tessera::serving {

// Thread-safe.
class TenantRegistrar final : public Registrar {
 public:
  struct Options {
    const cache::Node* node;
    Shares* arriving;  // bytes of requests that are arriving
    Shares* requests;  // bytes of requests that are there
    const Clock* clock;
    std::uint32_t max_sessions;  // of all tenants
  };
  explicit TenantRegistrar(const Options& options)
      : options_(options),
        connections_({.what = "connections",
                      .most = std::uint64_t{kPerSession} * options.max_sessions,
                      .tenants = options.node->tenants().size(),
                      .least_part = kPerSession}) {}

  TenantId Recognise(std::string_view begin) override;
  absl::Status Joined(TenantId tenant) override;
  void Left(TenantId tenant) override { (void)connections_.Adjust(tenant, 1, 0); }
  void SetTenants(std::size_t tenants) { connections_.SetTenants(tenants); }
  bool Charge(TenantId tenant, std::uint64_t before, std::uint64_t now) override {
    return options_.arriving->Adjust(tenant, before, now);
  }
  bool MustWait(TenantId tenant, const FrameGuard& asker) override;
  void Finished(TenantId tenant, const FrameGuard& payer) override {
    turns_.Finished(tenant, &payer);
  }

 private:
  // A worker needs one connection; some have one per thread, and some try again and again.
  static constexpr std::uint32_t kPerSession = 16;

  // Tokens that are looked up for a connection and are wrong, of all peers together. Guessing them
  // here would be faster than by Attach, which answers slowly.
  static constexpr double kMissesPerSecond = 10;
  static constexpr double kMissesAtOnce = 50;

  bool MayMiss();

  const Options options_;
  Shares connections_;
  ReadingTurns turns_;
  Mutex mutex_;
  EventBudget misses_ TESSERA_GUARDED_BY(mutex_){kMissesPerSecond, kMissesAtOnce};
};

}  // namespace tessera::serving
