// The StepView on the device: an image that the kernels of one step read, so that they never ask
// the host.
//
// begin_step writes the image (step_writer.h) and uploads it in one copy. Every kernel of the step
// then receives only the image's address, in stream order or from a captured graph. The header
// holds the offsets inside the image, so the next step may be larger or smaller without a new
// capture.
//
//   StepHeader | StepSequence[batch] | StepLayer[layers] | works | StepLane[] | StepSegment[]
//              | StepStrategy[] | StepSelection[] | StepChoice[] | pieces | slots | extent bases
//
//   works          u32[]: per layer lanes + 1 running counts of parts. Lane i owns the work items
//                  [works[i], works[i + 1]) of the layer, one per part; the tail is last. Segments
//                  with selection have no work items here
//   pieces, slots  u32[] each: per layer selections + 1 running counts of the pieces that lanes are
//                  scored in, and of the most parts that their selected blocks may fill
//   extent bases   u64[extents]: device address of each pool extent, 0 if the extent is missing
//
// Lane i of a layer belongs to sequence i / kv_heads and kv head i % kv_heads. If every query head
// selects its own blocks, kv_heads is the number of query heads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/target.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels::cuda {

inline constexpr std::uint64_t kStepMagic = 0x5445535353544550;  // "TESSSTEP"

// A pool as the device sees it. Extents need not be contiguous (CUDA IPC imports are not), and some
// may be missing. An offset is extent index x extent_bytes + offset in the extent. No object
// crosses extents.
struct DeviceArena {
  std::uint64_t extent_bases = 0;  // device address of u64[extents]
  std::uint64_t extent_bytes = 0;
  std::uint32_t extents = 0;
  std::uint32_t reserved = 0;
};
static_assert(sizeof(DeviceArena) == 24);

struct StepHeader {
  std::uint64_t magic;
  std::uint64_t bytes;  // size of the image
  std::uint32_t batch;
  std::uint32_t layers;
  std::uint64_t sequences_offset;
  std::uint64_t layers_offset;
  std::uint64_t works_offset;
  std::uint64_t lanes_offset;
  std::uint64_t segments_offset;
  std::uint64_t strategies_offset;
  std::uint64_t extents_offset;
  std::uint64_t extent_bytes;
  std::uint32_t extents;
  std::uint32_t reserved;
  std::uint64_t selections_offset;
  std::uint64_t choices_offset;
  std::uint64_t pieces_offset;
  std::uint64_t slots_offset;
};
static_assert(offsetof(StepHeader, sequences_offset) == 24);
static_assert(offsetof(StepHeader, extents) == 88);
static_assert(sizeof(StepHeader) == 128);

// The selection rule of a sequence for its segments with block summaries: SelectionRule of
// kernels/dispatch, in fixed bytes.
struct StepRule {
  double rate = 1;            // budget as a share of the entries that the queries may see there
  std::uint64_t entries = 0;  // budget in entries, if not 0; replaces `rate`
  std::uint8_t selects = 0;   // 0: attention reads every entry
  std::uint8_t by_share = 1;  // subtract the row's log-sum-exp over all candidates from its scores
  std::uint8_t first_block = 0;
  // The budget also covers the newest rows, which are in no block yet.
  std::uint8_t counts_tail = 0;
  std::uint32_t floor = 0;  // least budget in entries, if the budget is a `rate`
};
static_assert(sizeof(StepRule) == 24);

// Fields that change from one step to the next even if no snapshot changed. A captured graph may
// advance them on the device: kernels read them when they run.
struct StepSequence {
  std::uint64_t committed;             // tokens that every layer held before this step
  std::uint64_t first_query_position;  // query i is at position first_query_position + i
  std::uint32_t appended;              // new tokens per layer in this step
  std::uint32_t queries;               // query tokens in this step
  std::uint32_t first_append_row;  // index of the first of these rows in [row][kv_heads][head_dim]
  // Index of the first of these rows in [row][query_heads][head_dim].
  std::uint32_t first_query_row;
  StepRule rule = {};  // must not be advanced: the host's bounds depend on it
};
static_assert(sizeof(StepSequence) == 56);

