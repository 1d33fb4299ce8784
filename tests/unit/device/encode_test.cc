// Encoding of tiles on every device: equals the reference's bytes where rotated rows are exact, is
// within the error bound elsewhere, and reports the first tile that cannot be stored.

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "tests/contract/pack/pack_data.h"
#include "tests/unit/device/devices.h"

namespace tessera::device {
namespace {

using kernels::Content;
using kernels::RotationView;
using kernels::TileInput;
using kernels::TileShape;
using testing::HasSubstr;

constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};

// Maximum error of a rotated element on any device, relative to sum_d |R_cd x_d|.
constexpr double kRotationError = 0x1p-16;

enum class Turn { kNone, kPermuted, kReal };

class EncodeTest : public DeviceTest {
 protected:
  // One tile of a call, and its inputs.
  struct Case {
    TileShape shape;
    TileInput input;
    RotationView rotation;  // in the pool
    std::string text;
  };

  std::byte* Take(std::uint64_t bytes) {
    std::byte* const at = pool_.data() + used_;
    used_ += (bytes + 63) / 64 * 64;
    EXPECT_LE(used_, kPoolBytes);
    return at;
  }
  std::byte* Put(const void* from, std::uint64_t bytes) {
    std::byte* const at = Take(bytes);
    std::memcpy(at, from, bytes);
    return at;
  }

  // Rows that permute the channels and flip some signs: every product is exact.
  std::byte* PutPermutation(const TileShape& shape, const kernels::RowShape& side,
                            ElementType type) {
    const std::uint64_t bytes = kernels::RotationBytes(shape, side, type);
    std::byte* const at = Take(bytes);
    std::memset(at, 0, bytes);
    std::vector<std::uint32_t> order(shape.head_dim);
    for (std::uint32_t i = 0; i < shape.head_dim; ++i) order[i] = i;
    for (std::uint32_t c = 0; c < side.channels; ++c) {
      std::swap(order[c], order[dice_.Between(c, shape.head_dim - 1)]);
      const float sign = dice_.OneIn(2) ? -1.0f : 1.0f;
      const std::uint16_t half = kernels::FloatToBf16(sign);
      const std::size_t element = std::size_t{c} * shape.head_dim + order[c];
      if (type == ElementType::kFp32) {
        std::memcpy(at + 4 * element, &sign, 4);
      } else {
        std::memcpy(at + 2 * element, &half, 2);
      }
    }
    return at;
  }
  RotationView Rotation(const TileShape& shape, Turn turn) {
    if (turn == Turn::kNone) return {};
    const ElementType type = dice_.OneIn(2) ? ElementType::kBf16 : ElementType::kFp32;
    if (turn == Turn::kPermuted) {
      return kernels::SomeOf({.key = PutPermutation(shape, shape.key, type),
                              .value = PutPermutation(shape, shape.value, type),
                              .type = type},
                             shape, dice_);
    }
    const kernels::Rotations real(shape, type, dice_);
    const auto put = [&](const std::byte* matrix, const kernels::RowShape& side) {
      return Put(matrix, kernels::RotationBytes(shape, side, type));
    };
    return kernels::SomeOf({.key = put(real.view().key, shape.key),
                            .value = put(real.view().value, shape.value),
                            .type = type},
                           shape, dice_);
  }

  // A book of permutations, without means.
  RotationView Book(const TileShape& shape) {
    const std::uint64_t mean = std::uint64_t{2} * shape.head_dim;
    RotationView book = {.key = PutPermutation(shape, shape.key, ElementType::kBf16),
                         .value = PutPermutation(shape, shape.value, ElementType::kBf16),
                         .type = ElementType::kBf16,
                         .key_mean = Take(mean)};
    std::memset(const_cast<std::byte*>(book.key_mean), 0, mean);
    book.value_mean = book.key_mean;
    return book;
  }

