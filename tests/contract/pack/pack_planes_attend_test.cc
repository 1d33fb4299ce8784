// Attention over parts of planes, against its definition in double.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "tests/contract/pack/pack_planes.h"

namespace tessera::kernels {
namespace {

class PlanesAttendTest : public PlanesSuite {};

// One part over random tiles: whole ones, or scattered quads.
struct PartCase {
  PartCase(const TileShape& shape_of_tiles, TestRandom& random) : shape(shape_of_tiles) {
    const bool scattered = random.OneIn(2);
    for (std::uint64_t t = random.Between(1, 6); t > 0; --t) {
      const auto rows =
          static_cast<std::uint32_t>(t > 1 ? kTileEntries : random.Between(1, kTileEntries));
      tiles.push_back(AnyTile(shape, rows, random));
      const std::uint64_t base = shape.positions ? 0 : 100 * tiles.size();
      if (!scattered) {
        runs.push_back({tiles.back().data(), base, 0, rows});
        continue;
      }
      for (std::uint32_t q = 0; q < rows; q += kQuadRows) {
        if (random.OneIn(2)) continue;
        const std::uint32_t count = std::min(kQuadRows, rows - q);
        runs.push_back({tiles.back().data(), shape.positions ? base : base + q, q, count});
      }
    }
    constexpr std::uint32_t kGroups[] = {1, 2, 3, 4, 7, 8, 32};
    group = random.Pick(kGroups);
    for (std::uint32_t r = 0; r < group; ++r) {
      queries.emplace_back(shape.head_dim * sizeof(float));
      auto* row = reinterpret_cast<float*>(queries.back().data());
      for (std::uint32_t c = 0; c < shape.head_dim; ++c) row[c] = NormalNumber(random);
      const std::uint64_t begin = random.OneIn(2) ? 0 : random.Below(250);
      rows.push_back({queries.back().data(), begin,
                      random.OneIn(2) ? ~std::uint64_t{0} : begin + random.Below(400),
                      NormalNumber(random)});
    }
  }

  void ShowEverything() {
    for (QueryRow& row : rows) {
      row.visible_begin = 0;
      row.visible_end = ~std::uint64_t{0};
    }
  }

  AttendPart Part(float softcap) const {
    return {.runs = runs.data(),
            .rows = rows.data(),
            .run_count = static_cast<std::uint32_t>(runs.size()),
            .row_count = group,
            .shape = shape,
            .layout = LayoutOf(shape),
            .padded_channels = shape.head_dim,
            .scale = 1 / std::sqrt(static_cast<float>(shape.head_dim)),
            .logit_softcap = softcap,
            .lookahead = {}};
  }