// What a part is made of. The kind picks the attention kernel. A set of kinds is a mask of bits 1
// << kind. Tails and plain segments are kDense, which every launch handles.
enum class PartKind : std::uint8_t {
  kDense = 0,
  kDenseWords = 1,  // dense rows with weights or positions
  kPackedBf16 = 2,
  kPackedFp16 = 3,
  kPackedInt8 = 4,
  kPackedFp8 = 5,
  kPlanes = 6,      // planes of any widths
  kNearPlanes = 7,  // planes of the default widths, kNearKey and kNearValue
};
inline constexpr std::uint32_t kPartKinds = 8;
TESSERA_HOST_DEVICE constexpr std::uint32_t KindBit(PartKind kind) {
  return 1u << static_cast<std::uint32_t>(kind);
}

// Widths that have a kernel of their own, because they are the default.
inline constexpr PlaneWidths kNearKey = {6, 4};
inline constexpr PlaneWidths kNearValue = {4, 0};
TESSERA_HOST_DEVICE constexpr bool IsNear(const TileShape& shape) {
  // Member by member: device code has no address of a constant.
  return shape.key_planes.first == kNearKey.first && shape.key_planes.second == kNearKey.second &&
         shape.value_planes.first == kNearValue.first &&
         shape.value_planes.second == kNearValue.second;
}

TESSERA_HOST_DEVICE constexpr PartKind KindOf(const TileShape& shape) {
  if (shape.planes()) return IsNear(shape) ? PartKind::kNearPlanes : PartKind::kPlanes;
  if (shape.packed()) {
    return static_cast<PartKind>(static_cast<std::uint8_t>(ValuesOf(shape.format)) + 1);
  }
  return shape.weights || shape.positions ? PartKind::kDenseWords : PartKind::kDense;
}
static_assert(KindOf({.format = TileFormat::kPackedBf16}) == PartKind::kPackedBf16);
static_assert(KindOf({.format = TileFormat::kPackedFp8}) == PartKind::kPackedFp8);

// A set of kinds of summaries is a mask, too. Signs have a score kernel of their own.
TESSERA_HOST_DEVICE constexpr std::uint32_t SummaryBit(Summary summary) {
  return 1u << static_cast<std::uint32_t>(summary);
}

// The kind of a part of selected blocks. Selected dense parts share one kernel, with or without
// words.
TESSERA_HOST_DEVICE constexpr PartKind SelectedKindOf(const TileShape& shape) {
  return shape.packed() ? KindOf(shape) : PartKind::kDenseWords;
}

// A tile is plain if it holds dense K and V rows and nothing else.
TESSERA_HOST_DEVICE constexpr bool IsPlain(const TileShape& shape) {
  return !shape.packed() && !shape.weights && !shape.positions && shape.summary == Summary::kNone;
}

struct StepLayer {
  std::uint32_t kv_heads;
  std::uint32_t first_lane;       // among all lanes of the image
  std::uint32_t first_strategy;   // among all strategies of the image
  std::uint32_t strategies;       // strategies of the layer
  std::uint32_t kinds;            // mask of the kinds of its parts
  std::uint32_t first_selection;  // among all selections of the image
  std::uint32_t selections;       // selections of the layer
  std::uint32_t first_choice;     // among all choices of the image
  std::uint32_t choices;          // choices of the layer
  std::uint32_t blocks;           // blocks of its choices
  std::uint32_t selected_kinds;   // mask of the kinds of their parts (SelectedKindOf)
  std::uint32_t summaries;        // mask of the kinds of their summaries (SummaryBit)
};
static_assert(sizeof(StepLayer) == 48);

struct StepLane {
  std::uint32_t first_segment;  // among all segments of the image
  std::uint32_t segment_count;
  std::uint64_t tail_ring;   // device address of the ring's first tile; 0: no tail
  std::uint64_t tail_begin;  // the first token in the ring
  std::uint32_t ring_tiles;
  std::uint32_t segment_parts;  // parts of all segments without selection
  std::uint32_t selection;      // index in the layer; kReadWhole: the lane reads everything
  std::uint32_t reserved;
};
static_assert(sizeof(StepLane) == 40);
inline constexpr std::uint32_t kReadWhole = ~0u;