  void Add(const TileShape& shape, ElementType type, Content content, Turn turn) {
    const auto rows = static_cast<std::uint32_t>(dice_.OneIn(2) ? 32 : dice_.Between(1, 32));
    Add({.shape = shape,
         .input = TileInput(shape, type, rows, content, dice_),
         .rotation = Rotation(shape, turn),
         .text = kernels::Describe(shape) + " rows " + std::to_string(rows) + " of " +
                 kernels::ElementName(type) + " content " +
                 std::to_string(static_cast<int>(content))});
  }
  void Add(Case one) {
    const kernels::EncodeJob job = one.input.Job(one.shape);
    const std::uint64_t row_bytes = one.shape.head_dim * kernels::ElementBytes(job.type);
    std::byte* const rows[] = {Take(job.rows * row_bytes), Take(job.rows * row_bytes)};
    for (std::uint32_t r = 0; r < job.rows; ++r) {
      std::memcpy(rows[0] + r * row_bytes, job.key + r * job.stride, row_bytes);
      std::memcpy(rows[1] + r * row_bytes, job.value + r * job.stride, row_bytes);
    }
    const kernels::TileLayout layout = kernels::LayoutOf(one.shape);
    TileEncode tile = {.key = rows[0],
                       .value = rows[1],
                       .rows = job.rows,
                       .strategy = static_cast<std::uint32_t>(strategies_.size()),
                       .to = {.tile = Take(layout.bytes)}};
    if (layout.summary_bytes != 0) tile.to.summaries = Take(layout.summary_bytes);
    if (job.weights != nullptr) {
      tile.weights = reinterpret_cast<const float*>(Put(job.weights, 4 * job.rows));
    }
    if (job.positions != nullptr) {
      tile.positions = reinterpret_cast<const std::uint32_t*>(Put(job.positions, 4 * job.rows));
    }
    std::memset(tile.to.tile, 0xa5, layout.bytes);
    if (layout.summary_bytes != 0) std::memset(tile.to.summaries, 0xa5, layout.summary_bytes);
    strategies_.push_back({.shape = one.shape, .rotation = one.rotation});
    tiles_.push_back(tile);
    cases_.push_back(std::move(one));
  }
  void Clear() {
    used_ = 0;
    cases_.clear();
    strategies_.clear();
    tiles_.clear();
  }

  std::vector<std::byte> Stored(std::size_t i) const {
    const kernels::TileLayout layout = kernels::LayoutOf(cases_[i].shape);
    const TilePlace& place = tiles_[i].to;
    std::vector<std::byte> both(place.tile, place.tile + layout.bytes);
    both.insert(both.end(), place.summaries, place.summaries + layout.summary_bytes);
    return both;
  }
  // nullopt if the reference refuses a value.
  std::optional<std::vector<std::byte>> Expected(std::size_t i) const {
    return kernels::EncodeTile(kernels::OperationsOf(*kernels::FindImplementation("reference")),
                               cases_[i].shape, cases_[i].input, cases_[i].rotation);
  }
  void Encode(ElementType type) {
    const auto unfit = device_->Encode(strategies_, type, tiles_);
    ASSERT_TRUE(unfit.ok()) << unfit.status();
    ASSERT_EQ(*unfit, std::nullopt);
  }

