// Block scores and selection: the kernels' source on the emulated GPU, compared with the reference
// operations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "kernels/cuda/select/select.cuh"
#include "tests/fakes/gpu/gpu_emulator.h"
#include "tests/unit/kernels/cuda/selection_rig.h"

namespace tessera::tests {
namespace {

using namespace kernels::cuda;  // NOLINT: a test file
using kernels::ElementType;
using kernels::LayerGeometry;
using kernels::SegmentView;

constexpr double kLn2 = 0.69314718055994530942;
constexpr ElementType kSelectedTypes[] = {ElementType::kBf16, ElementType::kFp16,
                                          ElementType::kFp32};

// The range that the queries of an item see together.
struct Range {
  std::uint64_t begin, end;
};
Range SeenBy(const LayerGeometry& geometry, bool causal, std::uint64_t first, std::uint64_t last) {
  const std::uint64_t window = geometry.sliding_window;
  return {window != 0 && first + 1 > window ? first + 1 - window : 0,
          causal ? last + 1 : ~std::uint64_t{0}};
}

// For logits of some tens. fp32 is split into two bf16 halves, of which the smaller is rounded. An
// fp16 query is rounded to bf16, the type of min/max summaries of packed rows. Other products are
// exact.
double ToleranceOf(const kernels::TileShape& shape) {
  if (shape.format == kernels::TileFormat::kDenseFp32) return 2e-3;
  const bool rounds = shape.format == kernels::TileFormat::kPackedFp16 &&
                      shape.summary == kernels::Summary::kMinMax;
  return rounds ? 0.1 : 1e-4;
}

// One lane and everything that selection computes for it, in double.
class ScoreProblem {
 public:
  explicit ScoreProblem(TestRandom& random) : geometry_(AnyGeometry(random)) {
    causal_ = !random.OneIn(3);
    problem_.emplace(geometry_, causal_, random);
    std::vector<SegmentShape> shapes;
    for (std::uint32_t s = 0; s < random.Between(1, 3); ++s) {
      const auto entries = static_cast<std::uint32_t>(random.OneIn(3) ? random.Between(500, 1100)
                                                                      : random.Between(1, 90));
      shapes.push_back(SummedShape(geometry_, entries, random));
    }
    problem_->Add(shapes, 10, static_cast<std::uint32_t>(random.Between(1, 20)), 1);
    for (std::size_t s = 0; s < shapes.size(); ++s) SumUp(problem_->lane(0), s);
    item().rule = AnyStepRule(random);
    call_.emplace(geometry_, causal_, problem_->items());
  }
  HostItem& item() { return problem_->items()[0]; }
  SelectionCall& call() { return *call_; }
  std::uint32_t columns() { return item().queries * geometry_.group(); }

  void ExpectScores() {
    const AttendParams params = call_->params();
    std::uint32_t first_block = 0;
    std::uint32_t strategy = 0;
    for (std::uint32_t s = 0; s < item().lane->segment_count; ++s, ++strategy) {
      const SegmentView& segment = item().lane->segments[s];
      const std::uint32_t blocks = BlocksOf(segment.entries, segment.shape.block);
      const std::vector<std::vector<float>> expected = Expected(segment, strategy);
      for (std::uint32_t c = 0; c < columns(); ++c) {
        for (std::uint32_t b = 0; b < blocks; ++b) {
          const double got =
              params.scores[std::uint64_t{c} * params.max_blocks + first_block + b] * kLn2;
          if (std::isinf(expected[c][b])) {
            ASSERT_EQ(got, expected[c][b]) << "column " << c << " block " << b;
          } else {
            ASSERT_NEAR(got, expected[c][b], ToleranceOf(segment.shape))
                << "segment " << s << " column " << c << " block " << b;
          }
        }
      }
      ExpectVisible(segment, params.visible + first_block, blocks);
      first_block += blocks;
    }
    if (item().rule.by_share != 0) ExpectRowSums(params, first_block);
  }

