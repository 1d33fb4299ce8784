// Runs workers of two tenants that do everything, while they are killed, stopped and continued, and
// while workers of other protocol versions try to attach. Then checks that nothing of them is left.
// At the end the daemon drains with workers attached, and exits.
//
//   soak [--seconds=N] [--workers=N] [--seed=N]        `tests/soak --minutes N` builds and runs it
//
// Prints the events as a table. Exits with 1 if a worker saw a broken promise, the daemon died or
// logged an error, or something was left.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "client/rpc/channel.h"
#include "client/tools/flags.h"
#include "client/tools/run_command.h"
#include "client/tools/table.h"
#include "daemon/base/strings.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_worker.h"
#include "tests/fuzz/soak_counters.h"

namespace tessera::fuzz {
namespace {

using Seconds = std::chrono::duration<double>;
constexpr std::chrono::milliseconds kBetweenEvents{60};
constexpr std::chrono::seconds kPatience{30};
constexpr std::uint64_t kDirectoryExtent = 2 << 20;  // the default of directory_extent_bytes
constexpr std::uint64_t kDrainMs = 2000;
// Allowed heap growth from one crowd to the next, since allocators are not exact. More means a
// leak.
constexpr std::uint64_t kMostHeapGrowth = 64 << 20;
// The second tenant has a small quota, which is enforced.
constexpr char kTenants[] = R"({"tenants": [{"name": "default"},
    {"name": "small", "token": "sesame", "soft_limit_bytes": 8388608,
     "hard_limit_bytes": 16777216}]})";

struct Plan {
  std::uint64_t seconds;
  std::uint64_t workers;
  std::uint64_t seed;
};

// Events that the soak caused.
struct Events {
  std::uint64_t kills = 0;
  std::uint64_t stops = 0;
  std::uint64_t farewells = 0;
  std::uint64_t strangers = 0;
};

// Everything that a worker could leave.
struct Holdings {
  std::uint64_t sessions = 0, sequences = 0, used_bytes = 0, pool_extents = 0;
  std::uint64_t descriptors = 0;  // without those of the directory, which never shrinks
  // `before` may count a connection that was about to close.
  bool NoMoreThan(const Holdings& before) const {
    return sessions <= before.sessions && sequences <= before.sequences &&
           used_bytes <= before.used_bytes && pool_extents <= before.pool_extents &&
           descriptors <= before.descriptors;
  }
  std::string ToString() const {
    return Concat("sessions ", sessions, ", sequences ", sequences, ", used bytes ", used_bytes,
                  ", pool extents ", pool_extents, ", other descriptors ", descriptors);
  }
};

class Soak {
 public:
  explicit Soak(const Plan& plan) : plan_(plan), random_(plan.seed) {
    sigset_t ends;  // AwaitAnEnd waits for it
    sigemptyset(&ends);
    sigaddset(&ends, SIGCHLD);
    ::sigprocmask(SIG_BLOCK, &ends, nullptr);
  }

