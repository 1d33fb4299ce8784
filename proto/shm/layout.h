// The mapped protocol: every struct that daemon and worker share through memory.
//
// Rules: structs hold offsets and indices, never pointers. Sizes are fixed and asserted. A word
// that one process changes while another reads it is a lock-free 64- or 32-bit atomic. A change of
// layout changes the fingerprint, and a change of meaning must increase kProtocolVersion, so that
// Hello refuses an incompatible client and names both values.
//
// Who writes what:
//   DirectoryHeader, SequenceBlock, Snapshot, tile tables, tiles   daemon   (worker: read-only)
//   ControlPage, tail rings, staging arena                         worker   (daemon: untrusted)
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "kernels/format/tile_shape.h"
#include "proto/shm/descriptors.h"

namespace tessera::shm {

inline constexpr std::uint32_t kProtocolVersion = 5;

inline constexpr std::uint64_t kDirectoryMagic = 0x5445535344495231;  // "TESSDIR1"
inline constexpr std::uint64_t kControlMagic = 0x5445535343544c31;    // "TESSCTL1"
inline constexpr std::uint32_t kSnapshotMagic = 0x54534e50;           // "TSNP"

inline constexpr std::uint32_t kReaderSlots = 64;        // per session
inline constexpr std::uint32_t kCommitSlots = 4096;      // decoding sequences per session
inline constexpr std::uint32_t kMaxPoolExtents = 16384;  // 1 TiB of 64 MiB extents
inline constexpr std::uint32_t kMaxDirectoryExtents = 4096;
inline constexpr std::uint32_t kObjectAlignment = 64;  // of every object in pool and directory
inline constexpr std::uint32_t kMaxSegments = 4095;    // per lane: a snapshot stays below 256 KiB
inline constexpr std::uint32_t kMaxSegmentEntries = 65536;
inline constexpr std::uint32_t kMaxLanes = 16384;  // per sequence

using Word = std::atomic<std::uint64_t>;
using HalfWord = std::atomic<std::uint32_t>;
static_assert(Word::is_always_lock_free && HalfWord::is_always_lock_free);
static_assert(sizeof(Word) == 8 && sizeof(HalfWord) == 4);

// ---- Directory ---------------------------------------------------------------------------------

// At offset 0 of directory extent 0. One directory per tenant.
struct DirectoryHeader {
  std::uint64_t magic;
  std::uint32_t protocol_version;
  std::uint32_t header_bytes;
  std::uint64_t layout_fingerprint;
  std::uint64_t instance;  // of the daemon process
  std::uint64_t directory_extent_bytes;
  std::uint64_t pool_extent_bytes;
  std::uint64_t directory_limit_bytes;  // address space that a client reserves for the directory
  std::uint64_t pool_limit_bytes;       // and for the pool

  // The tenant's epoch. Readers pin it: see pin.h.
  alignas(64) Word epoch;
  // Incremented after any change of the two fields below. A reader whose mappings match this
  // version need not check them.
  alignas(64) Word mapping_version;
  HalfWord directory_extents;  // extents [0, n) exist; the directory never shrinks
  std::uint32_t reserved1;