  static constexpr std::uint64_t kPoolBytes = 16 * kPiece;
  TestRandom dice_;
  const Pool pool_ = PoolMemory(kPoolBytes);
  std::uint64_t used_ = 0;
  std::vector<Case> cases_;
  std::vector<TileStrategy> strategies_;
  std::vector<TileEncode> tiles_;
};

// Random forms, head_dims and strategies in one call.
TEST_P(EncodeTest, TilesAreTheReferencesWhereRotationsAreExact) {
  constexpr Content kOrdinary[] = {Content::kNormal, Content::kTies,   Content::kEqual,
                                   Content::kTiny,   Content::kSparse, Content::kZeros};
  for (const ElementType type : kTypes) {
    Clear();
    while (cases_.size() < 40) {
      const bool permuted = dice_.OneIn(2);
      const TileShape shape = kernels::RandomShape(dice_, {.cut = permuted, .dense = !permuted});
      if (!shape.packed() && kernels::ElementsOf(shape.format) != type) continue;
      // Permuting may change the sign of a zero; the first two kinds have no zeros.
      const Content content = kOrdinary[dice_.Below(permuted ? 2 : std::size(kOrdinary))];
      Add(shape, type, content, permuted ? Turn::kPermuted : Turn::kNone);
    }
    ASSERT_NO_FATAL_FAILURE(Encode(type));
    for (std::size_t i = 0; i < cases_.size(); ++i) {
      const auto expected = Expected(i);
      ASSERT_TRUE(expected.has_value());
      ASSERT_EQ(kernels::FirstDifference(cases_[i].shape, *expected, Stored(i)), "")
          << cases_[i].text;
    }
  }
}

// Rows in planes, and keys with signs beside rows of both kinds. Codes and norms next to a rounding
// boundary may differ by one.
TEST_P(EncodeTest, PlanesAndSignsAreCloseToTheReferences) {
  for (const ElementType type : kTypes) {
    Clear();
    while (cases_.size() < 24) {
      const std::uint32_t dim = dice_.Pick(kernels::kHeadDims);
      TileShape shape = dice_.OneIn(3) ? kernels::DenseShape(dim, type)
                                       : kernels::PlanesShape(dim, {6, 4}, {4, 0});
      if (!shape.packed() || dice_.OneIn(2)) shape = kernels::WithSigns(shape);
      const auto rows = static_cast<std::uint32_t>(dice_.Between(1, 32));
      Add({.shape = shape,
           .input = TileInput(shape, type, rows, Content::kNormal, dice_),
           .rotation = Book(shape),
           .text = kernels::Describe(shape) + " rows " + std::to_string(rows)});
    }
    ASSERT_NO_FATAL_FAILURE(Encode(type));
    for (std::size_t i = 0; i < cases_.size(); ++i) {
      const auto expected = Expected(i);
      ASSERT_TRUE(expected.has_value());
      const std::vector<std::byte> stored = Stored(i);
      const kernels::TileLayout layout = kernels::LayoutOf(cases_[i].shape);
      std::uint32_t others = 0;
      for (std::size_t b = 0; b < stored.size(); ++b) {
        others += stored[b] != (*expected)[b] ? 1 : 0;
        if (b < layout.bytes) continue;
        const int off = std::to_integer<int>(stored[b]) - std::to_integer<int>((*expected)[b]);
        ASSERT_LE(std::abs(off), b < layout.bytes + layout.block_data ? 0 : 1)
            << cases_[i].text << ", byte " << b;
      }
      ASSERT_LE(others, cases_[i].shape.planes() ? stored.size() / 100 : 1) << cases_[i].text;
    }
  }
}

// Two bits lose about 12 % of the energy.
TEST_P(EncodeTest, TheFirstTileOverItsErrorLimitIsNamed) {
  const TileShape shape = kernels::PlanesShape(64, {2, 2}, {2, 2});
  for (int i = 0; i < 6; ++i) {
    Add({.shape = shape,
         .input = TileInput(shape, ElementType::kBf16, 32, Content::kNormal, dice_),
         .rotation = Book(shape),
         .text = ""});
  }
  ASSERT_NO_FATAL_FAILURE(Encode(ElementType::kBf16));
  const std::size_t first = dice_.Below(6);
  (dice_.OneIn(2) ? strategies_[first].limits.key : strategies_[first].limits.value) = 0.001f;
  strategies_[5].limits.key = 0.001f;
  const auto unfit = device_->Encode(strategies_, ElementType::kBf16, tiles_);
  ASSERT_TRUE(unfit.ok()) << unfit.status();
  EXPECT_EQ(*unfit, first);
}

// A rotated row in double, and the allowed error of each element.
struct ExactRow {
  std::vector<double> elements;
  std::vector<double> slack;
};

ExactRow Rotate(const TileShape& shape, const RotationView& rotation, bool of_value,
                const std::vector<double>& row) {
  const std::byte* const matrix = of_value ? rotation.value : rotation.key;
  const std::uint32_t channels = (of_value ? shape.value : shape.key).channels;
  ExactRow exact = {.elements = kernels::RotateExactly(matrix, rotation.type, channels, row),
                    .slack = std::vector<double>(channels, 0x1p-118)};
  // |R| |x|, one column at a time.
  for (std::uint32_t d = 0; d < shape.head_dim; ++d) {
    std::vector<double> one(shape.head_dim, 0.0);
    one[d] = row[d];
    const std::vector<double> column = kernels::RotateExactly(matrix, rotation.type, channels, one);
    for (std::uint32_t c = 0; c < channels; ++c) {
      exact.slack[c] += kRotationError * std::fabs(column[c]);
    }
  }
  return exact;
}

// Half a unit in the last place of a stored value, or of its row's scale.
double Rounding(const TileShape& shape, double scale, double element) {
  switch (kernels::ValuesOf(shape.format)) {
    case kernels::ValueType::kBf16:
      return std::fabs(element) * 0x1p-8;
    case kernels::ValueType::kFp16:
      return std::fabs(element) * 0x1p-11 + 0x1p-25;
    case kernels::ValueType::kInt8:
      return scale * 0.5001;
    case kernels::ValueType::kFp8:
      return std::max(std::fabs(element) * 0.0626, scale * 0x1p-10);
  }
  return 0;
}

// Every stored value is close to the exact one, and no dropped group is clearly stronger than a
// kept one.
void ExpectKeeps(const TileShape& shape, std::uint32_t wanted, const kernels::ReadTileRow& stored,
                 const ExactRow& exact) {
  double weakest_kept = INFINITY, strongest_dropped = 0;
  std::uint32_t kept = 0;
  for (std::uint32_t g = 0; g < exact.elements.size(); g += shape.group) {
    double squares = 0, slack = 0;
    for (std::uint32_t c = g; c < g + shape.group; ++c) {
      squares += exact.elements[c] * exact.elements[c];
      slack += exact.slack[c];
      if (!stored.kept[c]) continue;
      ++kept;
      EXPECT_LE(std::fabs(stored.elements[c] - exact.elements[c]),
                1.01 * (Rounding(shape, stored.scale, exact.elements[c]) + exact.slack[c]))
          << "channel " << c;
    }
    const double length = std::sqrt(squares);
    slack += length * 0x1p-20;
    if (stored.kept[g]) {
      weakest_kept = std::min(weakest_kept, length + slack);
    } else {
      strongest_dropped = std::max(strongest_dropped, length - slack);
    }
  }
  EXPECT_EQ(kept, wanted);
  EXPECT_GE(weakest_kept, strongest_dropped);
}

TEST_P(EncodeTest, RotatedRowsAreWithinTheirBound) {
  for (const ElementType type : kTypes) {
    Clear();
    for (int i = 0; i < 8; ++i) {
      Add(kernels::RandomShape(dice_, {.cut = true}), type, Content::kNormal, Turn::kReal);
    }
    ASSERT_NO_FATAL_FAILURE(Encode(type));
    for (std::size_t i = 0; i < cases_.size(); ++i) {
      const auto& [shape, input, rotation, text] = cases_[i];
      const auto any = static_cast<std::uint32_t>(dice_.Below(input.rows()));
      for (const std::uint32_t r : {0u, any, input.rows() - 1}) {
        for (const bool of_value : {false, true}) {
          SCOPED_TRACE(text + ", row " + std::to_string(r) + (of_value ? " of V" : " of K"));
          const auto array = of_value ? kernels::Array::kValues : kernels::Array::kKeys;
          ExpectKeeps(shape, kernels::RowsOf(shape, array).kept,
                      kernels::ReadByDefinition(shape, tiles_[i].to.tile, array, r),
                      Rotate(shape, rotation, of_value, input.Row(of_value, r)));
        }
      }
    }
  }
}

// fp16 ends at 65504. Tiles of three head_dims, to check that the index is the caller's.
TEST_P(EncodeTest, TheFirstTileWithAValueBeyondFp16IsNamed) {
  TileShape shapes[3];
  for (std::size_t i = 0; i < 3; ++i) {
    shapes[i] = kernels::DenseShape(kernels::kHeadDims[i], ElementType::kBf16);
    shapes[i].format = kernels::TileFormat::kPackedFp16;
    shapes[i].key.kept = shapes[i].value.kept = 8;
  }
  for (int round = 0; round < 20; ++round) {
    Clear();
    std::optional<std::size_t> first;
    for (std::size_t i = 0; i < 12; ++i) {
      const TileShape& shape = shapes[dice_.Below(3)];
      const auto rows = static_cast<std::uint32_t>(dice_.Between(1, 32));
      Case one = {.shape = shape,
                  .input = TileInput(shape, ElementType::kBf16, rows, Content::kNormal, dice_),
                  .rotation = {},
                  .text = ""};
      if (dice_.OneIn(6)) {
        one.input.Set(dice_.OneIn(2), static_cast<std::uint32_t>(dice_.Below(rows)),
                      static_cast<std::uint32_t>(dice_.Below(shape.head_dim)), -70000.0f);
        first = std::min(first.value_or(i), i);
      }
      Add(std::move(one));
    }
    const auto unfit = device_->Encode(strategies_, ElementType::kBf16, tiles_);
    ASSERT_TRUE(unfit.ok()) << unfit.status();
    ASSERT_EQ(*unfit, first);
  }
  EXPECT_TRUE(device_->health().ok());
}

TEST_P(EncodeTest, NothingIsNothing) {
  const auto unfit = device_->Encode({}, ElementType::kBf16, {});
  ASSERT_TRUE(unfit.ok()) << unfit.status();
  EXPECT_EQ(*unfit, std::nullopt);
}

TEST_P(EncodeTest, CallsOfManyThreadsDoNotMeet) {
  for (int i = 0; i < 12; ++i) {
    Add(kernels::RandomShape(dice_, {}), ElementType::kBf16, Content::kNormal, Turn::kNone);
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 5; ++i) {
        const auto unfit =
            device_->Encode(strategies_, ElementType::kBf16, std::span(tiles_).subspan(3 * t, 3));
        wrong += !unfit.ok() || unfit->has_value();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong.load(), 0);
  for (std::size_t i = 0; i < cases_.size(); ++i) {
    EXPECT_EQ(kernels::FirstDifference(cases_[i].shape, *Expected(i), Stored(i)), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, EncodeTest, testing::ValuesIn(kKinds), KindName);

// ---- Specific to GPUs: failures, and requests that their kernels do not support

class CudaEncodeTest : public EncodeTest {};

TEST_P(CudaEncodeTest, AFailureAtAnyCallRetiresTheDevice) {
  Add(kernels::RandomShape(dice_, {}), ElementType::kBf16, Content::kNormal, Turn::kNone);
  int good = 0;
  for (;; ++good) {
    tests::EmulatedGpus gpus;
    gpus.options.fails_after = good;
    int told = 0;
    auto gpu = CudaDevice::Create(
        {.calls = &memory_, .gpus = &gpus, .ordinal = 0, .on_failure = [&](const absl::Status&) {
           ++told;
         }});
    ASSERT_TRUE(gpu.ok()) << gpu.status();
    const auto unfit = (*gpu)->Encode(strategies_, ElementType::kBf16, tiles_);
    EXPECT_EQ((*gpu)->health(), unfit.status());
    EXPECT_EQ(told, unfit.ok() ? 0 : 1);
    if (unfit.ok()) break;
    EXPECT_TRUE(absl::IsUnavailable(unfit.status())) << unfit.status();
    EXPECT_EQ((*gpu)->Encode(strategies_, ElementType::kBf16, tiles_).status(), unfit.status());
    EXPECT_EQ((*gpu)->Encode({}, ElementType::kBf16, {}).status(), unfit.status());
  }
  EXPECT_GE(good, 3);  // at least an upload, the launch and a wait
}

TEST_P(CudaEncodeTest, ATileThatKernelsWouldMisreadIsABug) {
  Add(kernels::RandomShape(dice_, {}), ElementType::kBf16, Content::kNormal, Turn::kNone);
  const auto encode = [&](const TileEncode& tile) {
    (void)device_->Encode(strategies_, ElementType::kBf16, {&tile, 1});
  };
  TileEncode tile = tiles_[0];
  tile.to.tile += 4;
  EXPECT_DEATH(encode(tile), "the tile is null or not 16-byte aligned");
  tile = tiles_[0];
  tile.strategy = 1;
  EXPECT_DEATH(encode(tile), "a tile's strategy must exist");
  tile = tiles_[0];
  tile.rows = 33;
  EXPECT_DEATH(encode(tile), "the row count is not in 1..32");
  strategies_[0].shape.head_dim = 96;
  EXPECT_DEATH(encode(tiles_[0]), "have a supported head_dim");
}

INSTANTIATE_TEST_SUITE_P(Devices, CudaEncodeTest, testing::Values(Kind::kGpuByDescriptor),
                         KindName);

}  // namespace
}  // namespace tessera::device
