// Every implementation reads and writes the committed golden tiles of the planes format. They were
// computed independently in numpy, in double precision, with rotations and means.
//
// A file is a list of sections: name [16 bytes, zero-padded], u32 bytes, then that many bytes of
// little-endian numbers.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/dispatch/implementation.h"
#include "tests/contract/attend/attend_lanes.h"

namespace tessera::kernels {
namespace {

const std::filesystem::path kPlanesFolder = std::string(TESSERA_GOLDEN_FOLDER) + "/planes_v1";
constexpr const char* kPlanesNames[] = {"d64_k64_v4", "d128_k64_v4", "d128_k42_v42", "d64_k84_v64"};

class Golden {
 public:
  explicit Golden(const std::string& name) {
    std::ifstream file(kPlanesFolder / (name + ".bin"), std::ios::binary);
    const std::vector<char> all{std::istreambuf_iterator<char>(file), {}};
    for (std::size_t at = 0; at + 20 <= all.size();) {
      std::uint32_t bytes;
      std::memcpy(&bytes, &all[at + 16], sizeof(bytes));
      const std::string section(&all[at], strnlen(&all[at], 16));
      at += 20;
      if (bytes > all.size() - at) break;
      sections_[section].assign(all.data() + at, all.data() + at + bytes);
      at += bytes;
    }
    const std::vector<std::uint32_t> widths = Numbers<std::uint32_t>("shape");
    if (widths.size() != 5) return;
    const auto width = [&](int i) { return static_cast<std::uint8_t>(widths[i]); };
    shape = WithSigns(PlanesShape(widths[0], {width(1), width(2)}, {width(3), width(4)}));
    const std::uint32_t dim = widths[0];
    const BookLayout layout = BookLayoutOf(dim);
    book_ = std::make_unique<Buffer>(layout.bytes);
    Copy("key_rotation", book_->data() + layout.key_rotation);
    Copy("value_rotation", book_->data() + layout.value_rotation);
    Copy("key_mean", book_->data() + layout.key_mean);
    Copy("value_mean", book_->data() + layout.value_mean);
  }

  bool ok() const { return sections_.size() == 20; }
  RotationView book() const { return BookAt(book_->data(), shape.head_dim); }
  const std::vector<char>& Bytes(const std::string& section) { return sections_[section]; }
  template <class T>
  std::vector<T> Numbers(const std::string& section) {
    std::vector<T> numbers(sections_[section].size() / sizeof(T));
    std::memcpy(numbers.data(), sections_[section].data(), numbers.size() * sizeof(T));
    return numbers;
  }

  TileShape shape;

 private:
  void Copy(const std::string& section, std::byte* to) {
    std::memcpy(to, sections_[section].data(), sections_[section].size());
  }

  std::map<std::string, std::vector<char>> sections_;
  std::unique_ptr<Buffer> book_;
};

const std::byte* AsBytes(const std::vector<char>& chars) {
  return reinterpret_cast<const std::byte*>(chars.data());
}

class GoldenPlanes : public testing::TestWithParam<std::tuple<const Implementation*, const char*>> {
 protected:
  void SetUp() override {
    const Implementation& implementation = *std::get<0>(GetParam());
    if (!ImplementationSupported(implementation)) {
      GTEST_SKIP() << ImplementationReason(implementation);
    }
    ASSERT_TRUE(golden_.ok());
  }
  const Operations& ops() const { return OperationsOf(*std::get<0>(GetParam())); }
  const TileShape& shape() const { return golden_.shape; }
  TileLayout layout() const { return LayoutOf(shape()); }

  // The committed quads and signs as a tile and its summaries.
  std::vector<std::byte> CommittedTile() {
    const std::vector<char>& quads = golden_.Bytes("quads");
    std::vector<std::byte> tile(AsBytes(quads), AsBytes(quads) + quads.size());
    EXPECT_EQ(tile.size(), layout().bytes);
    return tile;
  }
  std::vector<std::byte> CommittedSummaries() {
    std::vector<std::byte> summaries(
        AsBytes(golden_.Bytes("sign_bits")),
        AsBytes(golden_.Bytes("sign_bits")) + golden_.Bytes("sign_bits").size());
    for (char norm : golden_.Bytes("sign_norms")) summaries.push_back(std::byte(norm));
    EXPECT_EQ(summaries.size(), layout().summary_bytes);
    return summaries;
  }

