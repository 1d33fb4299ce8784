// Scores of quads by signs: the kernels' source on the emulated GPU, compared with the definition.
// Also which signs launches refuse.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <optional>
#include <vector>

#include "kernels/cuda/common/planes_index.h"
#include "tests/unit/kernels/cuda/selection_rig.h"

namespace tessera::tests {
namespace {

using namespace kernels::cuda;  // NOLINT: a test file
using kernels::ElementType;
using kernels::kQuadRows;
using kernels::kTileEntries;
using kernels::LayerGeometry;
using kernels::SegmentView;
using kernels::Summary;

constexpr double kLogOfTwo = 0.69314718055994530942;

// A lane of dense segments, most of them with signs: random bits and norms.
class SignProblem {
 public:
  explicit SignProblem(TestRandom& random) : random_(random), geometry_(AnyGeometry(random)) {
    problem_.emplace(geometry_, causal_, random);
    std::vector<SegmentShape> shapes;
    for (std::uint32_t s = 0; s < random.Between(1, 3); ++s) {
      const auto entries = static_cast<std::uint32_t>(random.OneIn(3) ? random.Between(500, 1100)
                                                                      : random.Between(1, 90));
      SegmentShape shape = {.tile = kernels::DenseShape(geometry_.head_dim, geometry_.type),
                            .entries = entries};
      shape.tile.positions = random.OneIn(3);
      shape.tile.summary = s == 0 || random.OneIn(2) ? Summary::kSigns : Summary::kMean;
      shape.tile.block = kQuadRows;
      shapes.push_back(shape);
    }
    problem_->Add(shapes, 10, static_cast<std::uint32_t>(random.Between(1, 9)), 1);
    for (std::size_t s = 0; s < shapes.size(); ++s) {
      if (HasSigns(shapes[s].tile)) {
        AddSigns(s);
      } else {
        SumUp(problem_->lane(0), s);
      }
    }
    item().rule = AnyStepRule(random);
    call_.emplace(geometry_, causal_, problem_->items());
  }
  SelectionCall& call() { return *call_; }
  HostItem& item() { return problem_->items()[0]; }

  // Moves all signs to addresses that are multiples of four only.
  void Misalign() {
    const DeviceArena arena = call_->step().arena();
    ForEachSigns([&](const SegmentView& segment, const StepSegment& stored, std::uint32_t) {
      const std::uint32_t bytes = kernels::LayoutOf(segment.shape).summary_bytes;
      for (std::uint32_t t = 0; t * kTileEntries < segment.entries; ++t) {
        auto& word = *reinterpret_cast<std::uint64_t*>(
            ResolveObject(arena, stored.summary_table + std::uint64_t{t} * 8, 8, 8));
        auto* at = reinterpret_cast<std::byte*>(ResolveObject(arena, word, bytes, 4));
        std::memmove(at + 4, at, bytes);  // objects are rounded up to 64 bytes
        word += 4;
      }
    });
  }

  void ExpectCodesAndScores() {
    ForEachSigns([&](const SegmentView& segment, const StepSegment& stored, std::uint32_t first) {
      for (std::uint32_t c = 0; c < item().queries * geometry_.group(); ++c) {
        ExpectCodes(segment, stored.strategy, c);
        ExpectScores(segment, stored.strategy, c, first);
        if (testing::Test::HasFatalFailure()) return;
      }
    });
  }

 private:
  static LayerGeometry AnyGeometry(TestRandom& random) {
    constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};
    constexpr std::uint32_t kGroups[] = {1, 2, 3, 4, 8};
    return Geometry(random.Pick(kTypes), random.Pick(kernels::kHeadDims), 2, random.Pick(kGroups));
  }

  void AddSigns(std::size_t index) {
    SegmentView& view = problem_->lane(0).segment_view(index);
    const kernels::TileLayout layout = kernels::LayoutOf(view.shape);
    for (std::uint32_t t = 0; t * kTileEntries < view.entries; ++t) {
      std::byte* summaries = problem_->lane(0).segment(index).summaries(t);
      for (std::uint32_t i = 0; i < layout.summary_bytes; ++i) {
        summaries[i] = static_cast<std::byte>(random_.Below(256));
      }
      summaries[layout.block_data + random_.Below(kTileEntries)] = std::byte{0};
    }
    const std::uint32_t dim = view.shape.head_dim;
    AlignedBytes& book = books_.emplace_back((std::size_t{dim} + 1) * dim * 2);
    for (std::uint32_t i = 0; i < (dim + 1) * dim; ++i) {
      StoreElement(ElementType::kBf16, Normal(random_), book.data() + std::size_t{i} * 2);
    }
    view.rotation = {.key = book.data(),
                     .type = ElementType::kBf16,
                     .key_mean = book.data() + std::size_t{dim} * dim * 2};
  }

  // Calls act(segment, its record, its first block) for those with signs.
  template <class Act>
  void ForEachSigns(Act act) {
    const StepReader step = call_->step();
    const StepSegment* segments = step.segments(step.lane(0, call_->LaneOfItem(0)));
    std::uint32_t first = 0;
    for (std::uint32_t s = 0; s < item().lane->segment_count; ++s) {
      const SegmentView& segment = item().lane->segments[s];
      if (HasSigns(segment.shape)) act(segment, segments[s], first);
      first += BlocksOf(segment.entries, segment.shape.block);
    }
  }

