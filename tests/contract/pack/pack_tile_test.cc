// decode and gather: rows read back from tiles.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tests/contract/pack/pack_conformance.h"

namespace tessera::kernels {
namespace {

constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};

ElementType RowType(const TileShape& shape, TestRandom& random) {
  return shape.packed() ? kTypes[random.Below(3)] : ElementsOf(shape.format);
}

TEST_P(PackConformance, DecodeReadsWhatTheBytesSay) {
  TESSERA_NEEDS(decode);
  for (int round = 0; round < Rounds(300); ++round) {
    const TileShape shape = RandomShape(random_, {.cut = true, .dense = true});
    const Rotations rotations(shape, ElementType::kBf16, random_);
    const RotationView rotation =
        shape.packed() ? SomeOf(rotations.view(), shape, random_) : RotationView{};
    const Content content = kContents[random_.Below(std::size(kContents))];
    const auto rows = static_cast<std::uint32_t>(random_.OneIn(2) ? 32 : random_.Between(1, 32));
    const TileInput input(shape, RowType(shape, random_), rows, content, random_);
    SCOPED_TRACE(Describe(shape));
    auto tile = EncodeTile(reference(), shape, input, rotation);
    if (!tile.has_value()) {  // too large for the value type
      ASSERT_EQ(shape.format, TileFormat::kPackedFp16);
      continue;
    }
    PoisonDeadRows(shape, rows, tile->data());
    const DecodedRows decoded = DecodeTile(ops(), shape, *tile, rows);
    for (std::uint32_t r = 0; r < rows; ++r) {
      for (bool value : {false, true}) {
        const Array array = value ? Array::kValues : Array::kKeys;
        const ReadTileRow row = ReadByDefinition(shape, tile->data(), array, r);
        const std::vector<float>& got = value ? decoded.values : decoded.keys;
        for (std::uint32_t c = 0; c < decoded.channels; ++c) {
          const double expected = c < RowsOf(shape, array).channels ? row.elements[c] : 0;
          ASSERT_EQ(got[r * decoded.channels + c], expected) << "row " << r << " channel " << c;
        }
      }
    }
  }
}

// Decoding and encoding again gives the same bytes: a row selects the same mask as long as each
// kept group has a nonzero channel.
TEST_P(PackConformance, PackingWhatWasUnpackedChangesNothing) {
  TESSERA_NEEDS(encode);
  TESSERA_NEEDS(decode);
  std::uint32_t compared = 0;
  for (int round = 0; round < Rounds(300); ++round) {
    TileShape shape = RandomShape(random_, {.summary = false, .words = false});
    const Content content = kContents[random_.Below(std::size(kContents))];
    const bool large = content == Content::kHuge || content == Content::kSpread;
    if (large && ValuesOf(shape.format) == ValueType::kFp16) continue;  // may be refused
    const TileInput input(shape, RowType(shape, random_), 32, content, random_);
    const auto tile = EncodeTile(ops(), shape, input, {});
    ASSERT_TRUE(tile.has_value());
    const DecodedRows decoded = DecodeTile(ops(), shape, *tile, 32);
    const TileInput again_input(shape, 32, decoded.keys, decoded.values);
    const auto again = EncodeTile(ops(), shape, again_input, {});
    ASSERT_TRUE(again.has_value());
    const TileLayout l = LayoutOf(shape);
    for (std::uint32_t r = 0; r < 32; ++r) {
      for (bool value : {false, true}) {
        const Array array = value ? Array::kValues : Array::kKeys;
        const ReadTileRow row = ReadByDefinition(shape, tile->data(), array, r);
        // Groups are selected by squared length, so a kept group that is this much weaker than the
        // strongest may round to zero.
        double peak = 0;
        for (const double e : row.elements) peak = std::max(peak, std::fabs(e));
        const double least = shape.group == 1 ? 0 : peak * 0x1p-60;
        bool all_filled = true;
        for (std::uint32_t c = 0; c < RowsOf(shape, array).channels; c += shape.group) {
          const auto group = row.elements.begin() + c;
          all_filled =
              all_filled && (!row.kept[c] || std::any_of(group, group + shape.group, [&](double e) {
                return e != 0 && std::fabs(e) >= least;
              }));
        }
        if (!all_filled) continue;
        ++compared;
        const auto same = [&](std::uint32_t begin, std::uint32_t bytes) {
          return std::equal(tile->begin() + begin + r * bytes,
                            tile->begin() + begin + (r + 1) * bytes,
                            again->begin() + begin + r * bytes);
        };
        const RowBytes& bytes = value ? l.value_row : l.key_row;
        ASSERT_TRUE(same(value ? l.value_bits : l.key_bits, bytes.bits) &&
                    same(value ? l.value_scales : l.key_scales, bytes.scale) &&
                    same(value ? l.value_data : l.key_data, bytes.data))
            << Describe(shape) << " row " << r << (value ? " value" : " key") << " content "
            << static_cast<int>(content);
      }
    }
  }
  ASSERT_GT(compared, 1000u);
}

// decode(encode(x)) is the rounded x in kept channels and zero elsewhere. If every channel is kept
// it is all of x.
TEST_P(PackConformance, UnpackingWhatWasPackedGivesTheKeptChannels) {
  TESSERA_NEEDS(encode);
  TESSERA_NEEDS(decode);
  constexpr double kRelative[] = {0x1p-8, 0x1p-11, 0.5001 / 127 * (1 + 0x1p-7), 0.0626};
  for (int round = 0; round < Rounds(120); ++round) {
    TileShape shape = RandomShape(random_, {});
    if (random_.OneIn(3)) shape.key.kept = shape.key.channels;
    const TileInput input(shape, RowType(shape, random_), 32, Content::kNormal, random_);
    const auto tile = EncodeTile(ops(), shape, input, {});
    ASSERT_TRUE(tile.has_value());
    const DecodedRows decoded = DecodeTile(ops(), shape, *tile, 32);
    const ValueType type = ValuesOf(shape.format);
    for (std::uint32_t r = 0; r < 32; ++r) {
      const std::vector<double> x = input.Row(false, r);
      const double peak = std::fabs(*std::max_element(
          x.begin(), x.end(), [](double a, double b) { return std::fabs(a) < std::fabs(b); }));
      const ReadTileRow row = ReadByDefinition(shape, tile->data(), Array::kKeys, r);
      for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
        const double relative = kRelative[static_cast<std::size_t>(type) - 1];
        const double allowed = type == ValueType::kInt8
                                   ? relative * peak
                                   : relative * std::fabs(x[c]) + peak * 0x1p-17;
        const float got = decoded.keys[r * decoded.channels + c];
        ASSERT_LE(std::fabs(got - (row.kept[c] ? x[c] : 0)), row.kept[c] ? allowed : 0)
            << Describe(shape) << " channel " << c;
        ASSERT_TRUE(row.kept[c] || shape.key.kept < shape.key.channels);
      }
    }
  }
}

