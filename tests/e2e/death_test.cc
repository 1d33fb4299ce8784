// The promises about dead processes, tested with SIGKILL and SIGSTOP on real processes.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "client/bench/workload/synthetic.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tessera/worker.h"
#include "tests/e2e/death_phase.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_worker.h"
#include "tests/fakes/seed.h"

namespace tessera {
namespace {

using cli::BytesOf;
using cli::SyntheticSequence;
using cli::SyntheticShape;
using cli::WritableBytesOf;
using fakes::DaemonProcess;
using testing::HasSubstr;

constexpr SyntheticShape kShape = {.layers = 4, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
constexpr char kTwoTenants[] =
    R"({"tenants": [{"name": "default"}, {"name": "other", "token": "sesame"}]})";

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::chrono::seconds kAllowed{10};
#else
constexpr std::chrono::seconds kAllowed{1};
#endif

pid_t SpawnVictim(const std::string& address, const std::string& phase_file,
                  const std::string& what) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  ::execl(DEATH_WORKER_BINARY, DEATH_WORKER_BINARY, address.c_str(), phase_file.c_str(),
          what.c_str(), nullptr);
  ::_exit(127);
}

// What the daemon holds: everything that a dead worker could leak.
struct Holdings {
  std::uint64_t sessions = 0;
  std::uint64_t used_bytes = 0;      // of the victims' tenant
  std::uint64_t reserved_bytes = 0;  // physical memory of the node
  std::uint64_t sequences = 0;
  std::uint64_t retired_bytes = 0;
  std::uint64_t offloaded_bytes = 0;  // the host tier's accounting
  int fds = 0;
  int mappings = 0;
  friend bool operator==(const Holdings&, const Holdings&) = default;
  std::string ToString() const {
    return "sessions " + std::to_string(sessions) + ", used " + std::to_string(used_bytes) +
           ", reserved " + std::to_string(reserved_bytes) + ", sequences " +
           std::to_string(sequences) + ", retired " + std::to_string(retired_bytes) +
           ", offloaded " + std::to_string(offloaded_bytes) + ", fds " + std::to_string(fds) +
           ", mappings " + std::to_string(mappings);
  }
};

class Death : public testing::Test {
 protected:
  void Start(const std::vector<std::string>& flags = {}) {
    daemon_ = DaemonProcess::Start({.flags = flags, .config_json = kTwoTenants});
    ASSERT_NE(daemon_, nullptr);
    admin_ = v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin());
  }

  v1::StatsResponse Stats() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    v1::StatsResponse stats;
    const grpc::Status status = admin_->NodeStats(&context, {}, &stats);
    EXPECT_TRUE(status.ok()) << status.error_message() << daemon_->Log();
    return stats;
  }
  Holdings Look() {
    const v1::StatsResponse stats = Stats();
    const v1::TenantStats& tenant = stats.tenants(0);
    return {.sessions = stats.sessions(),
            .used_bytes = tenant.used_bytes(),
            .reserved_bytes = stats.pool_reserved_bytes(),
            .sequences = tenant.sequences(),
            .retired_bytes = tenant.retired_bytes(),
            .offloaded_bytes = tenant.offloaded_bytes() + stats.host_tier_bytes(),
            .fds = daemon_->OpenFds(),
            .mappings = daemon_->Mappings()};
  }
  // Polls until `wanted` holds. Returns the elapsed time. Each poll is a call to the daemon.
  std::chrono::duration<double> Await(const std::function<bool()>& wanted) {
    const auto begun = std::chrono::steady_clock::now();
    while (!wanted() && std::chrono::steady_clock::now() - begun < 2 * kAllowed) {
    }
    return std::chrono::steady_clock::now() - begun;
  }

  std::string PhaseFile() const { return daemon_->folder() + "/phase"; }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<v1::TesseraAdmin::Stub> admin_;
};

// A worker of this process with one sequence.
struct Bystander {
  std::unique_ptr<client::Worker> worker;
  client::Sequence sequence;
  SyntheticSequence truth{kShape, 11};

