#include "daemon/metrics/metrics.h"

#include <algorithm>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"

namespace tessera::metrics {

void RpcMethod::Finished(absl::StatusCode code, std::chrono::nanoseconds duration) {
  // A code outside the list came from a peer's library and means UNKNOWN.
  const auto index = static_cast<std::size_t>(code);
  const std::size_t slot =
      index < kCodes ? index : static_cast<std::size_t>(absl::StatusCode::kUnknown);
  codes_[slot].fetch_add(1, std::memory_order_relaxed);
  nanoseconds_.fetch_add(std::max<std::int64_t>(duration.count(), 0), std::memory_order_relaxed);
  durations_.Observe(duration);
}

void RpcMethod::Visit(Visitor& visitor, std::string_view service, std::string_view method) const {
  for (std::size_t i = 0; i < kCodes; ++i) {
    const std::uint64_t count = codes_[i].load(std::memory_order_relaxed);
    // Codes that a method never returned are left out: they would add 16 series of zeros per
    // method. OK is always reported, so that rates start from zero.
    if (count == 0 && i != 0) continue;
    visitor.Add(kRpcRequestsTotal, count, service, method,
                absl::StatusCodeToString(static_cast<absl::StatusCode>(i)));
  }
  visitor.Add(kRpcSecondsTotal,
              static_cast<double>(nanoseconds_.load(std::memory_order_relaxed)) / 1e9, service,
              method);
}

Metrics::Metrics(BuildInfo build) : build_(std::move(build)) {}

Metrics::~Metrics() {
  MutexLock lock(collectors_mutex_);
  TESSERA_CHECK(collectors_.empty(),
                Concat(collectors_.size(), " collectors outlive the metrics they report to"));
}

RpcMethod& Metrics::AddRpc(std::string_view service, std::string_view method, RpcClass rpc_class) {
  MutexLock lock(methods_mutex_);
  std::unique_ptr<RpcMethod>& entry = methods_[{std::string(service), std::string(method)}];
  if (entry == nullptr) {
    DurationHistogram& durations =
        durations_.try_emplace({std::string(service), rpc_class}, kRpcBounds).first->second;
    entry.reset(new RpcMethod(durations));
  }
  return *entry;
}

RpcMethod& Metrics::Rpc(std::string_view service, std::string_view method) {
  MutexLock lock(methods_mutex_);
  const auto found = methods_.find({std::string(service), std::string(method)});
  TESSERA_CHECK(found != methods_.end(), Concat(service, ".", method, " was not added"));
  return *found->second;
}

Metrics::Registration Metrics::Register(const Collector& collector) {
  MutexLock lock(collectors_mutex_);
  collectors_.push_back(&collector);
  return Registration(this, &collector);
}

void Metrics::Unregister(const Collector* collector) {
  MutexLock lock(collectors_mutex_);
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

void Metrics::VisitRpcs(Visitor& visitor) const {
  MutexLock lock(methods_mutex_);
  for (const auto& [names, method] : methods_) method->Visit(visitor, names.first, names.second);
  for (const auto& [key, durations] : durations_) {
    const std::array<std::string_view, 2> labels = {
        key.first, kLabelValues<RpcClass>[static_cast<std::size_t>(key.second)]};
    durations.Visit(visitor, kRpcDurationSeconds.view(), labels);
  }
}

void Metrics::Visit(Visitor& visitor) const {
  visitor.Add(kBuildInfo, 1, build_.version, build_.device, build_.isa);
  sessions_total.Visit(visitor);
  session_ends_total.Visit(visitor);
  connections_refused_total.Visit(visitor);
  attach_refused_total.Visit(visitor);
  VisitRpcs(visitor);
  MutexLock lock(collectors_mutex_);
  for (const Collector* collector : collectors_) collector->Collect(visitor);
}

}  // namespace tessera::metrics
