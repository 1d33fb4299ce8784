#include "daemon/wiring.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "daemon/base/clock.h"
#include "daemon/base/heartbeat.h"
#include "daemon/base/log.h"
#include "daemon/base/published.h"
#include "daemon/base/scheduler.h"
#include "daemon/base/strings.h"
#include "daemon/base/version.h"
#include "daemon/cache/segment/book_library.h"
#include "daemon/cache/tenant/node.h"
#include "daemon/cluster/events/event_publisher.h"
#include "daemon/cluster/events/event_queue.h"
#include "daemon/compaction/jobs/compactor.h"
#include "daemon/compaction/jobs/tail_absorber.h"
#include "daemon/config/limits.h"
#include "daemon/config/load.h"
#include "daemon/config/memory_budget.h"
#include "daemon/config/service_manager.h"
#include "daemon/device/finder.h"
#include "daemon/lifecycle/drain_watch.h"
#include "daemon/lifecycle/privileges.h"
#include "daemon/lifecycle/reloader.h"
#include "daemon/lifecycle/signals.h"
#include "daemon/lifecycle/system_calls.h"
#include "daemon/lifecycle/watchdog.h"
#include "daemon/metrics/metrics.h"
#include "daemon/platform/fd.h"
#include "daemon/platform/memory_limit.h"
#include "daemon/platform/prepare_directory.h"
#include "daemon/platform/service_manager.h"
#include "daemon/policies/grammar/help.h"
#include "daemon/residency/demote_prefixes.h"
#include "daemon/residency/drop_prefixes.h"
#include "daemon/residency/offload_idle.h"
#include "daemon/residency/pressure.h"
#include "daemon/residency/reduce_channels.h"
#include "daemon/serving/library_logs.h"
#include "daemon/serving/server.h"
#include "daemon/serving/tls.h"
#include "kernels/dispatch/implementation.h"

