#include "kernels/reference/oracle.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/reference/scalar.h"

namespace tessera::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

bool Visible(const OracleQuery& query, std::uint64_t position) {
  if (query.causal && position > query.position) return false;
  const std::uint64_t window = query.geometry->sliding_window;
  return window == 0 || position + window > query.position;
}

// Calls visit(key, value) for every visible entry, in lane order.
template <class Visit>
void ForEachVisible(const OracleQuery& query, Visit visit) {
  const DenseTile tile{query.geometry->head_dim, query.geometry->type};
  const LaneView& lane = *query.lane;
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    const SegmentView& segment = lane.segments[s];
    for (std::uint32_t e = 0; e < segment.entries; ++e) {
      if (!Visible(query, segment.first_position + e)) continue;
      const std::byte* base = segment.arena + segment.tile_offsets[e / kTileEntries];
      visit(base + tile.key_offset(e % kTileEntries), base + tile.value_offset(e % kTileEntries));
    }
  }
  for (std::uint64_t t = lane.tail.begin; t < lane.tail.end; ++t) {
    if (!Visible(query, t)) continue;
    const std::byte* base =
        lane.tail.ring + (t / kTileEntries) % lane.tail.ring_tiles * tile.bytes();
    visit(base + tile.key_offset(t % kTileEntries), base + tile.value_offset(t % kTileEntries));
  }
}

double Logit(const LayerGeometry& geometry, const std::byte* query, const std::byte* key) {
  const double logit = geometry.scale * Dot(query, key, geometry.head_dim, geometry.type);
  if (geometry.logit_softcap == 0) return logit;
  return geometry.logit_softcap * std::tanh(logit / geometry.logit_softcap);
}

double AbsoluteDot(const LayerGeometry& geometry, const std::byte* query, const std::byte* key) {
  double sum = 0;
  for (std::uint32_t c = 0; c < geometry.head_dim; ++c) {
    sum += std::fabs(ElementAt(query, c, geometry.type) * ElementAt(key, c, geometry.type));
  }
  return sum * std::fabs(geometry.scale);
}

}  // namespace

OracleAnswer AttendByDefinition(const OracleQuery& query, double* output) {
  const LayerGeometry& geometry = *query.geometry;
  const auto* row = static_cast<const std::byte*>(query.row);
  const double sink = geometry.sinks == nullptr ? -kInfinity : geometry.sinks[query.query_head];
  OracleAnswer answer = {.lse = -kInfinity, .logit_mass = 0, .value_peak = 0, .visible = 0};

  double max = sink;
  ForEachVisible(query, [&](const std::byte* key, const std::byte*) {
    max = std::max(max, Logit(geometry, row, key));
    answer.logit_mass = std::max(answer.logit_mass, AbsoluteDot(geometry, row, key));
    ++answer.visible;
  });
  std::fill_n(output, geometry.head_dim, 0.0);
  if (max == -kInfinity) return answer;

  double sum = std::exp(sink - max);
  ForEachVisible(query, [&](const std::byte* key, const std::byte* value) {
    const double weight = std::exp(Logit(geometry, row, key) - max);
    sum += weight;
    for (std::uint32_t c = 0; c < geometry.head_dim; ++c) {
      const double element = ElementAt(value, c, geometry.type);
      output[c] += weight * element;
      answer.value_peak = std::max(answer.value_peak, std::fabs(element));
    }
  });
  for (std::uint32_t c = 0; c < geometry.head_dim; ++c) output[c] /= sum;
  answer.lse = max + std::log(sum);
  return answer;
}

}  // namespace tessera::kernels
