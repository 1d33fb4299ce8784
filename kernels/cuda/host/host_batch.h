// Packs a batch of attention over host lanes into what a device needs: a pool with tiles and
// tables, tail rings, query rows and a step image. For conformance tests and tools, whose lanes are
// in host memory; in production, lanes are already on the device.
//
// The pool layout is deliberately awkward: its first extent is missing, and extents are in memory
// in descending order. So only the table of extent bases leads to the data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/cuda/common/params.h"
#include "kernels/cuda/host/step_writer.h"
#include "kernels/cuda/select/selection_reader.h"
#include "kernels/format/lane_view.h"
#include "kernels/format/layer_geometry.h"

namespace tessera::kernels::cuda {

// One (sequence, kv head). The pointers refer to the rows of all heads.
struct HostItem {
  const LaneView* lane = nullptr;
  std::uint32_t kv_head = 0;
  std::uint32_t queries = 1;
  std::uint64_t first_query_position = 0;
  const void* query = nullptr;  // [queries][query_heads][head_dim], geometry.type
  void* output = nullptr;       // same shape, output_type
  float* lse = nullptr;         // [queries][query_heads]; may be null
  StepRule rule = {};
};

struct HostBatch {
  LayerGeometry geometry;  // `sinks` is a host address
  bool causal = true;
  ElementType output_type = ElementType::kFp32;
  std::span<const HostItem> items;
};

class HostBatchImage {
 public:
  HostBatchImage(const HostBatch& batch, std::uint64_t extent_bytes);

  // Bytes to copy to the device, each to an address that is a multiple of 256.
  std::span<const std::byte> pool() const { return pool_; }
  std::span<const std::byte> tails() const { return tails_; }
  std::span<const std::byte> queries() const { return queries_; }
  std::span<const std::byte> step() const { return step_; }

  // Bytes of the results, and of one query row of all heads.
  std::uint64_t output_bytes() const { return rows_ * output_row_bytes_; }
  std::uint64_t lse_bytes() const { return rows_ * batch_.geometry.query_heads * sizeof(float); }

  // Writes the step image for these device addresses.
  StepStatus WriteStep(std::uint64_t pool_address, std::uint64_t tails_address);
  const StepLimits& limits() const { return limits_; }

  // True if some item must not reach a device: tiles of an unsupported shape or of another type
  // than the layer's, or a tail without a ring. That item and all later ones are packed as empty
  // lanes.
  bool HasBadItem() const { return bad_item_ < batch_.items.size(); }
  std::uint32_t bad_item() const { return bad_item_; }
  std::uint32_t ItemOfLane(std::uint32_t lane) const { return lane / batch_.geometry.kv_heads; }

  // Wraps a selection's results in a SelectionReader.
  SelectionReader Selection(std::span<const std::uint32_t> taken,
                            std::span<const SelectedRange> ranges) const {
    return {step_.data(), 0, taken, ranges};
  }
  std::uint32_t LaneOfItem(std::uint32_t item) const {
    return item * batch_.geometry.kv_heads + batch_.items[item].kv_head;
  }

  // Copies each item's heads out of results in device layout.
  void Scatter(std::span<const std::byte> output, std::span<const float> lse) const;

 private:
  struct PackedLane {
    std::vector<SegmentSpec> segments;
    std::uint64_t tail_offset = 0;  // offset in tails()
    bool has_tail = false;
  };
  std::uint64_t Allocate(std::uint64_t bytes);
  std::byte* PoolAt(std::uint64_t offset);
  SegmentSpec PackSegment(const SegmentView& segment);
  // Packs a tile, or a tile's summaries, whose offset becomes a word of a table.
  void PackObject(const SegmentView& segment, std::uint64_t host_offset, std::uint32_t bytes,
                  std::uint64_t alignment, std::uint64_t table_word);
  std::uint64_t PackRotation(const SegmentView& segment, const RowShape& side,
                             const std::byte* matrix);
  std::uint64_t PackMean(const SegmentView& segment, const std::byte* mean);
  PackedLane PackLane(const LaneView& lane);
  void MeasurePool();

  const HostBatch batch_;
  const std::uint64_t extent_bytes_;
  const DenseTile tile_;
  const std::uint64_t output_row_bytes_;
  std::uint64_t rows_ = 0;
  std::uint64_t next_ = 0;  // pool offset of the next object
  std::uint32_t extents_ = 1;
  std::uint32_t bad_item_ = 0;
  std::vector<std::byte> pool_;
  std::vector<std::byte> tails_;
  std::vector<std::byte> queries_;
  std::vector<std::byte> step_storage_;
  std::span<std::byte> step_;
  std::vector<PackedLane> lanes_;  // one per item
  StepLimits limits_;
};

}  // namespace tessera::kernels::cuda
