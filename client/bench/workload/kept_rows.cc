#include "client/bench/workload/kept_rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/implementation.h"
#include "kernels/strategy/aligned_bytes.h"

namespace tessera::cli::bench {

namespace {

using kernels::kTileEntries;

struct alignas(64) TileRows {
  float elements[kTileEntries * 256];
};

// The rotation of keys or of values.
struct Side {
  const std::byte* matrix;
  kernels::ElementType type;
  std::uint32_t channels;
  std::uint32_t head_dim;
  std::uint32_t padded;
};

void TurnBack(const Side& side, const TileRows& rotated, std::uint32_t count,
              std::vector<float>& to) {
  const std::size_t before = to.size();
  to.resize(before + std::size_t{count} * side.head_dim);
  BenchOperations().unrotate({.rotation = side.matrix,
                              .rotation_type = side.type,
                              .channels = side.channels,
                              .head_dim = side.head_dim,
                              .rows = rotated.elements,
                              .padded_channels = side.padded,
                              .row_count = count,
                              .output = to.data() + before});
}

void Turn(const Side& side, const kernels::RowSpan& rows, TileRows& rotated) {
  const std::byte* pointers[kTileEntries];
  for (std::uint32_t r = 0; r < rows.count; ++r) pointers[r] = rows.row(r);
  BenchOperations().rotate({.rotation = side.matrix,
                            .rotation_type = side.type,
                            .channels = side.channels,
                            .head_dim = side.head_dim,
                            .rows = pointers,
                            .row_type = rows.type,
                            .row_count = static_cast<std::uint32_t>(rows.count),
                            .output = rotated.elements,
                            .padded_channels = side.padded});
}

// A mask of the `count` channels with the largest second moments.
std::vector<std::uint8_t> StrongestChannels(const kernels::RowSpan& rows, const Side& side,
                                            std::uint32_t count) {
  std::vector<double> moments(side.channels);
  TileRows rotated;
  for (std::uint64_t first = 0; first < rows.count; first += kTileEntries) {
    const std::uint64_t more = std::min<std::uint64_t>(kTileEntries, rows.count - first);
    Turn(side, rows.Slice(first, more), rotated);
    for (std::uint64_t r = 0; r < more; ++r) {
      for (std::uint32_t c = 0; c < side.channels; ++c) {
        const double element = rotated.elements[r * side.padded + c];
        moments[c] += element * element;
      }
    }
  }
  std::vector<std::uint32_t> order(side.channels);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::uint32_t a, std::uint32_t b) { return moments[a] > moments[b]; });
  std::vector<std::uint8_t> mask(side.channels);
  for (std::uint32_t i = 0; i < count; ++i) mask[order[i]] = 1;
  return mask;
}

std::vector<float> MaskSide(const kernels::RowSpan& rows, const Side& side,
                            std::uint32_t channels) {
  const std::vector<std::uint8_t> mask = StrongestChannels(rows, side, channels);
  std::vector<float> kept;
  TileRows rotated;
  for (std::uint64_t first = 0; first < rows.count; first += kTileEntries) {
    const std::uint64_t more = std::min<std::uint64_t>(kTileEntries, rows.count - first);
    Turn(side, rows.Slice(first, more), rotated);
    for (std::uint64_t r = 0; r < more; ++r) {
      for (std::uint32_t c = 0; c < side.channels; ++c) {
        float& element = rotated.elements[r * side.padded + c];
        element = mask[c] != 0 ? kernels::Bf16ToFloat(kernels::FloatToBf16(element)) : 0;
      }
    }
    TurnBack(side, rotated, static_cast<std::uint32_t>(more), kept);
  }
  return kept;
}

double MaskBytes(const kernels::LaneRows& rows, std::uint32_t channels, bool rotated) {
  const double vectors = rotated ? rows.keys.head_dim : 0;
  return 2 * sizeof(std::uint16_t) * channels * (static_cast<double>(rows.keys.count) + vectors);
}

}  // namespace

const kernels::Operations& BenchOperations() {
  return kernels::OperationsOf(kernels::BestImplementation());
}

