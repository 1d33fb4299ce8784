// Encoding on a device, compared with the scalar reference: the same bytes where rotated values are
// exact, and properties of the selection elsewhere.
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "tests/unit/kernels/cuda/tile_ops_rig.h"

namespace tessera::tests {
namespace {

using kernels::kHeadDims;
using kernels::StoredRow;
using kernels::ValueType;
using kernels::cuda::DeviceStrategy;
using kernels::cuda::EncodeTileJob;
using kernels::cuda::kRotationError;

constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};
constexpr std::uint8_t kGroups[] = {1, 2, 4};

class EncodeTest : public TileOpsTest {
 protected:
  void Add(EncodeCase&& of) {
    const auto strategy = static_cast<std::uint32_t>(strategies_.size());
    strategies_.push_back({.shape = of.shape,
                           .layout = of.layout,
                           .rotation_type = of.rotation_type,
                           .key_rotation = Put(of.key_rotation),
                           .value_rotation = Put(of.value_rotation)});
    jobs_.push_back({.key = Put(of.key->bytes()),
                     .value = Put(of.value->bytes()),
                     .stride = of.key->stride(),
                     .weights = of.has_weights ? Put(of.weights) : 0,
                     .positions = of.has_positions ? Put(of.positions) : 0,
                     .tile = Put(of.tile),
                     .summaries = Put(of.summaries),
                     .rows = of.rows,
                     .strategy = strategy});
    cases_.push_back(std::move(of));
  }
  // Encodes all jobs. Returns the first one with an element that is not finite.
  std::optional<std::uint32_t> Run(ElementType type) {
    std::optional<std::uint32_t> unusable;
    const kernels::cuda::Error error = calls().Encode(strategies_, type, jobs_, &unusable);
    EXPECT_TRUE(error.ok()) << error.text();
    for (std::size_t i = 0; i < jobs_.size(); ++i) {
      Get(jobs_[i].tile, cases_[i].tile);
      if (jobs_[i].summaries != 0) Get(jobs_[i].summaries, cases_[i].summaries);
    }
    return unusable;
  }
  void Clear() {
    cases_.clear();
    strategies_.clear();
    jobs_.clear();
  }

