// Metrics: the daemon's counters, and the registry of collectors.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/mutex.h"
#include "daemon/metrics/collector.h"
#include "daemon/metrics/instruments.h"
#include "daemon/metrics/names.h"

namespace tessera::metrics {

enum class SessionEnd : std::uint8_t {
  kClosed,   // the worker left
  kLost,     // the connection broke: the worker or the network failed
  kRefused,  // the worker broke the protocol
  kDrained,  // the daemon drained or stopped
};
template <>
inline constexpr std::array<std::string_view, 4> kLabelValues<SessionEnd> = {"closed", "lost",
                                                                             "refused", "drained"};

enum class ConnectionRefusal : std::uint8_t {
  kPeer,      // of a user that may not connect
  kLimit,     // too many connections, or too much that is unfinished
  kUnknown,   // showed no token and no session key in time
  kProtocol,  // sent what nobody may send
};
template <>
inline constexpr std::array<std::string_view, 4> kLabelValues<ConnectionRefusal> = {
    "peer", "limit", "unknown", "protocol"};

enum class AttachRefusal : std::uint8_t {
  kToken,     // a wrong one, or none
  kLimit,     // of sessions
  kDraining,  // or no device
  kVersion,   // of protocol, layout or prefix hash
  kHello,     // was not as it should be
};
template <>
inline constexpr std::array<std::string_view, 5> kLabelValues<AttachRefusal> = {
    "token", "limit", "draining", "version", "hello"};

// What an operator expects of a call. Each class has one latency histogram per service.
enum class RpcClass : std::uint8_t {
  kHot,    // short, on the path of a token or a request
  kBulk,   // moves rows in proportion to a prompt, or waits
  kAdmin,  // the operator's
};
template <>
inline constexpr std::array<std::string_view, 3> kLabelValues<RpcClass> = {"hot", "bulk", "admin"};

// Counters of one RPC method. Handlers look theirs up once, at start. Thread-safe.
class RpcMethod {
 public:
  void Finished(absl::StatusCode code, std::chrono::nanoseconds duration);

 private:
  friend class Metrics;
  static constexpr std::size_t kCodes = 17;  // OK to UNAUTHENTICATED

  explicit RpcMethod(DurationHistogram& durations) : durations_(durations) {}
  void Visit(Visitor& visitor, std::string_view service, std::string_view method) const;

  DurationHistogram& durations_;  // of the method's service and class
  std::array<std::atomic<std::uint64_t>, kCodes> codes_{};
  std::atomic<std::int64_t> nanoseconds_{0};
};

struct BuildInfo {
  std::string version;
  std::string device;
  std::string isa;  // the kernels in use: "avx2", "avx512", ...
};

// Thread-safe. Must outlive all registrations.
class Metrics {
 public:
  explicit Metrics(BuildInfo build);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // Only counters of connections and sessions are here: the cache reports its own (Collector).
  CounterBy<AttachRefusal> attach_refused_total{kAttachRefusedTotal};
  CounterBy<ConnectionRefusal> connections_refused_total{kConnectionsRefusedTotal};
  Counter sessions_total{kSessionsTotal};
  CounterBy<SessionEnd> session_ends_total{kSessionEndsTotal};

  // Adds a method, whose series are reported from now on, and returns its counters; the same object
  // for the same names. Takes a lock.
  RpcMethod& AddRpc(std::string_view service, std::string_view method, RpcClass rpc_class)
      TESSERA_EXCLUDES(methods_mutex_);
  // The counters of a method that was added. Takes a lock.
  RpcMethod& Rpc(std::string_view service, std::string_view method)
      TESSERA_EXCLUDES(methods_mutex_);

  // Unregisters the collector when destroyed. No scrape uses the collector after that.
  class Registration {
   public:
    Registration() = default;
    Registration(Registration&& other) noexcept
        : metrics_(std::exchange(other.metrics_, nullptr)), collector_(other.collector_) {}
    Registration& operator=(Registration&& other) noexcept;
    ~Registration() { Reset(); }
    void Reset();

   private:
    friend class Metrics;
    Registration(Metrics* metrics, const Collector* collector)
        : metrics_(metrics), collector_(collector) {}

    Metrics* metrics_ = nullptr;
    const Collector* collector_ = nullptr;
  };
  [[nodiscard]] Registration Register(const Collector& collector)
      TESSERA_EXCLUDES(collectors_mutex_);

  // Performs one scrape: passes every sample to `visitor`.
  void Visit(Visitor& visitor) const TESSERA_EXCLUDES(collectors_mutex_, methods_mutex_);

 private:
  void VisitRpcs(Visitor& visitor) const TESSERA_EXCLUDES(methods_mutex_);
  void Unregister(const Collector* collector) TESSERA_EXCLUDES(collectors_mutex_);

  const BuildInfo build_;
  // Held while collectors collect, which wait for locks of the cache.
  mutable Mutex collectors_mutex_;
  std::vector<const Collector*> collectors_ TESSERA_GUARDED_BY(collectors_mutex_);
  // Held for moments only: every call of an operator takes it.
  mutable Mutex methods_mutex_;
  // By service and class, and by service and method. Nothing is ever removed.
  std::map<std::pair<std::string, RpcClass>, DurationHistogram> durations_
      TESSERA_GUARDED_BY(methods_mutex_);
  std::map<std::pair<std::string, std::string>, std::unique_ptr<RpcMethod>> methods_
      TESSERA_GUARDED_BY(methods_mutex_);
};

}  // namespace tessera::metrics
