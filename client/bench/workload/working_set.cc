#include "client/bench/workload/working_set.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <random>

#include "kernels/dispatch/implementation.h"

namespace tessera::cli::bench {

namespace {

constexpr std::uint64_t kAlignment = 64;

std::byte* Aligned(std::byte* at) {
  const auto address = reinterpret_cast<std::uintptr_t>(at);
  return at + (kAlignment - address % kAlignment) % kAlignment;
}

std::uint64_t RoundUp(std::uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// A table of normally distributed bf16 numbers: each draw is one look-up.
std::vector<std::uint16_t> NormalTable() {
  std::mt19937_64 random(1);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> table(1 << 12);
  for (std::uint16_t& number : table) number = kernels::FloatToBf16(normal(random));
  return table;
}

// Random orthonormal rows, by Gram-Schmidt.
std::vector<std::vector<double>> RandomRotation(std::uint32_t dim) {
  std::mt19937_64 random(dim);
  std::normal_distribution<double> normal;
  std::vector<std::vector<double>> rows(dim, std::vector<double>(dim));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (double& element : rows[i]) element = normal(random);
    for (std::size_t j = 0; j < i; ++j) {
      double dot = 0;
      for (std::uint32_t c = 0; c < dim; ++c) dot += rows[i][c] * rows[j][c];
      for (std::uint32_t c = 0; c < dim; ++c) rows[i][c] -= dot * rows[j][c];
    }
    double length = 0;
    for (double element : rows[i]) length += element * element;
    for (double& element : rows[i]) element /= std::sqrt(length);
  }
  return rows;
}

}  // namespace

kernels::TileShape PackedTile(std::uint32_t head_dim, kernels::TileFormat format,
                              std::uint32_t group, std::uint8_t block) {
  const kernels::RowShape quarter = {static_cast<std::uint16_t>(head_dim),
                                     static_cast<std::uint16_t>(head_dim / 4)};
  return {.format = format,
          .head_dim = static_cast<std::uint16_t>(head_dim),
          .key = quarter,
          .value = quarter,
          .group = static_cast<std::uint8_t>(group),
          .summary = kernels::Summary::kMean,
          .block = block};
}

std::vector<std::byte> RandomRotations(const kernels::TileShape& tile) {
  const std::uint64_t bytes = kernels::RotationBytes(tile, tile.key, kernels::ElementType::kBf16);
  std::vector<std::byte> rotations(kernels::RotationBytes(tile, kernels::ElementType::kBf16));
  const std::vector<std::vector<double>> rows = RandomRotation(tile.head_dim);
  for (std::uint32_t c = 0; c < tile.key.channels; ++c) {
    for (std::uint32_t d = 0; d < tile.head_dim; ++d) {
      const std::uint16_t element = kernels::FloatToBf16(static_cast<float>(rows[c][d]));
      const std::size_t place = (std::size_t{c} * tile.head_dim + d) * sizeof element;
      std::memcpy(rotations.data() + place, &element, sizeof element);
      std::memcpy(rotations.data() + bytes + place, &element, sizeof element);
    }
  }
  // The means of a book, if any, are zeros.
  if (tile.planes()) rotations.resize(kernels::BookLayoutOf(tile.head_dim).bytes);
  return rotations;
}

TileEncoder::TileEncoder(const kernels::TileShape& shape, const kernels::RotationView& rotation)
    : shape_(shape), layout_(kernels::LayoutOf(shape)), prepared_(nullptr) {
  if (!shape.packed()) return;
  const kernels::Operations& operations = kernels::OperationsOf(kernels::BestImplementation());
  memory_.resize(operations.prepared_bytes(shape, kernels::ElementType::kBf16) + kAlignment);
  prepared_ = Aligned(memory_.data());
  operations.prepare_encode(shape, kernels::ElementType::kBf16, rotation, prepared_);
}

bool TileEncoder::Encode(const std::byte* dense, std::byte* tile, std::byte* summaries) const {
  const kernels::DenseTile from{shape_.head_dim, kernels::ElementType::kBf16};
  return kernels::OperationsOf(kernels::BestImplementation())
      .encode({.key = dense,
               .value = dense + from.value_offset(0),
               .stride = from.row_bytes(),
               .type = kernels::ElementType::kBf16,
               .rows = kernels::kTileEntries,
               .weights = nullptr,
               .positions = nullptr,
               .shape = shape_,
               .layout = layout_,
               .prepared = prepared_,
               .tile = tile,
               .summaries = summaries});
}

absl::StatusOr<std::unique_ptr<LaneSet>> LaneSet::Allocate(const LaneSetShape& shape) {
  std::unique_ptr<LaneSet> set(new LaneSet());
  set->shape_ = shape;
  const kernels::TileLayout layout = kernels::LayoutOf(shape.tile);
  set->tile_bytes_ = RoundUp(layout.bytes);
  set->summary_bytes_ = layout.summary_bytes;
  const std::uint64_t tiles = std::uint64_t{shape.lanes} * (shape.tokens / kernels::kTileEntries);
  const std::uint64_t page = PageBytes();
  const std::uint64_t summaries = tiles * set->tile_bytes_;  // where they begin
  const std::uint64_t used = summaries + tiles * set->summary_bytes_;
  const std::uint64_t bytes = (used + page - 1) / page * page;
  absl::StatusOr<Memfd> memory = Memfd::Create("tessera-bench", bytes);
  if (!memory.ok()) return memory.status();
  if (absl::Status status = memory->Prefault(); !status.ok()) return status;
  absl::StatusOr<AddressRange> range = AddressRange::Map(memory->fd(), bytes, Access::kReadWrite);
  if (!range.ok()) return range.status();
  set->memory_ = *std::move(memory);
  set->range_ = *std::move(range);
  set->offsets_.resize(tiles);
  set->summary_offsets_.resize(tiles);
  for (std::uint64_t i = 0; i < tiles; ++i) {
    set->offsets_[i] = i * set->tile_bytes_;
    set->summary_offsets_[i] = summaries + i * set->summary_bytes_;
  }
  return set;
}

void LaneSet::Cut() {
  const std::uint32_t per_lane = shape_.tokens / kernels::kTileEntries;
  const std::uint32_t segments = (shape_.tokens + kSegmentEntries - 1) / kSegmentEntries;
  for (std::uint32_t lane = 0; lane < shape_.lanes; ++lane) {
    for (std::uint32_t s = 0; s < segments; ++s) {
      const std::uint32_t first = s * kSegmentEntries;
      const std::uint32_t tile = lane * per_lane + first / kernels::kTileEntries;
      segments_.push_back({.arena = range_.data(),
                           .arena_bytes = range_.bytes(),
                           .tile_offsets = offsets_.data() + tile,
                           .summary_offsets = summary_offsets_.data() + tile,
                           .first_position = first,
                           .entries = std::min(kSegmentEntries, shape_.tokens - first),
                           .shape = shape_.tile,
                           .rotation = rotation_});
    }
  }
  for (std::uint32_t lane = 0; lane < shape_.lanes; ++lane) {
    lanes_.push_back({.segments = segments_.data() + lane * segments, .segment_count = segments});
  }
}

void LaneSet::FillRandom(std::uint32_t lane) {
  static const std::vector<std::uint16_t> table = NormalTable();
  const std::uint32_t per_lane = shape_.tokens / kernels::kTileEntries;
  std::mt19937_64 random(lane + 1);
  for (std::uint32_t t = 0; t < per_lane; ++t) {
    std::byte* tile = range_.data() + offsets_[lane * per_lane + t];
    for (std::uint64_t at = 0; at < tile_bytes_; at += 10) {  // five numbers of 12 bits each
      std::uint64_t bits = random();
      std::uint16_t numbers[5];
      for (std::uint16_t& number : numbers) {
        number = table[bits & 0xfff];
        bits >>= 12;
      }
      std::memcpy(tile + at, numbers, std::min<std::uint64_t>(sizeof numbers, tile_bytes_ - at));
    }
  }
}

absl::StatusOr<std::unique_ptr<LaneSet>> LaneSet::Random(const LaneSetShape& shape,
                                                         client::ThreadTeam& team) {
  absl::StatusOr<std::unique_ptr<LaneSet>> set = Allocate(shape);
  if (!set.ok()) return set.status();
  team.ParallelFor(
      shape.lanes,
      [](void* context, std::uint32_t lane) { static_cast<LaneSet*>(context)->FillRandom(lane); },
      set->get());
  (*set)->Cut();
  return set;
}

absl::StatusOr<std::unique_ptr<LaneSet>> LaneSet::Encoded(const LaneSet& dense,
                                                          const kernels::TileShape& tile,
                                                          client::ThreadTeam& team) {
  LaneSetShape shape = dense.shape();
  shape.tile = tile;
  absl::StatusOr<std::unique_ptr<LaneSet>> set = Allocate(shape);
  if (!set.ok()) return set.status();
  if (tile.packed()) {
    const std::uint64_t bytes = kernels::RotationBytes(tile, tile.key, kernels::ElementType::kBf16);
    const std::vector<std::byte> rotations = RandomRotations(tile);
    (*set)->rotations_.resize(rotations.size() + kAlignment);
    std::byte* at = Aligned((*set)->rotations_.data());
    std::copy(rotations.begin(), rotations.end(), at);
    (*set)->rotation_ = {.key = at, .value = at + bytes, .type = kernels::ElementType::kBf16};
    if (tile.planes()) (*set)->rotation_ = kernels::BookAt(at, tile.head_dim);
  }
  struct Context {
    const LaneSet* from;
    LaneSet* to;
    TileEncoder encoder;
    std::atomic<bool> failed{false};
  } context{&dense, set->get(), TileEncoder(tile, (*set)->rotation_)};
  team.ParallelFor(
      static_cast<std::uint32_t>(dense.offsets_.size()),
      [](void* raw, std::uint32_t number) {
        Context& shared = *static_cast<Context*>(raw);
        std::byte* const to = shared.to->range_.data();
        if (!shared.encoder.Encode(shared.from->Tile(number), to + shared.to->offsets_[number],
                                   to + shared.to->summary_offsets_[number])) {
          shared.failed = true;
        }
      },
      &context);
  if (context.failed) return absl::InternalError("encoding a benchmark tile failed");
  (*set)->Cut();
  return set;
}

double LaneSet::TileBytesPerToken() const {
  return static_cast<double>(tile_bytes_ + summary_bytes_) / kernels::kTileEntries;
}

double LaneSet::BytesPerToken() const {
  const double tokens = static_cast<double>(shape_.tokens);
  double bytes = TileBytesPerToken();
  if (shape_.tile.packed()) {
    const auto segments = static_cast<double>(lanes_[0].segment_count);
    const double rotations =
        static_cast<double>(kernels::RotationBytes(shape_.tile, kernels::ElementType::kBf16));
    // A book serves all segments of a lane.
    const double book = static_cast<double>(kernels::BookLayoutOf(shape_.tile.head_dim).bytes);
    bytes += (shape_.tile.planes() ? book : segments * rotations) / tokens;
  }
  return bytes;
}

}  // namespace tessera::cli::bench
