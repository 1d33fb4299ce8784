// The tests' device is the emulated machine; and what only a fake device can do: fail at any call.
#include "tests/fakes/emulated_runtime.h"
#include "tests/fakes/emulated_tile_ops.h"
#include "tests/unit/kernels/cuda/tile_ops_rig.h"

namespace tessera::tests {

TileGpu OpenTileGpu(std::uint64_t seed) {
  TileGpu gpu = {.runtime = NewEmulatedRuntime({})};
  gpu.queue = NewEmulatedTileQueue(*gpu.runtime, seed);
  return gpu;
}

namespace {

using namespace kernels::cuda;  // NOLINT: a test file

TEST(TileCalls, ReportADeviceThatFailsAtAnyCall) {
  const TileShape shape = {
      .format = TileFormat::kPackedInt8, .head_dim = 64, .channels = 64, .kept = 16, .group = 2};
  const DeviceStrategy strategies[] = {{.shape = shape, .layout = LayoutOf(shape)}};
  Bytes rows(64 * 2), tile(LayoutOf(shape).bytes);
  std::memset(rows.data(), 0, rows.size());
  const auto address = [](const Bytes& bytes) {
    return reinterpret_cast<std::uint64_t>(bytes.data());
  };
  const EncodeTileJob jobs[] = {
      {.key = address(rows), .value = address(rows), .tile = address(tile), .rows = 1}};
  // Three uploads, a download, a wait.
  for (int good = 0; good <= 5; ++good) {
    const std::unique_ptr<Runtime> runtime = NewEmulatedRuntime({.fails_after = good});
    const std::unique_ptr<TileQueue> queue = NewEmulatedTileQueue(*runtime, 1);
    kernels::cuda::TileCalls calls(*runtime, *queue);
    std::optional<std::uint32_t> unusable;
    EXPECT_EQ(calls.Encode(strategies, ElementType::kBf16, jobs, &unusable).ok(), good == 5);
    EXPECT_EQ(unusable, std::nullopt);
  }
}

}  // namespace
}  // namespace tessera::tests