struct StepSegment {
  std::uint64_t tile_table;     // pool offset of u64[ceil(entries / 32)]
  std::uint64_t summary_table;  // the same for block summaries, if tiles have them
  std::uint64_t first_position;
  std::uint32_t entries;
  std::uint32_t first_part;  // parts of the lane's earlier segments
  std::uint32_t strategy;    // index in the layer; kPlainSegment: plain tiles of the layer's type
  std::uint32_t choice;      // index in the lane's selection; kReadWhole: the segment is read whole
};
static_assert(sizeof(StepSegment) == 40);
inline constexpr std::uint32_t kPlainSegment = ~0u;

// How the tiles of one segment that is not plain are read. Each such segment has its own record,
// because rotations differ by lane and by segment.
struct StepStrategy {
  std::uint64_t key_rotation;  // pool offset of [channels][head_dim]; kNoRotation: the identity
  std::uint64_t value_rotation;
  std::uint64_t key_mean;  // pool offset of bf16 [head_dim], for planes; kNoRotation: none
  std::uint64_t value_mean;
  std::uint64_t position_span;  // exclusive end of its positions, relative to first_position
  std::uint32_t lane;           // index in the layer
  ElementType rotation_type;
  TileShape shape;
  TileLayout layout;  // layout of `shape`
};
static_assert(sizeof(StepStrategy) == 176);
inline constexpr std::uint64_t kNoRotation = ~std::uint64_t{0};

enum class LastForced : std::uint8_t { kNo = 0, kYes = 1, kWithoutTail = 2 };

// A lane that selects blocks. Its blocks are those of its choices, in order.
struct StepSelection {
  std::uint32_t lane;          // index in the layer
  std::uint32_t first_choice;  // index in the layer
  std::uint32_t choices;
  std::uint32_t first_block;  // index in the layer
  std::uint32_t blocks;
  std::uint8_t first_forced;  // the first block is selected whatever its score
  LastForced last_forced;     // the same for the last block
  // Entries per block of the last choice; the newest rows are counted in it.
  std::uint8_t tail_block;
  std::uint8_t unblocked;  // newest rows of the lane's last segment, which are in no block yet
};
static_assert(sizeof(StepSelection) == 24);

// A segment with block summaries, in a lane that selects.
struct StepChoice {
  std::uint32_t segment;      // index in the lane
  std::uint32_t first_block;  // index among the lane's blocks
  std::uint32_t blocks;       // not 0
  std::uint32_t first_piece;  // index among the lane's pieces
};
static_assert(sizeof(StepChoice) == 16);

// The device's result for a choice: where its selected blocks begin in the lane's list, and where
// its parts begin in the lane's slots. They end where the next choice's begin; an extra record
// after a lane's last choice marks the end.
struct SelectedRange {
  std::uint32_t first_taken;
  std::uint32_t first_part;
};
static_assert(sizeof(SelectedRange) == 8);

// Reads a step image, on the host or on the device.
class StepReader {
 public:
  TESSERA_HOST_DEVICE explicit StepReader(const std::byte* image) : image_(image) {}

