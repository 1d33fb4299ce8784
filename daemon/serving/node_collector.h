// NodeCollector reports the state of the node, its tenants and its background work when the metrics
// are scraped.
#pragma once

#include <string>

#include "daemon/metrics/collector.h"
#include "daemon/serving/call/services.h"

namespace tessera::serving {

// Thread-safe. Owned by the Server.
class NodeCollector final : public metrics::Collector {
 public:
  // `certificate`: path of the TLS certificate; empty: none.
  NodeCollector(const Services& services, std::string certificate)
      : services_(services), node_(*services.node), certificate_(std::move(certificate)) {}
  void Collect(metrics::Visitor& visitor) const override;

 private:
  void CollectState(metrics::Visitor& visitor) const;
  void CollectMemory(metrics::Visitor& visitor) const;
  void CollectJobs(metrics::Visitor& visitor) const;
  void CollectCompaction(metrics::Visitor& visitor) const;
  void CollectPressure(metrics::Visitor& visitor) const;
  // Series of the tenant.
  void CollectTenant(cache::Tenant& tenant, metrics::Visitor& visitor) const;
  // The tenant's part of the node's series.
  static void CollectWork(cache::Tenant& tenant, metrics::Visitor& visitor);
  static void CollectPrefixes(cache::Tenant& tenant, metrics::Visitor& visitor);

  const Services& services_;
  const cache::Node& node_;
  const std::string certificate_;
};

}  // namespace tessera::serving
