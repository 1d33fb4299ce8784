// Measures the overhead of the mapped transport: a step of 8 layers, the bare kernel at the same
// sizes, and a step without attention.

#include <benchmark/benchmark.h>

#include <cstdlib>
#include <memory>
#include <vector>

#include "client/api/worker_access.h"
#include "kernels/dispatch/implementation.h"
#include "tessera/worker.h"
#include "tests/fakes/daemon/mapped_daemon.h"

namespace tessera {
namespace {

constexpr std::uint32_t kLayers = 8;
constexpr std::uint32_t kQueryHeads = 8;
constexpr std::uint32_t kKvHeads = 2;
constexpr std::uint32_t kHeadDim = 64;

struct Setup {
  explicit Setup(std::size_t batch_size, std::uint64_t prompt)
      : daemon({.ring_tiles = 64,
                .pool_extent_bytes = 4 << 20,
                .staging_bytes = 16 << 20,
                .cut_segments = false}),
        kv(batch_size * kKvHeads * kHeadDim, 0x3f80),
        query(batch_size * kQueryHeads * kHeadDim, 0x3c00),
        output(query.size()) {
    worker = *client::AttachWith({.address = "fake:daemon"}, {}, daemon.NewConnector());
    client::ModelGeometry geometry;
    geometry.name = "bench";
    geometry.layers.assign(
        kLayers, {.query_heads = kQueryHeads, .kv_heads = kKvHeads, .head_dim = kHeadDim});
    model = *worker->RegisterModel(geometry);
    const std::vector<std::uint16_t> rows(kLayers * prompt * kKvHeads * kHeadDim, 0x3f80);
    const auto bytes = std::as_bytes(std::span(rows));
    for (std::size_t i = 0; i < batch_size; ++i) {
      sequences.push_back(*worker->CreateSequence(model));
      if (!sequences.back().Append({.key = bytes, .value = bytes, .tokens = prompt}).ok()) {
        std::abort();
      }
    }
    for (client::Sequence& sequence : sequences) batch.push_back(&sequence);
  }
  client::StepTensors tensors() {
    return {.key = std::as_bytes(std::span(kv)),
            .value = std::as_bytes(std::span(kv)),
            .query = std::as_bytes(std::span(query)),
            .output = std::as_writable_bytes(std::span(output))};
  }

  fakes::MappedDaemon daemon;
  std::unique_ptr<client::Worker> worker;
  client::Model model;
  std::vector<client::Sequence> sequences;
  std::vector<client::Sequence*> batch;
  std::vector<std::uint16_t> kv;
  std::vector<std::uint16_t> query;
  std::vector<float> output;
};

// A whole step: appends the new rows and attends over prompt and tail, layer by layer.
void BM_Step(benchmark::State& state) {
  Setup setup(static_cast<std::size_t>(state.range(0)), 32);
  const client::StepTensors tensors = setup.tensors();
  const std::vector<std::uint32_t> none(setup.batch.size(), 0);
  for (auto _ : state) {
    absl::StatusOr<client::Step> step = setup.worker->BeginStep(setup.batch);
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      if (!step->AppendAndAttend(layer, tensors).ok()) std::abort();
    }
    if (!step->End(none).ok()) std::abort();
  }
}
BENCHMARK(BM_Step)->Arg(1)->Arg(16);

// Only the attention of a step, over the same number of lanes.
void BM_BareAttention(benchmark::State& state) {
  const auto sequences = static_cast<std::uint32_t>(state.range(0));
  const std::uint32_t lanes = kLayers * sequences * kKvHeads;
  const kernels::DenseTile tile = {kHeadDim, kernels::ElementType::kBf16};
  std::vector<std::uint16_t> prompt(lanes * tile.bytes() / 2, 0x3f80), ring(prompt);
  std::vector<std::uint64_t> offsets(lanes);
  std::vector<kernels::SegmentView> segments(lanes);
  std::vector<kernels::LaneView> views(lanes);
  for (std::uint32_t i = 0; i < lanes; ++i) {
    offsets[i] = i * tile.bytes();
    segments[i] = {.arena = reinterpret_cast<const std::byte*>(prompt.data()),
                   .arena_bytes = lanes * tile.bytes(),
                   .tile_offsets = &offsets[i],
                   .entries = 32};
    views[i] = {.segments = &segments[i],
                .segment_count = 1,
                .tail = {reinterpret_cast<const std::byte*>(ring.data()) + offsets[i], 1, 32, 33}};
  }
  std::vector<std::uint16_t> query(sequences * kQueryHeads * kHeadDim, 0x3c00);
  std::vector<float> output(query.size());
  std::vector<kernels::AttendItem> items(sequences * kKvHeads);
  kernels::AttendBatch batch = {.geometry = {.query_heads = kQueryHeads,
                                             .kv_heads = kKvHeads,
                                             .head_dim = kHeadDim,
                                             .scale = 0.125f},
                                .items = items};
  const auto attend = [&](std::uint32_t layer, std::span<std::byte> workspace) {
    for (std::uint32_t i = 0; i < items.size(); ++i) {
      const std::uint32_t row = i / kKvHeads * kQueryHeads * kHeadDim;
      items[i] = {.lane = &views[layer * items.size() + i],
                  .kv_head = i % kKvHeads,
                  .queries = 1,
                  .first_query_position = 32,
                  .query = query.data() + row,
                  .output = output.data() + row};
    }
    batch.items = items;
    kernels::InlineExecutor executor;
    return kernels::Attend(kernels::BestImplementation(), batch, workspace, executor);
  };
  std::unique_ptr<std::byte, void (*)(void*)> workspace(
      static_cast<std::byte*>(std::aligned_alloc(64, 16 << 20)), std::free);
  for (auto _ : state) {
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      benchmark::DoNotOptimize(attend(layer, {workspace.get(), 16 << 20}));
    }
  }
}
BENCHMARK(BM_BareAttention)->Arg(1)->Arg(16);

// Begin and end of a step that appends one token, without attention.
void BM_BeginAppendEnd(benchmark::State& state) {
  Setup setup(static_cast<std::size_t>(state.range(0)), 32);
  const client::StepTensors tensors = setup.tensors();
  for (auto _ : state) {
    absl::StatusOr<client::Step> step = setup.worker->BeginStep(setup.batch);
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      if (!step->Append(layer, tensors.key, tensors.value).ok()) std::abort();
    }
    const std::vector<std::uint32_t> none(setup.batch.size(), 0);
    if (!step->End(none).ok()) std::abort();
  }
}
BENCHMARK(BM_BeginAppendEnd)->Arg(1)->Arg(16);

}  // namespace
}  // namespace tessera

BENCHMARK_MAIN();