  // Generation of pool extent i; 0: absent. It changes each time the extent is allocated again.
  alignas(64) HalfWord pool_extent_generation[kMaxPoolExtents];
};
static_assert(offsetof(DirectoryHeader, epoch) == 64);
static_assert(offsetof(DirectoryHeader, mapping_version) == 128);
static_assert(offsetof(DirectoryHeader, directory_extents) == 136);
static_assert(offsetof(DirectoryHeader, pool_extent_generation) == 192);
static_assert(sizeof(DirectoryHeader) == 192 + 4 * kMaxPoolExtents);

// One per sequence, in the directory, followed by `lanes` lane words (layer-major: the lanes of
// layer 0 first). `version` changes after any lane word has changed. A reader with a pinned epoch
// may reuse its resolved lanes while the version is the one it resolved them at.
struct SequenceBlock {
  Word sequence_id;  // 0 once the sequence is gone
  Word version;
  HalfWord state;            // SequenceBlockState
  HalfWord tail_generation;  // of the current tail rings; 0: no tail rings
  std::uint32_t lanes;
  std::uint32_t layers;
  Word next_position;  // of the worker's next query; set if the policy moves positions
  // The first token whose ring row must be kept. Rows of earlier tokens are absorbed and have no
  // readers left, so the worker may overwrite them: it writes token t once t < ring_start +
  // capacity.
  Word ring_start;
  std::uint64_t reserved[2];
};
static_assert(offsetof(SequenceBlock, state) == 16);
static_assert(offsetof(SequenceBlock, next_position) == 32);
static_assert(offsetof(SequenceBlock, ring_start) == 40);
static_assert(sizeof(SequenceBlock) == 64);

enum SequenceBlockState : std::uint32_t {
  kSequenceLive = 1,
  kSequenceFailed = 2,
  kSequenceGone = 3,
  // The rows are in the host tier, the lane words are 0 and there is no tail. Opening a tail
  // restores the sequence.
  kSequenceOffloaded = 4,
};

// A lane word: [63:40] generation, [39:0] directory offset of the snapshot in units of 64 bytes.
struct LaneWord {
  static constexpr std::uint64_t Pack(std::uint64_t generation, std::uint64_t snapshot_offset) {
    return (generation << 40) | (snapshot_offset / kObjectAlignment);
  }
  static constexpr std::uint64_t Offset(std::uint64_t word) {
    return (word & ((std::uint64_t{1} << 40) - 1)) * kObjectAlignment;
  }
  static constexpr std::uint64_t Generation(std::uint64_t word) { return word >> 40; }
};

// ---- Snapshot ----------------------------------------------------------------------------------

// The immutable description of a lane, in the directory, followed by `segment_count` SegmentRefs. A
// changed lane gets a new snapshot.
struct Snapshot {
  std::uint32_t magic;
  std::uint32_t segment_count;
  std::uint64_t entries;     // in all segments
  std::uint64_t tail_start;  // the first token in the tail ring
  std::uint64_t reserved;
};
static_assert(sizeof(Snapshot) == 32);

// One segment of a lane. The fields from `head_dim` to `flags`, `value_channels` and `value_kept`
// encode a kernels::TileShape (segment_ref.h).
struct SegmentRef {
  std::uint64_t tile_table;      // pool offset of the table of 64-bit tile offsets
  std::uint64_t first_position;  // of entry 0, or the base of the tiles' position words
  std::uint64_t position_span;   // positions are below first_position + span; 0: `entries`
  std::uint64_t rotations;       // pool offset of what flags name: R_k, R_v, or a book; 0: none
  std::uint32_t entries;         // of the segment that belong to this snapshot
  std::uint16_t head_dim;
  std::uint16_t key_channels;
  std::uint16_t key_kept;
  std::uint8_t format;  // kernels::TileFormat
  std::uint8_t group;
  std::uint8_t summary;  // kernels::Summary
  std::uint8_t block;
  std::uint8_t flags;          // SegmentFlags
  std::uint8_t rotation_type;  // kernels::ElementType
  std::uint16_t value_channels;
  std::uint16_t value_kept;
  std::uint8_t key_planes[2];    // kernels::PlaneWidths; 0 in other formats
  std::uint8_t value_planes[2];  // likewise
  std::uint64_t summary_table;   // pool offset of the table of block summary offsets, if summary
};
static_assert(offsetof(SegmentRef, entries) == 32);
static_assert(offsetof(SegmentRef, format) == 42);
static_assert(offsetof(SegmentRef, rotation_type) == 47);
static_assert(offsetof(SegmentRef, value_kept) == 50);
static_assert(offsetof(SegmentRef, value_planes) == 54);
static_assert(offsetof(SegmentRef, summary_table) == 56);
static_assert(sizeof(SegmentRef) == 64);

enum SegmentFlags : std::uint8_t {
  kSegmentHasWeights = 1,
  kSegmentHasPositions = 2,
  kSegmentRotatesKeys = 4,    // the segment has an R_k: its keys are rotated
  kSegmentRotatesValues = 8,  // the segment has an R_v: its values are rotated
  kSegmentHasBook = 16,       // R_k, R_v and means, laid out as kernels::BookLayout
};

// ---- Control page ------------------------------------------------------------------------------

// A reader slot. Its word is kPinFree, kPinRevoked, or (pinned epoch + 1) << 1: see pin.h.
struct alignas(64) ReaderSlot {
  Word word;
};

// Upper bounds of the buckets of ControlPage::step_waits; a further bucket takes longer waits.
inline constexpr std::array<std::chrono::nanoseconds, 6> kStepWaitBounds = {
    std::chrono::microseconds(50), std::chrono::microseconds(200), std::chrono::milliseconds(1),
    std::chrono::milliseconds(10), std::chrono::milliseconds(100), std::chrono::seconds(1)};
inline constexpr std::size_t kStepWaitBuckets = kStepWaitBounds.size() + 1;

// One memfd per session, written by the worker.
struct ControlPage {
  std::uint64_t magic;
  std::uint32_t protocol_version;
  std::uint32_t reserved0;
  std::uint64_t layout_fingerprint;

