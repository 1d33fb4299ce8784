// Services: the components that handlers use. Owned by RunDaemon; outlives the server.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "daemon/base/clock.h"
#include "daemon/base/heartbeat.h"
#include "daemon/base/log.h"
#include "daemon/base/scheduler.h"
#include "daemon/cache/tenant/node.h"
#include "daemon/compaction/jobs/compactor.h"
#include "daemon/compaction/jobs/tail_absorber.h"
#include "daemon/device/device.h"
#include "daemon/metrics/metrics.h"
#include "daemon/residency/pressure.h"
#include "daemon/serving/call/call_log.h"

namespace tessera::serving {

struct Services {
  cache::Node* node;
  compaction::TailAbsorber* absorber;
  compaction::Compactor* compactor;
  residency::Pressure* pressure;
  Scheduler* scheduler;
  metrics::Metrics* metrics;
  Logger* logger;
  CallLog* call_log;
  const Clock* clock;
  Heartbeats* heartbeats;
  device::Device* device;
  Clock::TimePoint started;
  std::uint64_t max_message_bytes;
  std::uint64_t message_bytes = 256 << 20;  // of all messages at a time
  std::uint32_t compactor_threads = 1;
  std::atomic<bool> serving{false};  // all addresses are listened on
  std::atomic<bool> draining{false};
  std::atomic<bool> stopping{false};  // the drain limit has passed: long handlers must return
};

}  // namespace tessera::serving
