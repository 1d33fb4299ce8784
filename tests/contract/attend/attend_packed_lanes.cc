#include "tests/contract/attend/attend_packed_lanes.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "gtest/gtest.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::kernels {
namespace {

constexpr std::size_t kTileAlignment = 64;

std::size_t AlignUp(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

std::uint32_t TilesFor(std::uint32_t entries) {
  return (entries + kTileEntries - 1) / kTileEntries;
}

float KeyFactor(Values values) {
  return values == Values::kLarge ? 0x1p12f : values == Values::kHuge ? 0x1p50f : 1.0f;
}

}  // namespace

SourceRows::SourceRows(std::uint32_t dim, ElementType element, std::uint32_t count, Values kind,
                       TestRandom& random)
    : head_dim(dim),
      type(element),
      keys(std::size_t{count} * dim * ElementBytes(element)),
      values(std::size_t{count} * dim * ElementBytes(element)) {
  for (std::uint32_t e = 0; e < count; ++e) {
    for (std::uint32_t c = 0; c < dim; ++c) {
      const std::size_t at = std::size_t{e} * dim + c;
      float key = NormalNumber(random) * KeyFactor(kind);
      if (kind == Values::kEqual) key = 0.75f;
      if (kind == Values::kZeros) key = random.OneIn(2) ? 0.0f : -0.0f;
      StoreElement(type, keys.data(), at, key);
      StoreElement(type, values.data(), at, NormalNumber(random));
    }
    weights.push_back(static_cast<float>(random.Between(1, random.OneIn(3) ? 500 : 3)));
    gaps.push_back(static_cast<std::uint32_t>(random.OneIn(3) ? random.Between(1, 40) : 1));
  }
}

std::vector<float> SourceRows::Row(bool value, std::uint32_t entry) const {
  std::vector<float> row(head_dim);
  const std::byte* data = (value ? values : keys).data();
  for (std::uint32_t c = 0; c < head_dim; ++c) {
    const std::size_t at = std::size_t{entry} * head_dim + c;
    std::uint32_t bits = 0;
    std::memcpy(&bits, data + at * ElementBytes(type), ElementBytes(type));
    row[c] = type == ElementType::kFp32   ? std::bit_cast<float>(bits)
             : type == ElementType::kBf16 ? Bf16ToFloat(static_cast<std::uint16_t>(bits))
                                          : Fp16ToFloat(static_cast<std::uint16_t>(bits));
  }
  return row;
}

Strategy::Strategy(const TileShape& tile_shape, bool rotated, ElementType rotation_type,
                   TestRandom& random)
    : shape(tile_shape) {
  if (shape.planes() || shape.summary == Summary::kSigns) {
    rotations_ = std::make_unique<Rotations>(shape, ElementType::kBf16, random);
    means_ = std::make_unique<Buffer>(4 * std::size_t{shape.head_dim});
    for (std::uint32_t i = 0; i < 2 * shape.head_dim; ++i) {
      StoreElement(ElementType::kBf16, means_->data(), i, NormalNumber(random));
    }
    rotation_ = rotations_->view();
    rotation_.key_mean = means_->data();
    rotation_.value_mean = means_->data() + 2 * std::size_t{shape.head_dim};
    return;
  }
  if (!rotated) return;
  rotations_ = std::make_unique<Rotations>(shape, rotation_type, random);
  rotation_ = SomeOf(rotations_->view(), shape, random);
}

Strategy::Strategy(const TileShape& tile_shape, ElementType rotation_type,
                   const std::vector<std::uint32_t>& channels)
    : shape(tile_shape),
      rotations_(std::make_unique<Rotations>(shape, rotation_type, channels)),
      rotation_(rotations_->view()) {}

GuardedArena::GuardedArena(std::size_t bytes) : size_(bytes) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  mapped_ = AlignUp(bytes, page) + page;
  void* base = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED ||
      mprotect(static_cast<std::byte*>(base) + mapped_ - page, page, PROT_NONE) != 0) {
    std::perror("mapping a test arena");
    std::abort();
  }
  base_ = static_cast<std::byte*>(base);
  data_ = base_ + mapped_ - page - bytes;
  std::memset(data_, 0xff, bytes);
}

GuardedArena::~GuardedArena() { munmap(base_, mapped_); }

PackedLane::PackedLane(const SourceRows& rows, std::uint32_t first,
                       const std::vector<SegmentPlan>& segments, std::uint32_t tail,
                       std::uint64_t first_position, TestRandom& random) {
  PlaceTiles(segments, random);
  std::uint64_t position = first_position;
  for (std::size_t s = 0; s < segments.size(); ++s) {
    FillSegment(rows, first, segments[s], s, position);
    first += segments[s].entries;
  }
  FillTail(rows, first, tail, position);
}