  void Open(const std::string& address, const std::string& token = "") {
    absl::StatusOr<std::unique_ptr<client::Worker>> attached = client::Worker::Attach(
        {.address = address, .tenant_token = token, .worker_name = "bystander"});
    ASSERT_TRUE(attached.ok()) << attached.status();
    worker = *std::move(attached);
    Create();
  }
  void Create() {
    absl::StatusOr<client::Model> model = worker->RegisterModel(kShape.Geometry());
    ASSERT_TRUE(model.ok()) << model.status();
    absl::StatusOr<client::Sequence> created = worker->CreateSequence(*model);
    ASSERT_TRUE(created.ok()) << created.status();
    sequence = *std::move(created);
    truth = SyntheticSequence(kShape, 11);
    truth.Grow(500);
    const std::vector<std::uint16_t> key = truth.KeysOfAllLayers(0, 500);
    const std::vector<std::uint16_t> value = truth.ValuesOfAllLayers(0, 500);
    absl::StatusOr<std::uint64_t> appended =
        sequence.Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = 500});
    ASSERT_TRUE(appended.ok()) << appended.status();
  }

  // Reads the same rows each time: nothing is appended, so the bits must not change.
  absl::StatusOr<std::vector<float>> Read() {
    client::Sequence* batch[] = {&sequence};
    absl::StatusOr<client::Step> step = worker->BeginStep(batch);
    if (!step.ok()) return step.status();
    std::vector<float> output(kShape.query_row());
    const std::vector<std::uint16_t> query = truth.Query(2, 499);
    absl::Status status =
        step->Attend(2, {.query = BytesOf(query), .output = WritableBytesOf(output)});
    if (!status.ok()) return status;
    return output;
  }

  absl::Status Decode(double* error) {
    truth.Grow(1);
    absl::Status status;
    std::vector<float> output(kShape.query_row());
    do {
      status = OneStep(output);
    } while (absl::IsAborted(status));
    if (status.ok()) *error = truth.Error(3, truth.tokens() - 1, output);
    return status;
  }
  absl::Status OneStep(std::vector<float>& output) {
    client::Sequence* batch[] = {&sequence};
    absl::StatusOr<client::Step> step = worker->BeginStep(batch);
    if (!step.ok()) return step.status();
    const std::uint64_t token = truth.tokens() - 1;
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      const std::vector<std::uint16_t> query = truth.Query(layer, token);
      absl::Status status =
          step->AppendAndAttend(layer, {.key = BytesOf(truth.Key(layer, token, 1)),
                                        .value = BytesOf(truth.Value(layer, token, 1)),
                                        .query = BytesOf(query),
                                        .output = WritableBytesOf(output)});
      if (!status.ok()) return status;
    }
    return step->End();
  }
};