struct Source {
  TileShape shape;
  std::vector<std::vector<std::byte>> tiles;
};

Source MakeSource(const TileShape& shape, std::size_t tiles, const Operations& operations,
                  TestRandom& random) {
  Source source = {.shape = shape, .tiles = {}};
  while (source.tiles.size() < tiles) {
    const TileInput input(shape, RowType(shape, random), 32, Content::kNormal, random);
    source.tiles.push_back(*EncodeTile(operations, shape, input, {}));
  }
  return source;
}

std::vector<std::byte> Gather(const Operations& operations, const Source& source,
                              const TileShape& to, const std::vector<GatherRow>& rows,
                              const char** ran) {
  const TileLayout layout = LayoutOf(to);
  const Buffer tile(layout.bytes);
  const Buffer summaries(layout.summary_bytes);
  *ran = operations.gather({.rows = rows.data(),
                            .row_count = static_cast<std::uint32_t>(rows.size()),
                            .from = source.shape,
                            .from_layout = LayoutOf(source.shape),
                            .to = to,
                            .to_layout = layout,
                            .tile = tile.data(),
                            .summaries = summaries.data()});
  std::vector<std::byte> both(tile.data(), tile.data() + tile.size());
  both.insert(both.end(), summaries.data(), summaries.data() + summaries.size());
  return both;
}

// The bytes of row `row` of an array.
std::vector<std::byte> RowBytes(const std::vector<std::byte>& tile, std::uint32_t begin,
                                std::uint32_t row, std::uint32_t bytes) {
  return {tile.begin() + begin + row * bytes, tile.begin() + begin + (row + 1) * bytes};
}