  absl::Status Run() {
    daemon_ =
        fakes::DaemonProcess::Start({.flags = {"--pin-limit-ms=300", "--raw-copy-bytes=8MiB",
                                               "--pool-extent-bytes=2MiB", "--max-sessions=64"},
                                     .pool_bytes = "64MiB",
                                     .config_json = kTenants});
    if (daemon_ == nullptr) return absl::UnavailableError("the daemon does not start");
    admin_ = v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin());
    counters_ = &MapCounters(daemon_->folder() + "/counters");
    if (absl::Status status = VisitEachTenant(); !status.ok()) return status;
    absl::StatusOr<Holdings> before = Look();
    if (!before.ok()) return before.status();
    heap_before_ = daemon_->HeapBytes();
    workers_.resize(plan_.workers);
    // Two crowds: the second one can reuse the heap that the first one left.
    absl::Status status = Crowd(*before);
    heap_between_ = daemon_->HeapBytes();
    if (status.ok()) status = Crowd(*before);
    heap_after_ = daemon_->HeapBytes();
    if (status.ok()) status = CheckHeap();
    if (status.ok()) status = Drain();
    KillAll();
    if (status.ok()) status = CheckLog();
    Print();
    return status;
  }

 private:
  struct Worker {
    pid_t pid = 0;
    std::string output;
    bool stopped = false;
  };

  // Runs workers for half of the time, then kills them and waits until nothing of them is left.
  absl::Status Crowd(const Holdings& before) {
    const std::uint64_t done = Operations();
    absl::Status status = Live(std::chrono::milliseconds(plan_.seconds * 500));
    KillAll();
    if (status.ok() && Operations() == done) status = absl::DataLossError("no worker did anything");
    if (status.ok()) status = FreePrefixes(*admin_);
    return status.ok() ? AwaitBaseline(before) : status;
  }

  absl::Status Live(std::chrono::milliseconds time) {
    const auto begun = std::chrono::steady_clock::now();
    const auto end = begun + time;
    auto told = begun;
    while (std::chrono::steady_clock::now() < end) {
      for (Worker& worker : workers_) {
        if (absl::Status status = Tend(worker); !status.ok()) return status;
      }
      if (absl::Status status = Event(); !status.ok()) return status;
      if (std::chrono::steady_clock::now() - told > std::chrono::seconds(10)) {
        told = std::chrono::steady_clock::now();
        std::fprintf(stderr, "%4.0f of %llu s: %llu operations, %llu kills\n",
                     Seconds(told - begun).count(),
                     static_cast<unsigned long long>(time.count() / 1000),
                     static_cast<unsigned long long>(Operations()),
                     static_cast<unsigned long long>(events_.kills));
      }
      AwaitAnEnd();
    }
    return absl::OkStatus();
  }

  // Waits until a worker ends or the next event is due.
  static void AwaitAnEnd() {
    const timespec limit = {.tv_sec = 0, .tv_nsec = kBetweenEvents.count() * 1'000'000};
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGCHLD);
    (void)::sigtimedwait(&ends, nullptr, &limit);
  }

  // Starts the worker if it does not run. Returns its output if it failed.
  absl::Status Tend(Worker& worker) {
    int status = 0;
    if (worker.pid != 0 && ::waitpid(worker.pid, &status, WNOHANG) == worker.pid) {
      worker.pid = 0;
      // Killed by this process; SIGTERM also ends a worker that has not installed its handler yet.
      const bool killed =
          WIFSIGNALED(status) && (WTERMSIG(status) == SIGKILL || WTERMSIG(status) == SIGTERM);
      if (!killed && !(WIFEXITED(status) && WEXITSTATUS(status) == 0)) {
        return absl::DataLossError(
            Concat("a worker ended with status ", status, ":\n", ReadAll(worker.output)));
      }
    }
    if (worker.pid != 0) return absl::OkStatus();
    worker.stopped = false;
    worker.output = Concat(daemon_->folder(), "/worker-", &worker - workers_.data());
    const std::string counters = daemon_->folder() + "/counters";
    const std::string seed = Concat(random_.Bits());
    worker.pid = ::fork();
    if (worker.pid != 0) return absl::OkStatus();
    if (std::freopen(worker.output.c_str(), "w", stderr) == nullptr) ::_exit(126);
    ::execl(SOAK_WORKER_BINARY, SOAK_WORKER_BINARY, daemon_->address().c_str(), counters.c_str(),
            seed.c_str(), nullptr);
    ::_exit(127);
  }

  absl::Status Event() {
    Worker& worker = workers_[random_.Below(workers_.size())];
    switch (random_.Below(10)) {
      case 0:
      case 1:
        if (worker.pid != 0) events_.kills += ::kill(worker.pid, SIGKILL) == 0;
        return absl::OkStatus();
      case 2:
      case 3:
        if (worker.pid == 0) return absl::OkStatus();
        worker.stopped = !worker.stopped;
        events_.stops += worker.stopped;
        ::kill(worker.pid, worker.stopped ? SIGSTOP : SIGCONT);
        return absl::OkStatus();
      case 4:
        if (worker.pid == 0 || worker.stopped) return absl::OkStatus();
        events_.farewells += ::kill(worker.pid, SIGTERM) == 0;
        return absl::OkStatus();
      case 5:
        return Knock();
      default:
        return absl::OkStatus();
    }
  }

  // A tenant's directory has memory from its first session on, so that the baseline includes it.
  absl::Status VisitEachTenant() {
    for (const char* token : {"", "sesame"}) {
      fakes::RawWorker visitor(daemon_->Connect());
      v1::Hello hello = fakes::RawWorker::GoodHello();
      hello.set_tenant_token(token);
      const grpc::Status attached = visitor.Attach(hello);
      if (!attached.ok()) {
        return absl::DataLossError(Concat("a visitor is refused: ", attached.error_message()));
      }
      if (const grpc::Status left = visitor.Leave(); !left.ok()) {
        return absl::DataLossError(Concat("a visitor cannot leave: ", left.error_message()));
      }
    }
    return absl::OkStatus();
  }

  // Attaches with another protocol version, which the daemon must refuse.
  absl::Status Knock() {
    // With the default timeout: all cores may be busy.
    const auto channel = client::OpenChannel(daemon_->address(), std::nullopt, {});
    if (!channel.ok()) return channel.status();
    fakes::RawWorker stranger(*channel);
    v1::Hello hello = fakes::RawWorker::GoodHello();
    const bool older = random_.OneIn(2);
    hello.set_protocol_version(hello.protocol_version() + (older ? -1 : 1));
    const grpc::Status status = stranger.Attach(hello);
    ++events_.strangers;
    if (status.error_code() == grpc::StatusCode::FAILED_PRECONDITION) return absl::OkStatus();
    return absl::DataLossError(
        Concat("the answer to a worker with ", older ? "an older" : "a newer", " protocol was ",
               static_cast<int>(status.error_code()), " ", status.error_message()));
  }

  void KillAll() {
    for (const Worker& worker : workers_) {
      if (worker.pid != 0) ::kill(worker.pid, SIGKILL);
    }
    for (Worker& worker : workers_) {
      if (worker.pid != 0) ::waitpid(std::exchange(worker.pid, 0), nullptr, 0);
    }
  }

  // Active workers may continue until the limit; stopped ones must not delay the exit.
  absl::Status Drain() {
    if (absl::Status status = Live(std::chrono::seconds(1)); !status.ok()) return status;
    grpc::ClientContext context;
    v1::DrainRequest request;
    v1::DrainResponse response;
    request.set_limit_ms(kDrainMs);
    const grpc::Status asked = admin_->Drain(&context, request, &response);
    if (!asked.ok())
      return absl::DataLossError(Concat("the daemon does not drain: ", asked.error_message()));
    const int status = daemon_->WaitForExit(static_cast<int>(kPatience.count()));
    if (status == 0) return absl::OkStatus();
    return absl::DataLossError(Concat("the drained daemon exited with status ", status));
  }

  absl::Status CheckHeap() const {
#if defined(__SANITIZE_ADDRESS__)
    // AddressSanitizer keeps freed memory for a while, and finds leaks itself.
    return absl::OkStatus();
#endif
    if (heap_after_ <= heap_between_ + kMostHeapGrowth) return absl::OkStatus();
    return absl::DataLossError(Concat("the daemon's heap has grown from ", heap_between_, " to ",
                                      heap_after_, " bytes; the limit is ", kMostHeapGrowth,
                                      " more"));
  }

  absl::StatusOr<Holdings> Look() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kPatience);
    v1::StatsResponse stats;
    const grpc::Status status = admin_->NodeStats(&context, {}, &stats);
    if (!status.ok()) {
      return absl::DataLossError(Concat("the daemon does not answer: ", status.error_message()));
    }
    Holdings sum = {.sessions = stats.sessions(),
                    .used_bytes = stats.compaction().raw_copy_bytes(),
                    .descriptors = static_cast<std::uint64_t>(daemon_->OpenFds())};
    std::uint64_t pool = 0;
    for (const v1::TenantStats& tenant : stats.tenants()) {
      sum.sequences += tenant.sequences();
      sum.used_bytes += tenant.used_bytes() + tenant.retired_bytes() + tenant.observation_bytes() +
                        tenant.offloaded_bytes();
      // A tenant may keep one empty extent for reuse.
      sum.pool_extents += std::max<std::uint64_t>(tenant.pool_extents(), 1);
      sum.descriptors -= tenant.pool_extents();
      pool += tenant.pool_extents() * tenant.pool_extent_bytes();
    }
    sum.descriptors -= (stats.pool_reserved_bytes() - pool) / kDirectoryExtent;
    return sum;
  }

  // Waits until nothing of the workers is left. The caller has freed their prefixes.
  absl::Status AwaitBaseline(const Holdings& before) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    absl::StatusOr<Holdings> now = Look();
    while (now.ok() && !now->NoMoreThan(before) && std::chrono::steady_clock::now() < deadline) {
      AwaitAnEnd();
      now = Look();
    }
    if (!now.ok()) return now.status();
    after_ = *now;
    if (now->NoMoreThan(before)) return absl::OkStatus();
    return absl::DataLossError(
        Concat("left: ", now->ToString(), "; at the start: ", before.ToString()));
  }

  // Workers can cause warnings, but never errors.
  absl::Status CheckLog() const {
    std::istringstream log(daemon_->Log());
    for (std::string line; std::getline(log, line);) {
      if (line.find(" error ") != std::string::npos || line.find("CHECK") != std::string::npos) {
        return absl::DataLossError("the daemon logged: " + line);
      }
    }
    return absl::OkStatus();
  }

  std::uint64_t Operations() const {
    std::uint64_t sum = 0;
    for (const auto& done : counters_->done) sum += done;
    return sum;
  }

  void Print() const {
    cli::Table table({{"", cli::Align::kLeft}, {"", cli::Align::kRight}});
    table.Add({"operations", Concat(Operations())});
    for (std::size_t i = 0; i < kActs; ++i) {
      table.Add({Concat("  ", NameOf(static_cast<Act>(i))), Concat(counters_->done[i].load())});
    }
    table.Add({"refused for want of room", Concat(counters_->refused.load())});
    table.Add({"steps taken again", Concat(counters_->retried.load())});
    table.Add({"outputs judged", Concat(counters_->outputs_judged.load())});
    table.Add({"workers killed", Concat(events_.kills)});
    table.Add({"workers stopped and continued", Concat(events_.stops)});
    table.Add({"workers that left", Concat(events_.farewells)});
    table.Add({"leases lost", Concat(counters_->leases_lost.load())});
    table.Add({"other protocol versions refused", Concat(events_.strangers)});
    table.Add({"bytes left behind", Concat(after_.used_bytes)});
    table.Add({"heap of the daemon before, MiB", Concat(heap_before_ >> 20)});
    table.Add({"after the first crowd, MiB", Concat(heap_between_ >> 20)});
    table.Add({"after the second, MiB", Concat(heap_after_ >> 20)});
    std::fputs(table.Render().c_str(), stdout);
  }

  static std::string ReadAll(const std::string& path) {
    std::ifstream file(path);
    std::ostringstream text;
    text << file.rdbuf();
    return text.str();
  }

  const Plan plan_;
  TestRandom random_;
  std::unique_ptr<fakes::DaemonProcess> daemon_;
  std::unique_ptr<v1::TesseraAdmin::Stub> admin_;
  SoakCounters* counters_ = nullptr;
  std::vector<Worker> workers_;
  Events events_;
  Holdings after_;
  std::uint64_t heap_before_ = 0;
  std::uint64_t heap_between_ = 0;
  std::uint64_t heap_after_ = 0;
};