  // 1 while the daemon sleeps and must be woken on the next full tile. The worker exchanges it for
  // 0, and signals the session's eventfd if it was 1. So waking the daemon costs at most one system
  // call per full tile, and none while the daemon is awake.
  alignas(64) HalfWord wake;
  HalfWord reserved1;
  // For metrics only: how often a step had to wait for ring space, how long in total, and the
  // number of steps by the time they waited, most of which is 0. The last ones count modulo 2^32.
  Word ring_full_waits;
  Word step_wait_nanoseconds;
  HalfWord step_waits[kStepWaitBuckets];

  alignas(64) ReaderSlot readers[kReaderSlots];

  // Commit slot s holds the committed count: the tokens that every layer of a decoding sequence
  // has. [63:48] tail generation (low 16 bits), [47] in a step, [46:0] token count. end_step stores
  // it with release order. A step first stores it with bit 47 set, before it reads the sequence
  // block: the daemon does not offload a sequence in a step.
  alignas(64) Word commits[kCommitSlots];
};
static_assert(offsetof(ControlPage, wake) == 64);
static_assert(offsetof(ControlPage, step_waits) == 88);
static_assert(offsetof(ControlPage, readers) == 128);
static_assert(offsetof(ControlPage, commits) == 128 + 64 * kReaderSlots);
static_assert(sizeof(ControlPage) == 128 + 64 * kReaderSlots + 8 * kCommitSlots);

struct CommitWord {
  static constexpr std::uint64_t kInStep = std::uint64_t{1} << 47;
  static constexpr std::uint64_t kTokenMask = kInStep - 1;
  static constexpr std::uint64_t Pack(std::uint32_t tail_generation, std::uint64_t tokens) {
    return (static_cast<std::uint64_t>(tail_generation & 0xffffu) << 48) | (tokens & kTokenMask);
  }
  static constexpr std::uint64_t Tokens(std::uint64_t word) { return word & kTokenMask; }
  static constexpr bool InStep(std::uint64_t word) { return (word & kInStep) != 0; }
  static constexpr bool Matches(std::uint64_t word, std::uint32_t tail_generation) {
    return (word >> 48) == (tail_generation & 0xffffu);
  }
};

// ---- Fingerprint -------------------------------------------------------------------------------

namespace internal {
constexpr std::uint64_t Mix(std::uint64_t hash, std::uint64_t value) {
  for (int i = 0; i < 8; ++i) {
    hash = (hash ^ ((value >> (8 * i)) & 0xff)) * 0x100000001b3;  // FNV-1a
  }
  return hash;
}
constexpr std::uint64_t Fingerprint() {
  std::uint64_t hash = 0xcbf29ce484222325;
  const std::uint64_t facts[] = {
      kProtocolVersion,
      sizeof(DirectoryHeader),
      offsetof(DirectoryHeader, epoch),
      offsetof(DirectoryHeader, mapping_version),
      offsetof(DirectoryHeader, pool_extent_generation),
      sizeof(SequenceBlock),
      offsetof(SequenceBlock, version),
      offsetof(SequenceBlock, state),
      offsetof(SequenceBlock, tail_generation),
      offsetof(SequenceBlock, next_position),
      offsetof(SequenceBlock, ring_start),
      sizeof(Snapshot),
      offsetof(Snapshot, tail_start),
      sizeof(SegmentRef),
      offsetof(SegmentRef, entries),
      offsetof(SegmentRef, format),
      offsetof(SegmentRef, rotation_type),
      offsetof(SegmentRef, value_kept),
      offsetof(SegmentRef, value_planes),
      offsetof(SegmentRef, summary_table),
      sizeof(ControlPage),
      offsetof(ControlPage, step_waits),
      offsetof(ControlPage, readers),
      offsetof(ControlPage, commits),
      kReaderSlots,
      kCommitSlots,
      kObjectAlignment,
      kernels::kTileEntries,
      kernels::DenseTile{128, kernels::ElementType::kBf16}.value_offset(1),
      kernels::kTileFormatVersion,
      sizeof(DescriptorOpening),
      sizeof(DescriptorAnswer),
      offsetof(DescriptorAnswer, memory)};
  for (std::uint64_t fact : facts) hash = Mix(hash, fact);
  return hash;
}
}  // namespace internal

inline constexpr std::uint64_t kLayoutFingerprint = internal::Fingerprint();

}  // namespace tessera::shm
