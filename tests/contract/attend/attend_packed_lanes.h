// Lanes for tests whose segments are packed, or dense with summaries, weights and positions: each
// segment with a shape and rotations of its own, and a tail. Everything that is not a live row is
// poisoned, and nothing behind the arena can be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/format/lane_view.h"
#include "tests/contract/attend/attend_lanes.h"
#include "tests/contract/pack/pack_data.h"

namespace tessera::kernels {

// Entries as the model computed them, before any strategy.
struct SourceRows {
  SourceRows(std::uint32_t head_dim, ElementType type, std::uint32_t count, Values values,
             TestRandom& random);

  std::vector<float> Row(bool value, std::uint32_t entry) const;

  std::uint32_t head_dim;
  ElementType type;
  Buffer keys;
  Buffer values;
  std::vector<float> weights;       // of each, where its segment has weights
  std::vector<std::uint32_t> gaps;  // to the entry before, where its segment has positions
};

// A shape with rotations, shared by the segments that use it.
struct Strategy {
  Strategy(const TileShape& shape, bool rotated, ElementType rotation_type, TestRandom& random);
  // Keys keep these channels, as many as the shape has.
  Strategy(const TileShape& shape, ElementType rotation_type,
           const std::vector<std::uint32_t>& channels);
  const RotationView& view() const { return rotation_; }

  TileShape shape;

 private:
  std::unique_ptr<Rotations> rotations_;  // null: dense, or the identity
  RotationView rotation_;                 // of these, maybe of one side alone
};

struct SegmentPlan {
  const Strategy* strategy;
  std::uint32_t entries;
};

// Memory whose end is the end of what can be read.
class GuardedArena {
 public:
  explicit GuardedArena(std::size_t bytes);  // a multiple of 64; so is the address
  ~GuardedArena();
  GuardedArena(const GuardedArena&) = delete;
  GuardedArena& operator=(const GuardedArena&) = delete;
  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  std::size_t size_;
  std::size_t mapped_;
  std::byte* base_;
  std::byte* data_;
};

// Entries [first, ...) of the rows: the segments', then the tail's.
class PackedLane {
 public:
  PackedLane(const SourceRows& rows, std::uint32_t first, const std::vector<SegmentPlan>& segments,
             std::uint32_t tail, std::uint64_t first_position, TestRandom& random);

  const LaneView& view() const { return view_; }
  std::uint64_t end_position() const { return view_.tail.end; }
  SegmentView& segment(std::size_t s) { return segments_[s]; }
  std::vector<std::uint64_t>& offsets(std::size_t s) { return offsets_[s]; }
  // Empty: they stand right behind their tiles.
  std::vector<std::uint64_t>& summary_offsets(std::size_t s) { return summary_offsets_[s]; }
  std::byte* arena() { return arena_->data(); }
  std::size_t arena_bytes() const { return arena_->size(); }

 private:
  void PlaceTiles(const std::vector<SegmentPlan>& segments, TestRandom& random);
  void FillSegment(const SourceRows& rows, std::uint32_t first, const SegmentPlan& plan,
                   std::size_t index, std::uint64_t& position);
  void FillTail(const SourceRows& rows, std::uint32_t first, std::uint32_t tail,
                std::uint64_t position);

  std::unique_ptr<GuardedArena> arena_;
  std::unique_ptr<Buffer> ring_;
  std::vector<std::vector<std::uint64_t>> offsets_;
  std::vector<std::vector<std::uint64_t>> summary_offsets_;
  std::vector<SegmentView> segments_;
  LaneView view_;
};

}  // namespace tessera::kernels
