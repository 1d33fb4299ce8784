#include "daemon/serving/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_posix.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/guard/guarded_sockets.h"
#include "daemon/platform/tcp_socket.h"
#include "daemon/serving/call/rpc_methods.h"
#include "daemon/serving/http/pages.h"

namespace tessera::serving {

namespace {
// Time for freeing the memory of sessions that the end of a drain has ended.
constexpr std::chrono::seconds kFreeLimit{1};

// Runs `work` on its own thread. A session has at most one such thread, which ends before its
// stream.
void RunOnThread(const std::function<void()>& work) {
  try {
    std::thread(work).detach();
  } catch (const std::system_error&) {
    work();  // no more threads: run it here and make other streams wait
  }
}

constexpr unsigned kAdminMode = 0600;
constexpr int kAdminThreads = 64;
// Bytes that gRPC buffers for a stream before the next message is read.
constexpr int kLookaheadBytes = 64 << 10;
constexpr int kLeastPingMs = 5000;

void SetLimits(grpc::ServerBuilder& builder, std::uint64_t max_message_bytes) {
  builder.SetMaxReceiveMessageSize(static_cast<int>(max_message_bytes));
  builder.SetMaxSendMessageSize(static_cast<int>(max_message_bytes));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                             static_cast<int>(FrameGuard::Limits().streams));
  // Otherwise gRPC takes up to 4 MiB for each stream on a fast connection.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kLookaheadBytes);
  // Workers on TCP ask whether the daemon is there. The guard limits pings.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, kLeastPingMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // A compressed message may be a thousand times as large as its bytes on the wire.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
}

// gRPC's library adds reflection to every server of a program. A stream of it holds a thread, so
// workers' addresses have none.
class WithoutReflection final : public grpc::ServerBuilderOption {
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    const std::string reflection = grpc::reflection::ProtoServerReflectionPlugin().name();
    std::erase_if(*plugins, [&](const auto& plugin) { return plugin->name() == reflection; });
  }
};

// The rest of the descriptors is for memory, listening sockets and files.
std::size_t MostConnections() { return std::max<std::uint64_t>(64, RaiseFdLimit() / 2); }

std::filesystem::path DirectoryOf(const std::string& socket_path) {
  return std::filesystem::path(socket_path).parent_path();
}

std::string HowToMake(const std::filesystem::path& directory) {
  return Concat("as root, \"tesserad --prepare-directory=", directory.native(),
                " --owner=", ::geteuid(), ":", ::getegid(), "\" gives it to this user");
}

