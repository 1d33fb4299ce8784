#include "kernels/reference/oracle.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/reference/scalar.h"
#include "kernels/reference/tile_row.h"

namespace tessera::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool Visible(const OracleQuery& query, std::uint64_t position) {
  if (query.causal && position > query.position) return false;
  const std::uint64_t window = query.geometry->sliding_window;
  return window == 0 || position + window > query.position;
}

// R as doubles; empty for the identity.
std::vector<double> ReadRotation(const std::byte* rotation, ElementType type,
                                 std::size_t elements) {
  std::vector<double> read;
  for (std::size_t i = 0; rotation != nullptr && i < elements; ++i) {
    read.push_back(ElementAt(rotation, i, type));
  }
  return read;
}

// R^T y.
void Unrotate(const std::vector<double>& rotation, const double* row, std::uint32_t channels,
              std::uint32_t head_dim, double* output) {
  if (rotation.empty()) {
    std::copy_n(row, head_dim, output);
    return;
  }
  std::fill_n(output, head_dim, 0.0);
  for (std::uint32_t c = 0; c < channels; ++c) {
    if (row[c] == 0) continue;
    const double* r = &rotation[std::size_t{c} * head_dim];
    for (std::uint32_t d = 0; d < head_dim; ++d) output[d] += r[d] * row[c];
  }
}

// The position of entry e, computed independently of the kernels' position code.
std::uint64_t PositionOfEntry(const SegmentView& segment, std::uint32_t e) {
  if (!segment.shape.positions) return segment.first_position + e;
  const std::byte* tile = segment.arena + segment.tile_offsets[e / kTileEntries];
  std::uint32_t word;
  std::memcpy(&word, tile + LayoutOf(segment.shape).positions + e % kTileEntries * sizeof(word),
              sizeof(word));
  return segment.first_position + word;
}

double Peak(const double* row, std::uint32_t count) {
  double peak = 0;
  for (std::uint32_t i = 0; i < count; ++i) peak = std::max(peak, std::fabs(row[i]));
  return peak;
}

}  // namespace

// What the rows of one segment, or of the tail, have in common.
struct ExactLane::Source {
  std::uint32_t space;
  RowShape key;
  RowShape value;
  std::vector<double> value_rotation;
  std::vector<double> value_mean;
};

double* ExactLane::Rows(std::size_t elements) { return rows_.emplace_back(elements).data(); }

void ExactLane::Add(const Source& source, std::uint64_t position, double log_weight,
                    const double* key, const double* value) {
  double* rows = Rows(2 * std::size_t{head_dim_} + source.key.channels);
  double* exact_value = rows + head_dim_;
  double* stored = rows + 2 * std::size_t{head_dim_};
  Unrotate(spaces_[source.space].rotation, key, source.key.channels, head_dim_, rows);
  Unrotate(source.value_rotation, value, source.value.channels, head_dim_, exact_value);
  std::copy_n(key, source.key.channels, stored);
  const std::vector<double>& mean = spaces_[source.space].mean;
  for (std::size_t d = 0; d < mean.size(); ++d) rows[d] += mean[d];
  for (std::size_t d = 0; d < source.value_mean.size(); ++d) exact_value[d] += source.value_mean[d];
  entries_.push_back(
      {.position = position,
       .log_weight = log_weight,
       .key = rows,
       .value = exact_value,
       .stored = stored,
       .value_peak = std::max(Peak(exact_value, head_dim_), Peak(value, source.value.channels)),
       .space = source.space});
}

ExactLane::ExactLane(const LaneView& lane, const LayerGeometry& geometry)
    : head_dim_(geometry.head_dim) {
  double key[kMaxChannels];
  double value[kMaxChannels];
  spaces_.push_back({.channels = head_dim_, .rotation = {}, .mean = {}, .planes = 0});
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    const SegmentView& segment = lane.segments[s];
    const TileShape& shape = segment.shape;
    const TileLayout layout = LayoutOf(shape);
    Source source = {
        .space = 0, .key = shape.key, .value = shape.value, .value_rotation = {}, .value_mean = {}};
    if (shape.packed()) {
      const RotationView& rotation = segment.rotation;
      source.space = static_cast<std::uint32_t>(spaces_.size());
      source.value_rotation = ReadRotation(rotation.value, rotation.type,
                                           std::size_t{shape.value.channels} * head_dim_);
      spaces_.push_back({.channels = shape.key.channels,
                         .rotation = ReadRotation(rotation.key, rotation.type,
                                                  std::size_t{shape.key.channels} * head_dim_),
                         .mean = ReadRotation(rotation.key_mean, ElementType::kBf16, head_dim_),
                         .planes = shape.key_planes.planes()});
      source.value_mean = ReadRotation(rotation.value_mean, ElementType::kBf16, head_dim_);
    }
    for (std::uint32_t e = 0; e < segment.entries; ++e) {
      const std::byte* tile = segment.arena + segment.tile_offsets[e / kTileEntries];
      const std::uint32_t row = e % kTileEntries;
      ReadKey(shape, layout, tile, row, key);
      ReadValue(shape, layout, tile, row, value);
      Add(source, PositionOfEntry(segment, e), std::log(WeightOf(shape, layout, tile, row)), key,
          value);
    }
  }
  const TileShape shape = DenseShape(head_dim_, geometry.type);
  const TileLayout layout = LayoutOf(shape);
  const Source source = {
      .space = 0, .key = shape.key, .value = shape.value, .value_rotation = {}, .value_mean = {}};
  for (std::uint64_t t = lane.tail.begin; t < lane.tail.end; ++t) {
    const std::byte* tile =
        lane.tail.ring + (t / kTileEntries) % lane.tail.ring_tiles * std::size_t{layout.bytes};
    ReadRow(KeyRow(shape, layout, tile, t % kTileEntries), key);
    ReadRow(ValueRow(shape, layout, tile, t % kTileEntries), value);
    Add(source, t, 0, key, value);
  }
}