 private:
  static LayerGeometry AnyGeometry(TestRandom& random) {
    constexpr std::uint32_t kGroups[] = {1, 2, 3, 4, 8};
    constexpr std::uint32_t kWindows[] = {0, 0, 0, 30, 400};
    LayerGeometry geometry = Geometry(random.Pick(kSelectedTypes), random.Pick(kernels::kHeadDims),
                                      2, random.Pick(kGroups));
    geometry.sliding_window = random.Pick(kWindows);
    return geometry;
  }

  // The query rows that are multiplied with the segment's summaries, as rotated by the kernels.
  std::vector<float> Rows(const SegmentView& segment, std::uint32_t strategy) {
    const std::uint32_t padded = kernels::PaddedChannels(segment.shape);
    const AttendParams params = call_->params();
    std::vector<float> rows(std::size_t{columns()} * padded);
    for (std::uint32_t c = 0; c < columns(); ++c) {
      const std::uint32_t head = geometry_.group() * item().kv_head + c % geometry_.group();
      const std::size_t row = std::size_t{c / geometry_.group()} * geometry_.query_heads + head;
      const std::uint64_t slot = std::uint64_t{strategy} * params.max_columns + c;
      for (std::uint32_t i = 0; i < segment.shape.key.channels; ++i) {
        double value = kernels::ElementAt(static_cast<const std::byte*>(item().query),
                                          row * geometry_.head_dim + i, geometry_.type);
        if (segment.shape.packed()) {
          const ElementType type = OperandType(kernels::ValuesOf(segment.shape.format));
          value = kernels::ElementAt(reinterpret_cast<const std::byte*>(params.rotated),
                                     slot * geometry_.head_dim + i, type) *
                  params.rotated_scales[slot];
        }
        rows[std::size_t{c} * padded + i] = static_cast<float>(value);
      }
    }
    return rows;
  }

  std::vector<std::vector<float>> Expected(const SegmentView& segment, std::uint32_t strategy) {
    const std::uint32_t block = segment.shape.block;
    const std::uint32_t blocks = BlocksOf(segment.entries, block);
    const std::vector<float> rows = Rows(segment, strategy);
    const std::uint32_t padded = kernels::PaddedChannels(segment.shape);
    const kernels::TileLayout layout = kernels::LayoutOf(segment.shape);
    std::vector<std::vector<float>> all(columns(), std::vector<float>(blocks));
    for (std::uint32_t c = 0; c < columns(); ++c) {
      if (!CellSees(segment, c)) {
        std::fill(all[c].begin(), all[c].end(), -INFINITY);
        continue;
      }
      for (std::uint32_t t = 0; t * 32 < segment.entries; ++t) {
        const std::uint32_t here = std::min(32u, segment.entries - t * 32);
        const kernels::BlockRun run = {.summaries = segment.arena + segment.summary_offsets[t],
                                       .tile = segment.arena + segment.tile_offsets[t],
                                       .blocks = (here + block - 1) / block,
                                       .last_entries = here - (here - 1) / block * block};
        kernels::ScorePartReference({.runs = &run,
                                     .run_count = 1,
                                     .rows = rows.data() + std::size_t{c} * padded,
                                     .row_count = 1,
                                     .shape = segment.shape,
                                     .layout = layout,
                                     .padded_channels = padded,
                                     .scale = geometry_.scale,
                                     .scores = all[c].data() + t * (32 / block),
                                     .score_stride = blocks});
      }
    }
    return all;
  }

  // Whether any of the up to 32 adjacent rows may see a position of the segment.
  bool CellSees(const SegmentView& segment, std::uint32_t column) {
    const std::uint32_t first = column / 32 * 32;
    const std::uint32_t last = std::min(first + 32, columns()) - 1;
    const Range seen =
        SeenBy(geometry_, causal_, item().first_query_position + first / geometry_.group(),
               item().first_query_position + last / geometry_.group());
    return segment.first_position < seen.end &&
           segment.first_position + segment.positions() > seen.begin;
  }