// Waits until the victim is in its phase and for a random moment more, then kills it. Returns the
// phase in which it died.
Phase KillInside(pid_t pid, const PhaseWord& phase, Phase wanted, std::mt19937_64& random) {
  while (phase.Get() != wanted && ::waitpid(pid, nullptr, WNOHANG) == 0) {
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(random() % 3000);
  while (std::chrono::steady_clock::now() < until) {
  }
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  return phase.Get();
}

TEST_F(Death, KilledWorkersLeaveNothing) {
  ASSERT_NO_FATAL_FAILURE(Start());
  Bystander reader;
  ASSERT_NO_FATAL_FAILURE(reader.Open(daemon_->address()));
  absl::StatusOr<std::vector<float>> first = reader.Read();
  ASSERT_TRUE(first.ok()) << first.status();

  // One worker decodes all the time, in a separate tenant so that the victims' accounts do not
  // change.
  Bystander decoder;
  ASSERT_NO_FATAL_FAILURE(decoder.Open(daemon_->address(), "sesame"));
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::atomic<int> decoded{0};
  std::string decode_error;
  std::thread decoding([&] {
    while (!stop.load() && decoder.truth.tokens() < 20000) {
      double error = 1;
      const absl::Status status = decoder.Decode(&error);
      if (!status.ok()) {
        decode_error = status.ToString();
        return;
      }
      wrong += !(error < 0.02);
      ++decoded;
      // Short enough to need only its own tail and first extent.
      if (decoder.truth.tokens() >= 600) {
        if (!decoder.sequence.Truncate(500).ok()) return;
        decoder.truth.Truncate(500);
      }
    }
  });

  std::mt19937_64 random(TestSeed());
  PhaseWord phase(PhaseFile());
  constexpr std::array kKinds = {Phase::kAttach, Phase::kAppend,   Phase::kStep,
                                 Phase::kFork,   Phase::kCompress, Phase::kOffload};
  std::array<int, static_cast<std::size_t>(Phase::kPhases)> died{};
  const auto kill_one = [&](Phase kind) {
    phase.Set(Phase::kBetween);
    const pid_t pid =
        SpawnVictim(daemon_->address(), PhaseFile(), kPhaseNames[static_cast<std::size_t>(kind)]);
    return KillInside(pid, phase, kind, random);
  };
  // Warm-up: creates the first extents, connections and threads.
  for (Phase kind : kKinds) kill_one(kind);
  Await([&] { return Look().sessions == 2; });
  const auto settled = [&](const Holdings& a, const Holdings& b) {
    // The decoder's tenant changes all the time; only the victims' tenant must return to its old
    // state.
    Holdings x = a;
    Holdings y = b;
    x.reserved_bytes = y.reserved_bytes = 0;
    return x == y;
  };
  // On a busy machine a closing connection may be counted twice.
  constexpr int kAlike = 25;
  Holdings baseline = Look();
  int alike = 0;
  Await([&] {
    const Holdings again = Look();
    alike = settled(again, baseline) && again.retired_bytes == 0 ? alike + 1 : 0;
    baseline = again;
    return alike >= kAlike;
  });
  ASSERT_GE(alike, kAlike) << baseline.ToString();

  double worst = 0;
  int kills = 0;
  const auto enough = [&] {
    for (Phase kind : kKinds) {
      if (died[static_cast<std::size_t>(kind)] < 25) return false;
    }
    return kills >= 200;
  };
  while (!enough() && kills < 600) {
    const Phase kind = kKinds[kills % kKinds.size()];
    ++died[static_cast<std::size_t>(kill_one(kind))];
    ++kills;
    Holdings now;
    const double seconds = Await([&] {
                             now = Look();
                             return settled(now, baseline);
                           }).count();
    worst = std::max(worst, seconds);
    ASSERT_LE(seconds, std::chrono::duration<double>(kAllowed).count())
        << "kill " << kills << " in " << kPhaseNames[static_cast<std::size_t>(kind)]
        << "\nbaseline: " << baseline.ToString() << "\nnow:      " << now.ToString();
    const absl::StatusOr<std::vector<float>> again = reader.Read();
    ASSERT_TRUE(again.ok()) << again.status();
    ASSERT_EQ(*again, *first) << "another worker's result changed";
  }
  stop = true;
  decoding.join();
  std::printf("kills: %d; inside", kills);
  for (Phase kind : kKinds) {
    std::printf(" %s %d,", kPhaseNames[static_cast<std::size_t>(kind)],
                died[static_cast<std::size_t>(kind)]);
  }
  std::printf(
      " between %d; back at the baseline after %.3f s at worst; meanwhile another worker "
      "decoded %d tokens\n",
      died[0], worst, decoded.load());
  EXPECT_TRUE(enough());
  EXPECT_EQ(decode_error, "");
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(decoded, 0);
}

TEST_F(Death, AnotherComputesWhatAKilledWorkerSaidItWould) {
  ASSERT_NO_FATAL_FAILURE(Start());
  PhaseWord phase(PhaseFile());
  const pid_t pid = SpawnVictim(daemon_->address(), PhaseFile(), "compute");
  while (phase.Get() != Phase::kCompute) {
    ASSERT_EQ(::waitpid(pid, nullptr, WNOHANG), 0) << "the victim ended by itself";
  }
  Bystander other;
  ASSERT_NO_FATAL_FAILURE(other.Open(daemon_->address()));
  const absl::StatusOr<client::Model> model = other.worker->RegisterModel(kShape.Geometry());
  ASSERT_TRUE(model.ok()) << model.status();
  std::vector<std::uint32_t> ids(300);
  std::iota(ids.begin(), ids.end(), 0u);
  auto waits = std::async(std::launch::async, [&] {
    return other.worker->Match(
        *model, {.tokens = ids, .wait = std::chrono::minutes(1), .will_compute = true});
  });
  Await([&] { return Stats().tenants(0).prefix_waits() == 1; });
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  ASSERT_EQ(waits.wait_for(2 * kAllowed), std::future_status::ready) << "it waits for the dead";
  const absl::StatusOr<client::PrefixMatch> match = waits.get();
  ASSERT_TRUE(match.ok()) << match.status();
  EXPECT_FALSE(match->found());
  EXPECT_EQ(match->computing, 0u);
  EXPECT_TRUE(match->computation.valid()) << "nobody computes it now";
}

TEST_F(Death, AStoppedWorkerDelaysNobodyAndRetries) {
  ASSERT_NO_FATAL_FAILURE(Start({"--pin-limit-ms=300"}));
  PhaseWord phase(PhaseFile());
  const pid_t pid = SpawnVictim(daemon_->address(), PhaseFile(), "stop");
  int status = 0;
  ASSERT_EQ(::waitpid(pid, &status, WUNTRACED), pid);
  ASSERT_TRUE(WIFSTOPPED(status)) << "the victim ended: " << status;
  ASSERT_EQ(phase.Get(), Phase::kStep);

  // Other workers continue to append, fork and free. At first their freed memory waits for the
  // stopped reader.
  Bystander other;
  ASSERT_NO_FATAL_FAILURE(other.Open(daemon_->address()));
  for (int i = 0; i < 40; ++i) {
    double error = 1;
    ASSERT_TRUE(other.Decode(&error).ok());
    EXPECT_LT(error, 0.02);
  }
  ASSERT_TRUE(other.sequence.Free().ok());
  // The pin is revoked, the memory is freed, and the session survives.
  EXPECT_LE(Await([&] { return Stats().tenants(0).pins_revoked() > 0; }).count(),
            std::chrono::duration<double>(2 * kAllowed).count());
  Await([&] { return Look().retired_bytes == 0; });
  EXPECT_EQ(Look().retired_bytes, 0);
  grpc::ClientContext context;
  v1::ListSessionsResponse sessions;
  ASSERT_TRUE(admin_->ListSessions(&context, {}, &sessions).ok());
  EXPECT_EQ(std::count_if(sessions.sessions().begin(), sessions.sessions().end(),
                          [](const v1::SessionInfo& s) { return s.worker_name() == "victim"; }),
            1);
  ::kill(pid, SIGCONT);
  ASSERT_EQ(::waitpid(pid, &status, 0), pid);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0) << "2: not ABORTED, 3: committed, 4: wrong after the retry";
}