namespace {

// A query row in double, and |R_k q| per space, the values an implementation computes with.
struct ExactQuery {
  ExactQuery(const OracleQuery& query, const ExactLane& lane)
      : geometry(*query.geometry), row(geometry.head_dim) {
    double squares = 0;
    for (std::uint32_t d = 0; d < geometry.head_dim; ++d) {
      row[d] = ElementAt(static_cast<const std::byte*>(query.row), d, geometry.type);
      squares += row[d] * row[d];
    }
    const double mean_channel = std::sqrt(squares / geometry.head_dim);
    for (const ExactLane::Space& space : lane.spaces()) {
      std::vector<double>& magnitudes = rotated.emplace_back(space.channels);
      for (std::uint32_t c = 0; c < space.channels; ++c) {
        if (space.rotation.empty()) {
          magnitudes[c] = std::fabs(row[c]);
          continue;
        }
        double sum = 0;
        for (std::uint32_t d = 0; d < geometry.head_dim; ++d) {
          sum += space.rotation[std::size_t{c} * geometry.head_dim + d] * row[d];
        }
        magnitudes[c] = std::max(std::fabs(sum), mean_channel);
      }
      double with_mean = 0;
      for (std::size_t d = 0; d < space.mean.size(); ++d) {
        with_mean += std::fabs(row[d] * space.mean[d]);
      }
      mean_mass.push_back(with_mean);
      const std::uint32_t plane = space.planes == 0 ? 1 : space.channels / space.planes;
      for (auto first = magnitudes.begin(); first != magnitudes.end(); first += plane) {
        std::fill_n(first, plane, *std::max_element(first, first + plane));
      }
    }
  }

  double Logit(const ExactLane::Entry& entry) const {
    double logit = 0;
    for (std::uint32_t d = 0; d < geometry.head_dim; ++d) logit += row[d] * entry.key[d];
    logit *= geometry.scale;
    if (geometry.logit_softcap != 0) {
      logit = geometry.logit_softcap * std::tanh(logit / geometry.logit_softcap);
    }
    return logit + entry.log_weight;
  }

  double Mass(const ExactLane::Entry& entry) const {
    const std::vector<double>& magnitudes = rotated[entry.space];
    double sum = mean_mass[entry.space];
    for (std::size_t c = 0; c < magnitudes.size(); ++c) {
      sum += magnitudes[c] * std::fabs(entry.stored[c]);
    }
    return sum * std::fabs(geometry.scale) + std::fabs(entry.log_weight);
  }

  const LayerGeometry& geometry;
  std::vector<double> row;
  std::vector<std::vector<double>> rotated;  // per space: |R_k q|
  std::vector<double> mean_mass;             // per space: sum |q_d mu_d|
};

}  // namespace

OracleAnswer AttendByDefinition(const OracleQuery& query, const ExactLane& lane, double* output) {
  const LayerGeometry& geometry = *query.geometry;
  const ExactQuery exact(query, lane);
  const double sink = geometry.sinks == nullptr ? -kInfinity : geometry.sinks[query.query_head];
  OracleAnswer answer = {.lse = -kInfinity, .logit_mass = 0, .value_peak = 0, .visible = 0};

  double max = sink;
  for (const ExactLane::Entry& entry : lane.entries()) {
    if (!Visible(query, entry.position) || entry.log_weight == -kInfinity) continue;
    max = std::max(max, exact.Logit(entry));
    answer.logit_mass = std::max(answer.logit_mass, exact.Mass(entry));
    ++answer.visible;
  }
  std::fill_n(output, geometry.head_dim, 0.0);
  if (max == -kInfinity) return answer;

  double sum = std::exp(sink - max);
  for (const ExactLane::Entry& entry : lane.entries()) {
    if (!Visible(query, entry.position) || entry.log_weight == -kInfinity) continue;
    const double weight = std::exp(exact.Logit(entry) - max);
    sum += weight;
    for (std::uint32_t d = 0; d < geometry.head_dim; ++d) output[d] += weight * entry.value[d];
    answer.value_peak = std::max(answer.value_peak, entry.value_peak);
  }
  for (std::uint32_t d = 0; d < geometry.head_dim; ++d) output[d] /= sum;
  answer.lse = max + std::log(sum);
  return answer;
}

OracleAnswer AttendByDefinition(const OracleQuery& query, double* output) {
  return AttendByDefinition(query, ExactLane(*query.lane, *query.geometry), output);
}

}  // namespace tessera::kernels