  void ExpectVisible(const SegmentView& segment, const std::uint8_t* visible,
                     std::uint32_t blocks) {
    const Range seen = SeenBy(geometry_, causal_, item().first_query_position,
                              item().first_query_position + item().queries - 1);
    const kernels::TileLayout layout = kernels::LayoutOf(segment.shape);
    std::vector<std::uint32_t> expected(blocks);
    for (std::uint32_t e = 0; e < segment.entries; ++e) {
      const std::byte* tile = segment.arena + segment.tile_offsets[e / 32];
      const std::uint64_t first =
          segment.first_position + (segment.shape.positions ? 0 : e - e % 32);
      const std::uint64_t position =
          kernels::PositionOf(segment.shape, layout, tile, first, e % 32);
      expected[e / segment.shape.block] += position >= seen.begin && position < seen.end ? 1 : 0;
    }
    for (std::uint32_t b = 0; b < blocks; ++b) ASSERT_EQ(visible[b], expected[b]) << "block " << b;
  }

  void ExpectRowSums(const AttendParams& params, std::uint32_t blocks) {
    for (std::uint32_t c = 0; c < columns(); ++c) {
      double sum = 0;
      for (std::uint32_t b = 0; b < blocks; ++b) {
        if (params.visible[b] == 0) continue;
        sum += std::exp2(params.scores[std::uint64_t{c} * params.max_blocks + b]);
      }
      ASSERT_NEAR(params.row_sums[c], sum == 0 ? 0 : std::log2(sum), 1e-4) << "column " << c;
    }
  }

  LayerGeometry geometry_;
  bool causal_;
  std::optional<MixedProblem> problem_;
  std::optional<SelectionCall> call_;
};

TEST(Score, AgreesWithTheReference) {
  TestRandom random;
  for (int round = 0; round < 60; ++round) {
    ScoreProblem problem(random);
    ASSERT_EQ(problem.call().Select(random.Bits()), kNoFault);
    problem.ExpectScores();
    if (HasFatalFailure()) return;
  }
}

// A layer whose blocks have scores set by the test.
class ChoiceProblem {
 public:
  explicit ChoiceProblem(TestRandom& random) : random_(random), problem_(geometry_, false, random) {
    for (std::uint32_t i = 0; i < random.Between(1, 4); ++i) {
      std::vector<SegmentShape> shapes;
      for (std::uint32_t s = 0; s < random.Between(1, 4); ++s) {
        const auto most = random.OneIn(3) ? 9000 : 200;
        const auto entries = static_cast<std::uint32_t>(random.Below(most));
        SegmentShape shape = {.tile = kernels::DenseShape(64, ElementType::kBf16),
                              .entries = entries};
        if (!random.OneIn(4)) {
          shape.tile.summary = kernels::Summary::kMean;
          shape.tile.block = static_cast<std::uint8_t>(4u << random.Below(3));
        }
        shapes.push_back(shape);
      }
      const auto tail = static_cast<std::uint32_t>(random.OneIn(3) ? 0 : random.Below(90));
      problem_.Add(shapes, tail, static_cast<std::uint32_t>(random.Between(1, 3)), 0);
      if (!random.OneIn(5)) problem_.items()[i].rule = AnyStepRule(random);
    }
    call_.emplace(geometry_, false, problem_.items());
  }

  std::uint32_t selections() { return call_->step().layer(0).selections; }

  void Run() {
    const AttendParams params = call_->params();
    for (std::uint32_t s = 0; s < selections(); ++s) Fill(params, s);
    if (selections() == 0) return;
    EmulateGpu({.blocks_x = selections(),
                .threads = kSelectThreads,
                .shared_bytes = kSelectSharedBytes,
                .seed = random_.Bits()},
               [&] { SelectBlocks(params); });
  }

