// Descriptions of sequences, prefixes, tenants and the node, for Describe, Stats, the admin service
// and the metrics.
#pragma once

#include "daemon/metrics/metrics.h"
#include "daemon/serving/call/services.h"
#include "tessera/v1/admin.pb.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

v1::SequenceState StateOf(const cache::Sequence::Description& description);
// RESOURCE_EXHAUSTED: the answer would exceed the message limit.
absl::Status DescribeSequence(const Services& services, const cache::Sequence& sequence,
                              const v1::DescribeRequest& request, v1::DescribeResponse& out);
// Fills all fields but the tenant's name.
void Describe(const Clock& clock, const cache::PrefixStore::Description& prefix,
              v1::PrefixInfo& out);
void FillNodeStats(const Services& services, v1::StatsResponse& out);
void FillTenantStats(cache::Tenant& tenant, v1::TenantStats& out);

// Collects the metrics of the cache and of compaction when they are scraped. Thread-safe.
class NodeCollector final : public metrics::Collector {
 public:
  explicit NodeCollector(const Services& services) : services_(services), node_(*services.node) {}
  void Collect(metrics::Visitor& visitor) const override;

 private:
  void CollectCompaction(metrics::Visitor& visitor) const;
  static void CollectPrefixes(cache::Tenant& tenant, metrics::Visitor& visitor);
  void CollectPressure(metrics::Visitor& visitor) const;

  const Services& services_;
  const cache::Node& node_;
};

}  // namespace tessera::serving
