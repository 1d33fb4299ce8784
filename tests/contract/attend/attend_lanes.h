// Lanes for tests: tiles scattered over an arena, a tail ring that has wrapped, and NaN in every
// byte that is not a live row, so that reading too far changes the result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/format/lane_view.h"
#include "tests/fakes/seed.h"

namespace tessera::kernels {

// Exactly `size` bytes, page-aligned and filled with ones, which is NaN in every element type.
// AddressSanitizer's red zone begins directly after them.
class Buffer {
 public:
  explicit Buffer(std::size_t size);

  std::byte* data() const { return bytes_.get(); }
  std::size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(std::byte* bytes) const;
  };
  std::size_t size_;
  std::unique_ptr<std::byte[], Free> bytes_;
};

// Kinds of numbers in rows.
enum class Values {
  kNormal,  // standard normal
  kLarge,   // keys times 2^12: logits in the millions
  kHuge,    // keys times 2^50 where the type allows it: far beyond softmax's range
  kEqual,   // all keys equal
  kZeros,   // keys are zeros of both signs, values are normal
};

struct LaneShape {
  std::uint32_t head_dim = 128;
  ElementType type = ElementType::kBf16;
  std::vector<std::uint32_t> segments;  // entries per segment
  std::uint32_t tail = 0;               // live tokens in the ring
  std::uint32_t ring_tiles = 0;         // 0: the minimum
  std::uint64_t first_position = 0;
  Values values = Values::kNormal;
};

void StoreElement(ElementType type, std::byte* row, std::size_t index, float value);

class TestLane {
 public:
  TestLane(const LaneShape& shape, TestRandom& random);

  const LaneView& view() const { return view_; }
  const LaneShape& shape() const { return shape_; }
  std::uint64_t entries() const;       // in segments and tail
  std::uint64_t end_position() const;  // one past the newest entry

  // The rows of entry `e`, counted over segments, then the tail.
  std::byte* Key(std::uint64_t e);
  std::byte* Value(std::uint64_t e);

  std::vector<std::uint64_t>& offsets(std::size_t segment) { return offsets_[segment]; }
  SegmentView& segment(std::size_t segment) { return segments_[segment]; }
  LaneView& mutable_view() { return view_; }

 private:
  std::byte* TileOf(std::uint64_t e, std::uint32_t& row);

  LaneShape shape_;
  DenseTile tile_;
  Buffer arena_;
  Buffer ring_;
  std::vector<std::vector<std::uint64_t>> offsets_;
  std::vector<SegmentView> segments_;
  LaneView view_;
};

// A lane with the same entries in the same order, in other segments and another tail.
std::unique_ptr<TestLane> Recut(TestLane& lane, std::vector<std::uint32_t> segments,
                                std::uint32_t tail, TestRandom& random);

// A lane of entries [begin, end) of another lane, at their original positions.
std::unique_ptr<TestLane> Slice(TestLane& lane, std::uint64_t begin, std::uint64_t end,
                                TestRandom& random);

float NormalNumber(TestRandom& random);

}  // namespace tessera::kernels