  void ExpectChoice(std::uint32_t index) {
    const StepReader step = call_->step();
    const StepSelection& selection = step.selection(0, index);
    const AttendParams params = call_->params();
    const StepRule& rule = RuleOf(selection);
    std::vector<kernels::BlockFacts> facts(selection.blocks);
    std::uint64_t visible = 0;
    const std::uint32_t tail = TailOf(selection);
    for (std::uint32_t b = 0; b < selection.blocks; ++b) {
      facts[b].entries = params.visible[selection.first_block + b];
      facts[b].forced = ForcedOf(selection, tail).Has(b);
      visible += facts[b].entries;
    }
    const bool last = ForcedOf(selection, tail).last == selection.blocks - 1;
    std::vector<float> values = Values(params, selection, index, rule);
    std::vector<float> scratch(selection.blocks);
    std::vector<std::uint8_t> taken(selection.blocks);
    kernels::SelectReference(
        {.scores = values.data(),
         .score_stride = selection.blocks,
         .row_count = 1,
         .blocks = facts.data(),
         .block_count = selection.blocks,
         .budget =
             BudgetOf(rule, {.entries = visible,
                             .newest = tail + UnblockedOf(selection),
                             .partial = last ? facts.back().entries % selection.tail_block : 0u,
                             .block = selection.tail_block}),
         .by_share = false,
         .values = scratch.data(),
         .taken = taken.data()});
    const std::vector<std::vector<std::uint32_t>> lists = call_->Taken(index);
    std::uint32_t parts = 0;
    const SelectedRange* ranges = params.ranges + FirstRangeOf(selection, index);
    for (std::uint32_t c = 0; c < selection.choices; ++c) {
      const StepChoice& choice = step.choices(0)[selection.first_choice + c];
      std::vector<std::uint32_t> expected;
      for (std::uint32_t b = 0; b < choice.blocks; ++b) {
        if (taken[choice.first_block + b] != 0) expected.push_back(b);
      }
      ASSERT_EQ(lists[c], expected) << "choice " << c << " of " << selection.choices;
      ASSERT_EQ(ranges[c].first_part, parts);
      parts +=
          SelectedPartsOf(static_cast<std::uint32_t>(expected.size()), BlockOf(selection, choice));
    }
    ASSERT_EQ(ranges[selection.choices].first_part, parts);
    ASSERT_LE(parts, step.slots(0)[index + 1] - step.slots(0)[index]);
  }
  std::uint64_t fault() const { return call_->fault(); }

 private:
  const StepRule& RuleOf(const StepSelection& selection) {
    return call_->step().sequence(selection.lane / geometry_.kv_heads).rule;
  }
  // Entries in no block; all of them are visible.
  std::uint32_t UnblockedOf(const StepSelection& selection) {
    for (std::uint32_t i = 0; i < problem_.items().size(); ++i) {
      if (call_->LaneOfItem(i) != selection.lane) continue;
      const kernels::LaneView& lane = *problem_.items()[i].lane;
      const kernels::SegmentView& newest = lane.segments[lane.segment_count - 1];
      return newest.shape.block == 0 ? newest.entries % kernels::kTileEntries : 0;
    }
    return 0;
  }
  std::uint32_t TailOf(const StepSelection& selection) {
    for (std::uint32_t i = 0; i < problem_.items().size(); ++i) {
      const kernels::TailView& tail = problem_.items()[i].lane->tail;
      if (call_->LaneOfItem(i) == selection.lane) {
        return static_cast<std::uint32_t>(tail.end - tail.begin);
      }
    }
    ADD_FAILURE() << "lane " << selection.lane << " is no item's";
    return 0;
  }
  std::uint32_t BlockOf(const StepSelection& selection, const StepChoice& choice) {
    const StepReader step = call_->step();
    const StepSegment& segment = step.segments(step.lane(0, selection.lane))[choice.segment];
    return step.strategy(0, segment.strategy).shape.block;
  }
  std::uint32_t ColumnsOf(const StepSelection& selection) {
    return call_->step().sequence(selection.lane / geometry_.kv_heads).queries * geometry_.group();
  }