  TileShape shape;
  std::vector<std::vector<std::byte>> tiles;
  std::vector<RowRun> runs;
  std::uint32_t group;
  std::vector<Buffer> queries;
  std::vector<QueryRow> rows;
};

// The results of one query row by definition, and how far 8-bit weights may move its output.
struct ExactPart {
  double max = -HUGE_VAL;
  double sum = 0;
  std::vector<double> output;
  std::vector<double> moved;
};

ExactPart AttendExactly(const PartCase& part, const AttendPart& job, std::uint32_t row) {
  const TileShape& shape = part.shape;
  const TileLayout layout = LayoutOf(shape);
  const SidePlanes keys = KeyPlanes(shape, layout);
  const SidePlanes values = ValuePlanes(shape, layout);
  std::vector<double> query(shape.head_dim);
  RoundQueryToCodes(reinterpret_cast<const float*>(part.rows[row].query), keys.planes,
                    keys.channels, query.data());
  struct Entry {
    double x;
    std::vector<double> value;
    std::size_t batch;
    double scales[kMaxPlanes];
  };
  std::vector<Entry> entries;
  std::size_t quads = 0;
  ExactPart exact = {.output = std::vector<double>(shape.head_dim),
                     .moved = std::vector<double>(shape.head_dim)};
  for (const RowRun& run : part.runs) {
    for (std::uint32_t i = 0; i < run.row_count; ++i) {
      const std::uint32_t r = run.row_begin + i;
      if (i % kQuadRows == 0) ++quads;
      std::uint64_t position = run.position + i;
      float weight = 1;
      if (shape.positions) {
        std::uint32_t word;
        std::memcpy(&word, run.tile + layout.positions + 4 * r, 4);
        position = run.position + word;
      }
      if (shape.weights) std::memcpy(&weight, run.tile + layout.weights + 4 * r, 4);
      if (position < part.rows[row].visible_begin || position >= part.rows[row].visible_end) {
        continue;
      }
      std::vector<double> key(shape.head_dim);
      Entry entry = {.x = 0,
                     .value = std::vector<double>(shape.head_dim),
                     .batch = (quads - 1) / kTileQuads,
                     .scales = {}};
      for (std::uint32_t p = 0; p < values.planes; ++p) {
        entry.scales[p] = ReadScale(values, run.tile, r, p);
      }
      ReadPlanesRow(keys, run.tile, r, key.data());
      ReadPlanesRow(values, run.tile, r, entry.value.data());
      double logit = part.rows[row].mean_product;
      for (std::uint32_t c = 0; c < shape.head_dim; ++c) logit += query[c] * key[c];
      logit *= job.scale;
      if (job.logit_softcap != 0) logit = job.logit_softcap * std::tanh(logit / job.logit_softcap);
      entry.x = logit * 1.4426950408889634 + std::log2(weight);
      exact.max = std::max(exact.max, entry.x);
      if (entry.x > -HUGE_VAL) entries.push_back(std::move(entry));
    }
  }
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const double weight = std::exp2(entries[i].x - exact.max);
    exact.sum += weight;
    for (std::uint32_t c = 0; c < shape.head_dim; ++c) {
      exact.output[c] += weight * entries[i].value[c];
    }
  }
  // A weight times its scale is off by at most half a unit: the batch's largest over 255.
  for (std::uint32_t p = 0; p < values.planes; ++p) {
    const double centre = ((1u << values.width[p]) - 1) / 2.0;
    for (std::size_t b = 0; b <= quads / kTileQuads; ++b) {
      double top = 0;
      double count = 0;
      for (const Entry& entry : entries) {
        if (entry.batch != b) continue;
        top = std::max(top, std::exp2(entry.x - exact.max) * entry.scales[p]);
        ++count;
      }
      for (std::uint32_t c = 0; c < values.channels; ++c) {
        exact.moved[p * values.channels + c] += count * top / (2 * 255) * centre;
      }
    }
  }
  return exact;
}

TEST_P(PlanesAttendTest, AttendIsWithinTheRoundingOfItsWeights) {
  for (int round = 0; round < Rounds(120); ++round) {
    const PartCase part(AnyPlanes(random_), random_);
    const AttendPart job = part.Part(random_.OneIn(3) ? 2.0f : 0.0f);
    std::vector<float> max(part.group);
    std::vector<float> sum(part.group);
    const Buffer output(part.group * part.shape.head_dim * sizeof(float));
    const auto* rows = reinterpret_cast<const float*>(output.data());
    ExpectRan(
        ops().attend_part(job, {max.data(), sum.data(), reinterpret_cast<float*>(output.data())}));
    for (std::uint32_t r = 0; r < part.group; ++r) {
      SCOPED_TRACE(Describe(part.shape) + " row " + std::to_string(r) + " of " +
                   std::to_string(part.group));
      const ExactPart exact = AttendExactly(part, job, r);
      if (exact.max == -HUGE_VAL) {
        ASSERT_EQ(sum[r], 0);
        ASSERT_EQ(max[r], exact.max);
        continue;
      }
      ASSERT_NEAR(max[r], exact.max, 1e-3);
      const double relative = std::exp2(max[r] - exact.max);
      ASSERT_NEAR(sum[r] * relative, exact.sum, exact.sum * 1e-3);
      for (std::uint32_t c = 0; c < part.shape.head_dim; ++c) {
        const double got = rows[r * part.shape.head_dim + c] * relative;
        const double moved = name() == "reference" ? 0 : exact.moved[c];
        ASSERT_NEAR(got, exact.output[c], moved + 2e-3 * (exact.sum * 4 + 1)) << "channel " << c;
      }
    }
  }
}

// The error of 8-bit weights averages out: on rows of similar scales it is far below the bound.
TEST_P(PlanesAttendTest, AttendIsAccurateOnAverage) {
  const TileShape shape = PlanesShape(128, {6, 4}, {4, 0});
  double squares = 0;
  double energy = 0;
  for (int round = 0; round < 20; ++round) {
    const TestBook book(shape, random_);
    TileInput input(shape, ElementType::kBf16, kTileEntries, Content::kNormal, random_);
    const auto tile = EncodeTile(reference(), shape, input, book.view());
    ASSERT_TRUE(tile.has_value());
    PartCase part(shape, random_);
    part.runs = {{tile->data(), 0, 0, kTileEntries}};
    part.ShowEverything();
    const AttendPart job = part.Part(0);
    std::vector<float> max(part.group);
    std::vector<float> sum(part.group);
    const Buffer output(part.group * shape.head_dim * sizeof(float));
    ops().attend_part(job, {max.data(), sum.data(), reinterpret_cast<float*>(output.data())});
    const ExactPart exact = AttendExactly(part, job, 0);
    for (std::uint32_t c = 0; c < shape.head_dim; ++c) {
      const double off = reinterpret_cast<const float*>(output.data())[c] - exact.output[c];
      squares += off * off;
      energy += exact.output[c] * exact.output[c];
    }
  }
  ASSERT_LE(std::sqrt(squares / energy), 0x1p-7);
}

TEST_P(PlanesAttendTest, NanInAQueryIsSeen) {
  PartCase part(PlanesShape(64, {6, 4}, {4, 0}), random_);
  part.ShowEverything();
  auto* query = reinterpret_cast<float*>(part.queries[0].data());
  query[random_.Below(64)] = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> max(part.group);
  std::vector<float> sum(part.group);
  const Buffer output(part.group * 64 * sizeof(float));
  if (part.runs.empty()) part.runs.push_back({part.tiles[0].data(), 0, 0, 1});
  ops().attend_part(part.Part(0),
                    {max.data(), sum.data(), reinterpret_cast<float*>(output.data())});
  ASSERT_TRUE(std::isnan(sum[0]));
  if (part.group > 1) {
    ASSERT_FALSE(std::isnan(sum[1]));
  }
}

INSTANTIATE_TEST_SUITE_P(Cpu, PlanesAttendTest, testing::ValuesIn(PlanesSubjects()),
                         PackSubjectName);

}  // namespace
}  // namespace tessera::kernels
