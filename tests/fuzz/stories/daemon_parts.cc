#include "tests/fuzz/stories/daemon_parts.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/device/cpu_device.h"
#include "daemon/metrics/metrics.h"
#include "daemon/residency/demote_prefixes.h"
#include "daemon/residency/drop_prefixes.h"
#include "daemon/residency/offload_idle.h"
#include "daemon/residency/reduce_channels.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::fuzz {

namespace {

device::Device& Cpu() {
  static device::CpuDevice device(kernels::BestImplementation());
  return device;
}

metrics::Metrics& AllMetrics() {
  static metrics::Metrics metrics({.version = "fuzz", .device = "cpu", .isa = "any"});
  return metrics;
}

}  // namespace

DaemonParts::DaemonParts(Options options)
    : heartbeats_(*options.clock), call_log_(logger_, *options.clock), services_{} {
  options.node.device = &Cpu();
  options.node.tenant_template.clock = options.clock;
  options.node.tenant_template.on_attention = [this] {
    if (watcher_ != nullptr) watcher_->Attention();
  };
  absl::StatusOr<std::unique_ptr<cache::Node>> node = cache::Node::Create(options.node);
  TESSERA_CHECK(node.ok(), node.status().ToString());
  node_ = *std::move(node);
  compactor_ = std::make_unique<compaction::Compactor>(compaction::Compactor::Options{
      .scheduler = options.scheduler,
      .logger = &logger_,
      .clock = options.clock,
      .operations = &kernels::OperationsOf(kernels::BestImplementation())});
  absorber_ = std::make_unique<compaction::TailAbsorber>(
      compaction::TailAbsorber::Options{.scheduler = options.scheduler,
                                        .logger = &logger_,
                                        .clock = options.clock,
                                        .compactor = compactor_.get()});
  residency::Pressure::Options pressure = {.node = node_.get(),
                                           .scheduler = options.scheduler,
                                           .logger = &logger_,
                                           .clock = options.clock,
                                           .pause = std::move(options.pause),
                                           .high_percent = options.pressure_high_percent,
                                           .low_percent = options.pressure_low_percent};
  auto demote = std::make_unique<residency::DemotePrefixes>(&node_->host_tier());
  auto offload = std::make_unique<residency::OffloadIdle>(residency::OffloadIdle::Options{
      .clock = options.clock, .node = node_.get(), .idle = options.offload_idle});
  auto drop = std::make_unique<residency::DropPrefixes>(
      std::vector<residency::Measure*>{demote.get(), offload.get()});
  pressure.ladder.push_back(std::move(demote));
  pressure.ladder.push_back(std::move(offload));
  pressure.ladder.push_back(std::move(drop));
  pressure.ladder.push_back(std::make_unique<residency::ReduceChannels>(compactor_.get()));
  pressure_ = std::make_unique<residency::Pressure>(std::move(pressure));
  services_.node = node_.get();
  services_.absorber = absorber_.get();
  services_.compactor = compactor_.get();
  services_.pressure = pressure_.get();
  services_.scheduler = options.scheduler;
  services_.metrics = &AllMetrics();
  serving::AddRpcMethods(AllMetrics());
  services_.logger = &logger_;
  services_.call_log = &call_log_;
  services_.clock = options.clock;
  services_.heartbeats = &heartbeats_;
  services_.device = &Cpu();
  services_.started = options.clock->Now();
  services_.max_message_bytes = 1 << 20;
  absl::StatusOr<std::unique_ptr<serving::Watcher>> watcher =
      serving::Watcher::Create(services_, connections_);
  TESSERA_CHECK(watcher.ok(), watcher.status().ToString());
  watcher_ = *std::move(watcher);
  connections_.set_watcher(watcher_.get());
  door_ = {.services = &services_,
           .connections = &connections_,
           .descriptor_socket = std::move(options.descriptor_socket),
           .aside = [](const std::function<void()>& work) { work(); },
           .rpc = &AllMetrics().Rpc(serving::kWorkerServiceName, "Attach")};
  worker_ = std::make_unique<serving::WorkerService>(door_);
}

void DaemonParts::ExpectNothingLeft() {
  for (const std::unique_ptr<cache::Tenant>& tenant : node_->tenants()) ExpectNothingLeft(*tenant);
  TESSERA_CHECK(node_->host_tier().used_bytes() == 0, "the host tier is empty");
  TESSERA_CHECK(node_->host_rows().used_bytes() == 0, "no raw copies");
  TESSERA_CHECK(node_->sessions() == 0, "no session is counted");
  std::uint64_t extents = 0;
  for (const std::unique_ptr<cache::Tenant>& tenant : node_->tenants()) {
    const cache::Tenant::Options& options = tenant->options();
    extents += tenant->pool().extents() * options.pool_extent_bytes +
               // The first extent is charged before the first session allocates it.
               std::max(tenant->directory().pool().extents(), 1u) * options.directory_extent_bytes;
  }
  TESSERA_CHECK(node_->account().used_bytes() == extents,
                Concat(node_->account().used_bytes(), " bytes of ", extents, " in extents"));
}

void DaemonParts::ExpectNothingLeft(cache::Tenant& tenant) {
  for (const auto& prefix : tenant.prefixes().List()) tenant.prefixes().Free(prefix.prefix->id());
  TESSERA_CHECK(!tenant.epochs().Collect().has_value(), "no memory waits for a reader");
  TESSERA_CHECK(tenant.session_count() == 0 && tenant.sequence_count() == 0, tenant.name());
  for (std::size_t i = 0; i < pool::kMemoryTags; ++i) {
    const auto tag = static_cast<pool::MemoryTag>(i);
    TESSERA_CHECK(tenant.account().used_bytes(tag) == 0,
                  Concat(tenant.account().used_bytes(tag), " bytes of ", pool::TagName(tag)));
  }
  TESSERA_CHECK(tenant.account().used_bytes() == 0, "nothing is charged");
  TESSERA_CHECK(tenant.pool().used_bytes() == 0, "the pool is empty");
  TESSERA_CHECK(tenant.directory().pool().used_bytes() == 0, "the directory is empty");
  TESSERA_CHECK(tenant.offloaded().used_bytes() == 0, "nothing is offloaded");
  TESSERA_CHECK(tenant.host_rows().used_bytes() == 0, "no raw copies");
  tenant.pool().Validate();
  tenant.directory().pool().Validate();
}

}  // namespace tessera::fuzz