// Places tiles and summaries in random order, with some gaps, and one at the very end of the arena.
// Some segments have their summaries directly after their tiles.
void PackedLane::PlaceTiles(const std::vector<SegmentPlan>& segments, TestRandom& random) {
  struct Place {
    std::uint64_t* offset;
    std::uint64_t bytes;
    std::uint64_t alignment;
  };
  std::vector<Place> places;
  offsets_.resize(segments.size());
  summary_offsets_.resize(segments.size());
  for (std::size_t s = 0; s < segments.size(); ++s) {
    const TileLayout layout = LayoutOf(segments[s].strategy->shape);
    const bool apart = layout.summary_bytes != 0 && !random.OneIn(4);
    offsets_[s].resize(TilesFor(segments[s].entries));
    if (apart) summary_offsets_[s].resize(offsets_[s].size());
    for (std::uint64_t& offset : offsets_[s]) {
      places.push_back(
          {&offset, apart ? layout.bytes : TileAndSummaryBytes(layout), kTileAlignment});
    }
    for (std::uint64_t& offset : summary_offsets_[s]) {
      places.push_back({&offset, layout.summary_bytes, kSummaryAlignment});
    }
  }
  for (std::size_t i = places.size(); i > 1; --i) std::swap(places[i - 1], places[random.Below(i)]);
  std::size_t at = 0;
  for (const Place& place : places) {
    at = AlignUp(at, place.alignment);
    if (random.OneIn(4)) at += place.alignment * random.Between(1, 5);
    *place.offset = at;
    at += place.bytes;
  }
  // The last item ends at the end of the arena, as far as its alignment allows.
  const std::size_t end = AlignUp(std::max<std::size_t>(at, 1), kTileAlignment);
  if (!places.empty() && (end - at) % places.back().alignment == 0)
    *places.back().offset += end - at;
  arena_ = std::make_unique<GuardedArena>(end);
}

void PackedLane::FillSegment(const SourceRows& rows, std::uint32_t first, const SegmentPlan& plan,
                             std::size_t index, std::uint64_t& position) {
  const Operations& reference = OperationsOf(*FindImplementation("reference"));
  const Strategy& strategy = *plan.strategy;
  const TileShape& shape = strategy.shape;
  const Buffer prepared(reference.prepared_bytes(shape, rows.type));
  reference.prepare_encode(shape, rows.type, strategy.view(), prepared.data());
  const std::uint64_t begin = position;
  std::uint64_t next = begin;
  const std::size_t row_bytes = rows.head_dim * ElementBytes(rows.type);
  for (std::uint32_t e = 0; e < plan.entries; e += kTileEntries) {
    const std::uint32_t count = std::min(kTileEntries, plan.entries - e);
    std::vector<std::uint32_t> words;
    for (std::uint32_t r = 0; r < count; ++r) {
      if (e + r > 0 && shape.positions) next += rows.gaps[first + e + r] - 1;
      words.push_back(static_cast<std::uint32_t>(next++ - begin));
    }
    const TileLayout layout = LayoutOf(shape);
    std::byte* tile = arena_->data() + offsets_[index][e / kTileEntries];
    std::byte* summaries = summary_offsets_[index].empty()
                               ? SummariesAfter(tile, layout)
                               : arena_->data() + summary_offsets_[index][e / kTileEntries];
    const bool encoded = reference.encode({.key = rows.keys.data() + (first + e) * row_bytes,
                                           .value = rows.values.data() + (first + e) * row_bytes,
                                           .stride = row_bytes,
                                           .type = rows.type,
                                           .rows = count,
                                           .weights = rows.weights.data() + first + e,
                                           .positions = words.data(),
                                           .shape = shape,
                                           .layout = layout,
                                           .prepared = prepared.data(),
                                           .tile = tile,
                                           .summaries = summaries});
    EXPECT_TRUE(encoded);
    PoisonDeadRows(shape, count, tile, summaries);
  }
  position = next;
  segments_.push_back({.arena = arena_->data(),
                       .arena_bytes = arena_->size(),
                       .tile_offsets = offsets_[index].data(),
                       .summary_offsets = summary_offsets_[index].empty()
                                              ? nullptr
                                              : summary_offsets_[index].data(),
                       .first_position = begin,
                       .position_span = shape.positions ? next - begin : 0,
                       .entries = plan.entries,
                       .shape = shape,
                       .rotation = strategy.view()});
}

void PackedLane::FillTail(const SourceRows& rows, std::uint32_t first, std::uint32_t tail,
                          std::uint64_t position) {
  const DenseTile tile{rows.head_dim, rows.type};
  const std::uint32_t tiles = TilesFor(tail);
  ring_ = std::make_unique<Buffer>(tiles * tile.bytes());
  for (std::uint32_t i = 0; i < tail; ++i) {
    const std::uint64_t token = position + i;
    std::byte* base = ring_->data() + token / kTileEntries % tiles * tile.bytes();
    const std::uint32_t row = token % kTileEntries;
    const std::size_t from = (first + i) * tile.row_bytes();
    std::memcpy(base + tile.key_offset(row), rows.keys.data() + from, tile.row_bytes());
    std::memcpy(base + tile.value_offset(row), rows.values.data() + from, tile.row_bytes());
  }
  view_ = {
      .segments = segments_.data(),
      .segment_count = static_cast<std::uint32_t>(segments_.size()),
      .tail = {
          .ring = ring_->data(), .ring_tiles = tiles, .begin = position, .end = position + tail}};
}

}  // namespace tessera::kernels
