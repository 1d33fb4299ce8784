// A tile with arbitrary bytes, as seen by a reader whose memory has been reused. No operation may
// read past the tile's end, rows are copied unchanged, and all implementations agree.
#include <cstring>
#include <optional>
#include <vector>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/implementation.h"
#include "kernels/format/part.h"
#include "kernels/strategy/reduce/channels.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/guarded.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/shapes.h"

namespace tessera::fuzz {
namespace {

using namespace kernels;

constexpr std::size_t kMostTile = 256 << 10;

struct TileCase {
  TileShape shape;
  TileLayout layout;
  std::uint32_t rows;
  const std::byte* tile;
  const std::byte* summaries;
};

class Runner {
 public:
  explicit Runner(const TileCase& tile) : case_(tile), padded_(PaddedChannels(tile.shape)) {}

  void Run(const Operations& operations) {
    Decode(operations);
    // Only the daemon gathers, from its own tiles, whose values are finite. Without block summaries
    // gather copies bytes without interpreting them, so any bytes will do.
    if (case_.shape.summary == Summary::kNone) Gather(operations);
    if (case_.shape.summary != Summary::kNone) Score(operations);
    Attend(operations);
  }

  // Reducing a row's channels must work even if its bitmap disagrees with the stored channels.
  void Thin() {
    const std::optional<TileShape> thinner = ReducedShape(case_.shape, 0.125);
    if (!thinner.has_value()) return;
    const TileLayout layout = LayoutOf(*thinner);
    constexpr std::byte kUntouched{0xa5};
    std::vector<std::byte> thinned(layout.bytes + 64, kUntouched);
    std::vector<std::byte> summaries(layout.summary_bytes + 64, kUntouched);
    ReduceTile({case_.shape, case_.tile, case_.summaries, case_.rows, *thinner, thinned.data(),
                summaries.data()});
    for (std::size_t i = 0; i < 64; ++i) {
      TESSERA_CHECK(thinned[layout.bytes + i] == kUntouched,
                    "nothing is written after the reduced tile");
      TESSERA_CHECK(summaries[layout.summary_bytes + i] == kUntouched,
                    "nothing is written after the reduced summaries");
    }
  }

 private:
  // A 64-byte aligned block of floats.
  struct Floats {
    explicit Floats(std::size_t count) : values(count + 16) {}
    float* data() {
      const auto at = reinterpret_cast<std::uintptr_t>(values.data());
      return values.data() + (64 - at % 64) % 64 / sizeof(float);
    }
    std::vector<float> values;
  };

  void Decode(const Operations& operations) {
    Floats keys(std::size_t{kTileEntries} * padded_), values(std::size_t{kTileEntries} * padded_);
    operations.decode({.tile = case_.tile,
                       .shape = case_.shape,
                       .layout = case_.layout,
                       .rows = case_.rows,
                       .padded_channels = padded_,
                       .keys = keys.data(),
                       .values = values.data()});
  }

  // Gathers all rows, last first. K and V of each row must be unchanged, whatever their bytes.
  void Gather(const Operations& operations) {
    std::vector<std::byte> gathered(WholeUnits(case_.layout.bytes));
    GatherRow rows[kTileEntries];
    for (std::uint32_t i = 0; i < case_.rows; ++i) {
      rows[i] = {.tile = case_.tile, .row = case_.rows - 1 - i, .position = i};
    }
    operations.gather({.rows = rows,
                       .row_count = case_.rows,
                       .from = case_.shape,
                       .from_layout = case_.layout,
                       .to = case_.shape,
                       .to_layout = case_.layout,
                       .tile = gathered.data(),
                       .summaries = nullptr});
    const TileLayout& l = case_.layout;
    const struct {
      std::uint32_t at, bytes;
    } arrays[] = {{l.key_bits, l.key_row.bits},        {l.key_scales, l.key_row.scale},
                  {l.key_data, l.key_row.data},        {l.value_bits, l.value_row.bits},
                  {l.value_scales, l.value_row.scale}, {l.value_data, l.value_row.data}};
    for (const auto& [at, bytes] : arrays) {
      for (std::uint32_t i = 0; i < case_.rows; ++i) {
        TESSERA_CHECK(std::memcmp(gathered.data() + at + i * bytes,
                                  case_.tile + at + (case_.rows - 1 - i) * bytes, bytes) == 0,
                      Concat("row ", i, " of the array at ", at));
      }
    }
  }