  TESSERA_HOST_DEVICE const StepHeader& header() const {
    return *reinterpret_cast<const StepHeader*>(image_);
  }
  // Returns false if the image was never written, or does not have the layer.
  TESSERA_HOST_DEVICE bool Holds(std::uint32_t layer) const {
    return header().magic == kStepMagic && layer < header().layers;
  }
  TESSERA_HOST_DEVICE const StepSequence& sequence(std::uint32_t index) const {
    return At<StepSequence>(header().sequences_offset)[index];
  }
  TESSERA_HOST_DEVICE const StepLayer& layer(std::uint32_t index) const {
    return At<StepLayer>(header().layers_offset)[index];
  }
  TESSERA_HOST_DEVICE std::uint32_t lanes(std::uint32_t layer_index) const {
    return header().batch * layer(layer_index).kv_heads;
  }
  // `lanes` + 1 running counts. Each earlier layer has one more count than lanes.
  TESSERA_HOST_DEVICE const std::uint32_t* works(std::uint32_t layer_index) const {
    return At<std::uint32_t>(header().works_offset) + layer(layer_index).first_lane + layer_index;
  }
  TESSERA_HOST_DEVICE const StepLane& lane(std::uint32_t layer_index, std::uint32_t index) const {
    return At<StepLane>(header().lanes_offset)[layer(layer_index).first_lane + index];
  }
  TESSERA_HOST_DEVICE const StepSegment* segments(const StepLane& lane) const {
    return At<StepSegment>(header().segments_offset) + lane.first_segment;
  }
  TESSERA_HOST_DEVICE const StepStrategy& strategy(std::uint32_t layer_index,
                                                   std::uint32_t index) const {
    return At<StepStrategy>(header().strategies_offset)[layer(layer_index).first_strategy + index];
  }
  TESSERA_HOST_DEVICE const StepSelection& selection(std::uint32_t layer_index,
                                                     std::uint32_t index) const {
    return At<StepSelection>(
        header().selections_offset)[layer(layer_index).first_selection + index];
  }
  // Choices of the layer. Those of one lane are consecutive.
  TESSERA_HOST_DEVICE const StepChoice* choices(std::uint32_t layer_index) const {
    return At<StepChoice>(header().choices_offset) + layer(layer_index).first_choice;
  }
  // `selections` + 1 running counts each.
  TESSERA_HOST_DEVICE const std::uint32_t* pieces(std::uint32_t layer_index) const {
    return At<std::uint32_t>(header().pieces_offset) + layer(layer_index).first_selection +
           layer_index;
  }
  TESSERA_HOST_DEVICE const std::uint32_t* slots(std::uint32_t layer_index) const {
    return At<std::uint32_t>(header().slots_offset) + layer(layer_index).first_selection +
           layer_index;
  }
  TESSERA_HOST_DEVICE DeviceArena arena() const {
    return {.extent_bases = reinterpret_cast<std::uint64_t>(image_ + header().extents_offset),
            .extent_bytes = header().extent_bytes,
            .extents = header().extents};
  }

 private:
  template <class T>
  TESSERA_HOST_DEVICE const T* At(std::uint64_t offset) const {
    return reinterpret_cast<const T*>(image_ + offset);
  }
  const std::byte* image_;
};

// A fault that a kernel found. The lowest word wins, so the report does not depend on timing.
//   [63:48] 0   [47:32] layer   [31:8] lane of the layer   [7:0] FaultKind
enum class FaultKind : std::uint8_t {
  kBadTile = 1,  // a tile, table or rotation outside the pool's extents, or of another head_dim
  // a tail longer than its ring, tokens before the ring's begin, or an append without a ring
  kBadTail = 2,
  // No image, a missing layer, or more work or other kinds than the launch was made for.
  kBadStep = 3,
};

inline constexpr std::uint64_t kNoFault = ~std::uint64_t{0};

struct FaultWord {
  TESSERA_HOST_DEVICE static constexpr std::uint64_t Pack(FaultKind kind, std::uint32_t layer,
                                                          std::uint32_t lane) {
    return (static_cast<std::uint64_t>(layer & 0xffffu) << 32) |
           (static_cast<std::uint64_t>(lane & 0xffffffu) << 8) | static_cast<std::uint64_t>(kind);
  }
  static constexpr FaultKind Kind(std::uint64_t word) {
    return static_cast<FaultKind>(word & 0xff);
  }
  static constexpr std::uint32_t Layer(std::uint64_t word) { return (word >> 32) & 0xffff; }
  static constexpr std::uint32_t Lane(std::uint64_t word) { return (word >> 8) & 0xffffff; }
};

// The first row that may not enter a tile: lowest run, then K before V, then lowest row.
//   [63:32] run   [31] 1: V row   [30:0] row of the run
inline constexpr std::uint64_t kNoneUnusable = ~std::uint64_t{0};

struct UnusableWord {
  TESSERA_HOST_DEVICE static constexpr std::uint64_t Pack(std::uint32_t run, std::uint32_t row,
                                                          bool value) {
    return (static_cast<std::uint64_t>(run) << 32) | (value ? 1u << 31 : 0u) | (row & 0x7fffffffu);
  }
  static constexpr std::uint32_t Run(std::uint64_t word) {
    return static_cast<std::uint32_t>(word >> 32);
  }
  static constexpr bool IsValue(std::uint64_t word) { return (word >> 31 & 1) != 0; }
  static constexpr std::uint32_t Row(std::uint64_t word) { return word & 0x7fffffff; }
};

}  // namespace tessera::kernels::cuda
