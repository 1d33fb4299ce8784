#include "tests/contract/attend/attend_lanes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

namespace tessera::kernels {
namespace {

constexpr std::align_val_t kPage{4096};

std::uint32_t TilesFor(std::uint32_t entries) {
  return (entries + kTileEntries - 1) / kTileEntries;
}

std::uint32_t SegmentTiles(const LaneShape& shape) {
  std::uint32_t tiles = 0;
  for (std::uint32_t entries : shape.segments) tiles += TilesFor(entries);
  return tiles;
}

std::uint64_t SegmentEntries(const LaneShape& shape) {
  return std::accumulate(shape.segments.begin(), shape.segments.end(), std::uint64_t{0});
}

// The smallest ring for the tail: once it has wrapped, the oldest and newest tokens may share a
// tile.
LaneShape WithRing(LaneShape shape) {
  if (shape.ring_tiles == 0) shape.ring_tiles = TilesFor(shape.tail);
  return shape;
}

float KeyNumber(Values values, TestRandom& random) {
  switch (values) {
    case Values::kNormal:
      return NormalNumber(random);
    case Values::kLarge:
      return NormalNumber(random) * 0x1p12f;
    case Values::kHuge:
      return NormalNumber(random) * 0x1p50f;
    case Values::kEqual:
      return 0.75f;
    case Values::kZeros:
      return random.OneIn(2) ? 0.0f : -0.0f;
  }
  return 0;
}

}  // namespace

void Buffer::Free::operator()(std::byte* bytes) const { ::operator delete[](bytes, kPage); }

Buffer::Buffer(std::size_t size)
    : size_(size), bytes_(static_cast<std::byte*>(::operator new[](size, kPage))) {
  std::memset(bytes_.get(), 0xff, size);
}

float NormalNumber(TestRandom& random) {
  const double u = (static_cast<double>(random.Bits() >> 11) + 1) * 0x1p-53;
  const double v = static_cast<double>(random.Bits() >> 11) * 0x1p-53;
  return static_cast<float>(std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v));
}

void StoreElement(ElementType type, std::byte* row, std::size_t index, float value) {
  if (type == ElementType::kFp32) {
    std::memcpy(row + index * 4, &value, 4);
    return;
  }
  const float finite = type == ElementType::kFp16 ? std::clamp(value, -65504.0f, 65504.0f) : value;
  const std::uint16_t bits = type == ElementType::kBf16 ? FloatToBf16(finite) : FloatToFp16(finite);
  std::memcpy(row + index * 2, &bits, 2);
}

TestLane::TestLane(const LaneShape& shape, TestRandom& random)
    : shape_(WithRing(shape)),
      tile_{shape.head_dim, shape.type},
      arena_((SegmentTiles(shape) + SegmentTiles(shape) / 4 + 1) * tile_.bytes()),
      ring_(shape_.ring_tiles * tile_.bytes()) {
  // Puts tiles at random places of the arena and leaves some places unused.
  std::vector<std::uint64_t> places(arena_.size() / tile_.bytes());
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = i * tile_.bytes();
  for (std::size_t i = places.size(); i > 1; --i) std::swap(places[i - 1], places[random.Below(i)]);

  std::uint64_t position = shape.first_position;
  std::size_t next_place = 0;
  offsets_.resize(shape.segments.size());
  for (std::size_t s = 0; s < shape.segments.size(); ++s) {
    for (std::uint32_t t = 0; t < TilesFor(shape.segments[s]); ++t) {
      offsets_[s].push_back(places[next_place++]);
    }
    segments_.push_back({.arena = arena_.data(),
                         .arena_bytes = arena_.size(),
                         .tile_offsets = offsets_[s].data(),
                         .first_position = position,
                         .entries = shape.segments[s],
                         .shape = DenseShape(shape.head_dim, shape.type)});
    position += shape.segments[s];
  }
  view_ = {.segments = segments_.data(),
           .segment_count = static_cast<std::uint32_t>(segments_.size()),
           .tail = {.ring = ring_.data(),
                    .ring_tiles = shape_.ring_tiles,
                    .begin = position,
                    .end = position + shape.tail}};
  for (std::uint64_t e = 0; e < entries(); ++e) {
    for (std::uint32_t c = 0; c < shape.head_dim; ++c) {
      StoreElement(shape.type, Key(e), c, KeyNumber(shape.values, random));
      StoreElement(shape.type, Value(e), c, NormalNumber(random));
    }
  }
}

std::uint64_t TestLane::entries() const { return SegmentEntries(shape_) + shape_.tail; }

std::uint64_t TestLane::end_position() const { return shape_.first_position + entries(); }

std::byte* TestLane::TileOf(std::uint64_t e, std::uint32_t& row) {
  for (std::size_t s = 0; s < segments_.size(); ++s) {
    if (e < segments_[s].entries) {
      row = e % kTileEntries;
      return arena_.data() + offsets_[s][e / kTileEntries];
    }
    e -= segments_[s].entries;
  }
  const std::uint64_t token = view_.tail.begin + e;
  row = token % kTileEntries;
  return ring_.data() + token / kTileEntries % shape_.ring_tiles * tile_.bytes();
}

std::byte* TestLane::Key(std::uint64_t e) {
  std::uint32_t row;
  std::byte* base = TileOf(e, row);
  return base + tile_.key_offset(row);
}

std::byte* TestLane::Value(std::uint64_t e) {
  std::uint32_t row;
  std::byte* base = TileOf(e, row);
  return base + tile_.value_offset(row);
}

namespace {

void CopyEntries(TestLane& from, std::uint64_t begin, TestLane& to) {
  const std::size_t row_bytes = DenseTile{to.shape().head_dim, to.shape().type}.row_bytes();
  for (std::uint64_t e = 0; e < to.entries(); ++e) {
    std::memcpy(to.Key(e), from.Key(begin + e), row_bytes);
    std::memcpy(to.Value(e), from.Value(begin + e), row_bytes);
  }
}

}  // namespace

std::unique_ptr<TestLane> Recut(TestLane& lane, std::vector<std::uint32_t> segments,
                                std::uint32_t tail, TestRandom& random) {
  LaneShape shape = lane.shape();
  shape.segments = std::move(segments);
  shape.tail = tail;
  shape.ring_tiles = 0;
  auto copy = std::make_unique<TestLane>(shape, random);
  CopyEntries(lane, 0, *copy);
  return copy;
}

std::unique_ptr<TestLane> Slice(TestLane& lane, std::uint64_t begin, std::uint64_t end,
                                TestRandom& random) {
  LaneShape shape = lane.shape();
  const auto entries = static_cast<std::uint32_t>(end - begin);
  const auto tail = static_cast<std::uint32_t>(random.Between(0, entries));
  shape.segments = {entries - tail};
  shape.tail = tail;
  shape.ring_tiles = 0;
  shape.first_position = lane.shape().first_position + begin;
  auto slice = std::make_unique<TestLane>(shape, random);
  CopyEntries(lane, begin, *slice);
  return slice;
}

}  // namespace tessera::kernels