namespace tessera {
namespace {

absl::StatusOr<std::unique_ptr<cache::Node>> BuildNode(const config::Config& config,
                                                       const cache::BookLibrary& library,
                                                       device::Device& device, const Clock& clock,
                                                       cache::BlockEventSink* blocks,
                                                       std::function<void()> on_attention) {
  cache::Node::Options options;
  options.memory_bytes = config.pool_bytes;
  options.raw_copy_bytes = config.raw_copy_bytes;
  options.host_tier_bytes = config.host_tier_bytes.value_or(0);
  options.device = &device;
  options.max_sessions = config.max_sessions;
  options.tenants = lifecycle::TenantsOf(config);
  options.tenant_template.pool_extent_bytes = config.pool_extent_bytes;
  options.tenant_template.directory_extent_bytes = config.directory_extent_bytes;
  options.tenant_template.ring_tiles = config.tail_ring_tiles;
  options.tenant_template.staging_bytes = config.staging_bytes;
  options.tenant_template.tail_extent_bytes = config.tail_extent_bytes;
  options.tenant_template.max_models = config.max_models_per_tenant;
  options.tenant_template.max_sequences = config.max_sequences_per_tenant;
  options.tenant_template.max_prefixes = config.max_prefixes_per_tenant;
  options.tenant_template.prefix_hash_seed = config.prefix_hash_seed;
  options.tenant_template.pin_limit = config.pin_limit;
  options.tenant_template.clock = &clock;
  options.tenant_template.loaded_books = &library;
  options.tenant_template.on_attention = std::move(on_attention);
  options.tenant_template.blocks = blocks;
  return cache::Node::Create(options);
}

// Null: no events are configured.
absl::StatusOr<std::unique_ptr<cluster::EventPublisher>> PublisherOf(const config::Config& config,
                                                                     const device::Device& device,
                                                                     cluster::EventQueue& queue,
                                                                     const cache::Node& node) {
  if (!config.kv_events.has_value()) return nullptr;
  return cluster::EventPublisher::Create(
      {.address = config.kv_events->ToString(),
       .replay_address = config.kv_events_replay ? config.kv_events_replay->ToString() : "",
       .encoding = config.kv_events_encoding,
       .medium = device.description().name == "cpu" ? "CPU" : "GPU",
       .queue = &queue,
       .retell = [&node](const cache::BlockReader& reader) {
         for (const std::unique_ptr<cache::Tenant>& tenant : node.tenants()) {
           if (tenant->name() == reader.tenant) tenant->prefixes().Retell(reader.worker);
         }
       }});
}

// Options with the reclaim ladder, cheapest rung first.
residency::Pressure::Options PressureOptions(const config::Config& config, cache::Node& node,
                                             compaction::Compactor& compactor, Scheduler& scheduler,
                                             Logger& logger, const Clock& clock) {
  residency::Pressure::Options options = {
      .node = &node,
      .scheduler = &scheduler,
      .logger = &logger,
      .clock = &clock,
      .pause = [](Clock::Duration time) { std::this_thread::sleep_for(time); },
      .high_percent = config.pressure_high_percent,
      .low_percent = config.pressure_low_percent};
  auto demote = std::make_unique<residency::DemotePrefixes>(&node.host_tier());
  auto offload = std::make_unique<residency::OffloadIdle>(
      residency::OffloadIdle::Options{.clock = &clock, .node = &node, .idle = config.offload_idle});
  auto drop = std::make_unique<residency::DropPrefixes>(
      std::vector<residency::Measure*>{demote.get(), offload.get()});
  options.ladder.push_back(std::move(demote));
  options.ladder.push_back(std::move(offload));
  options.ladder.push_back(std::move(drop));
  options.ladder.push_back(std::make_unique<residency::ReduceChannels>(&compactor));
  return options;
}

serving::Server::Options ServerOptions(const config::Config& config) {
  serving::Server::Options options;
  for (const config::ListenAddress& address : config.listen) {
    if (address.is_unix()) {
      options.unix_endpoints.push_back({address.unix_path, config.unix_socket_mode});
    } else {
      options.tcp_endpoints.push_back(address.tcp);
    }
  }
  options.admin_path = config.admin_listen.unix_path;
  options.tcp_peer_limit = std::chrono::duration_cast<std::chrono::seconds>(config.tcp_peer_limit);
  options.max_sessions = config.max_sessions;
  options.http_address = config.metrics_address;
  options.unix_peers = config.unix_peers;
  options.tls = lifecycle::TlsFilesOf(config);
  options.drain_limit = config.drain_limit;
  return options;
}

// Exit codes of the process, beside 0.
constexpr int kFailed = 1;
constexpr int kBadConfiguration = 2;  // a further start cannot succeed without a change

int Fail(const absl::Status& status, int code = kFailed) {
  std::istringstream lines{std::string(AsStringView(status.message()))};
  for (std::string line; std::getline(lines, line);) {
    std::fprintf(stderr, "tesserad: %s\n", line.c_str());
  }
  return code;
}

// A GPU's driver is not ours: its calls are only logged, unless an operator decides.
config::UnusedCalls UnusedCallsOn(const device::Device& device, config::UnusedCalls configured) {
  using config::UnusedCalls;
  if (configured != UnusedCalls::kAuto) return configured;
  return device.description().name == "cpu" ? UnusedCalls::kRefuse : UnusedCalls::kLog;
}

// What a start and each reload read, and what the start found.
struct Source {
  std::function<absl::StatusOr<config::Config>()> load;
  config::DeviceMemory memory;
};

int Serve(const config::Invocation& invocation, const Source& source, device::Finder& devices,
          const lifecycle::Signals& signals) {
  const config::Config& config = invocation.config;
  lifecycle::GiveUpPrivileges({.core_dumps = config.allow_core_dumps});
  const config::MemoryBudget budget = config::BudgetOf(config, source.memory);
  if (budget.limit_bytes < config::kLittleMemory) ReturnFreedMemory();
  constexpr std::size_t kQueuedLines = 4096;
  Logger logger(
      {.level = config.log_level, .format = config.log_format, .queue_lines = kQueuedLines});
  for (const std::string& warning : config::Warnings(config)) {
    logger.Log(LogLevel::kWarning, warning);
  }
  for (const std::string& note : invocation.notes) logger.Log(LogLevel::kInfo, note);
  if (!devices.why_no_cuda().empty()) {
    logger.Log(LogLevel::kInfo, "no CUDA device", {{"reason", devices.why_no_cuda()}});
  }
  logger.Log(LogLevel::kInfo, "limits", {{"descriptors", RaiseFdLimit()}});
  const SystemClock clock;
  const serving::LibraryLogs library_logs(logger, clock);
  Heartbeats heartbeats(clock);
  Published<config::Config> running(config);
  serving::CallLog call_log(logger, clock, config.slow_call);
  const config::ServiceManagerEnvironment environment = config::ReadServiceManagerEnvironment();
  const ServiceManager manager(environment.notify_socket);
  device::Device& device = devices.device();
  if (const std::string uuid = device.description().UuidText(); !uuid.empty()) {
    logger.Log(LogLevel::kInfo, "device",
               {{"device", device.description().name},
                {"uuid", uuid},
                {"model", device.description().model}});
  }
  metrics::Metrics metrics({.version = std::string(Version()),
                            .device = device.description().name,
                            .isa = device.description().kernels});

  // Create the server first, because it locks the socket path: a second daemon must fail before it
  // allocates memory.
  serving::Services services{.metrics = &metrics,
                             .logger = &logger,
                             .call_log = &call_log,
                             .clock = &clock,
                             .heartbeats = &heartbeats,
                             .device = &device,
                             .started = clock.Now(),
                             .max_message_bytes = config.max_message_bytes,
                             .message_bytes = budget.transport_bytes,
                             .compactor_threads = config.compactor_threads};
  serving::Server::Options server_options = ServerOptions(config);
  server_options.memory_limit_bytes = budget.limit_bytes;
  absl::StatusOr<std::unique_ptr<serving::Server>> server =
      serving::Server::Create(services, server_options);
  if (!server.ok()) return Fail(server.status());
  absl::StatusOr<std::unique_ptr<ThreadScheduler>> scheduler =
      ThreadScheduler::Create({.threads = config.compactor_threads,
                               .cpus = config.compactor_cpus,
                               .pulse = &heartbeats.Add("background jobs")});
  if (!scheduler.ok()) {
    return Fail(absl::Status(scheduler.status().code(),
                             Concat("compactor_cpus: ", scheduler.status().message())));
  }

  const absl::StatusOr<cache::BookLibrary> library = cache::BookLibrary::Load(config.books);
  if (!library.ok()) return Fail(library.status(), kBadConfiguration);
  cluster::EventQueue block_events;
  absl::StatusOr<std::unique_ptr<cache::Node>> node = BuildNode(
      config, *library, device, clock, config.kv_events ? &block_events : nullptr, [&server] {
        if (*server != nullptr) (*server)->Attention();
      });
  if (!node.ok()) return Fail(node.status());
  absl::StatusOr<std::unique_ptr<cluster::EventPublisher>> publisher =
      PublisherOf(config, device, block_events, **node);
  if (!publisher.ok()) return Fail(publisher.status());
  metrics::Metrics::Registration publisher_metrics;
  if (*publisher != nullptr) {
    publisher_metrics = metrics.Register(**publisher);
    logger.Log(
        LogLevel::kInfo, "kv events",
        {{"address", (*publisher)->address()}, {"replay_address", (*publisher)->replay_address()}});
  }
  compaction::Compactor compactor(
      {.scheduler = scheduler->get(),
       .logger = &logger,
       .clock = &clock,
       .operations = &kernels::OperationsOf(kernels::BestImplementation()),
       .on_attention = [&server] {
         if (*server != nullptr) (*server)->Attention();
       }});
  compaction::TailAbsorber absorber({.scheduler = scheduler->get(),
                                     .logger = &logger,
                                     .clock = &clock,
                                     .linger = config.compactor_linger,
                                     .compactor = &compactor});
  residency::Pressure pressure(
      PressureOptions(config, **node, compactor, **scheduler, logger, clock));
  services.node = node->get();
  services.scheduler = scheduler->get();
  services.absorber = &absorber;
  services.compactor = &compactor;
  services.pressure = &pressure;

  std::atomic<std::uint64_t> requested_limit_ms{0};
  lifecycle::Reloader reloader({.load = source.load,
                                .memory = source.memory,
                                .running = &running,
                                .services = &services,
                                .server = server->get(),
                                .manager = &manager});
  const metrics::Metrics::Registration reloads = metrics.Register(reloader);
  (*server)->set_admin_actions({.drain =
                                    [&requested_limit_ms](std::uint64_t limit_ms) {
                                      requested_limit_ms.store(limit_ms);
                                      ::kill(::getpid(), lifecycle::kDrainRequested);
                                    },
                                .reload = [&reloader] { return reloader.Reload(); }});
  // The order matters: the server's threads use the scheduler and the node, and sessions end on the
  // scheduler's threads. After that nothing uses the node.
  const auto stop = [&] {
    (*server)->Drain(Clock::Duration::zero());
    devices.OnFailure(nullptr);
    scheduler->reset();
    server->reset();
  };
  const config::UnusedCalls unused = UnusedCallsOn(device, config.unused_system_calls);
  absl::Status status = lifecycle::LimitSystemCalls(unused);
  if (status.ok()) status = (*server)->Start();
  if (!status.ok()) {
    stop();
    return Fail(status);
  }
  devices.OnFailure([&server](const absl::Status& why) { (*server)->RetireDevice(why); });
  for (const std::string& address : (*server)->addresses()) {
    logger.Log(LogLevel::kInfo, "serving",
               {{"address", address},
                {"device", device.description().name},
                {"kernels", device.description().kernels},
                {"pool_bytes", config.pool_bytes}});
  }
  if ((*server)->http_port() != 0) {
    logger.Log(LogLevel::kInfo, "metrics", {{"port", (*server)->http_port()}});
  }

  manager.Ready();
  const lifecycle::Watchdog watchdog({.heartbeats = &heartbeats,
                                      .manager = &manager,
                                      .logger = &logger,
                                      .clock = &clock,
                                      .interval = environment.watchdog});
  int first = signals.Wait();
  for (; first == SIGHUP; first = signals.Wait()) (void)reloader.Reload();
  const auto limit_of = [&](int signal) {
    const std::uint64_t requested = requested_limit_ms.load();
    if (signal != lifecycle::kDrainRequested || requested == 0) return running.Get()->drain_limit;
    return std::chrono::milliseconds(std::min(requested, config::kDrainLimitMs.max));
  };
  manager.Stopping(limit_of(first) + lifecycle::kDrainPatience);
  logger.Log(LogLevel::kInfo, "draining", {{"limit_ms", limit_of(first).count()}});
  {
    lifecycle::DrainWatch watch({.signals = &signals,
                                 .first = first,
                                 .server = server->get(),
                                 .logger = &logger,
                                 .clock = &clock,
                                 .limit_of = limit_of});
    (*server)->Drain(limit_of(first));
    watch.ForgetServer();
    stop();
  }
  logger.Log(LogLevel::kInfo, "stopped");
  return 0;
}

// Opens the configured device and returns its memory.
absl::StatusOr<config::DeviceMemory> OpenDevice(const config::DeviceChoice& choice,
                                                device::Finder& devices) {
  using Kind = config::DeviceChoice::Kind;
  if (choice.kind != Kind::kCpu) {
    const absl::StatusOr<std::uint64_t> bytes =
        choice.uuid.has_value() ? devices.OpenCuda(*choice.uuid)
                                : devices.OpenCuda(static_cast<int>(choice.ordinal));
    if (bytes.ok()) {
      absl::StatusOr<MemoryLimit> host = DetectMemoryLimit();
      if (!host.ok()) return host.status();
      return config::DeviceMemory{
          .bytes = *bytes,
          .source = Concat("the memory of ", devices.device().description().name, " (",
                           devices.device().description().model, ")"),
          .uuid = devices.device().description().uuid,
          .host = *std::move(host)};
    }
    if (choice.kind == Kind::kCuda) return bytes.status();
  }
  devices.OpenCpu(choice.uuid);
  return config::HostMemoryOf({.kind = Kind::kCpu, .uuid = choice.uuid});
}

// The part of --check-config that is left after loading: files that only the server reads.
int CheckConfig(const config::Invocation& invocation) {
  const absl::Status tls = serving::TcpCredentials(ServerOptions(invocation.config).tls).status();
  if (!tls.ok()) return Fail(tls, kBadConfiguration);
  for (const std::string& warning : config::Warnings(invocation.config)) {
    std::fprintf(stderr, "tesserad: warning: %s\n", warning.c_str());
  }
  for (const std::string& note : invocation.notes) {
    std::fprintf(stderr, "tesserad: %s\n", note.c_str());
  }
  std::puts("ok");
  return 0;
}

int Prepare(const DirectoryRequest& request) {
  const absl::StatusOr<Prepared> prepared = PrepareDirectory(request);
  if (!prepared.ok()) {
    return Fail(absl::Status(prepared.status().code(),
                             Concat("--prepare-directory: ", prepared.status().message())));
  }
  const char* const what = *prepared == Prepared::kMade       ? "made"
                           : *prepared == Prepared::kAdjusted ? "adjusted"
                                                              : "unchanged";
  std::printf("%s: %s, owner %u:%u, mode %04o\n", request.path.c_str(), what, request.uid,
              request.gid, request.mode);
  return 0;
}

}  // namespace

int RunDaemon(std::span<const std::string_view> args, const Machine& machine) {
  const lifecycle::Signals signals;  // before any thread starts, so that all inherit the mask
  device::Finder devices(machine.load_cuda, *machine.gpus);
  config::DeviceMemory memory;
  bool device_failed = false;
  absl::StatusOr<config::Invocation> invocation =
      config::LoadConfig(args, [&](const config::DeviceChoice& choice) {
        absl::StatusOr<config::DeviceMemory> found = OpenDevice(choice, devices);
        device_failed = !found.ok();
        if (found.ok()) memory = *found;
        return found;
      });
  // A device may appear later, unlike a correct configuration.
  if (!invocation.ok()) {
    return Fail(invocation.status(), device_failed ? kFailed : kBadConfiguration);
  }
  if (invocation->prepare_directory.has_value()) return Prepare(*invocation->prepare_directory);
  if (invocation->print_policies) invocation->print = policies::HelpText();
  if (invocation->print.has_value()) {
    std::fputs(invocation->print->c_str(), stdout);
    return 0;
  }
  if (invocation->check_only) return CheckConfig(*invocation);
  // A reload compares with the device that is open, whatever the configuration then names.
  const Source source = {.load = [args, memory]() -> absl::StatusOr<config::Config> {
                           absl::StatusOr<config::Invocation> again = config::LoadConfig(
                               args, [&](const config::DeviceChoice&) { return memory; });
                           if (!again.ok()) return again.status();
                           return std::move(again->config);
                         },
                         .memory = memory};
  return Serve(*invocation, source, devices, signals);
}

}  // namespace tessera
