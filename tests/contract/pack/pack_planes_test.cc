// Planes and signs as separate calls, against their definition in double.
#include "tests/contract/pack/pack_planes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace tessera::kernels {
namespace {

constexpr ElementType kRowTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};

// R (x - mu), computed as the reference defines it.
std::vector<double> CentredAndRotated(const RotationView& book, const TileInput& input, bool value,
                                      std::uint32_t row) {
  std::vector<double> x = input.Row(value, row);
  const std::byte* mean = value ? book.value_mean : book.key_mean;
  for (std::size_t d = 0; d < x.size(); ++d) {
    std::uint16_t bits;
    std::memcpy(&bits, mean + 2 * d, sizeof(bits));
    x[d] -= Bf16ToFloat(bits);
  }
  return RotateExactly(value ? book.value : book.key, book.type,
                       static_cast<std::uint32_t>(x.size()), x);
}

double LengthOf(const std::vector<double>& row) {
  double squares = 0;
  for (double element : row) squares += element * element;
  return std::sqrt(squares);
}

class PlanesTest : public PlanesSuite {
 protected:
  // A tile of these rows, and behind it its index.
  static std::vector<std::byte> Gathered(const Operations& operations, const TileShape& from,
                                         const TileShape& to, const std::vector<GatherRow>& rows) {
    const TileLayout layout = LayoutOf(to);
    std::vector<std::byte> tile(layout.bytes + layout.summary_bytes, std::byte{0xa5});
    operations.gather({.rows = rows.data(),
                       .row_count = static_cast<std::uint32_t>(rows.size()),
                       .from = from,
                       .from_layout = LayoutOf(from),
                       .to = to,
                       .to_layout = layout,
                       .tile = tile.data(),
                       .summaries = tile.data() + layout.bytes});
    return tile;
  }
  // Every code must be a nearest one for its step, and the scale the least-squares one.
  void JudgeRow(const SidePlanes& side, const std::byte* tile, std::uint32_t row,
                const std::vector<double>& z, double off) {
    for (std::uint32_t p = 0; p < side.planes; ++p) {
      const double* plane = z.data() + p * side.channels;
      const double half = 1u << (side.width[p] - 1);
      double top = 0;
      for (std::uint32_t c = 0; c < side.channels; ++c) top = std::max(top, std::fabs(plane[c]));
      double yz = 0;
      double yy = 0;
      for (std::uint32_t c = 0; c < side.channels; ++c) {
        const double y = ReadCode(side, tile, row, p, c) - half + 0.5;
        const double t = std::clamp(plane[c] / (top / half), 0.5 - half, half - 0.5);
        ASSERT_LE(std::fabs(y - t), 0.5 + 2 * off * half / top) << "channel " << c;
        yz += y * plane[c];
        yy += y * y;
      }
      const double scale = std::max(yz / yy, 0.0);
      ASSERT_NEAR(ReadScale(side, tile, row, p), scale, scale * 0x1p-8 + 2 * off);
    }
  }

  // The index of the key z, except for channels near zero.
  static void JudgeSigns(const TileShape& shape, const std::byte* summaries,
                         const std::vector<double>& z, std::uint32_t row) {
    const TileLayout layout = LayoutOf(shape);
    double norm = 0;
    for (std::uint32_t c = 0; c < shape.head_dim; ++c) {
      norm += std::fabs(z[c]) / shape.head_dim;
      if (c >= shape.head_dim / 2 || std::fabs(z[c]) < 1e-3) continue;
      const auto byte = std::to_integer<unsigned>(
          summaries[layout.block_bits + row * SignBytes(shape.head_dim) + c / 8]);
      ASSERT_EQ(byte >> c % 8 & 1u, z[c] >= 0 ? 1u : 0u) << "channel " << c;
    }
    const double k = std::to_integer<int>(summaries[layout.block_data + row]);
    ASSERT_NEAR(k, (std::log2(norm) + 16) * 8, 0.51);
  }
};