TEST_P(PackConformance, GatherCopiesRowsAndSumsThemUp) {
  TESSERA_NEEDS(gather);
  for (int round = 0; round < Rounds(150); ++round) {
    const TileShape from = RandomShape(random_, {.dense = true});
    TileShape to = from;
    to.weights = random_.OneIn(2);
    to.positions = random_.OneIn(2);
    SCOPED_TRACE(Describe(from) + " to " + Describe(to));
    const Source source = MakeSource(from, 3, reference(), random_);
    std::vector<GatherRow> rows(random_.Between(1, 32));
    std::vector<std::size_t> tiles;
    for (GatherRow& row : rows) {
      tiles.push_back(random_.Below(3));
      row = {.tile = source.tiles[tiles.back()].data(),
             .row = static_cast<std::uint32_t>(random_.Below(32)),
             .position = static_cast<std::uint32_t>(random_.Bits())};
    }
    const char* ran = nullptr;
    const std::vector<std::byte> tile = Gather(ops(), source, to, rows, &ran);
    ExpectRan(ran);
    const TileLayout a = LayoutOf(from);
    const TileLayout b = LayoutOf(to);
    for (std::uint32_t r = 0; r < rows.size(); ++r) {
      const std::vector<std::byte>& bytes = source.tiles[tiles[r]];
      const auto same = [&](std::uint32_t from_begin, std::uint32_t to_begin, std::uint32_t size) {
        return RowBytes(bytes, from_begin, rows[r].row, size) == RowBytes(tile, to_begin, r, size);
      };
      ASSERT_TRUE(same(a.key_bits, b.key_bits, a.key_row.bits)) << r;
      ASSERT_TRUE(same(a.key_scales, b.key_scales, a.key_row.scale)) << r;
      ASSERT_TRUE(same(a.key_data, b.key_data, a.key_row.data)) << r;
      ASSERT_TRUE(same(a.value_bits, b.value_bits, a.value_row.bits)) << r;
      ASSERT_TRUE(same(a.value_scales, b.value_scales, a.value_row.scale)) << r;
      ASSERT_TRUE(same(a.value_data, b.value_data, a.value_row.data)) << r;
      if (to.weights && from.weights) {
        ASSERT_TRUE(same(a.weights, b.weights, 4)) << r;
      }
      if (to.weights && !from.weights) {
        const float one = 1;
        ASSERT_EQ(std::memcmp(&one, tile.data() + b.weights + 4 * r, 4), 0);
      }
      if (to.positions) {
        ASSERT_EQ(std::memcmp(&rows[r].position, tile.data() + b.positions + 4 * r, 4), 0);
      }
    }
    // Blocks, dead rows and all other bytes equal those of the reference for the same rows.
    ASSERT_EQ(FirstDifference(to, Gather(reference(), source, to, rows, &ran), tile), "");
  }
}

// The summaries of a gathered tile equal those of its rows, decoded and encoded again.
TEST_P(PackConformance, GatherSummariesAreOfTheStoredRows) {
  TESSERA_NEEDS(gather);
  for (int round = 0; round < Rounds(60); ++round) {
    TileShape shape = RandomShape(random_, {.dense = true, .words = false});
    shape.summary = random_.OneIn(2) ? Summary::kMean : Summary::kMinMax;
    shape.block = static_cast<std::uint8_t>(4u << random_.Below(3));
    const Source source = MakeSource(shape, 2, reference(), random_);
    std::vector<GatherRow> rows(random_.Between(1, 32));
    for (GatherRow& row : rows) {
      row = {.tile = source.tiles[random_.Below(2)].data(),
             .row = static_cast<std::uint32_t>(random_.Below(32)),
             .position = 0};
    }
    const char* ran = nullptr;
    const std::vector<std::byte> tile = Gather(ops(), source, shape, rows, &ran);
    for (std::uint32_t b = 0; b * shape.block < rows.size(); ++b) {
      const std::uint32_t end =
          std::min<std::uint32_t>(static_cast<std::uint32_t>(rows.size()), (b + 1) * shape.block);
      const ReadTileRow block = ReadByDefinition(shape, tile.data(), Array::kBlocks, b);
      for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
        double sum = 0;
        double least = std::numeric_limits<double>::infinity();
        for (std::uint32_t r = b * shape.block; r < end; ++r) {
          const double e = ReadByDefinition(shape, tile.data(), Array::kKeys, r).elements[c];
          sum += e;
          least = std::min(least, e);
        }
        const double mean = sum / (end - b * shape.block);
        if (shape.summary == Summary::kMinMax) {
          ASSERT_LE(block.elements[c], least);
          ASSERT_GE(block.elements[c], least - std::fabs(least) * 0x1p-7);
        } else if (block.kept[c]) {
          ASSERT_NEAR(block.elements[c], mean,
                      std::max(std::fabs(mean) * 0.0626, block.scale * 0.51) + 1e-7)
              << Describe(shape);
        }
      }
    }
  }
}

TEST_P(PackConformance, GatherOfAWholeTileIsTheTile) {
  TESSERA_NEEDS(gather);
  for (int round = 0; round < Rounds(60); ++round) {
    TileShape shape = RandomShape(random_, {.dense = true});
    if (shape.summary == Summary::kMean && shape.packed()) shape.summary = Summary::kMinMax;
    const Source source = MakeSource(shape, 1, reference(), random_);
    std::vector<GatherRow> rows(32);
    for (std::uint32_t r = 0; r < 32; ++r) {
      rows[r] = {.tile = source.tiles[0].data(), .row = r, .position = 0};
      if (!shape.positions) continue;
      std::memcpy(&rows[r].position, source.tiles[0].data() + LayoutOf(shape).positions + 4 * r, 4);
    }
    const char* ran = nullptr;
    const std::vector<std::byte> tile = Gather(ops(), source, shape, rows, &ran);
    ASSERT_EQ(FirstDifference(shape, source.tiles[0], tile), "") << Describe(shape);
  }
}

}  // namespace
}  // namespace tessera::kernels