// A missing directory is refused rather than made: it may be a misspelt path, on which no worker
// would find the daemon.
absl::Status CheckDirectory(const std::string& socket_path) {
  const std::filesystem::path directory = DirectoryOf(socket_path);
  std::error_code error;
  if (socket_path == config::kDefaultSocketPath) {
    std::filesystem::create_directory(directory, error);
  }
  std::error_code unknown;  // e.g. not allowed to look; opening the lock file says so
  if (directory.empty() || std::filesystem::exists(directory, unknown) || unknown) {
    return absl::OkStatus();
  }
  return absl::NotFoundError(
      Concat("listen: the directory ", directory.native(), " of unix:", socket_path,
             " does not exist", error ? Concat(" and cannot be made (", error.message(), ")") : "",
             "; make it, or use another address: ", HowToMake(directory)));
}
}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Create(Services& services, const Options& options) {
  std::unique_ptr<Server> server(new Server(services, options));
  if (absl::Status status = server->LockPaths(); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<Watcher>> watcher =
      Watcher::Create(services, server->connections_);
  if (!watcher.ok()) return watcher.status();
  server->watcher_ = *std::move(watcher);
  server->connections_.set_watcher(server->watcher_.get());
  return server;
}

Server::Server(Services& services, const Options& options)
    : services_(services),
      options_(options),
      unix_peers_(options.unix_peers),
      connections_(services),
      process_(options.memory_limit_bytes) {}

Server::~Server() {
  Drain(Clock::Duration::zero());
  watcher_.reset();
  registration_.Reset();
  process_registration_.Reset();
  for (const std::string& path : bound_) ::unlink(path.c_str());
}

absl::Status Server::LockPaths() {
  std::vector<std::string> paths;
  for (const UnixEndpoint& door : options_.unix_endpoints) paths.push_back(door.path);
  if (!options_.admin_path.empty()) paths.push_back(options_.admin_path);
  for (const std::string& path : paths) {
    if (absl::Status status = CheckDirectory(path); !status.ok()) return status;
    absl::StatusOr<LockFile> lock = LockFile::Acquire(LockPath(path));
    if (absl::IsAlreadyExists(lock.status())) {
      return absl::AlreadyExistsError(Concat("the socket ", path, " is served by a live daemon: ",
                                             AsStringView(lock.status().message()),
                                             ". Stop it, or use another address (--listen)"));
    }
    if (absl::IsPermissionDenied(lock.status())) {
      return absl::PermissionDeniedError(
          Concat(AsStringView(lock.status().message()), "; ", HowToMake(DirectoryOf(path))));
    }
    if (!lock.ok()) return lock.status();
    for (const std::string& each : {path, DescriptorPath(path)}) {
      struct stat found {};
      if (::stat(each.c_str(), &found) == 0 && !S_ISSOCK(found.st_mode)) {
        return absl::AlreadyExistsError(Concat(
            each, " exists and is not a socket; remove it or use another address (--listen)"));
      }
    }
    locks_.push_back(*std::move(lock));
  }
  return absl::OkStatus();
}

absl::Status Server::StartGrpc() {
  const std::string descriptor_socket =
      options_.unix_endpoints.empty() ? "" : DescriptorPath(options_.unix_endpoints.front().path);
  worker_service_ = std::make_unique<WorkerService>(
      AttachContext{.services = &services_,
                    .connections = &connections_,
                    .descriptor_socket = descriptor_socket,
                    .aside = RunOnThread,
                    .rpc = &services_.metrics->Rpc(kWorkerServiceName, "Attach"),
                    .ungreeted = &ungreeted_,
                    .token_delay = &token_delay_,
                    .refusal_lines = &attach_refusals_});
  health_service_ = std::make_unique<HealthService>(services_);
  registrar_ = std::make_unique<TenantRegistrar>(
      TenantRegistrar::Options{.node = services_.node,
                               .arriving = &worker_service_->arriving(),
                               .requests = &worker_service_->requests(),
                               .clock = services_.clock,
                               .max_sessions = options_.max_sessions});

  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  SetLimits(builder, services_.max_message_bytes);
  builder.SetOption(std::make_unique<WithoutReflection>());
  builder.RegisterService(worker_service_.get());
  builder.RegisterService(health_service_.get());
  builder.RegisterCallbackGenericService(&admin_refusal_);
  absl::StatusOr<std::vector<Acceptor::Door>> doors = OpenTcpDoors(builder);
  if (!doors.ok()) return doors.status();
  grpc_ = builder.BuildAndStart();
  if (grpc_ == nullptr) return absl::UnavailableError("gRPC did not start");
  if (absl::Status status = OpenUnixDoors(*doors); !status.ok()) return status;
  if (absl::Status status = StartAdmin(*doors); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<Acceptor>> acceptor =
      Acceptor::Start({.doors = *std::move(doors),
                       .registrar = registrar_.get(),
                       .logger = services_.logger,
                       .metrics = services_.metrics,
                       .clock = services_.clock,
                       .peer_limit = options_.tcp_peer_limit,
                       .most_connections = MostConnections(),
                       .tick = [this] { return Tick(); }});
  if (!acceptor.ok()) return acceptor.status();
  acceptor_ = *std::move(acceptor);
  return absl::OkStatus();
}

absl::Status Server::StartAdmin(std::vector<Acceptor::Door>& doors) {
  if (options_.admin_path.empty()) return absl::OkStatus();
  admin_service_ = std::make_unique<AdminService>(services_, connections_, admin_actions_);
  grpc::ServerBuilder builder;
  SetLimits(builder, services_.max_message_bytes);
  // Enough pollers that a call finds one waiting, and none is created per call.
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 4);
  grpc::ResourceQuota quota("tesserad-admin");
  quota.SetMaxThreads(kAdminThreads);
  builder.SetResourceQuota(quota);
  builder.RegisterService(admin_service_.get());
  builder.RegisterService(health_service_.get());
  admin_grpc_ = builder.BuildAndStart();
  if (admin_grpc_ == nullptr) return absl::UnavailableError("gRPC did not start");
  absl::StatusOr<Acceptor::Door> door =
      UnixDoor({.path = options_.admin_path, .mode = kAdminMode}, admin_grpc_);
  if (!door.ok()) return door.status();
  door->trusted = true;
  doors.push_back(*std::move(door));
  return absl::OkStatus();
}

absl::Status Server::OpenUnixDoors(std::vector<Acceptor::Door>& doors) {
  for (const UnixEndpoint& endpoint : options_.unix_endpoints) {
    absl::StatusOr<Acceptor::Door> door = UnixDoor(endpoint, grpc_);
    if (!door.ok()) return door.status();
    door->peers = &unix_peers_;
    doors.push_back(*std::move(door));
  }
  return absl::OkStatus();
}

// gRPC names the peer of such a connection by its descriptor, so a call can find the credentials of
// the process that made it (call/peer.h).
absl::StatusOr<Acceptor::Door> Server::UnixDoor(const UnixEndpoint& endpoint,
                                                const std::unique_ptr<grpc::Server>& server) {
  const std::string address = "unix:" + endpoint.path;
  absl::StatusOr<Fd> listening = ListenUnix(endpoint.path, endpoint.mode, /*non_blocking=*/true);
  if (!listening.ok()) {
    return absl::UnavailableError(
        Concat("cannot listen on ", address, ": ", AsStringView(listening.status().message())));
  }
  bound_.push_back(endpoint.path);
  return Acceptor::Door{.address = address,
                        .listening = *std::move(listening),
                        .take = [raw = server.get()](Fd socket) {
                          grpc::AddInsecureChannelFromFd(raw, socket.Release());
                        }};
}

absl::StatusOr<std::vector<Acceptor::Door>> Server::OpenTcpDoors(grpc::ServerBuilder& builder) {
  const absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> credentials =
      TcpCredentials(options_.tls);
  if (!credentials.ok()) return credentials.status();
  std::vector<Acceptor::Door> doors;
  for (const config::HostPort& endpoint : options_.tcp_endpoints) {
    absl::StatusOr<std::vector<Fd>> sockets = ListenTcp(endpoint.host, endpoint.port);
    if (!sockets.ok()) {
      return absl::Status(sockets.status().code(),
                          Concat("cannot listen on ", endpoint.ToString(), ": ",
                                 AsStringView(sockets.status().message())));
    }
    tcp_ports_.push_back(LocalPort(sockets->front().get()));
    for (Fd& socket : *sockets) {
      doors.push_back(
          {.address = endpoint.ToString(),
           .listening = std::move(socket),
           .tcp = true,
           .tls = !options_.tls.certificate.empty(),
           .take = [this](Fd accepted) {
             grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters connection;
             connection.fd = accepted.Release();
             tcp_->HandleNewConnection(&connection);
           }});
    }
  }
  if (doors.empty()) return doors;
  using Type = grpc::ServerBuilder::experimental_type::ExternalConnectionType;
  tcp_ = builder.experimental().AddExternalConnectionAcceptor(Type::FROM_FD, *credentials);
  return doors;
}

// About once a second while there are connections. Returns whether anything is left to do.
bool Server::Tick() {
  const Clock::TimePoint now = services_.clock->Now();
  ungreeted_.GiveUp(now);
  worker_service_->unread().GiveUp(now);
  heap_.Trim();
  return !ungreeted_.empty() || !worker_service_->unread().empty();
}

std::vector<std::string> Server::addresses() const {
  std::vector<std::string> addresses;
  for (const UnixEndpoint& door : options_.unix_endpoints) addresses.push_back("unix:" + door.path);
  for (std::size_t i = 0; i < options_.tcp_endpoints.size(); ++i) {
    config::HostPort address = options_.tcp_endpoints[i];
    address.port = tcp_ports_[i];
    addresses.push_back(address.ToString());
  }
  return addresses;
}

absl::Status Server::Start() {
  for (const UnixEndpoint& door : options_.unix_endpoints) {
    const std::string path = DescriptorPath(door.path);
    if (absl::Status status = watcher_->Listen(path, door.mode, unix_peers_); !status.ok())
      return status;
    bound_.push_back(path);
  }
  AddRpcMethods(*services_.metrics);
  collector_ = std::make_unique<NodeCollector>(services_, options_.tls.certificate);
  registration_ = services_.metrics->Register(*collector_);
  process_registration_ = services_.metrics->Register(process_);
  if (options_.http_address.has_value()) {
    absl::StatusOr<std::unique_ptr<http::Server>> http =
        http::Server::Start(options_.http_address->host, options_.http_address->port,
                            {.pages = StatusPages(services_), .clock = services_.clock});
    if (!http.ok()) {
      return absl::Status(http.status().code(),
                          Concat("metrics address ", http.status().message()));
    }
    http_ = *std::move(http);
  }
  watcher_->Start();
  absl::Status status = StartGrpc();
  services_.serving.store(status.ok());
  return status;
}

void Server::RetireDevice(const absl::Status& why) {
  services_.logger->Log(LogLevel::kError, "device retired",
                        {{"error", AsStringView(why.message())}});
  if (grpc_ == nullptr) return;
  if (grpc::HealthCheckServiceInterface* health = grpc_->GetHealthCheckService()) {
    health->SetServingStatus(false);
  }
  // Not on the failing call's thread: it may hold locks that ending a session needs.
  services_.scheduler->Submit(
      {.name = "retire-device", .priority = JobPriority::kTails},
      [this, why] { connections_.EndAll(metrics::SessionEnd::kLost, why); });
}

void Server::Drain(Clock::Duration limit) {
  MutexLock lock(drain_mutex_);
  if (std::exchange(drained_, true)) return;
  services_.draining.store(true);
  if (grpc_ != nullptr) EndSessions(limit);
  // After the sessions, because the watcher must handle their end.
  if (watcher_ != nullptr) watcher_->Stop();
  http_.reset();
}

void Server::EndSessions(Clock::Duration limit) {
  if (grpc::HealthCheckServiceInterface* health = grpc_->GetHealthCheckService()) {
    health->SetServingStatus(false);
  }
  v1::AttachResponse message;
  message.mutable_draining()->set_limit_ms(
      std::chrono::duration_cast<std::chrono::milliseconds>(limit).count());
  connections_.Broadcast(message);
  const Clock::TimePoint deadline = services_.clock->Now() + limit;
  connections_.WaitUntilNone(deadline);
  connections_.EndAll(metrics::SessionEnd::kDrained,
                      absl::UnavailableError("the daemon is stopping; reattach when it is back"));
  // Before the scheduler stops, which drops waiting jobs: each of these logs the end of a session.
  if (const std::size_t left = connections_.WaitUntilFreed(services_.clock->Now() + kFreeLimit)) {
    services_.logger->Log(LogLevel::kWarning, "sessions not freed before the end",
                          {{"sessions", left}});
  }
  // All streams have ended. The remaining calls give up when they see `stopping`.
  services_.stopping.store(true);
  acceptor_.reset();  // no more connections for gRPC
  for (grpc::Server* server : {grpc_.get(), admin_grpc_.get()}) {
    if (server == nullptr) continue;
    server->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
    server->Wait();
  }
  GuardedSockets::OfProcess().Clear();
}

}  // namespace tessera::serving
