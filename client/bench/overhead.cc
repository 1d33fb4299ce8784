// tessera bench overhead: cost that client and daemon add to an attention call that is nearly free.

#include <grpcpp/create_channel.h>
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/byte_buffer.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "client/bench/bench.h"
#include "client/bench/measure/syscalls.h"
#include "client/bench/workload/decode_loop.h"
#include "client/bench/workload/synthetic.h"
#include "client/tools/local_daemon.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/attend.h"
#include "kernels/dispatch/implementation.h"
#include "proto/shm/tail_ring.h"
#include "tessera/v1/tessera.grpc.pb.h"
#include "tessera/worker.h"

namespace tessera::cli::bench {

namespace {

// Longest sequence, in tokens: attention over it is nearly free.
constexpr std::uint64_t kLongest = DecodeLoop::kPrompt + 64;

double MicrosecondsOf(const auto& act) {
  const auto begun = std::chrono::steady_clock::now();
  act();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begun)
      .count();
}

// The baseline of direct_added_us: stores the same rows and runs the same kernel over a lane of the
// same shape, in memory of this process.
class PlainCall {
 public:
  explicit PlainCall(const SyntheticShape& shape)
      : tile_{shape.head_dim, kernels::ElementType::kBf16},
        query_(shape.query_row(), 0x3c00),
        key_(shape.kv_row(), 0x3c00),
        output_(shape.query_row()),
        lse_(shape.query_heads) {
    memory_.assign((kSegmentTiles + kRingTiles) * tile_.bytes() + 64, std::byte{0});
    void* start = memory_.data();
    std::size_t space = memory_.size();
    std::byte* const tiles = static_cast<std::byte*>(std::align(64, 64, start, space));
    for (std::uint32_t i = 0; i < kSegmentTiles; ++i) offsets_.push_back(i * tile_.bytes());
    segment_ = {.arena = tiles,
                .arena_bytes = kSegmentTiles * tile_.bytes(),
                .tile_offsets = offsets_.data(),
                .shape = kernels::DenseShape(shape.head_dim, kernels::ElementType::kBf16)};
    ring_ = {tiles + kSegmentTiles * tile_.bytes(), kRingTiles, tile_};
    batch_.geometry = {.query_heads = shape.query_heads,
                       .kv_heads = shape.kv_heads,
                       .head_dim = shape.head_dim,
                       .type = kernels::ElementType::kBf16,
                       .scale = 0.125f};
    items_ = {
        {.lane = &lane_, .query = query_.data(), .output = output_.data(), .lse = lse_.data()}};
    batch_.items = items_;
    Shape(kLongest - 1);
    workspace_.resize(kernels::AttendWorkspaceBytes(batch_) + 64);
  }

  // Appends token number `token` and attends. Whole tiles before it are in the segment.
  void Run(std::uint64_t token) {
    shm::StoreRow(ring_, token, key_.data(), key_.data());
    Shape(token);
    void* start = workspace_.data();
    std::size_t space = workspace_.size();
    std::align(64, space - 64, start, space);
    kernels::InlineExecutor executor;
    const kernels::AttendResult result = kernels::Attend(
        kernels::BestImplementation(), batch_, {static_cast<std::byte*>(start), space}, executor);
    TESSERA_CHECK(result.status == kernels::AttendStatus::kOk, "the baseline attends");
  }

 private:
  void Shape(std::uint64_t token) {
    const std::uint64_t absorbed = token / kernels::kTileEntries * kernels::kTileEntries;
    segment_.entries = static_cast<std::uint32_t>(absorbed);
    lane_ = {
        .segments = &segment_,
        .segment_count = 1,
        .tail = {
            .ring = ring_.base, .ring_tiles = kRingTiles, .begin = absorbed, .end = token + 1}};
    items_[0].first_query_position = token;
  }

