// Daemon and worker end to end on an emulated GPU: device memory is shared memory, and the kernels'
// own source runs on the host. Everything else is product code: export and import, StepViews, rows
// into tiles, attention through both transports, failure.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/api/worker_access.h"
#include "client/bench/workload/synthetic.h"
#include "client/cli/command.h"
#include "tessera/worker.h"
#include "tests/e2e/gpu/emulated_gpu.h"

namespace tessera {
namespace {

using cli::BytesOf;
using fakes::DaemonProcess;
using testing::HasSubstr;

// Memory is shared by descriptors, or by CUDA IPC for a GPU that exports none.
class Gpu : public testing::TestWithParam<bool> {
 protected:
  std::unique_ptr<DaemonProcess> StartDaemon(std::vector<std::string> flags) {
    return gpu_.StartDaemon(std::move(flags));
  }
  absl::StatusOr<std::unique_ptr<client::Worker>> Attach(const DaemonProcess& daemon) {
    return client::AttachWith({.address = daemon.address()}, {.gpus = &gpu_.platform});
  }
  int RunWorker(const DaemonProcess& daemon, std::string_view door) {
    const std::string address = "--address=" + daemon.address();
    const std::string by = "--transport=" + std::string(door);
    const std::string_view args[] = {address,       by,           "--sequences=2",
                                     "--prompt=70", "--steps=40", "--check-every=9"};
    return cli::RunWorkerOn(gpu_.platform, args);
  }

  EmulatedGpu gpu_{GetParam()};
};

TEST_P(Gpu, BothTransportsGiveRightOutputsAndAllMemoryIsFreed) {
  const auto daemon = StartDaemon({"--device=cuda:0"});
  ASSERT_NE(daemon, nullptr);
  EXPECT_THAT(daemon->Log(), HasSubstr("device=cuda:0 kernels=cuda_emulated"));
  ASSERT_EQ(RunWorker(*daemon, "mapped"), 0);
  const int mappings = daemon->Mappings();
  const int fds = daemon->OpenFds();
  for (const std::string_view door : {"mapped", "rpc", "mapped"}) {
    ASSERT_EQ(RunWorker(*daemon, door), 0) << door;
  }
  // The daemon releases a session's resources soon after its worker has closed it, but not at once.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
  while ((daemon->Mappings() > mappings || daemon->OpenFds() > fds) &&
         std::chrono::steady_clock::now() < deadline) {
  }
  EXPECT_LE(daemon->Mappings(), mappings);
  EXPECT_LE(daemon->OpenFds(), fds);
}

TEST_P(Gpu, AutoPrefersTheGpu) {
  const auto daemon = StartDaemon({"--device=auto"});
  ASSERT_NE(daemon, nullptr);
  EXPECT_THAT(daemon->Log(), HasSubstr("device=cuda:0"));
}

TEST_P(Gpu, AWorkerWithoutTheGpuIsToldSoAndWorksByRpc) {
  const auto daemon = StartDaemon({"--device=cuda:0"});
  ASSERT_NE(daemon, nullptr);
  gpu_.platform.load_cuda = []() -> absl::StatusOr<std::unique_ptr<CudaCalls>> {
    return absl::FailedPreconditionError("no CUDA driver here");
  };
  const auto worker = Attach(*daemon);
  ASSERT_TRUE(absl::IsFailedPrecondition(worker.status())) << worker.status();
  EXPECT_THAT(worker.status().ToString(), HasSubstr("no CUDA driver here"));
  EXPECT_THAT(worker.status().ToString(), HasSubstr("map_memory=false"));
  EXPECT_EQ(RunWorker(*daemon, "rpc"), 0);
}

TEST_P(Gpu, ValuesThatMayNotBeKeptFailTheSequenceByEitherWay) {
  const auto daemon = StartDaemon({"--device=cuda:0"});
  ASSERT_NE(daemon, nullptr);
  auto worker = Attach(*daemon);
  ASSERT_TRUE(worker.ok()) << worker.status();
  const cli::SyntheticShape shape;
  const auto model = (*worker)->RegisterModel(shape.Geometry());
  ASSERT_TRUE(model.ok()) << model.status();
  cli::SyntheticSequence truth(shape, 5);
  truth.Grow(40);
  std::vector<std::uint16_t> key = truth.KeysOfAllLayers(0, 40);
  const std::vector<std::uint16_t> value = truth.ValuesOfAllLayers(0, 40);

  auto good = (*worker)->CreateSequence(*model);
  ASSERT_TRUE(good.ok());
  ASSERT_TRUE(good->Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = 40}).ok());
  auto bad = (*worker)->CreateSequence(*model);
  ASSERT_TRUE(bad.ok());
  key[((2 * 40 + 33) * 2 + 1) * 128 + 77] = 0x7f80;  // infinity: layer 2, token 33, head 1
  const auto refused = bad->Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = 40});
  ASSERT_TRUE(absl::IsDataLoss(refused.status())) << refused.status();
  EXPECT_THAT(refused.status().ToString(),
              HasSubstr("K of layer 2, kv head 1, token 33, channel 77"));

  // Directly into the tail.
  auto tensor = (*worker)->NewTensor(2 * shape.query_row());
  auto output = (*worker)->NewTensor(4 * shape.query_row());
  ASSERT_TRUE(tensor.ok() && output.ok());
  std::vector<std::uint16_t> rows(shape.query_row(), 0x3f80);
  rows[128 + 3] = 0x7fc0;  // NaN in head 1
  ASSERT_TRUE(tensor->Write(BytesOf(rows)).ok());
  client::Sequence* const batch[] = {&*good};
  auto step = (*worker)->BeginStep(batch);
  ASSERT_TRUE(step.ok()) << step.status();
  const std::span<const std::byte> kv = tensor->bytes().first(2 * shape.kv_row());
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    ASSERT_TRUE(
        step->AppendAndAttend(
                layer,
                {.key = kv, .value = kv, .query = tensor->bytes(), .output = output->bytes()})
            .ok());
  }
  ASSERT_TRUE(step->End().ok());
  const absl::Status parked = good->Park();
  EXPECT_THAT(parked.ToString(), HasSubstr("K of layer 0, kv head 1, token 40, channel 3"));
}

