// Runs the tests on the emulated GPU, and tests what only a fake device can do: fail at any call.
#include "tests/fakes/gpu/emulated_runtime.h"
#include "tests/unit/kernels/cuda/tile_ops_rig.h"

namespace tessera::tests {

TileGpu OpenTileGpu(std::uint64_t seed) {
  TileGpu gpu = {.runtime = NewEmulatedRuntime({.grid = {.seed = seed}})};
  EXPECT_TRUE(gpu.runtime->NewQueue(&gpu.queue).ok());
  return gpu;
}

namespace {

using namespace kernels::cuda;  // NOLINT: a test file

TEST(TileCalls, ReportADeviceThatFailsAtAnyCall) {
  const TileShape shape = {.format = TileFormat::kPackedInt8,
                           .head_dim = 64,
                           .key = {64, 16},
                           .value = {64, 16},
                           .group = 2};
  const DeviceStrategy strategies[] = {{.shape = shape, .layout = LayoutOf(shape)}};
  Bytes rows(64 * 2), tile(LayoutOf(shape).bytes);
  std::memset(rows.data(), 0, rows.size());
  const auto address = [](const Bytes& bytes) {
    return reinterpret_cast<std::uint64_t>(bytes.data());
  };
  const EncodeTileJob jobs[] = {
      {.key = address(rows), .value = address(rows), .tile = address(tile), .rows = 1}};
  // Three uploads, the launch, a download, a wait.
  for (int good = 0; good <= 6; ++good) {
    const std::unique_ptr<Runtime> runtime = NewEmulatedRuntime({.fails_after = good});
    std::unique_ptr<Queue> queue;
    ASSERT_TRUE(runtime->NewQueue(&queue).ok());
    kernels::cuda::TileCalls calls(*runtime, *queue);
    std::optional<std::uint32_t> unusable;
    EXPECT_EQ(calls.Encode(strategies, ElementType::kBf16, jobs, &unusable).ok(), good == 6);
    EXPECT_EQ(unusable, std::nullopt);
  }
}

}  // namespace
}  // namespace tessera::tests