  static constexpr std::uint32_t kSegmentTiles = kLongest / kernels::kTileEntries;
  static constexpr std::uint32_t kRingTiles = 4;
  kernels::DenseTile tile_;
  std::vector<std::byte> memory_;
  std::vector<std::uint64_t> offsets_;
  kernels::SegmentView segment_;
  shm::TailRing ring_;
  kernels::LaneView lane_;
  std::vector<std::uint16_t> query_, key_;
  std::vector<float> output_, lse_;
  std::vector<kernels::AttendItem> items_;
  kernels::AttendBatch batch_;
  std::vector<std::byte> workspace_;
};

struct DirectTimes {
  double direct_us;
  double plain_us;
};

// Alternates the two calls, so that both see the same load of the machine.
absl::StatusOr<DirectTimes> MeasureDirect(const LocalDaemon& daemon, int steps) {
  absl::StatusOr<std::unique_ptr<DecodeLoop>> loop = DecodeLoop::Open(daemon.address(), kLongest);
  if (!loop.ok()) return loop.status();
  PlainCall plain(DecodeLoop::kShape);
  std::vector<double> direct_us;
  std::vector<double> plain_us;
  for (int i = 0; i < steps; ++i) {
    const std::uint64_t token = (*loop)->tokens();
    absl::Status status = (*loop)->Step([&](const auto& append_and_attend) {
      direct_us.push_back(MicrosecondsOf(append_and_attend));
      plain_us.push_back(MicrosecondsOf([&] { plain.Run(token); }));
    });
    if (!status.ok()) return status;
  }
  return DirectTimes{Median(direct_us), Median(plain_us)};
}

struct RpcTimes {
  double attend_us;
  double echo_us;
};

absl::StatusOr<RpcTimes> MeasureRpc(const LocalDaemon& daemon, int calls) {
  absl::StatusOr<std::unique_ptr<DecodeLoop>> loop = DecodeLoop::Open(daemon.address(), kLongest);
  if (!loop.ok()) return loop.status();
  const auto channel = grpc::CreateChannel(daemon.address(), grpc::InsecureChannelCredentials());
  const std::unique_ptr<v1::Tessera::Stub> stub = v1::Tessera::NewStub(channel);
  const v1::AttendRequest request = (*loop)->AttendRequest();
  const grpc::internal::RpcMethod echo("/grpc.health.v1.Health/Check",
                                       grpc::internal::RpcMethod::NORMAL_RPC);
  const grpc::ByteBuffer empty = [] {
    const grpc::Slice slice("");
    return grpc::ByteBuffer(&slice, 1);
  }();
  std::vector<double> attend_us;
  std::vector<double> echo_us;
  for (int i = 0; i < calls; ++i) {
    grpc::Status status;
    const double attend = MicrosecondsOf([&] {
      grpc::ClientContext context;
      v1::AttendResponse response;
      status = stub->Attend(&context, request, &response);
    });
    if (!status.ok()) return absl::InternalError(status.error_message());
    const double echoed = MicrosecondsOf([&] {
      grpc::ClientContext context;
      grpc::ByteBuffer response;
      status = grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer,
                                                 grpc::ByteBuffer, grpc::ByteBuffer>(
          channel.get(), echo, &context, empty, &response);
    });
    if (!status.ok()) return absl::InternalError(status.error_message());
    if (i < calls / 10) continue;  // warm-up
    attend_us.push_back(attend);
    echo_us.push_back(echoed);
  }
  return RpcTimes{Median(attend_us), Median(echo_us)};
}

// CPU use of a daemon whose only worker holds a decoding sequence and makes no calls.
absl::StatusOr<double> MeasureIdle(const LocalDaemon& daemon, int seconds) {
  absl::StatusOr<std::unique_ptr<DecodeLoop>> loop = DecodeLoop::Open(daemon.address(), kLongest);
  if (!loop.ok()) return loop.status();
  for (int i = 0; i < 40; ++i) {
    absl::Status status = (*loop)->Step([](const auto& act) { act(); });
    if (!status.ok()) return status;
  }
  std::this_thread::sleep_for(std::chrono::seconds(1));  // lets background work finish
  const double before = daemon.CpuSeconds();
  std::this_thread::sleep_for(std::chrono::seconds(seconds));
  return 100 * (daemon.CpuSeconds() - before) / seconds;
}

void AddSystemCalls(const LocalDaemon& daemon, Report& report) {
  constexpr int kSteps = 1000;
  absl::StatusOr<CountedRun> run =
      CountSystemCalls({BinaryFolder() + "/tessera", "bench", "decode-loop",
                        "--address=" + daemon.address(), Concat("--steps=", kSteps)});
  if (!run.ok()) {
    report.notes.push_back(Concat("direct_syscalls_per_step skipped: ", run.status().message()));
    return;
  }
  report.Add({.name = "direct_syscalls_per_step",
              .value = static_cast<double>(run->calls) / kSteps,
              .unit = "calls",
              .goal = 0,
              .sense = Goal::kAtMost});
  std::string numbers;
  for (std::uint64_t number : run->numbers) Append(numbers, " ", number);
  report.notes.push_back(Concat("system calls: ", run->calls, " in ", kSteps,
                                " steps of 200 us, counted by ptrace while the compactor is awake",
                                numbers.empty() ? "" : "; call numbers:", numbers));
}

}  // namespace