TEST_P(Gpu, TensorsInHostMemoryGiveTheSameBits) {
  const auto daemon = StartDaemon({"--device=cuda:0"});
  ASSERT_NE(daemon, nullptr);
  auto worker = Attach(*daemon);
  ASSERT_TRUE(worker.ok()) << worker.status();
  const cli::SyntheticShape shape;
  const auto model = (*worker)->RegisterModel(shape.Geometry());
  cli::SyntheticSequence truth(shape, 9);
  truth.Grow(41);
  const std::vector<std::uint16_t> key = truth.KeysOfAllLayers(0, 40);
  const std::vector<std::uint16_t> value = truth.ValuesOfAllLayers(0, 40);
  std::vector<std::vector<float>> outputs[2];
  std::vector<float> lse[2];
  for (const bool on_host : {false, true}) {
    auto sequence = (*worker)->CreateSequence(*model);
    ASSERT_TRUE(sequence.ok());
    ASSERT_TRUE(
        sequence->Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = 40}).ok());
    client::Sequence* const batch[] = {&*sequence};
    auto step = (*worker)->BeginStep(batch);
    ASSERT_TRUE(step.ok()) << step.status();
    std::vector<client::Tensor> kept;
    const auto place = [&](std::span<const std::byte> bytes) -> std::span<std::byte> {
      kept.push_back(*(*worker)->NewTensor(bytes.size()));
      EXPECT_TRUE(kept.back().Write(bytes).ok());
      return kept.back().bytes();
    };
    lse[on_host].assign(shape.query_heads, 0);
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      std::vector<float>& output = outputs[on_host].emplace_back(shape.query_row());
      std::span<const std::byte> k = BytesOf(truth.Key(layer, 40, 1));
      std::span<const std::byte> v = BytesOf(truth.Value(layer, 40, 1));
      const std::vector<std::uint16_t> query = truth.Query(layer, 40);
      std::span<const std::byte> q = BytesOf(query);
      std::span<std::byte> o = cli::WritableBytesOf(output);
      if (!on_host) k = place(k), v = place(v), q = place(q), o = place(o);
      const absl::Status status = step->AppendAndAttend(
          layer, {.key = k, .value = v, .query = q, .output = o, .lse = lse[on_host]});
      ASSERT_TRUE(status.ok()) << status;
    }
    ASSERT_TRUE(step->End().ok());
    for (std::uint32_t layer = 0; layer < shape.layers && !on_host; ++layer) {
      ASSERT_TRUE(kept[4 * layer + 3].Read(cli::WritableBytesOf(outputs[0][layer])).ok());
    }
  }
  EXPECT_EQ(outputs[0], outputs[1]);
  EXPECT_EQ(lse[0], lse[1]);
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    EXPECT_LT(truth.Error(layer, 40, outputs[1][layer]), 0.02);
  }
}