  std::vector<EncodeCase> cases_;
  std::vector<DeviceStrategy> strategies_;
  std::vector<EncodeTileJob> jobs_;
};

// ---- Exact rotations: the reference's bytes ----------------------------------------------------

class EncodeExact : public EncodeTest,
                    public ::testing::WithParamInterface<std::tuple<std::uint16_t, ElementType>> {
 protected:
  std::uint16_t head_dim() const { return std::get<0>(GetParam()); }
  ElementType type() const { return std::get<1>(GetParam()); }

  void ExpectReferenceBytes() {
    EXPECT_EQ(Run(type()), std::nullopt);
    for (const EncodeCase& of : cases_) {
      const std::optional<StoredBytes> expected = of.Expected();
      ASSERT_TRUE(expected.has_value());
      EXPECT_TRUE(of.Is(*expected)) << Describe(of.shape) << " rows " << of.rows << ": "
                                    << FirstDifference(of.layout, expected->tile, of.tile);
    }
  }
};

TEST_P(EncodeExact, PackedTilesWithoutRotation) {
  for (int format = 4; format <= 7; ++format) {
    for (std::uint8_t group : kGroups) {
      const TileShape shape =
          RandomPackedShape(random_, static_cast<TileFormat>(format), head_dim(), group, false);
      Add(EncodeCase(random_, shape, type(), RotationKind::kNone, ElementType::kBf16));
    }
  }
  ExpectReferenceBytes();
}

// Rotations that permute, negate and scale by powers of two are exact even on tensor cores, so that
// every index of the product is tested. Includes truncated ones.
TEST_P(EncodeExact, PackedTilesThatSelectChannels) {
  for (int format = 4; format <= 7; ++format) {
    for (std::uint8_t group : kGroups) {
      const TileShape shape = RandomPackedShape(random_, static_cast<TileFormat>(format),
                                                head_dim(), group, random_.OneIn(2));
      const ElementType rotation = random_.OneIn(2) ? ElementType::kBf16 : random_.Pick(kTypes);
      Add(EncodeCase(random_, shape, type(), RotationKind::kSelection, rotation));
    }
  }
  ExpectReferenceBytes();
}

TEST_P(EncodeExact, DenseTilesWithSummaries) {
  for (int i = 0; i < 6; ++i) {
    const TileShape shape = RandomDenseShape(random_, type(), head_dim());
    Add(EncodeCase(random_, shape, type(), RotationKind::kNone, ElementType::kBf16));
  }
  ExpectReferenceBytes();
}

INSTANTIATE_TEST_SUITE_P(Cuda, EncodeExact,
                         ::testing::Combine(::testing::ValuesIn(std::vector<std::uint16_t>(
                                                std::begin(kHeadDims), std::end(kHeadDims))),
                                            ::testing::ValuesIn(kTypes)));

// ---- Real rotations: properties ----------------------------------------------------------------

// The exact row, and the allowed error of each element.
struct ExactRow {
  std::vector<double> values;
  std::vector<double> slack;
};

ExactRow Rotated(const EncodeCase& of, bool of_value, std::uint32_t row) {
  const RandomRows& rows = of_value ? *of.value : *of.key;
  const Bytes& rotation = of_value ? of.value_rotation : of.key_rotation;
  const std::uint32_t channels = (of_value ? of.shape.value : of.shape.key).channels;
  ExactRow exact;
  for (std::uint32_t c = 0; c < channels; ++c) {
    double sum = 0;
    double mass = 0;
    for (std::uint32_t d = 0; d < of.shape.head_dim; ++d) {
      const std::size_t at = std::size_t{c} * of.shape.head_dim + d;
      const double product =
          static_cast<double>(LoadElement(of.rotation_type,
                                          rotation.data() + at * ElementBytes(of.rotation_type))) *
          rows.Get(row, d);
      sum += product;
      mass += std::fabs(product);
    }
    exact.values.push_back(sum);
    exact.slack.push_back(mass * kRotationError + 0x1p-140);
  }
  return exact;
}

ExactRow MeanOf(const EncodeCase& of, std::uint32_t block) {
  const std::uint32_t first = block * of.shape.block;
  const std::uint32_t count = std::min<std::uint32_t>(of.shape.block, of.rows - first);
  ExactRow mean = {std::vector<double>(of.shape.key.channels),
                   std::vector<double>(of.shape.key.channels)};
  for (std::uint32_t e = 0; e < count; ++e) {
    const ExactRow row = Rotated(of, false, first + e);
    for (std::uint32_t c = 0; c < of.shape.key.channels; ++c) {
      mean.values[c] += row.values[c] / count;
      mean.slack[c] += (row.slack[c] + 0x1p-24 * std::fabs(row.values[c])) / count;
    }
  }
  return mean;
}

// The rounding error of a stored value: half a unit in the last place, relative to the value or to
// the row's scale.
double RoundingOf(const StoredRow& row, double value) {
  switch (row.values) {
    case ValueType::kBf16:
      return 0x1p-8 * std::fabs(value);
    case ValueType::kFp16:
      return 0x1p-11 * std::fabs(value) + 0x1p-25;
    case ValueType::kInt8:
    case ValueType::kFp8:
      break;
  }
  const double scale = kernels::ElementAt(row.scale, 0, ElementType::kBf16);
  // No scale: the row was too small for one.
  if (scale == 0) return kernels::kSmallestScaledPeak;
  if (row.values == ValueType::kInt8) return 0.5001 * scale;
  return std::max(0x1.1p-4 * std::fabs(value), 0x1.1p-10 * scale);
}

void ExpectSelection(const StoredRow& stored, const ExactRow& exact) {
  std::vector<double> elements(stored.channels);
  kernels::ReadRow(stored, elements.data());
  double weakest_kept = std::numeric_limits<double>::infinity();
  double strongest_dropped = 0;
  std::uint32_t kept = 0;
  for (std::uint32_t g = 0; g < stored.channels / stored.group; ++g) {
    double strength = 0;
    double slack = 0;
    const bool in = stored.bits == nullptr ||
                    (std::to_integer<unsigned>(stored.bits[g / 8]) >> (g % 8) & 1u) != 0;
    for (std::uint32_t i = 0; i < stored.group; ++i) {
      const std::uint32_t c = g * stored.group + i;
      strength += exact.values[c] * exact.values[c];
      slack += exact.slack[c];
      if (in) {
        EXPECT_LE(std::fabs(elements[c] - exact.values[c]),
                  exact.slack[c] + RoundingOf(stored, std::fabs(exact.values[c]) + exact.slack[c]))
            << "channel " << c;
      }
    }
    strength = std::sqrt(strength);
    slack += 0x1p-20 * strength;
    kept += in ? stored.group : 0;
    if (in) weakest_kept = std::min(weakest_kept, strength + slack);
    if (!in) strongest_dropped = std::max(strongest_dropped, strength - slack);
  }
  EXPECT_EQ(kept, stored.kept);
  EXPECT_GE(weakest_kept, strongest_dropped);
}

void ExpectRealRotation(const EncodeCase& of) {
  SCOPED_TRACE(Describe(of.shape) + " rows " + std::to_string(of.rows));
  for (std::uint32_t r = 0; r < of.rows; ++r) {
    SCOPED_TRACE("row " + std::to_string(r));
    ExpectSelection(kernels::KeyRow(of.shape, of.layout, of.tile.data(), r), Rotated(of, false, r));
    ExpectSelection(kernels::ValueRow(of.shape, of.layout, of.tile.data(), r),
                    Rotated(of, true, r));
  }
  if (of.shape.summary != Summary::kMean) return;
  for (std::uint32_t b = 0; b * of.shape.block < of.rows; ++b) {
    SCOPED_TRACE("block " + std::to_string(b));
    ExpectSelection(kernels::BlockRow(of.shape, of.layout, of.summaries.data(), b), MeanOf(of, b));
  }
}

class EncodeRotated : public EncodeTest,
                      public ::testing::WithParamInterface<std::tuple<ElementType, ElementType>> {};

TEST_P(EncodeRotated, KeepsTheStrongestAndRoundsThem) {
  const auto [type, rotation] = GetParam();
  for (const std::uint32_t head_dim : kHeadDims) {
    Clear();
    for (int format = 4; format <= 7; ++format) {
      const TileShape shape =
          RandomPackedShape(random_, static_cast<TileFormat>(format),
                            static_cast<std::uint16_t>(head_dim), random_.Pick(kGroups), true);
      Add(EncodeCase(random_, shape, type, RotationKind::kReal, rotation));
    }
    ASSERT_EQ(Run(type), std::nullopt);
    for (const EncodeCase& of : cases_) ExpectRealRotation(of);
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, EncodeRotated,
                         ::testing::Combine(::testing::ValuesIn(kTypes),
                                            ::testing::ValuesIn(kTypes)));

// ---- Values that are not finite ----------------------------------------------------------------

TEST_F(EncodeTest, NamesTheFirstJobAndLeavesTheOthersAlone) {
  const float bad[] = {std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity(), std::nanf("")};
  const RotationKind kinds[] = {RotationKind::kNone, RotationKind::kSelection};
  for (const ElementType type : kTypes) {
    Clear();
    std::vector<bool> usable;
    std::optional<std::uint32_t> first;
    for (std::uint32_t i = 0; i < 8; ++i) {
      const RotationKind kind = random_.Pick(kinds);
      const TileShape shape =
          random_.OneIn(4)
              ? RandomDenseShape(random_, type, 64)
              : RandomPackedShape(random_, TileFormat::kPackedBf16, 64, random_.Pick(kGroups),
                                  kind == RotationKind::kSelection);
      EncodeCase of(random_, shape, type, shape.packed() ? kind : RotationKind::kNone,
                    random_.Pick(kTypes));
      usable.push_back(!random_.OneIn(3));
      if (!usable.back()) {
        // NaN times 0 is NaN, so every channel becomes NaN, including those that select another.
        RandomRows& rows = random_.OneIn(2) ? *of.key : *of.value;
        rows.Set(static_cast<std::uint32_t>(random_.Below(of.rows)),
                 static_cast<std::uint32_t>(random_.Below(64)), random_.Pick(bad));
        first = std::min(first.value_or(i), i);
      }
      Add(std::move(of));
    }
    EXPECT_EQ(Run(type), first);
    for (std::size_t i = 0; i < cases_.size(); ++i) {
      const std::optional<StoredBytes> expected = cases_[i].Expected();
      ASSERT_EQ(expected.has_value(), usable[i]);
      if (expected.has_value()) {
        EXPECT_TRUE(cases_[i].Is(*expected)) << i;
      }
    }
  }
}

// ---- Refusals ----------------------------------------------------------------------------------

TEST_F(EncodeTest, WrongJobsAreNamedAndNothingRuns) {
  TileShape summed = RandomPackedShape(random_, TileFormat::kPackedInt8, 64, 2, false);
  summed.summary = Summary::kMean;
  summed.block = 8;
  Add(EncodeCase(random_, summed, ElementType::kBf16, RotationKind::kSelection,
                 ElementType::kBf16));
  const auto refused = [&](auto change) {
    std::vector<DeviceStrategy> strategies = strategies_;
    strategies.push_back(strategies[0]);
    EncodeTileJob job = jobs_[0];
    change(strategies, job);
    std::optional<std::uint32_t> unusable;
    return !calls().Encode(strategies, ElementType::kBf16, std::span(&job, 1), &unusable).ok();
  };
  using Strategies = std::vector<DeviceStrategy>;
  EXPECT_TRUE(refused([](Strategies&, EncodeTileJob& j) { j.strategy = 2; }));
  EXPECT_TRUE(refused([](Strategies&, EncodeTileJob& j) { j.rows = 0; }));
  EXPECT_TRUE(refused([](Strategies&, EncodeTileJob& j) { j.rows = 33; }));
  EXPECT_TRUE(refused([](Strategies&, EncodeTileJob& j) { j.key += 8; }));
  EXPECT_TRUE(refused([](Strategies&, EncodeTileJob& j) { j.value = 0; }));
  EXPECT_TRUE(refused([](Strategies&, EncodeTileJob& j) { j.stride += 2; }));
  EXPECT_TRUE(refused([](Strategies&, EncodeTileJob& j) { j.tile += 4; }));
  EXPECT_TRUE(refused([](Strategies&, EncodeTileJob& j) { j.summaries = 0; }));
  EXPECT_TRUE(refused([](Strategies&, EncodeTileJob& j) { j.summaries += 2; }));
  EXPECT_TRUE(refused([](Strategies&, EncodeTileJob& j) { j.weights += 2; }));
  EXPECT_TRUE(refused([](Strategies& s, EncodeTileJob&) { s[0].shape.group = 3; }));
  EXPECT_TRUE(refused([](Strategies& s, EncodeTileJob&) { s[0].layout.value_data += 2; }));
  EXPECT_TRUE(refused([](Strategies& s, EncodeTileJob&) { s[0].key_rotation += 8; }));
  EXPECT_TRUE(refused([](Strategies& s, EncodeTileJob& j) {
    s[1].shape = {
        .format = TileFormat::kPackedInt8, .key = {32, 32}, .value = {32, 32}, .group = 1};
    s[1].shape.head_dim = 64;
    s[1].layout = LayoutOf(s[1].shape);
    s[1].key_rotation = 0;
    j.strategy = 1;
  }));
  EXPECT_TRUE(refused([](Strategies& s, EncodeTileJob& j) {
    s[1].shape = kernels::DenseShape(128, ElementType::kBf16);
    s[1].layout = LayoutOf(s[1].shape);
    j.strategy = 1;
  }));
  EXPECT_TRUE(refused([](Strategies& s, EncodeTileJob&) {
    s[0].shape = kernels::DenseShape(64, ElementType::kFp16);
    s[0].layout = LayoutOf(s[0].shape);
  }));
  Get(jobs_[0].tile, cases_[0].tile);
  for (std::size_t i = 0; i < cases_[0].tile.size(); ++i) {
    ASSERT_EQ(cases_[0].tile.data()[i], std::byte{0xff});
  }
  EXPECT_FALSE(refused([](Strategies&, EncodeTileJob&) {}));
}

}  // namespace
}  // namespace tessera::tests