TEST_P(PlanesTest, EncodeTakesTheNearestCodesAndTheBestScales) {
  for (int round = 0; round < Rounds(150); ++round) {
    const TileShape shape = AnyPlanes(random_);
    const TestBook book(shape, random_);
    TileInput input(shape, random_.Pick(kRowTypes),
                    static_cast<std::uint32_t>(random_.Between(1, kTileEntries)), Content::kNormal,
                    random_);
    const auto tile = EncodeTile(ops(), shape, input, book.view());
    ASSERT_TRUE(tile.has_value());
    const TileLayout layout = LayoutOf(shape);
    const std::byte* summaries = tile->data() + layout.bytes;
    for (std::uint32_t r = 0; r < input.rows(); ++r) {
      SCOPED_TRACE(Describe(shape) + " row " + std::to_string(r));
      for (const bool value : {false, true}) {
        const std::vector<double> z = CentredAndRotated(book.view(), input, value, r);
        const SidePlanes side = value ? ValuePlanes(shape, layout) : KeyPlanes(shape, layout);
        JudgeRow(side, tile->data(), r, z,
                 subject().rotation_error * (LengthOf(input.Row(value, r)) + 50));
        if (HasFatalFailure()) return;
        if (value || shape.summary != Summary::kSigns) continue;
        JudgeSigns(shape, summaries, z, r);
        if (HasFatalFailure()) return;
      }
    }
    // Rows without an entry are zeros, for the bytes of a tile to depend on its rows alone.
    const SidePlanes keys = KeyPlanes(shape, layout);
    for (std::uint32_t r = input.rows(); r < kTileEntries; ++r) {
      ASSERT_EQ(ReadScale(keys, tile->data(), r, 0), 0);
      ASSERT_EQ(ReadCode(keys, tile->data(), r, 0, 0), 0u);
    }
  }
}

// The rows are stored as they are; the index is that of the centred and rotated keys.
TEST_P(PlanesTest, DenseRowsHaveSigns) {
  for (int round = 0; round < Rounds(60); ++round) {
    TileShape shape = WithSigns(DenseShape(random_.Pick(kHeadDims), random_.Pick(kRowTypes)));
    shape.weights = random_.OneIn(2);
    const TestBook book(shape, random_);
    const TileInput input(shape, ElementsOf(shape.format),
                          static_cast<std::uint32_t>(random_.Between(1, kTileEntries)),
                          Content::kNormal, random_);
    const auto tile = EncodeTile(ops(), shape, input, book.view());
    ASSERT_TRUE(tile.has_value());
    const TileLayout layout = LayoutOf(shape);
    const auto exact = EncodeTile(reference(), shape, input, book.view());
    ASSERT_TRUE(exact.has_value());
    ASSERT_EQ(std::memcmp(tile->data(), exact->data(), layout.bytes), 0) << Describe(shape);
    for (std::uint32_t r = 0; r < input.rows(); ++r) {
      JudgeSigns(shape, tile->data() + layout.bytes,
                 CentredAndRotated(book.view(), input, false, r), r);
      if (HasFatalFailure()) return;
    }
    for (std::uint32_t i = input.rows() * SignBytes(shape.head_dim); i < layout.block_data; ++i) {
      ASSERT_EQ((*tile)[layout.bytes + i], std::byte{0});
    }
    for (std::uint32_t r = input.rows(); r < kTileEntries; ++r) {
      ASSERT_EQ((*tile)[layout.bytes + layout.block_data + r], std::byte{0});
    }
  }
}

