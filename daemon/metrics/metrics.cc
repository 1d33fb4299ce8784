#include "daemon/metrics/metrics.h"

#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"

namespace tessera::metrics {

std::vector<DescriptionView> AllMetrics() {
  return {
      kPoolBytes.view(),
      kPoolUsedBytes.view(),
      kPoolExtents.view(),
      kSessions.view(),
      kSequences.view(),
      kDecodingSequences.view(),
      kEpochRetiredBytes.view(),
      kRawCopyBytes.view(),
      kObservationBytes.view(),
      kPrefixes.view(),
      kPrefixBytes.view(),
      kPrefixWaits.view(),
      kHostTierBytes.view(),
      kHostTierLimitBytes.view(),
      kBackgroundJobs.view(),
      kBuildInfo.view(),
      kSessionsTotal.view(),
      kSessionEndsTotal.view(),
      kTokensAppendedTotal.view(),
      kTilesEncodedTotal.view(),
      kEntriesPackedTotal.view(),
      kEntriesDroppedTotal.view(),
      kTokenChoicesTotal.view(),
      kShownBytesTotal.view(),
      kPackedBytesTotal.view(),
      kBackgroundJobsTotal.view(),
      kProvisionalTilesTotal.view(),
      kSegmentsSealedTotal.view(),
      kStrategiesTotal.view(),
      kRunsLeftPlainTotal.view(),
      kSegmentsLeftDenseTotal.view(),
      kRawRowsDroppedTotal.view(),
      kSelectRequestsTotal.view(),
      kPrefixMatchesTotal.view(),
      kPrefixMatchTokensTotal.view(),
      kPrefixesPublishedTotal.view(),
      kPrefixesDroppedTotal.view(),
      kTailFullWaitsTotal.view(),
      kSnapshotsPublishedTotal.view(),
      kPinsRevokedTotal.view(),
      kSequencesFailedTotal.view(),
      kAttendRequestsTotal.view(),
      kMovesTotal.view(),
      kMovedBytesTotal.view(),
      kPressureClimbsTotal.view(),
      kPressureStepsTotal.view(),
      kPressureCallsTotal.view(),
      kRpcRequestsTotal.view(),
      kRpcDurationSeconds.view(),
  };
}

void RpcMethod::Finished(absl::StatusCode code, std::chrono::nanoseconds duration) {
  // A code outside the list came from a peer's library and means UNKNOWN.
  const auto index = static_cast<std::size_t>(code);
  const std::size_t slot =
      index < kCodes ? index : static_cast<std::size_t>(absl::StatusCode::kUnknown);
  codes_[slot].fetch_add(1, std::memory_order_relaxed);
  duration_.Observe(duration);
}

void RpcMethod::Visit(Visitor& visitor, std::string_view method) const {
  for (std::size_t i = 0; i < kCodes; ++i) {
    const std::uint64_t count = codes_[i].load(std::memory_order_relaxed);
    // Codes that a method never returned are left out: they would add 16 series of zeros per
    // method. OK is always reported, so that rates start from zero.
    if (count == 0 && i != 0) continue;
    visitor.Add(kRpcRequestsTotal, count, method,
                absl::StatusCodeToString(static_cast<absl::StatusCode>(i)));
  }
  const std::array<std::string_view, 1> labels = {method};
  duration_.Visit(visitor, kRpcDurationSeconds.view(), labels);
}

Metrics::Metrics(BuildInfo build) : build_(std::move(build)) {}

Metrics::~Metrics() {
  MutexLock lock(mutex_);
  TESSERA_CHECK(collectors_.empty(),
                Concat(collectors_.size(), " collectors outlive the metrics they report to"));
}

RpcMethod& Metrics::Rpc(std::string_view method) {
  MutexLock lock(mutex_);
  const auto found = methods_.find(method);
  if (found != methods_.end()) return *found->second;
  return *methods_.emplace(std::string(method), std::make_unique<RpcMethod>()).first->second;
}

Metrics::Registration Metrics::Register(const Collector& collector) {
  MutexLock lock(mutex_);
  collectors_.push_back(&collector);
  return Registration(this, &collector);
}

void Metrics::Unregister(const Collector* collector) {
  MutexLock lock(mutex_);
  const auto found = std::find(collectors_.begin(), collectors_.end(), collector);
  TESSERA_CHECK(found != collectors_.end(), "the collector is not registered");
  collectors_.erase(found);
}

Metrics::Registration& Metrics::Registration::operator=(Registration&& other) noexcept {
  if (this != &other) {
    Reset();
    metrics_ = std::exchange(other.metrics_, nullptr);
    collector_ = other.collector_;
  }
  return *this;
}

void Metrics::Registration::Reset() {
  if (metrics_ != nullptr) std::exchange(metrics_, nullptr)->Unregister(collector_);
}

void Metrics::Visit(Visitor& visitor) const {
  visitor.Add(kBuildInfo, 1, build_.version, build_.device, build_.isa);
  sessions_total.Visit(visitor);
  session_ends_total.Visit(visitor);
  MutexLock lock(mutex_);
  for (const auto& [name, method] : methods_) method->Visit(visitor, name);
  for (const Collector* collector : collectors_) collector->Collect(visitor);
}

}  // namespace tessera::metrics