absl::StatusOr<Report> RunOverhead(const Options& options) {
  Report report{.name = "overhead"};
  Progress("starting daemons");
  absl::StatusOr<std::unique_ptr<LocalDaemon>> daemon = LocalDaemon::Start({});
  if (!daemon.ok()) return daemon.status();

  Progress("direct path");
  absl::StatusOr<DirectTimes> direct = MeasureDirect(**daemon, options.quick ? 2000 : 20000);
  if (!direct.ok()) return direct.status();
  report.Add({.name = "plain_call", .value = direct->plain_us, .unit = "us"});
  report.Add({.name = "direct_added_us",
              .value = direct->direct_us - direct->plain_us,
              .unit = "us",
              .baseline = "plain_call",
              .ratio = direct->direct_us / direct->plain_us,
              .goal = 1,
              .sense = Goal::kAtMost,
              .goal_is_on_ratio = false});
  {
    Progress("counting system calls");
    absl::StatusOr<std::unique_ptr<LocalDaemon>> awake =
        LocalDaemon::Start({"--compactor-linger-ms=60000"});
    if (!awake.ok()) return awake.status();
    AddSystemCalls(**awake, report);
  }
  Progress("RPC path");
  absl::StatusOr<RpcTimes> rpc = MeasureRpc(**daemon, options.quick ? 3000 : 30000);
  if (!rpc.ok()) return rpc.status();
  report.Add({.name = "rpc_echo", .value = rpc->echo_us, .unit = "us"});
  report.Add({.name = "rpc_attend_vs_echo",
              .value = rpc->attend_us,
              .unit = "us",
              .baseline = "rpc_echo",
              .ratio = rpc->attend_us / rpc->echo_us,
              .goal = 1.5,
              .sense = Goal::kAtMost});
  Progress("idle daemon");
  absl::StatusOr<double> idle = MeasureIdle(**daemon, options.quick ? 10 : 30);
  if (!idle.ok()) return idle.status();
  report.Add({.name = "idle_cpu_percent",
              .value = *idle,
              .unit = "%",
              .goal = 0.1,
              .sense = Goal::kAtMost});
  report.notes.push_back(
      "direct: one layer's call (1 sequence, 1 query head, 1 kv head, head_dim 64, 32 to 96 "
      "entries) compared with the same kernel and row copy in local memory; medians. The value is "
      "the difference of the two calls, the ratio that of the whole call to plain_call");
  report.notes.push_back(
      "rpc_echo: grpc.health.v1.Health/Check, the smallest call on the same socket");
  return report;
}

}  // namespace tessera::cli::bench