// Rows of dense tiles keep their signs when they are gathered.
TEST_P(PlanesTest, GatherOfDenseRowsCopiesTheirSigns) {
  for (int round = 0; round < Rounds(60); ++round) {
    TileShape from = WithSigns(DenseShape(random_.Pick(kHeadDims), random_.Pick(kRowTypes)));
    from.weights = random_.OneIn(2);
    TileShape to = from;
    to.positions = random_.OneIn(2);
    const TileLayout layout = LayoutOf(to);
    std::vector<std::byte> source(LayoutOf(from).bytes + layout.summary_bytes);
    for (std::byte& byte : source) byte = std::byte(random_.Below(256));
    for (std::uint32_t r = 0; from.weights && r < kTileEntries; ++r) {
      const auto weight = static_cast<float>(random_.Below(9));
      std::memcpy(source.data() + LayoutOf(from).weights + r * sizeof(weight), &weight,
                  sizeof(weight));
    }
    std::vector<GatherRow> rows(random_.Between(1, kTileEntries));
    for (GatherRow& row : rows) {
      row = {source.data(), static_cast<std::uint32_t>(random_.Below(kTileEntries)),
             static_cast<std::uint32_t>(random_.Below(1000)), source.data() + LayoutOf(from).bytes};
    }
    ASSERT_EQ(Gathered(ops(), from, to, rows), Gathered(reference(), from, to, rows))
        << Describe(to);
  }
}

TEST_P(PlanesTest, EncodeRefusesRows) {
  for (int round = 0; round < Rounds(20); ++round) {
    const TileShape shape =
        PlanesShape(random_.Pick(kHeadDims), {2, 2}, {random_.Pick(kPlaneWidths), 0});
    const TestBook book(shape, random_);
    TileInput input(shape, random_.Pick(kRowTypes), 7, Content::kNormal, random_);
    const auto with_limits = [&](float key, float value) {
      const Buffer prepared(ops().prepared_bytes(shape, input.type()));
      ops().prepare_encode(shape, input.type(), book.view(), prepared.data());
      std::vector<std::byte> tile(LayoutOf(shape).bytes);
      EncodeJob job = input.Job(shape);
      job.prepared = prepared.data();
      job.tile = tile.data();
      job.key_error_limit = key;
      job.value_error_limit = value;
      return ops().encode(job);
    };
    constexpr float kNone = std::numeric_limits<float>::infinity();
    ASSERT_TRUE(with_limits(kNone, kNone));
    // Two bits lose about 12 % of the energy.
    ASSERT_FALSE(with_limits(0.001f, kNone));
    ASSERT_TRUE(with_limits(1e6f, kNone));
    // A small share of the energy is accepted whatever the limit.
    if (shape.value_planes.first > 4) {
      ASSERT_TRUE(with_limits(kNone, 1e-6f));
    }
    input.Set(random_.OneIn(2), static_cast<std::uint32_t>(random_.Below(7)),
              static_cast<std::uint32_t>(random_.Below(shape.head_dim)),
              random_.OneIn(2) ? kNone : std::numeric_limits<float>::quiet_NaN());
    ASSERT_FALSE(with_limits(kNone, kNone));
  }
}

TEST_P(PlanesTest, ZerosAndTinyRowsHaveScaleZero) {
  const TileShape shape = PlanesShape(64, {6, 4}, {4, 0});
  const Rotations rotations(shape, ElementType::kBf16, random_);
  const Buffer zeros(2 * 64);
  std::memset(zeros.data(), 0, zeros.size());
  RotationView book = rotations.view();
  book.key_mean = book.value_mean = zeros.data();
  const std::vector<float> keys(3 * 64, 0.0f);
  const std::vector<float> values(3 * 64, 0x1p-110f);
  const TileInput input(shape, 3, keys, values);
  const auto tile = EncodeTile(ops(), shape, input, book);
  ASSERT_TRUE(tile.has_value());
  const DecodedRows rows = DecodeTile(ops(), shape, *tile, 3);
  for (float element : rows.keys) ASSERT_EQ(element, 0);
  for (float element : rows.values) ASSERT_EQ(element, 0);
}

