// Block selection on the emulated GPU, with access to all results in scratch memory.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/cuda/host/host_batch.h"
#include "kernels/reference/packed.h"
#include "tests/fakes/gpu/emulated_kernels.h"
#include "tests/unit/kernels/cuda/packed_problem.h"

namespace tessera::tests {

// Computes the summaries of a segment's rows, which were 0xff.
inline void SumUp(MixedLane& lane, std::size_t index) {
  const kernels::SegmentView& view = lane.segment_view(index);
  const kernels::TileLayout& layout = lane.segment(index).layout();
  for (std::uint32_t t = 0; t < (view.entries + 31) / 32; ++t) {
    std::byte* tile = lane.segment(index).tile(t);
    std::vector<kernels::GatherRow> rows;
    for (std::uint32_t r = 0; r < std::min(32u, view.entries - t * 32); ++r) {
      rows.push_back({.tile = tile, .row = r, .position = 0});
    }
    AlignedBytes summed(layout.bytes);
    kernels::GatherReference({.rows = rows.data(),
                              .row_count = static_cast<std::uint32_t>(rows.size()),
                              .from = view.shape,
                              .from_layout = layout,
                              .to = view.shape,
                              .to_layout = layout,
                              .tile = summed.data(),
                              .summaries = lane.segment(index).summaries(t)});
  }
}

// A shape with summaries: any format, group size, block size, weights and positions.
inline SegmentShape SummedShape(const kernels::LayerGeometry& geometry, std::uint32_t entries,
                                TestRandom& random) {
  constexpr kernels::ValueType kValues[] = {kernels::ValueType::kBf16, kernels::ValueType::kFp16,
                                            kernels::ValueType::kInt8, kernels::ValueType::kFp8};
  SegmentShape shape = {.tile = kernels::DenseShape(geometry.head_dim, geometry.type),
                        .entries = entries};
  if (!random.OneIn(3)) {
    const std::uint32_t group = 1u << random.Below(3);
    const auto groups = static_cast<std::uint32_t>(
        random.OneIn(2) ? geometry.head_dim / group : random.Between(3, geometry.head_dim / group));
    const auto kept = static_cast<std::uint32_t>(random.Between(1, groups));
    shape = Packed(random.Pick(kValues), geometry.head_dim, group, groups * group, kept * group,
                   entries);
    shape.rotated = groups * group != geometry.head_dim || !random.OneIn(4);
    if (random.OneIn(2)) PartSides(shape, random);
  }
  shape.tile.weights = random.OneIn(2);
  shape.tile.positions = random.OneIn(3);
  shape.tile.summary = random.OneIn(2) ? kernels::Summary::kMean : kernels::Summary::kMinMax;
  shape.tile.block = static_cast<std::uint8_t>(4u << random.Below(3));
  return shape;
}

inline kernels::cuda::StepRule AnyStepRule(TestRandom& random) {
  constexpr double kRates[] = {0, 0.01, 0.0625, 0.25, 0.5, 0.99, 1, 7};
  kernels::cuda::StepRule rule = {.rate = random.Pick(kRates), .selects = 1};
  if (random.OneIn(4)) rule.entries = 1 + random.Below(300);
  if (random.OneIn(4)) rule.floor = static_cast<std::uint32_t>(random.Below(300));
  rule.by_share = random.OneIn(2) ? 1 : 0;
  rule.first_block = random.OneIn(2) ? 1 : 0;
  rule.counts_tail = random.OneIn(2) ? 1 : 0;
  return rule;
}

// Items in the emulated GPU's memory, as LaunchAttend and LaunchSelect take them.
class SelectionCall {
 public:
  SelectionCall(const kernels::LayerGeometry& geometry, bool causal,
                std::span<const kernels::cuda::HostItem> items)
      : geometry_(geometry),
        image_({.geometry = geometry,
                .causal = causal,
                .output_type = kernels::ElementType::kFp32,
                .items = items},
               std::uint64_t{1} << 20),
        causal_(causal),
        pool_(image_.pool().size()),
        tails_(image_.tails().size()),
        queries_(image_.queries().size()),
        output_(image_.output_bytes()) {
    Load(pool_, image_.pool());
    Load(tails_, image_.tails());
    Load(queries_, image_.queries());
    EXPECT_EQ(image_.WriteStep(Address(pool_), Address(tails_)), kernels::cuda::StepStatus::kOk);
    step_ = std::make_unique<AlignedBytes>(image_.step().size());
    Load(*step_, image_.step());
    limits = image_.limits();
    scratch_ = std::make_unique<AlignedBytes>(
        kernels::cuda::AttendScratchBytes(geometry, image_.limits()));
  }

  // `limits` may be lowered for a launch, but not raised.
  kernels::cuda::AttendCall Call() {
    return {.geometry = geometry_,
            .causal = causal_,
            .limits = limits,
            .step = step_->data(),
            .query = queries_.data(),
            .output = output_.data(),
            .scratch = scratch_->data(),
            .scratch_bytes = scratch_->size(),
            .fault = &fault_};
  }
  std::uint64_t Select(std::uint64_t seed) {
    fault_ = kernels::cuda::kNoFault;
    EmulateSelect(Call(), {.blocks_x = static_cast<std::uint32_t>(seed % 5 + 1), .seed = seed});
    return fault_;
  }
  std::uint64_t Attend(std::uint64_t seed) {
    fault_ = kernels::cuda::kNoFault;
    EmulateAttend(Call(), {.blocks_x = static_cast<std::uint32_t>(seed % 5 + 1), .seed = seed});
    return fault_;
  }
  kernels::cuda::AttendParams params() { return kernels::cuda::MakeAttendParams(Call()); }
  kernels::cuda::StepReader step() const { return kernels::cuda::StepReader(step_->data()); }
  std::byte* step_bytes() { return step_->data(); }
  std::uint64_t fault() const { return fault_; }
  std::uint32_t LaneOfItem(std::uint32_t item) const { return image_.LaneOfItem(item); }

  // The selected blocks of a lane's choices, from the lists in memory.
  std::vector<std::vector<std::uint32_t>> Taken(std::uint32_t selection_index) {
    const kernels::cuda::StepSelection& selection = step().selection(0, selection_index);
    const kernels::cuda::AttendParams all = params();
    const kernels::cuda::SelectedRange* ranges =
        all.ranges + kernels::cuda::FirstRangeOf(selection, selection_index);
    std::vector<std::vector<std::uint32_t>> taken;
    for (std::uint32_t c = 0; c < selection.choices; ++c) {
      const std::uint32_t* list = all.taken + selection.first_block;
      taken.emplace_back(list + ranges[c].first_taken, list + ranges[c + 1].first_taken);
    }
    return taken;
  }

  kernels::cuda::StepLimits limits;

 private:
  static void Load(AlignedBytes& to, std::span<const std::byte> from) {
    std::copy(from.begin(), from.end(), to.data());
  }
  static std::uint64_t Address(AlignedBytes& bytes) {
    return reinterpret_cast<std::uint64_t>(bytes.data());
  }

  kernels::LayerGeometry geometry_;
  kernels::cuda::HostBatchImage image_;
  bool causal_;
  AlignedBytes pool_, tails_, queries_, output_;
  std::unique_ptr<AlignedBytes> step_, scratch_;
  std::uint64_t fault_ = kernels::cuda::kNoFault;
};

}  // namespace tessera::tests