TEST_P(Gpu, TensorsThatTheKernelsCannotReadAreRefused) {
  const auto daemon = StartDaemon({"--device=cuda:0"});
  ASSERT_NE(daemon, nullptr);
  auto worker = Attach(*daemon);
  ASSERT_TRUE(worker.ok()) << worker.status();
  const cli::SyntheticShape shape;
  const auto model = (*worker)->RegisterModel(shape.Geometry());
  auto sequence = (*worker)->CreateSequence(*model);
  ASSERT_TRUE(sequence.ok());
  auto tensor = (*worker)->NewTensor(2 * shape.kv_row() + 8);
  ASSERT_TRUE(tensor.ok());
  client::Sequence* const batch[] = {&*sequence};
  auto step = (*worker)->BeginStep(batch);
  ASSERT_TRUE(step.ok()) << step.status();
  const std::span<const std::byte> kv = tensor->bytes().subspan(8, 2 * shape.kv_row());
  const absl::Status status = step->Append(0, kv, kv);
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("not a multiple of 16"));
}

TEST_P(Gpu, AGpuThatFailsIsRetiredAndTheDaemonLives) {
  const auto daemon = StartDaemon({"--device=cuda:0", "--gpu-fails-after=400"});
  ASSERT_NE(daemon, nullptr);
  EXPECT_EQ(RunWorker(*daemon, "rpc"), 1);
  EXPECT_THAT(daemon->Log(), HasSubstr("device retired"));
  const auto worker = Attach(*daemon);
  ASSERT_TRUE(absl::IsUnavailable(worker.status())) << worker.status();
  EXPECT_THAT(worker.status().ToString(),
              HasSubstr("device cuda:0 has failed: the emulated device has failed"));
  daemon->Kill(SIGTERM);
  EXPECT_EQ(daemon->WaitForExit(10), 0) << daemon->Log();
}

TEST_P(Gpu, TheWorkersOwnGpuMayFail) {
  const auto daemon = StartDaemon({"--device=cuda:0"});
  ASSERT_NE(daemon, nullptr);
  gpu_.gpus.options.fails_after = 300;
  EXPECT_EQ(RunWorker(*daemon, "mapped"), 1);
  gpu_.gpus.options.fails_after = -1;
  EXPECT_EQ(RunWorker(*daemon, "mapped"), 0);  // other workers are not affected
}

INSTANTIATE_TEST_SUITE_P(Sharing, Gpu, testing::Bool(), [](const auto& param) {
  return std::string(param.param ? "ByDescriptor" : "ByIpc");
});

}  // namespace
}  // namespace tessera