  // The committed query, rotated, and its product with the mean.
  QueryRow RotatedQuery(Buffer& rotated) {
    const std::byte* row = AsBytes(golden_.Bytes("query"));
    QueryRow query = {.query = rotated.data(), .visible_begin = 0, .visible_end = kTileEntries};
    ops().rotate({.rotation = golden_.book().key,
                  .rotation_type = ElementType::kBf16,
                  .channels = shape().head_dim,
                  .head_dim = shape().head_dim,
                  .rows = &row,
                  .row_type = ElementType::kBf16,
                  .row_count = 1,
                  .output = reinterpret_cast<float*>(rotated.data()),
                  .padded_channels = PaddedChannels(shape()),
                  .mean = golden_.book().key_mean,
                  .mean_products = &query.mean_product});
    return query;
  }

  struct Result {
    float max;
    float sum;
    std::vector<float> output;
  };
  Result AttendTile(const TileShape& tile_shape, const std::vector<std::byte>& tile,
                    const QueryRow& query, float scale) {
    const RowRun run = {tile.data(), 0, 0, kTileEntries};
    const Buffer output(shape().head_dim * sizeof(float));
    Result result;
    ops().attend_part({.runs = &run,
                       .rows = &query,
                       .run_count = 1,
                       .row_count = 1,
                       .shape = tile_shape,
                       .layout = LayoutOf(tile_shape),
                       .padded_channels = PaddedChannels(tile_shape),
                       .scale = scale,
                       .logit_softcap = 0,
                       .lookahead = {}},
                      {&result.max, &result.sum, reinterpret_cast<float*>(output.data())});
    const auto* rows = reinterpret_cast<const float*>(output.data());
    result.output.assign(rows, rows + shape().head_dim);
    return result;
  }

  // The logit of each row alone, unscaled, must be the committed one.
  void ExpectLogits(const TileShape& tile_shape, const std::vector<std::byte>& tile,
                    const std::vector<double>& logits) {
    const Buffer rotated(shape().head_dim * sizeof(float));
    Buffer scratch(shape().head_dim * sizeof(float));
    QueryRow query = RotatedQuery(scratch);
    constexpr double kLn2 = 0.69314718055994530942;
    double largest = 1;
    for (double logit : logits) largest = std::max(largest, std::fabs(logit));
    for (std::uint32_t r = 0; r < kTileEntries; ++r) {
      query.visible_begin = r;
      query.visible_end = r + 1;
      ASSERT_NEAR(AttendTile(tile_shape, tile, query, 1).max * kLn2, logits[r], largest * 1e-5)
          << "row " << r;
    }
  }