  // Few different scores, so that many tie. A range of each segment's entries is visible. Sums of
  // rows are whole numbers, sometimes zero or NaN.
  void Fill(const AttendParams& params, std::uint32_t index) {
    const StepReader step = call_->step();
    const StepSelection& selection = step.selection(0, index);
    for (std::uint32_t c = 0; c < ColumnsOf(selection); ++c) {
      for (std::uint32_t b = 0; b < selection.blocks; ++b) {
        float score = static_cast<float>(random_.Below(64)) / 8 - 4;
        if (random_.OneIn(9)) score = -INFINITY;
        if (random_.OneIn(50)) score = -0.0f;
        params.scores[std::uint64_t{c} * params.max_blocks + selection.first_block + b] = score;
      }
      for (std::uint32_t p = step.pieces(0)[index]; p < step.pieces(0)[index + 1]; ++p) {
        float* sums = params.score_sums + (std::uint64_t{p} * params.max_columns + c) * 2;
        sums[0] = -INFINITY;
        sums[1] = 0;
      }
      const auto pieces = step.pieces(0)[index + 1] - step.pieces(0)[index];
      float* sums =
          params.score_sums +
          (std::uint64_t{step.pieces(0)[index] + random_.Below(pieces)} * params.max_columns + c) *
              2;
      if (!random_.OneIn(8)) {
        sums[0] = static_cast<float>(random_.Below(9)) - 4;
        sums[1] = random_.OneIn(9) ? NAN : std::ldexp(1.0f, static_cast<int>(random_.Below(5)));
      }
    }
    for (std::uint32_t c = 0; c < selection.choices; ++c) {
      const StepChoice& choice = step.choices(0)[selection.first_choice + c];
      const StepSegment& segment = step.segments(step.lane(0, selection.lane))[choice.segment];
      const std::uint32_t block = BlockOf(selection, choice);
      const auto begin = random_.OneIn(2) ? 0 : random_.Below(segment.entries + 1);
      const auto end = random_.OneIn(2) ? segment.entries : random_.Between(begin, segment.entries);
      for (std::uint32_t b = 0; b < choice.blocks; ++b) {
        std::uint8_t visible = 0;
        for (std::uint32_t e = b * block; e < (b + 1) * block; ++e) {
          visible += e >= begin && e < end ? 1 : 0;
        }
        params.visible[selection.first_block + choice.first_block + b] = visible;
      }
    }
  }

  // By definition. The sums are exact: one piece holds a power of two, the others zero.
  std::vector<float> Values(const AttendParams& params, const StepSelection& selection,
                            std::uint32_t index, const StepRule& rule) {
    const std::uint32_t* pieces = call_->step().pieces(0);
    std::vector<float> values(selection.blocks, -INFINITY);
    for (std::uint32_t c = 0; c < ColumnsOf(selection); ++c) {
      float lse = 0;
      for (std::uint32_t p = pieces[index]; p < pieces[index + 1] && rule.by_share != 0; ++p) {
        const float* sums = params.score_sums + (std::uint64_t{p} * params.max_columns + c) * 2;
        if (sums[1] != 0) lse = sums[0] + std::log2(sums[1]);
      }
      for (std::uint32_t b = 0; b < selection.blocks; ++b) {
        const float score =
            params.scores[std::uint64_t{c} * params.max_blocks + selection.first_block + b];
        if (score - lse > values[b]) values[b] = score - lse;
      }
    }
    return values;
  }