absl::Status Main(const cli::Flags& flags) {
  const auto seconds = flags.Number("seconds", 1, 7 * 24 * 3600);
  const auto workers = flags.Number("workers", 1, 48);
  const auto seed = flags.Number("seed", 0, ~std::uint64_t{0});
  for (const absl::Status& status : {seconds.status(), workers.status(), seed.status()}) {
    if (!status.ok()) return status;
  }
  const Plan plan = {*seconds, *workers, *seed == 0 ? std::random_device()() : *seed};
  std::printf("seed %llu\n", static_cast<unsigned long long>(plan.seed));
  return Soak(plan).Run();
}

}  // namespace
}  // namespace tessera::fuzz

int main(int argc, char** argv) {
  const std::vector<std::string_view> args(argv + 1, argv + argc);
  return tessera::cli::RunCommand(
      {.name = "soak",
       .summary = "run workers under stress",
       .description =
           "Runs workers that do everything while they are killed, stopped and continued.\n",
       .flags = {{"seconds", "N", "how long", "60"},
                 {"workers", "N", "Number of concurrent workers.", "8"},
                 {"seed", "N", "Seed of the events; 0: a new one.", "0"}},
       .connects = tessera::cli::Connects::kNowhere},
      args, tessera::fuzz::Main);
}