  Golden golden_{std::get<1>(GetParam())};
};

TEST_P(GoldenPlanes, AreWhatTheCommittedRowsEncodeTo) {
  const Buffer prepared(ops().prepared_bytes(shape(), ElementType::kBf16));
  ops().prepare_encode(shape(), ElementType::kBf16, golden_.book(), prepared.data());
  std::vector<std::byte> tile(layout().bytes);
  std::vector<std::byte> summaries(layout().summary_bytes);
  ASSERT_TRUE(ops().encode({.key = AsBytes(golden_.Bytes("keys")),
                            .value = AsBytes(golden_.Bytes("values")),
                            .stride = shape().head_dim * std::uint64_t{2},
                            .type = ElementType::kBf16,
                            .rows = kTileEntries,
                            .weights = nullptr,
                            .positions = nullptr,
                            .shape = shape(),
                            .layout = layout(),
                            .prepared = prepared.data(),
                            .tile = tile.data(),
                            .summaries = summaries.data()}));
  ASSERT_EQ(tile, CommittedTile());
  ASSERT_EQ(summaries, CommittedSummaries());
}

TEST_P(GoldenPlanes, GiveTheCommittedLogits) {
  ExpectLogits(shape(), CommittedTile(), golden_.Numbers<double>("logits"));
}

TEST_P(GoldenPlanes, GiveTheCommittedLogitsWithoutCrumbs) {
  TileShape pressed = shape();
  pressed.key_planes = WithoutCrumbs(pressed.key_planes);
  pressed.value_planes = WithoutCrumbs(pressed.value_planes);
  const std::vector<std::byte> tile = CommittedTile();
  const std::vector<std::byte> summaries = CommittedSummaries();
  std::vector<GatherRow> rows;
  for (std::uint32_t r = 0; r < kTileEntries; ++r)
    rows.push_back({tile.data(), r, r, summaries.data()});
  std::vector<std::byte> gathered(LayoutOf(pressed).bytes);
  std::vector<std::byte> signs(LayoutOf(pressed).summary_bytes);
  ops().gather({.rows = rows.data(),
                .row_count = kTileEntries,
                .from = shape(),
                .from_layout = layout(),
                .to = pressed,
                .to_layout = LayoutOf(pressed),
                .tile = gathered.data(),
                .summaries = signs.data()});
  ASSERT_EQ(signs, summaries);
  ExpectLogits(pressed, gathered, golden_.Numbers<double>("without_crumbs"));
}

TEST_P(GoldenPlanes, GiveTheCommittedOutput) {
  Buffer rotated(shape().head_dim * sizeof(float));
  const QueryRow query = RotatedQuery(rotated);
  const auto dim = static_cast<double>(shape().head_dim);
  const Result result =
      AttendTile(shape(), CommittedTile(), query, static_cast<float>(1 / std::sqrt(dim)));
  const double lse = (result.max + std::log2(double{result.sum})) * 0.69314718055994530942;
  ASSERT_NEAR(lse, golden_.Numbers<double>("lse")[0], 1e-4);
  Buffer row(shape().head_dim * sizeof(float));
  Buffer output(shape().head_dim * sizeof(float));
  std::memcpy(row.data(), result.output.data(), row.size());
  ops().unrotate({.rotation = golden_.book().value,
                  .rotation_type = ElementType::kBf16,
                  .channels = shape().head_dim,
                  .head_dim = shape().head_dim,
                  .rows = reinterpret_cast<const float*>(row.data()),
                  .padded_channels = PaddedChannels(shape()),
                  .row_count = 1,
                  .output = reinterpret_cast<float*>(output.data()),
                  .mean = golden_.book().value_mean,
                  .weights = &result.sum});
  const std::vector<double> expected = golden_.Numbers<double>("output");
  double peak = 0;
  for (double element : expected) peak = std::max(peak, std::fabs(element));
  for (std::uint32_t c = 0; c < shape().head_dim; ++c) {
    const double got = reinterpret_cast<const float*>(output.data())[c] / double{result.sum};
    ASSERT_NEAR(got, expected[c], peak * 0x1p-7) << "channel " << c;
  }
}

TEST_P(GoldenPlanes, GiveTheCommittedScoresAndChoice) {
  Buffer rotated(shape().head_dim * sizeof(float));
  RotatedQuery(rotated);
  const std::vector<std::byte> tile = CommittedTile();
  const std::vector<std::byte> summaries = CommittedSummaries();
  const BlockRun run = {summaries.data(), tile.data(), kTileQuads, kQuadRows};
  std::vector<float> scores(kTileQuads);
  ops().score_part({.runs = &run,
                    .run_count = 1,
                    .rows = reinterpret_cast<const float*>(rotated.data()),
                    .row_count = 1,
                    .shape = shape(),
                    .layout = layout(),
                    .padded_channels = PaddedChannels(shape()),
                    .scale = 1,
                    .scores = scores.data(),
                    .score_stride = kTileQuads});
  const std::vector<double> expected = golden_.Numbers<double>("sign_scores");
  for (std::uint32_t q = 0; q < kTileQuads; ++q) {
    double best = expected[4 * q];
    for (std::uint32_t e = 1; e < kQuadRows; ++e) best = std::max(best, expected[4 * q + e]);
    ASSERT_NEAR(scores[q], best, std::fabs(best) * 1e-5) << "quad " << q;
  }
  const std::vector<BlockFacts> facts(kTileQuads, BlockFacts{kQuadRows, 0});
  std::vector<float> values(kTileQuads);
  std::vector<std::uint8_t> taken(kTileQuads);
  ops().select({.scores = scores.data(),
                .score_stride = kTileQuads,
                .row_count = 1,
                .blocks = facts.data(),
                .block_count = kTileQuads,
                .budget = 3 * kQuadRows,
                .by_share = false,
                .values = values.data(),
                .taken = taken.data()});
  std::vector<std::uint32_t> chosen;
  for (std::uint32_t q = 0; q < kTileQuads; ++q) {
    if (taken[q] != 0) chosen.push_back(q);
  }
  ASSERT_EQ(chosen, golden_.Numbers<std::uint32_t>("chosen_3"));
}

INSTANTIATE_TEST_SUITE_P(Cpu, GoldenPlanes,
                         testing::Combine(testing::ValuesIn(Implementations()),
                                          testing::ValuesIn(kPlanesNames)),
                         [](const auto& param) {
                           return std::string(ImplementationName(*std::get<0>(param.param))) + "_" +
                                  std::get<1>(param.param);
                         });

}  // namespace
}  // namespace tessera::kernels
