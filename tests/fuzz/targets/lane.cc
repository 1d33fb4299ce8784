// A lane with arbitrary words, snapshot, tables and tiles, as a reader with a revoked pin sees it.
// Resolving and attention must never follow an address outside of the mappings, and all
// implementations must report it alike.
#include <algorithm>
#include <cstring>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/attend.h"
#include "kernels/dispatch/implementation.h"
#include "proto/shm/layout.h"
#include "proto/shm/resolve.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/guarded.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/shapes.h"

namespace tessera::fuzz {
namespace {

using namespace kernels;

constexpr std::size_t kMostDirectory = 4096;
constexpr std::size_t kMostPool = 128 << 10;
constexpr std::size_t kRing = 32 << 10;
constexpr std::uint64_t kMostEntries = 4096;  // keeps inputs fast

struct LaneCase {
  LayerGeometry geometry;
  LaneView view;
  std::uint32_t queries;
  std::uint64_t first_position;
  bool causal;
  const SelectionRule* rule;
};

class Counting final : public SelectionSink {
 public:
  explicit Counting(const LaneView& view) : view_(view) {}
  void Take(std::uint32_t, const SelectedRun& run) override {
    TESSERA_CHECK(run.segment < view_.segment_count, Concat("segment ", run.segment));
    TESSERA_CHECK(run.entries > 0 && run.first_entry < view_.segments[run.segment].entries &&
                      run.entries <= view_.segments[run.segment].entries - run.first_entry,
                  Concat("entries ", run.first_entry, " + ", run.entries));
  }