  TestRandom& random_;
  LayerGeometry geometry_ = Geometry(ElementType::kBf16, 64, 1, 2);
  MixedProblem problem_;
  std::optional<SelectionCall> call_;
};

TEST(Select, TakesWhatTheReferenceTakes) {
  TestRandom random;
  for (int round = 0; round < 60; ++round) {
    ChoiceProblem problem(random);
    problem.Run();
    ASSERT_EQ(problem.fault(), kNoFault);
    for (std::uint32_t s = 0; s < problem.selections(); ++s) {
      problem.ExpectChoice(s);
      if (HasFatalFailure()) return;
    }
  }
}

// More visible blocks than a rule allows, which corrupt positions can cause: no more parts than
// slots are written, and the lane is reported.
TEST(Select, KeepsToItsSlotsWhateverIsVisible) {
  TestRandom random;
  const LayerGeometry geometry = Geometry(ElementType::kBf16, 64, 1, 2);
  MixedProblem problem(geometry, false, random);
  SegmentShape shape = {.tile = kernels::DenseShape(64, ElementType::kBf16), .entries = 4096};
  shape.tile.summary = kernels::Summary::kMean;
  shape.tile.block = 16;
  problem.Add({shape}, 0, 1, 0);
  problem.items()[0].rule = {.entries = 100, .selects = 1};
  SelectionCall call(geometry, false, problem.items());
  const AttendParams params = call.params();
  std::fill_n(params.visible, 256, std::uint8_t{1});
  std::fill_n(params.scores, 2 * params.max_blocks, 0.0f);
  std::fill_n(params.score_sums, 2 * 2 * params.max_pieces, 0.0f);
  EmulateGpu({.threads = kSelectThreads, .shared_bytes = kSelectSharedBytes, .seed = random.Bits()},
             [&] { SelectBlocks(params); });
  EXPECT_EQ(call.fault(), FaultWord::Pack(FaultKind::kBadTile, 0, 0));
  EXPECT_EQ(params.ranges[1].first_taken, 100u);
  EXPECT_EQ(params.ranges[1].first_part, call.step().slots(0)[1]);
  EXPECT_LT(call.step().slots(0)[1], SelectedPartsOf(100, 16));
}

// Lanes with and without selection, of several sequences: each result is as if the lane were alone.
TEST(Selection, BitsDependOnTheLaneAlone) {
  TestRandom random;
  for (int round = 0; round < 8; ++round) {
    const LayerGeometry geometry = Geometry(random.Pick(kSelectedTypes), 64, 2, 3);
    MixedProblem together(geometry, true, random);
    for (std::uint32_t i = 0; i < 4; ++i) {
      std::vector<SegmentShape> shapes;
      for (std::uint32_t s = 0; s < random.Between(1, 3); ++s) {
        shapes.push_back(
            SummedShape(geometry, static_cast<std::uint32_t>(random.Between(1, 700)), random));
        if (random.OneIn(3)) shapes.back().tile.summary = kernels::Summary::kNone;
        if (shapes.back().tile.summary == kernels::Summary::kNone) shapes.back().tile.block = 0;
      }
      together.Add(shapes, static_cast<std::uint32_t>(random.Below(40)),
                   static_cast<std::uint32_t>(random.Between(1, 7)),
                   static_cast<std::uint32_t>(random.Below(2)));
      for (std::size_t s = 0; s < shapes.size(); ++s) {
        if (shapes[s].tile.block != 0) SumUp(together.lane(i), s);
      }
      if (i != 2) together.items()[i].rule = AnyStepRule(random);
    }
    ASSERT_EQ(together.Run({.blocks_x = 3, .seed = random.Bits()}), kNoFault);
    std::vector<std::vector<float>> all;
    for (std::size_t i = 0; i < 4; ++i) all.push_back(together.Results(i));
    together.ExpectItemRight(2);
    for (std::size_t i = 0; i < 4; ++i) {
      const HostItem& item = together.items()[i];
      ASSERT_EQ(EmulateHostBatch({.geometry = geometry,
                                  .causal = true,
                                  .output_type = ElementType::kFp32,
                                  .items = {&item, 1}},
                                 {.blocks_x = 1, .seed = random.Bits()}),
                kNoFault);
      const std::vector<float> alone = together.Results(i);
      EXPECT_EQ(std::memcmp(alone.data(), all[i].data(), alone.size() * sizeof(float)), 0)
          << "item " << i;
    }
  }
}

}  // namespace
}  // namespace tessera::tests
