// Lanes with packed segments, or dense ones with summaries, weights and positions. Each segment has
// its own shape and rotations; a tail follows. All bytes but live rows are poisoned, and the memory
// after the arena is not readable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/format/lane_view.h"
#include "tests/contract/attend/attend_lanes.h"
#include "tests/contract/pack/pack_data.h"

namespace tessera::kernels {

// Entries as the model computed them, before encoding.
struct SourceRows {
  SourceRows(std::uint32_t head_dim, ElementType type, std::uint32_t count, Values values,
             TestRandom& random);

  std::vector<float> Row(bool value, std::uint32_t entry) const;

  std::uint32_t head_dim;
  ElementType type;
  Buffer keys;
  Buffer values;
  std::vector<float> weights;       // per entry, if the segment has weights
  std::vector<std::uint32_t> gaps;  // to the previous entry, if the segment has positions
};

// A shape and its rotations, shared by segments. Planes, and dense tiles with signs, have a book.
struct Strategy {
  Strategy(const TileShape& shape, bool rotated, ElementType rotation_type, TestRandom& random);
  // Keys keep exactly these channels, as many as the shape has.
  Strategy(const TileShape& shape, ElementType rotation_type,
           const std::vector<std::uint32_t>& channels);
  const RotationView& view() const { return rotation_; }

  TileShape shape;

 private:
  std::unique_ptr<Buffer> means_;         // of a book
  std::unique_ptr<Rotations> rotations_;  // null: dense or unrotated
  RotationView rotation_;                 // a view of rotations_, possibly of one side only
};

struct SegmentPlan {
  const Strategy* strategy;
  std::uint32_t entries;
};

// Memory followed by an unreadable page.
class GuardedArena {
 public:
  explicit GuardedArena(std::size_t bytes);  // `bytes` is a multiple of 64; the address is too
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

// Holds the rows from `first` on: first in the segments, then in the tail.
class PackedLane {
 public:
  PackedLane(const SourceRows& rows, std::uint32_t first, const std::vector<SegmentPlan>& segments,
             std::uint32_t tail, std::uint64_t first_position, TestRandom& random);

  const LaneView& view() const { return view_; }
  std::uint64_t end_position() const { return view_.tail.end; }
  SegmentView& segment(std::size_t s) { return segments_[s]; }
  std::vector<std::uint64_t>& offsets(std::size_t s) { return offsets_[s]; }
  // Empty if the summaries directly follow their tiles.
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