  const std::int8_t* Codes(std::uint32_t strategy, std::uint32_t column) {
    const AttendParams params = call_->params();
    const std::uint64_t slot = std::uint64_t{strategy} * params.max_columns + column;
    return reinterpret_cast<const std::int8_t*>(params.rotated + slot * geometry_.head_dim);
  }

  // The codes are those of the rotated query, up to what fp32 leaves open.
  void ExpectCodes(const SegmentView& segment, std::uint32_t strategy, std::uint32_t column) {
    const std::uint32_t dim = geometry_.head_dim;
    const std::uint32_t head = geometry_.group() * item().kv_head + column % geometry_.group();
    const std::size_t row = std::size_t{column / geometry_.group()} * geometry_.query_heads + head;
    std::vector<double> rotated(dim / 2);
    double peak = 0;
    for (std::uint32_t c = 0; c < dim / 2; ++c) {
      for (std::uint32_t d = 0; d < dim; ++d) {
        rotated[c] += kernels::ElementAt(segment.rotation.key, c * dim + d, ElementType::kBf16) *
                      kernels::ElementAt(static_cast<const std::byte*>(item().query), row * dim + d,
                                         geometry_.type);
      }
      peak = std::max(peak, std::fabs(rotated[c]));
    }
    for (std::uint32_t c = 0; c < dim / 2; ++c) {
      ASSERT_NEAR(Codes(strategy, column)[c], rotated[c] / peak * 127, 0.501) << "channel " << c;
    }
  }

  void ExpectScores(const SegmentView& segment, std::uint32_t strategy, std::uint32_t column,
                    std::uint32_t first_block) {
    const AttendParams params = call_->params();
    const kernels::TileLayout layout = kernels::LayoutOf(segment.shape);
    const std::uint32_t channels = geometry_.head_dim / 2;
    const std::int8_t* codes = Codes(strategy, column);
    double squares = 0;
    for (std::uint32_t c = 0; c < channels; ++c) squares += codes[c] * codes[c];
    std::vector<double> scores(BlocksOf(segment.entries, kQuadRows), -kInfinity);
    for (std::uint32_t e = 0; e < segment.entries; ++e) {
      const std::byte* summaries =
          segment.arena + segment.summary_offsets[e / kTileEntries] + layout.block_bits;
      const std::byte* bits = summaries + e % kTileEntries * (channels / 8);
      double dot = 0;
      for (std::uint32_t c = 0; c < channels; ++c) {
        dot += (std::to_integer<int>(bits[c / 8]) >> c % 8 & 1) != 0 ? codes[c] : -codes[c];
      }
      const int k = std::to_integer<int>(summaries[layout.block_data + e % kTileEntries]);
      const double norm = k == 0 ? 0 : std::exp2(k / 8.0 - 16);
      double& score = scores[e / kQuadRows];
      score = std::max(score, norm * dot / std::sqrt(squares));
    }
    for (std::uint32_t b = 0; b < scores.size(); ++b) {
      const double got =
          params.scores[std::uint64_t{column} * params.max_blocks + first_block + b] * kLogOfTwo;
      ASSERT_NEAR(got, scores[b], std::fabs(scores[b]) * 1e-6)
          << "column " << column << " quad " << b << " of " << scores.size();
    }
  }

  TestRandom& random_;
  LayerGeometry geometry_;
  bool causal_ = false;  // every segment is seen
  std::deque<AlignedBytes> books_;
  std::optional<MixedProblem> problem_;
  std::optional<SelectionCall> call_;
};

TEST(Signs, ScoresAreThoseOfTheDefinition) {
  TestRandom random;
  for (int round = 0; round < 40; ++round) {
    SignProblem problem(random);
    if (random.OneIn(3)) problem.Misalign();
    ASSERT_EQ(problem.call().Select(random.Bits()), kNoFault);
    problem.ExpectCodesAndScores();
    if (HasFatalFailure()) return;
  }
}

// Attention over dense quads and a launch for other summaries.
TEST(Signs, LaunchesForOtherSummariesRefuseThem) {
  TestRandom random;
  SignProblem problem(random);
  ASSERT_EQ(problem.call().Attend(1), kNoFault);
  problem.call().limits.summaries &= ~SummaryBit(Summary::kSigns);
  EXPECT_EQ(problem.call().Attend(1), FaultWord::Pack(FaultKind::kBadStep, 0, 0));
}

TEST(Signs, SummariesOutsideThePoolAreReported) {
  TestRandom random;
  for (int round = 0; round < 5; ++round) {
    SignProblem problem(random);
    const StepReader step = problem.call().step();
    const std::uint32_t lane = problem.call().LaneOfItem(0);
    const StepSegment& segment = step.segments(step.lane(0, lane))[0];
    const auto tiles = (segment.entries + kTileEntries - 1) / kTileEntries;
    *reinterpret_cast<std::uint64_t*>(
        ResolveObject(step.arena(), segment.summary_table + random.Below(tiles) * 8, 8, 8)) =
        random.OneIn(2) ? ~std::uint64_t{63} : 2;
    EXPECT_EQ(problem.call().Attend(random.Bits()), FaultWord::Pack(FaultKind::kBadTile, 0, lane));
  }
}

}  // namespace
}  // namespace tessera::tests
