// A node for tests of packing, with kernels that run on every machine.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/cache/packed.h"

namespace tessera::cache {

class PackFixture : public testing::Test {
 protected:
  using Stamps = std::vector<std::uint64_t>;

  void TearDown() override {
    world_.tenant().EndSession(worker_->session().id());
    worker_.reset();
    world_.ExpectBaseline();
  }
  std::string Shown(const Sequence& sequence, const Stamps& stamps) {
    const absl::StatusOr<SequenceView> view = ReadSequence(world_.tenant(), sequence);
    if (!view.ok()) return view.status().ToString();
    return PackedDiffers(*view, sequence.model(),
                         std::vector<Stamps>(sequence.model().layers(), stamps));
  }
  SequenceView View(const Sequence& sequence) {
    absl::StatusOr<SequenceView> view = ReadSequence(world_.tenant(), sequence);
    EXPECT_TRUE(view.ok()) << view.status();
    return *std::move(view);
  }
  std::uint64_t Used(pool::MemoryTag tag) { return world_.tenant().account().used_bytes(tag); }
  void Collect() { world_.tenant().epochs().Collect(); }
  Stamps Fill(Sequence& sequence, std::uint64_t tokens) {
    Stamps stamps = NewStamps(tokens);
    EXPECT_TRUE(AppendAll(sequence, 0, stamps).ok());
    return stamps;
  }
  void AppendMore(Sequence& sequence, Stamps& stamps, std::uint64_t tokens) {
    const Stamps more = NewStamps(tokens);
    ASSERT_TRUE(AppendAll(sequence, stamps.size(), more).ok());
    stamps.insert(stamps.end(), more.begin(), more.end());
  }
  kernels::TileShape Quarter(std::uint32_t head_dim = 64) {
    kernels::TileShape shape = kernels::DenseShape(head_dim, kernels::ElementType::kBf16);
    shape.format = kernels::TileFormat::kPackedBf16;
    shape.key.kept = shape.value.kept = shape.head_dim / 4;
    return shape;
  }
  PackSpec All(const Model& model, const kernels::TileShape& shape) {
    return {.shapes = std::vector<kernels::TileShape>(model.layers(), shape)};
  }

  TestRandom random_;
  device::CpuDevice device_{ReferenceKernels()};
  World world_{World::Options{.ring_tiles = 4, .device = &device_}};
  std::optional<TestWorker> worker_{std::in_place, world_.tenant(), world_.OpenSession()};
  std::shared_ptr<const Model> small_ = world_.Register(SmallModel("small", 2, 2));
};

}  // namespace tessera::cache