int MappedFromDaemon() {
  std::ifstream maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("/memfd:tessera-") != std::string::npos;
  }
  return count;
}

TEST_F(Death, AKilledDaemonIsNoticedUnmappedAndReplaced) {
  ASSERT_NO_FATAL_FAILURE(Start());
  Bystander worker;
  ASSERT_NO_FATAL_FAILURE(worker.Open(daemon_->address()));
  double error = 1;
  ASSERT_TRUE(worker.Decode(&error).ok());
  ASSERT_GT(MappedFromDaemon(), 0);
  const std::string folder = daemon_->folder();
  const client::SequenceId before = worker.sequence.id();

  daemon_->Kill(SIGKILL);
  daemon_->WaitForExit(10);
  // Needs no call: the lease thread unmaps.
  Await([] { return MappedFromDaemon() == 0; });
  EXPECT_EQ(MappedFromDaemon(), 0);
  const absl::Status lost = worker.Decode(&error);
  EXPECT_TRUE(absl::IsUnavailable(lost)) << lost;
  EXPECT_THAT(std::string(lost.message()), testing::Not(testing::IsEmpty()));

  // A new daemon with more than half of the machine's memory can start while the old one's workers
  // still run.
  std::ifstream meminfo("/proc/meminfo");
  std::string word;
  std::uint64_t total_kib = 0;
  meminfo >> word >> total_kib;
  std::unique_ptr<DaemonProcess> successor = DaemonProcess::Start(
      {.pool_bytes = std::to_string(total_kib * 6 / 10 / 16384 * 16) + "MiB", .folder = folder});
  ASSERT_NE(successor, nullptr);
  absl::StatusOr<client::ReattachReport> report = worker.worker->Reattach();
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_FALSE(report->same_daemon);
  EXPECT_THAT(report->gone, testing::ElementsAre(before));
  client::Sequence* batch[] = {&worker.sequence};
  EXPECT_TRUE(absl::IsNotFound(worker.worker->BeginStep(batch).status()));
  ASSERT_NO_FATAL_FAILURE(worker.Create());
  ASSERT_TRUE(worker.Decode(&error).ok());
  EXPECT_LT(error, 0.02);
}

}  // namespace
}  // namespace tessera
