// Descriptions of sequences, prefixes, tenants and the node, for Describe, Stats and the admin
// service.
#pragma once

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

}  // namespace tessera::serving
