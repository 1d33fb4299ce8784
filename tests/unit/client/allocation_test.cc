// Decoding allocates nothing in its steady state. A separate program, because it replaces the
// global operator new to count allocations.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "tests/unit/client/decoder.h"

namespace {

std::atomic<std::uint64_t> allocations{0};

void* Count(std::size_t bytes, std::size_t alignment) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  void* memory = alignment == 0 ? std::malloc(bytes)
                                : std::aligned_alloc(
                                      alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) std::abort();
  return memory;
}

}  // namespace

// Not inline: GCC warns if it sees only one half of a new/delete pair.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return Count(bytes, 0); }
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return Count(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace tessera::client {
namespace {

TEST(SteadyDecode, AllocatesNothingAndStaysPinnedOnlyWhileItRuns) {
  TestRandom random;
  ModelGeometry geometry;
  geometry.name = "small";
  geometry.layers.assign(4, {.query_heads = 8, .kv_heads = 2, .head_dim = 64});
  Decoder decoder(random, geometry, {.ring_tiles = 8});
  std::vector<Track> tracks;
  std::vector<Sequence*> batch;
  for (int i = 0; i < 4; ++i) tracks.push_back(decoder.NewTrack());
  for (Track& track : tracks) {
    decoder.Prefill(track, 100);
    batch.push_back(&track.sequence);
  }
  LayerRows rows(random, tracks[0].history.model(), 0, 4);
  const auto step_once = [&] {
    absl::StatusOr<Step> step = decoder.worker->BeginStep(batch);
    if (!step.ok()) return step.status();
    for (std::uint32_t layer = 0; layer < 4; ++layer) {
      absl::Status status = step->AppendAndAttend(layer, rows.tensors());
      if (!status.ok()) return status;
    }
    return step->End();
  };
  for (int i = 0; i < 40; ++i) TESSERA_ASSERT_OK(step_once());
  decoder.daemon->Absorb();
  TESSERA_ASSERT_OK(step_once());
  const std::uint64_t before = allocations.load();
  ASSERT_GT(before, 0u);
  for (int i = 0; i < 60; ++i) TESSERA_ASSERT_OK(step_once());
  EXPECT_EQ(allocations.load() - before, 0u);
  EXPECT_EQ(decoder.daemon->pins(), 0u);
}

}  // namespace
}  // namespace tessera::client