  void Score(const Operations& operations) {
    Floats query(padded_);
    for (std::uint32_t c = 0; c < case_.shape.key.channels; ++c) query.data()[c] = 0.25f;
    const std::uint32_t block = case_.shape.block;
    const std::uint32_t blocks = (case_.rows + block - 1) / block;
    const BlockRun run = {.summaries = case_.summaries,
                          .tile = case_.tile,
                          .blocks = blocks,
                          .last_entries = case_.rows - (blocks - 1) * block};
    float scores[kMaxTileBlocks];
    operations.score_part({.runs = &run,
                           .run_count = 1,
                           .rows = query.data(),
                           .row_count = 1,
                           .shape = case_.shape,
                           .layout = case_.layout,
                           .padded_channels = padded_,
                           .scale = 0.125f,
                           .scores = scores,
                           .score_stride = kMaxTileBlocks});
  }

  void Attend(const Operations& operations) {
    const bool packed = case_.shape.packed();
    const std::uint32_t padded = packed ? padded_ : case_.shape.head_dim;
    Floats query(2 * padded);
    for (std::uint32_t c = 0; c < case_.shape.key.channels; ++c) query.data()[c] = 0.25f;
    const RowRun run = {.tile = case_.tile, .position = 0, .row_begin = 0, .row_count = case_.rows};
    const QueryRow row = {.query = reinterpret_cast<const std::byte*>(query.data()),
                          .visible_begin = 0,
                          .visible_end = case_.rows};
    float max = 0, sum = 0;
    Floats output(padded);
    operations.attend_part({.runs = &run,
                            .rows = &row,
                            .run_count = 1,
                            .row_count = 1,
                            .shape = case_.shape,
                            .layout = case_.layout,
                            .padded_channels = padded,
                            .scale = 0.125f,
                            .logit_softcap = 0},
                           {.max = &max, .sum = &sum, .output = output.data()});
  }

  const TileCase case_;
  const std::uint32_t padded_;
};

TileShape Packed(TileFormat format, RowShape key, RowShape value, std::uint8_t group) {
  return {.format = format, .head_dim = 64, .key = key, .value = value, .group = group};
}

}  // namespace

std::vector<Seed> Seeds() {
  std::vector<Seed> seeds;
  const auto add = [&](const char* name, const TileShape& shape, std::uint8_t rows) {
    Output output;
    AddShape(shape, output);
    output.Byte(rows).Add<std::uint32_t>(7);
    seeds.push_back({name, output.bytes()});
  };
  add("dense", DenseShape(64, ElementType::kBf16), 31);
  add("dense-fp32", DenseShape(64, ElementType::kFp32), 5);
  TileShape shape = Packed(TileFormat::kPackedBf16, {64, 16}, {64, 16}, 1);
  add("bf16", shape, 31);
  shape.summary = Summary::kMean;
  shape.block = 8;
  add("means", shape, 20);
  shape = Packed(TileFormat::kPackedInt8, {48, 16}, {64, 64}, 4);
  shape.weights = shape.positions = true;
  add("int8-words", shape, 31);
  shape = Packed(TileFormat::kPackedFp8, {64, 32}, {32, 8}, 2);
  shape.summary = Summary::kMinMax;
  shape.block = 4;
  add("fp8-minmax", shape, 2);
  add("planes", PlanesShape(128, {6, 4}, {4, 0}), 31);
  shape = WithSigns(PlanesShape(64, {8, 2}, {6, 2}));
  shape.weights = shape.positions = true;
  add("planes-signs", shape, 18);
  add("dense-signs", WithSigns(DenseShape(256, ElementType::kBf16)), 9);
  add("fp16", Packed(TileFormat::kPackedFp16, {64, 1}, {63, 62}, 1), 0);
  return seeds;
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera;
  static const fuzz::Guarded memory(fuzz::kMostTile);
  static const fuzz::Guarded summary_memory(fuzz::kMostTile);
  fuzz::Input input(data, size);
  const kernels::TileShape shape = fuzz::TakeShape(input);
  if (kernels::UnsupportedReason(shape) != nullptr) return 0;
  const kernels::TileLayout layout = kernels::LayoutOf(shape);
  const std::uint32_t rows = 1 + input.Byte() % kernels::kTileEntries;
  const auto noise = input.Take<std::uint32_t>();
  // The tile and its summaries end at the end of readable memory, as far as alignment allows.
  const std::size_t bytes = fuzz::WholeUnits(layout.bytes);
  std::byte* tile = memory.Last(bytes);
  fuzz::Fill({tile, bytes}, input.Rest(), noise);
  std::byte* summaries = summary_memory.Last(layout.summary_bytes, kernels::kSummaryAlignment);
  fuzz::Fill({summaries, layout.summary_bytes}, {}, noise + 1);
  fuzz::Runner runner(
      {.shape = shape, .layout = layout, .rows = rows, .tile = tile, .summaries = summaries});
  for (const kernels::Implementation* implementation : kernels::Implementations()) {
    if (!kernels::ImplementationSupported(*implementation)) continue;
    runner.Run(kernels::OperationsOf(*implementation));
  }
  runner.Thin();
  return 0;
}
