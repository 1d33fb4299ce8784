#include "daemon/serving/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/server_builder.h>
#include <grpcpp/server_posix.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <system_error>
#include <thread>
#include <utility>

#include "daemon/base/strings.h"
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
  for (const UnixEndpoint& door : options_.unix_endpoints) {
    if (absl::Status status = CheckDirectory(door.path); !status.ok()) return status;
    absl::StatusOr<LockFile> lock = LockFile::Acquire(LockPath(door.path));
    if (absl::IsAlreadyExists(lock.status())) {
      return absl::AlreadyExistsError(Concat(
          "the socket ", door.path, " is served by a live daemon: ",
          AsStringView(lock.status().message()), ". Stop it, or use another address (--listen)"));
    }
    if (absl::IsPermissionDenied(lock.status())) {
      return absl::PermissionDeniedError(
          Concat(AsStringView(lock.status().message()), "; ", HowToMake(DirectoryOf(door.path))));
    }
    if (!lock.ok()) return lock.status();
    for (const std::string& path : {door.path, DescriptorPath(door.path)}) {
      struct stat found {};
      if (::stat(path.c_str(), &found) == 0 && !S_ISSOCK(found.st_mode)) {
        return absl::AlreadyExistsError(Concat(
            path, " exists and is not a socket; remove it or use another address (--listen)"));
      }
    }
    locks_.push_back(*std::move(lock));
  }
  return absl::OkStatus();
}

absl::Status Server::StartGrpc() {
  const std::string descriptor_socket =
      options_.unix_endpoints.empty() ? "" : DescriptorPath(options_.unix_endpoints.front().path);
  const absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> tcp = TcpCredentials(options_.tls);
  if (!tcp.ok()) return tcp.status();
  worker_service_ = std::make_unique<WorkerService>(
      AttachContext{.services = &services_,
                    .connections = &connections_,
                    .descriptor_socket = descriptor_socket,
                    .aside = RunOnThread,
                    .rpc = &services_.metrics->Rpc(kWorkerServiceName, "Attach")});
  admin_service_ = std::make_unique<AdminService>(services_, connections_, admin_actions_);
  health_service_ = std::make_unique<HealthService>(services_);

  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT,
                             0);  // a port in use must be an error
  builder.SetMaxReceiveMessageSize(static_cast<int>(services_.max_message_bytes));
  builder.SetMaxSendMessageSize(static_cast<int>(services_.max_message_bytes));
  tcp_ports_.assign(options_.tcp_endpoints.size(), 0);
  for (const UnixEndpoint& door : options_.unix_endpoints) {
    if (absl::Status status = AcceptOn(door); !status.ok()) return status;
  }
  for (std::size_t i = 0; i < options_.tcp_endpoints.size(); ++i) {
    builder.AddListeningPort(options_.tcp_endpoints[i], *tcp, &tcp_ports_[i]);
  }
  // Enough pollers that a call finds one waiting, and none is created per call.
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, 2);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 16);
  // Calls beyond this number of threads are refused with RESOURCE_EXHAUSTED.
  grpc::ResourceQuota quota("tesserad");
  const std::size_t tenants = services_.node->tenants().size();
  quota.SetMaxThreads(static_cast<int>(Calls::ThreadsFor(tenants)));
  builder.SetResourceQuota(quota);
  builder.RegisterService(worker_service_.get());
  builder.RegisterService(admin_service_.get());
  builder.RegisterService(health_service_.get());
  grpc_ = builder.BuildAndStart();
  for (std::size_t i = 0; i < options_.tcp_endpoints.size(); ++i) {
    if (tcp_ports_[i] == 0) {
      return absl::AlreadyExistsError(
          Concat("cannot listen on ", options_.tcp_endpoints[i],
                 ": the port is in use, or this machine does not have the address"));
    }
  }
  if (grpc_ == nullptr) return absl::UnavailableError("gRPC did not start");
  for (const std::unique_ptr<UnixAcceptor>& acceptor : acceptors_) acceptor->Start();
  return absl::OkStatus();
}

// gRPC names the peer of such a connection by its descriptor, so a call can find the credentials of
// the process that made it (call/peer.h).
absl::Status Server::AcceptOn(const UnixEndpoint& door) {
  absl::StatusOr<std::unique_ptr<UnixAcceptor>> acceptor =
      UnixAcceptor::Listen({.path = door.path,
                            .mode = door.mode,
                            .peers = &unix_peers_,
                            .logger = services_.logger,
                            .clock = services_.clock,
                            .take = [this](Fd socket) {
                              grpc::AddInsecureChannelFromFd(grpc_.get(), socket.Release());
                            }});
  if (!acceptor.ok()) {
    return absl::UnavailableError(Concat("cannot listen on unix:", door.path, ": ",
                                         AsStringView(acceptor.status().message())));
  }
  acceptors_.push_back(*std::move(acceptor));
  bound_.push_back(door.path);
  return absl::OkStatus();
}

std::vector<std::string> Server::addresses() const {
  std::vector<std::string> addresses;
  for (const UnixEndpoint& door : options_.unix_endpoints) addresses.push_back("unix:" + door.path);
  for (std::size_t i = 0; i < options_.tcp_endpoints.size(); ++i) {
    const std::string& asked = options_.tcp_endpoints[i];
    addresses.push_back(Concat(asked.substr(0, asked.rfind(':')), ":", tcp_ports_[i]));
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
  acceptors_.clear();  // no more connections for gRPC
  grpc_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  grpc_->Wait();
}

}  // namespace tessera::serving