absl::StatusOr<KeptRows> ThroughTiles(const kernels::LaneRows& rows,
                                      const kernels::TileShape& shape,
                                      const kernels::RotationView& rotation) {
  const kernels::Operations& operations = BenchOperations();
  const kernels::TileLayout layout = kernels::LayoutOf(shape);
  kernels::AlignedBytes prepared(operations.prepared_bytes(shape, rows.keys.type));
  operations.prepare_encode(shape, rows.keys.type, rotation, prepared.data());
  kernels::AlignedBytes tile(kernels::TileAndSummaryBytes(layout));
  const std::uint32_t padded = kernels::PaddedChannels(shape);
  const auto side = [&](const std::byte* matrix, const kernels::RowShape& row) -> Side {
    return {matrix, rotation.type, row.channels, shape.head_dim, padded};
  };
  KeptRows kept = {.lane = {.head_dim = shape.head_dim, .keys = {}, .values = {}},
                   .bytes = kernels::BytesPerEntry(shape, rotation.type, rows.keys.count) *
                            static_cast<double>(rows.keys.count)};
  if (rotation.key == nullptr) {
    kept.bytes -= static_cast<double>(kernels::RotationBytes(shape, rotation.type));
  }
  TileRows keys;
  TileRows values;
  for (std::uint64_t first = 0; first < rows.keys.count; first += kTileEntries) {
    const auto count =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(kTileEntries, rows.keys.count - first));
    if (!operations.encode({.key = rows.keys.row(first),
                            .value = rows.values.row(first),
                            .stride = rows.keys.row_bytes(),
                            .type = rows.keys.type,
                            .rows = count,
                            .weights = nullptr,
                            .positions = nullptr,
                            .shape = shape,
                            .layout = layout,
                            .prepared = prepared.data(),
                            .tile = tile.data(),
                            .summaries = kernels::SummariesAfter(tile.data(), layout)})) {
      return absl::InternalError(Concat("encoding the tile of entry ", first, " failed"));
    }
    operations.decode({.tile = tile.data(),
                       .shape = shape,
                       .layout = layout,
                       .rows = count,
                       .padded_channels = padded,
                       .keys = keys.elements,
                       .values = values.elements});
    TurnBack(side(rotation.key, shape.key), keys, count, kept.lane.keys);
    TurnBack(side(rotation.value, shape.value), values, count, kept.lane.values);
  }
  return kept;
}

KeptRows ThroughMask(const kernels::LaneRows& rows, std::uint32_t channels,
                     const kernels::RotationView& rotation) {
  const std::uint32_t dim = rows.keys.head_dim;
  TESSERA_CHECK(channels <= dim, "the mask has at most head_dim channels");
  const auto side = [&](const std::byte* matrix) -> Side {
    return {matrix, rotation.type, dim, dim, dim};
  };
  return {.lane = {.head_dim = dim,
                   .keys = MaskSide(rows.keys, side(rotation.key), channels),
                   .values = MaskSide(rows.values, side(rotation.value), channels)},
          .bytes = MaskBytes(rows, channels, rotation.key != nullptr)};
}

std::uint32_t ChannelsWithin(double bytes, const kernels::LaneRows& rows, bool rotated) {
  const double channels = bytes / MaskBytes(rows, 1, rotated);
  return std::clamp(static_cast<std::uint32_t>(channels), 1u, rows.keys.head_dim);
}

kernels::StrategyOptions FixedOptions(double share, std::uint32_t group) {
  return {.kept = {share}, .groups = {group}, .summary = kernels::Summary::kNone, .blocks = {}};
}

kernels::Strategy StrategyFor(const kernels::LaneRows& rows,
                              const kernels::StrategyOptions& options) {
  kernels::Moments keys(rows.keys.head_dim);
  kernels::Moments values(rows.keys.head_dim);
  keys.Add(rows.keys, BenchOperations());
  values.Add(rows.values, BenchOperations());
  return kernels::MakeStrategy(rows, keys, values, options, BenchOperations());
}

EveryOtherTile::EveryOtherTile(const kernels::LaneRows& rows, bool odd) : like_(rows.keys) {
  for (std::uint64_t first = odd ? kTileEntries : 0; first < rows.keys.count;
       first += 2 * kTileEntries) {
    const std::uint64_t count = std::min<std::uint64_t>(kTileEntries, rows.keys.count - first);
    const std::size_t bytes = count * rows.keys.row_bytes();
    keys_.insert(keys_.end(), rows.keys.row(first), rows.keys.row(first) + bytes);
    values_.insert(values_.end(), rows.values.row(first), rows.values.row(first) + bytes);
  }
}

kernels::LaneRows EveryOtherTile::rows() const {
  kernels::RowSpan keys = like_;
  keys.data = keys_.data();
  keys.count = keys_.size() / like_.row_bytes();
  kernels::RowSpan values = keys;
  values.data = values_.data();
  return {.keys = keys, .values = values};
}

void EveryOtherTile::Append(const EveryOtherTile& more) {
  keys_.insert(keys_.end(), more.keys_.begin(), more.keys_.end());
  values_.insert(values_.end(), more.values_.begin(), more.values_.end());
}

}  // namespace tessera::cli::bench