TEST_P(PlanesTest, DecodeAndGatherAreExact) {
  for (int round = 0; round < Rounds(150); ++round) {
    TileShape from = AnyPlanes(random_);
    TileShape to = from;
    to.weights = random_.OneIn(2);
    to.positions = random_.OneIn(2);
    if (random_.OneIn(2)) to.key_planes = WithoutCrumbs(to.key_planes);
    if (random_.OneIn(2)) to.value_planes = WithoutCrumbs(to.value_planes);
    const auto a = AnyTile(from, kTileEntries, random_);
    const auto b = AnyTile(from, kTileEntries, random_);
    const DecodedRows decoded = DecodeTile(ops(), from, a, kTileEntries);
    const DecodedRows exact = DecodeTile(reference(), from, a, kTileEntries);
    ASSERT_EQ(decoded.keys, exact.keys) << Describe(from);
    ASSERT_EQ(decoded.values, exact.values) << Describe(from);

    std::vector<GatherRow> rows(random_.Between(1, kTileEntries));
    for (GatherRow& row : rows) {
      const auto& source = random_.OneIn(2) ? a : b;
      row = {source.data(), static_cast<std::uint32_t>(random_.Below(kTileEntries)),
             static_cast<std::uint32_t>(random_.Below(1000)), source.data() + LayoutOf(from).bytes};
    }
    ASSERT_EQ(Gathered(ops(), from, to, rows), Gathered(reference(), from, to, rows))
        << Describe(to);
  }
}

TEST_P(PlanesTest, ScoresOfSignsMatchTheReference) {
  if (ops().score_part == nullptr) GTEST_SKIP() << name() << " scores as a step of a launch";
  for (int round = 0; round < Rounds(100); ++round) {
    const TileShape shape =
        WithSigns(random_.OneIn(2) ? PlanesShape(random_.Pick(kHeadDims), {6, 4}, {4, 0})
                                   : DenseShape(random_.Pick(kHeadDims), ElementType::kBf16));
    const TileLayout layout = LayoutOf(shape);
    std::vector<Buffer> summaries;
    std::vector<BlockRun> runs;
    std::uint32_t blocks = 0;
    for (std::uint64_t t = random_.Between(1, 5); t > 0; --t) {
      summaries.emplace_back(layout.summary_bytes);
      for (std::uint32_t i = 0; i < layout.summary_bytes; ++i) {
        summaries.back().data()[i] = std::byte(random_.Below(256));
      }
      const std::uint32_t rows =
          t > 1 ? kTileEntries : static_cast<std::uint32_t>(random_.Between(1, kTileEntries));
      const std::uint32_t count = (rows + kQuadRows - 1) / kQuadRows;
      runs.push_back({summaries.back().data(), nullptr, count, rows - (count - 1) * kQuadRows});
      blocks += count;
    }
    const auto heads = static_cast<std::uint32_t>(random_.Between(1, 9));
    const Buffer rows(heads * shape.head_dim * sizeof(float));
    for (std::uint32_t i = 0; i < heads * shape.head_dim; ++i) {
      reinterpret_cast<float*>(rows.data())[i] = NormalNumber(random_);
    }
    if (random_.OneIn(5)) std::memset(rows.data(), 0, shape.head_dim * sizeof(float));
    const auto score = [&](const Operations& operations) {
      std::vector<float> scores(std::size_t{heads} * blocks);
      operations.score_part({.runs = runs.data(),
                             .run_count = static_cast<std::uint32_t>(runs.size()),
                             .rows = reinterpret_cast<const float*>(rows.data()),
                             .row_count = heads,
                             .shape = shape,
                             .layout = layout,
                             .padded_channels = shape.head_dim,
                             .scale = 1,
                             .scores = scores.data(),
                             .score_stride = blocks});
      return scores;
    };
    const std::vector<float> got = score(ops());
    const std::vector<float> exact = score(reference());
    for (std::size_t i = 0; i < exact.size(); ++i) {
      ASSERT_NEAR(got[i], exact[i], std::fabs(exact[i]) * 1e-5) << "score " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PlanesTest, testing::ValuesIn(PlanesSubjects()), PackSubjectName);

}  // namespace
}  // namespace tessera::kernels
