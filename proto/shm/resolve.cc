#include "proto/shm/resolve.h"

#include <cstring>

#include "proto/shm/segment_ref.h"

namespace tessera::shm {

namespace {

bool TableFits(const SegmentRef& ref, std::uint64_t table, const MappedArena& pool) {
  const std::uint64_t tiles =
      (std::uint64_t{ref.entries} + kernels::kTileEntries - 1) / kernels::kTileEntries;
  return table % sizeof(std::uint64_t) == 0 && pool.Holds(table, tiles * sizeof(std::uint64_t));
}

bool TablesFit(const SegmentRef& ref, const kernels::TileShape& shape, const MappedArena& pool) {
  return TableFits(ref, ref.tile_table, pool) &&
         (shape.summary == kernels::Summary::kNone || TableFits(ref, ref.summary_table, pool));
}

const std::uint64_t* TableAt(std::uint64_t offset, const MappedArena& pool) {
  return reinterpret_cast<const std::uint64_t*>(pool.base + offset);
}

// Returns false if the segment is empty, too long, or has a position range that does not fit its
// entries. Kernels derive the number of parts and blocks from these fields.
bool EntriesFit(const SegmentRef& ref, const kernels::TileShape& shape) {
  if (ref.entries == 0 || ref.entries > kMaxSegmentEntries) return false;
  if (!shape.positions && ref.position_span != 0 && ref.position_span != ref.entries) return false;
  const std::uint64_t span = ref.position_span != 0 ? ref.position_span : ref.entries;
  return span <= ~std::uint64_t{0} - ref.first_position;
}

// Returns false if the rotations lie outside the pool, or if the shape needs others.
bool FindRotations(const SegmentRef& ref, const kernels::TileShape& shape, const MappedArena& pool,
                   kernels::RotationView& rotation) {
  if (ref.rotations == 0) return kernels::HasRequiredRotations(shape, rotation);
  if ((ref.flags & kSegmentHasBook) != 0) {
    if (ref.rotations % kObjectAlignment != 0 ||
        !pool.Holds(ref.rotations, kernels::BookLayoutOf(shape.head_dim).bytes)) {
      return false;
    }
    rotation = kernels::BookAt(pool.base + ref.rotations, shape.head_dim);
    return kernels::HasRequiredRotations(shape, rotation);
  }
  if (!shape.packed() || !kernels::IsElementType(ref.rotation_type)) return false;
  rotation.type = static_cast<kernels::ElementType>(ref.rotation_type);
  const bool keys = (ref.flags & kSegmentRotatesKeys) != 0;
  const bool values = (ref.flags & kSegmentRotatesValues) != 0;
  const std::uint64_t key_bytes =
      keys ? kernels::RotationBytes(shape, shape.key, rotation.type) : 0;
  const std::uint64_t value_bytes =
      values ? kernels::RotationBytes(shape, shape.value, rotation.type) : 0;
  if (ref.rotations % kObjectAlignment != 0 ||
      !pool.Holds(ref.rotations, key_bytes + value_bytes)) {
    return false;
  }
  if (keys) rotation.key = pool.base + ref.rotations;
  if (values) rotation.value = pool.base + ref.rotations + key_bytes;
  return kernels::HasRequiredRotations(shape, rotation);
}

}  // namespace

ResolveStatus ResolveLane(std::uint64_t lane_word, const MappedArena& directory,
                          const MappedArena& pool, std::vector<kernels::SegmentView>& segments,
                          ResolvedLane& lane) {
  lane = ResolvedLane{};
  if (lane_word == 0) return ResolveStatus::kNoSnapshot;
  const std::uint64_t offset = LaneWord::Offset(lane_word);
  if (!directory.Holds(offset, sizeof(Snapshot))) return ResolveStatus::kOutOfBounds;
  Snapshot snapshot;
  std::memcpy(&snapshot, directory.base + offset, sizeof snapshot);
  if (snapshot.magic != kSnapshotMagic || snapshot.segment_count > kMaxSegments ||
      !directory.Holds(offset + sizeof(Snapshot),
                       std::uint64_t{snapshot.segment_count} * sizeof(SegmentRef))) {
    return ResolveStatus::kOutOfBounds;
  }
  const std::byte* refs = directory.base + offset + sizeof(Snapshot);
  const std::size_t before = segments.size();
  for (std::uint32_t i = 0; i < snapshot.segment_count; ++i) {
    SegmentRef ref;
    std::memcpy(&ref, refs + i * sizeof(SegmentRef), sizeof ref);
    const kernels::TileShape shape = ShapeOf(ref);
    kernels::RotationView rotation;
    if (!TablesFit(ref, shape, pool) || kernels::UnsupportedReason(shape) != nullptr ||
        !EntriesFit(ref, shape) || !FindRotations(ref, shape, pool, rotation)) {
      segments.resize(before);
      return ResolveStatus::kOutOfBounds;
    }
    segments.push_back({
        .arena = pool.base,
        .arena_bytes = pool.bytes,
        .tile_offsets = TableAt(ref.tile_table, pool),
        .summary_offsets =
            shape.summary == kernels::Summary::kNone ? nullptr : TableAt(ref.summary_table, pool),
        .first_position = ref.first_position,
        .position_span = ref.position_span,
        .entries = ref.entries,
        .shape = shape,
        .rotation = rotation,
    });
  }
  lane = {.entries = snapshot.entries,
          .tail_start = snapshot.tail_start,
          .segments = snapshot.segment_count};
  return ResolveStatus::kOk;
}

const Word* LaneWords(const MappedArena& directory, std::uint64_t block_offset,
                      const SequenceBlock** block) {
  if (block_offset % kObjectAlignment != 0 ||
      !directory.Holds(block_offset, sizeof(SequenceBlock))) {
    return nullptr;
  }
  *block = reinterpret_cast<const SequenceBlock*>(directory.base + block_offset);
  const std::uint64_t words = block_offset + sizeof(SequenceBlock);
  if (!directory.Holds(words, std::uint64_t{(*block)->lanes} * sizeof(Word))) return nullptr;
  return reinterpret_cast<const Word*>(directory.base + words);
}

}  // namespace tessera::shm