 private:
  const LaneView& view_;
};

AttendResult Run(const Implementation& implementation, const LaneCase& lane, bool select) {
  const std::size_t elements =
      std::size_t{lane.queries} * lane.geometry.query_heads * lane.geometry.head_dim;
  const std::vector<std::byte> query(elements * ElementBytes(lane.geometry.type), std::byte{0x3d});
  std::vector<float> output(elements), lse(std::size_t{lane.queries} * lane.geometry.query_heads);
  const AttendItem item = {.lane = &lane.view,
                           .kv_head = 0,
                           .queries = lane.queries,
                           .first_query_position = lane.first_position,
                           .query = query.data(),
                           .output = output.data(),
                           .lse = lse.data(),
                           .selection = lane.rule};
  const AttendBatch batch = {.geometry = lane.geometry, .causal = lane.causal, .items = {&item, 1}};
  const std::size_t bytes = AttendWorkspaceBytes(batch);
  std::vector<std::byte> memory(bytes + 64);
  const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
  const std::span<std::byte> workspace(memory.data() + (64 - at % 64) % 64, bytes);
  InlineExecutor inline_executor;
  if (!select) return Attend(implementation, batch, workspace, inline_executor);
  Counting sink(lane.view);
  return Select(implementation, batch, workspace, inline_executor, sink);
}

void Judge(const LaneCase& lane) {
  AttendStatus first = AttendStatus::kOk;
  for (const Implementation* implementation : Implementations()) {
    if (!ImplementationSupported(*implementation)) continue;
    const AttendResult attended = Run(*implementation, lane, false);
    TESSERA_CHECK(attended.status != AttendStatus::kWorkspaceTooSmall,
                  "a workspace of the requested size is enough");
    if (implementation == Implementations().front()) first = attended.status;
    TESSERA_CHECK(attended.status == first, ImplementationName(*implementation));
    if (lane.rule == nullptr) continue;
    const AttendResult selected = Run(*implementation, lane, true);
    TESSERA_CHECK(selected.status != AttendStatus::kWorkspaceTooSmall,
                  "a workspace of the requested size is enough");
  }
}

struct Memory {
  Guarded directory{kMostDirectory};
  Guarded pool{kMostPool};
  Guarded ring{kRing};
};

void RunInput(Input input, const Memory& memory) {
  LaneCase lane = {};
  const std::uint64_t word = input.Take<std::uint64_t>();
  const std::uint8_t flags = input.Byte();
  lane.causal = (flags & 1) != 0;
  lane.geometry = {.query_heads = 1u + (flags >> 1) % 2,
                   .kv_heads = 1,
                   .head_dim = kWidths[(flags >> 2) % 3],
                   .type = static_cast<ElementType>(1 + (flags >> 4) % 3),
                   .scale = 0.125f,
                   .sliding_window = input.Take<std::uint16_t>(),
                   .logit_softcap = (flags & 0x80) != 0 ? 30.0f : 0};
  lane.queries = 1 + input.Byte() % 4;
  lane.first_position = input.Take<std::uint64_t>();
  const std::uint8_t rate = input.Byte();
  const SelectionRule rule = {.rate = rate / 255.0,
                              .entries = input.Byte(),
                              .judge = static_cast<SelectionRule::Judge>(rate % 2),
                              .first_block = rate % 3 == 0};
  if (rate != 0) lane.rule = &rule;
  const std::uint64_t tail_begin = input.Take<std::uint64_t>();
  const std::uint64_t tail_tokens = input.Take<std::uint16_t>();
  const auto noise = input.Take<std::uint32_t>();

  const std::string_view words = input.Chunk();
  const std::size_t directory_bytes = WholeUnits(std::min(words.size(), kMostDirectory));
  const shm::MappedArena directory = {memory.directory.Last(directory_bytes), directory_bytes};
  Fill({memory.directory.Last(directory_bytes), directory_bytes}, words, noise);
  const std::size_t pool_bytes = WholeUnits(input.Take<std::uint32_t>() % (kMostPool - 63));
  const shm::MappedArena pool = {memory.pool.Last(pool_bytes), pool_bytes};
  Fill({memory.pool.Last(pool_bytes), pool_bytes}, input.Rest(), noise + 1);

  std::vector<SegmentView> segments;
  shm::ResolvedLane resolved;
  const shm::ResolveStatus status = shm::ResolveLane(word, directory, pool, segments, resolved);
  if (status != shm::ResolveStatus::kOk) {
    TESSERA_CHECK(segments.empty(), "an unresolved lane has no segments");
    return;
  }
  TESSERA_CHECK(segments.size() == resolved.segments, "the number of segments is as reported");
  std::uint64_t entries = 0;
  for (const SegmentView& segment : segments) entries += segment.entries;
  if (entries > kMostEntries) return;

  const DenseTile tile = {lane.geometry.head_dim, lane.geometry.type};
  Fill({memory.ring.Last(kRing), kRing}, {}, noise + 2);
  lane.view = {.segments = segments.data(),
               .segment_count = static_cast<std::uint32_t>(segments.size()),
               .tail = {.ring = memory.ring.Last(kRing),
                        .ring_tiles = static_cast<std::uint32_t>(kRing / tile.bytes()),
                        .begin = tail_begin,
                        .end = tail_begin + tail_tokens}};
  Judge(lane);
}

// One segment with its tables in the pool's first bytes, followed by its tiles and their summaries.
Seed OneSegment(const char* name, const TileShape& shape, std::uint32_t entries,
                std::uint8_t width_flags, std::uint8_t rate, bool rotated) {
  shm::SegmentRef ref = {};
  ref.entries = entries;
  ref.position_span = shape.positions ? 4 * entries : 0;
  ref.head_dim = shape.head_dim;
  ref.key_channels = shape.key.channels;
  ref.key_kept = shape.key.kept;
  ref.value_channels = shape.value.channels;
  ref.value_kept = shape.value.kept;
  ref.format = static_cast<std::uint8_t>(shape.format);
  ref.group = shape.group;
  ref.summary = static_cast<std::uint8_t>(shape.summary);
  ref.block = shape.block;
  ref.flags = (shape.weights ? shm::kSegmentHasWeights : 0) |
              (shape.positions ? shm::kSegmentHasPositions : 0);
  const TileLayout layout = LayoutOf(shape);
  const std::uint64_t tile_bytes = WholeUnits(layout.bytes);
  const std::uint32_t tiles = (entries + kTileEntries - 1) / kTileEntries;
  const std::uint64_t first_tile = WholeUnits(2 * tiles * 8);
  const std::uint64_t first_summaries = first_tile + tiles * tile_bytes;
  ref.summary_table = tiles * 8;
  Output pool;
  for (std::uint32_t i = 0; i < tiles; ++i) pool.Add<std::uint64_t>(first_tile + i * tile_bytes);
  for (std::uint32_t i = 0; i < tiles; ++i) {
    pool.Add<std::uint64_t>(first_summaries + i * layout.summary_bytes);
  }
  std::uint64_t pool_bytes = first_summaries + WholeUnits(tiles * layout.summary_bytes);
  if (rotated) {
    ref.rotations = pool_bytes;
    ref.rotation_type = static_cast<std::uint8_t>(ElementType::kBf16);
    ref.flags |= shm::kSegmentRotatesKeys | shm::kSegmentRotatesValues;
    pool_bytes += RotationBytes(shape, ElementType::kBf16);
  }
  shm::Snapshot snapshot = {};
  snapshot.magic = shm::kSnapshotMagic;
  snapshot.segment_count = 1;
  snapshot.entries = snapshot.tail_start = entries;

  Output output;
  std::string directory(64, '\0');
  directory.append(reinterpret_cast<const char*>(&snapshot), sizeof snapshot);
  directory.append(reinterpret_cast<const char*>(&ref), sizeof ref);
  output.Add(shm::LaneWord::Pack(1, 64)).Byte(width_flags).Add<std::uint16_t>(0).Byte(0);
  output.Add<std::uint64_t>(entries + 8).Byte(rate).Byte(0);
  output.Add<std::uint64_t>(entries).Add<std::uint16_t>(9).Add<std::uint32_t>(1);
  output.Chunk(directory).Add(static_cast<std::uint32_t>(pool_bytes)).Bytes(pool.bytes());
  return {name, output.bytes()};
}

}  // namespace

std::vector<Seed> Seeds() {
  TileShape packed = {
      .format = TileFormat::kPackedInt8, .head_dim = 64, .key = {64, 16}, .value = {64, 16}};
  std::vector<Seed> seeds = {
      OneSegment("dense", DenseShape(64, ElementType::kBf16), 70, 1, 0, false),
      OneSegment("packed", packed, 40, 1, 0, true)};
  packed.summary = Summary::kMean;
  packed.block = 8;
  seeds.push_back(OneSegment("selected", packed, 100, 1, 64, true));
  packed.positions = packed.weights = true;
  seeds.push_back(OneSegment("words", packed, 33, 1, 99, true));
  packed.format = TileFormat::kPackedBf16;
  packed.summary = Summary::kMinMax;
  packed.block = 4;
  packed.key = {48, 48};
  seeds.push_back(OneSegment("min-max", packed, 64, 3, 30, true));
  return seeds;
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const tessera::fuzz::Memory memory;
  tessera::fuzz::RunInput(tessera::fuzz::Input(data, size), memory);
  return 0;
}
