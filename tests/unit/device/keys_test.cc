// Keys of a lane and the attention that queries pay to them, on every device, compared with double.

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/format/error_bound.h"
#include "tests/contract/pack/pack_data.h"
#include "tests/contract/pack/pack_planes.h"
#include "tests/unit/device/devices.h"

namespace tessera::device {
namespace {

using kernels::Content;
using kernels::KeyObservation;
using kernels::kTileEntries;
using kernels::TileShape;
using testing::HasSubstr;

constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32};
// Maximum error of a key rotated back, relative to sum_c |R_cd y_c|.
constexpr double kRotationError = 0x1p-16;
// Maximum error of a share on any device, for logits of some tens.
constexpr double kShareError = 1e-4;

double ElementAt(const std::byte* row, std::size_t index, ElementType type) {
  if (type == ElementType::kFp32) {
    float element;
    std::memcpy(&element, row + 4 * index, 4);
    return element;
  }
  std::uint16_t bits;
  std::memcpy(&bits, row + 2 * index, 2);
  return type == ElementType::kBf16 ? kernels::Bf16ToFloat(bits) : kernels::Fp16ToFloat(bits);
}

using Row = std::vector<double>;

class KeysTest : public DeviceTest {
 protected:
  // A key as stored in its tile, and its allowed error once loaded.
  struct Expected {
    Row key;
    Row slack;
  };

  std::byte* Take(std::uint64_t bytes) {
    std::byte* const at = pool_.data() + used_;
    used_ += (bytes + 63) / 64 * 64;
    EXPECT_LE(used_, kPoolBytes);
    return at;
  }

  void Begin(std::uint32_t head_dim, ElementType type) {
    used_ = 0;
    runs_.clear();
    expected_.clear();
    tiles_.clear();
    rows_.clear();
    geometry_ = {.query_heads = 1,
                 .kv_heads = 1,
                 .head_dim = head_dim,
                 .type = type,
                 .scale = static_cast<float>(1 / std::sqrt(double{1} * head_dim)),
                 .logit_softcap = dice_.OneIn(3) ? 2.0f : 0.0f};
  }
  std::size_t row_bytes() const {
    return geometry_.head_dim * kernels::ElementBytes(geometry_.type);
  }

  TileShape AnyShape() {
    for (;;) {
      const TileShape shape = kernels::RandomShape(dice_, {.cut = true, .dense = true});
      if (shape.head_dim != geometry_.head_dim) continue;
      if (shape.packed() || kernels::ElementsOf(shape.format) == geometry_.type) return shape;
    }
  }
  // Adds entries in tiles of some form.
  void AddTiles(std::uint64_t entries) {
    const TileShape shape = AnyShape();
    const bool identity =
        !shape.packed() || (kernels::HasRequiredRotations(shape, {}) && dice_.OneIn(3));
    const ElementType rotation_type = dice_.OneIn(2) ? ElementType::kBf16 : ElementType::kFp32;
    kernels::RotationView rotation;
    if (!identity) {
      const kernels::Rotations made(shape, rotation_type, dice_);
      const kernels::RotationView some = kernels::SomeOf(made.view(), shape, dice_);
      const auto take = [&](const std::byte* matrix, const kernels::RowShape& row) {
        if (matrix == nullptr) return static_cast<std::byte*>(nullptr);
        const std::uint64_t bytes = kernels::RotationBytes(shape, row, rotation_type);
        std::byte* const at = Take(bytes);
        std::memcpy(at, matrix, bytes);
        return at;
      };
      rotation = {.key = take(some.key, shape.key),
                  .value = take(some.value, shape.value),
                  .type = rotation_type};
    }
    std::vector<const std::byte*>& tiles = tiles_.emplace_back();
    for (std::uint64_t first = 0; first < entries; first += kTileEntries) {
      const auto live =
          static_cast<std::uint32_t>(std::min<std::uint64_t>(kTileEntries, entries - first));
      const auto tile = kernels::EncodeTile(
          kernels::OperationsOf(*kernels::FindImplementation("reference")), shape,
          kernels::TileInput(shape, geometry_.type, live, Content::kNormal, dice_), rotation);
      ASSERT_TRUE(tile.has_value());
      std::byte* const at = Take(tile->size());
      std::memcpy(at, tile->data(), tile->size());
      kernels::PoisonDeadRows(shape, live, at);
      tiles.push_back(at);
      for (std::uint32_t r = 0; r < live; ++r) expected_.push_back(Exact(shape, rotation, at, r));
    }
    runs_.push_back(
        {.entries = entries, .tiles = tiles, .strategy = {.shape = shape, .rotation = rotation}});
  }
  Expected Exact(const TileShape& shape, const kernels::RotationView& rotation,
                 const std::byte* tile, std::uint32_t row) {
    const Row stored = kernels::ReadByDefinition(shape, tile, kernels::Array::kKeys, row).elements;
    Expected exact = {.key = Row(shape.head_dim), .slack = Row(shape.head_dim)};
    const kernels::Rounding rounding = kernels::RoundingOf(geometry_.type);
    for (std::uint32_t d = 0; d < shape.head_dim; ++d) {
      for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
        const double weight =
            rotation.key == nullptr
                ? (c == d ? 1.0 : 0.0)
                : ElementAt(rotation.key, std::size_t{c} * shape.head_dim + d, rotation.type);
        exact.key[d] += weight * stored[c];
        if (rotation.key != nullptr)
          exact.slack[d] += kRotationError * std::fabs(weight * stored[c]);
      }
      if (shape.packed()) {
        exact.slack[d] = 1.01 * (exact.slack[d] + rounding.relative * std::fabs(exact.key[d])) +
                         rounding.absolute;
      }
    }
    return exact;
  }
  // Adds entries in the daemon's own memory.
  void AddRows(std::uint64_t entries) {
    std::vector<std::byte>& rows = rows_.emplace_back(RandomRows(entries));
    for (std::uint64_t r = 0; r < entries; ++r) {
      Expected exact = {.key = {}, .slack = Row(geometry_.head_dim)};
      for (std::uint32_t d = 0; d < geometry_.head_dim; ++d) {
        exact.key.push_back(ElementAt(rows.data() + r * row_bytes(), d, geometry_.type));
      }
      expected_.push_back(std::move(exact));
    }
    runs_.push_back({.entries = entries, .rows = rows.data()});
  }
  std::vector<std::byte> RandomRows(std::uint64_t count) {
    std::vector<std::byte> rows(count * row_bytes());
    const std::uint64_t drawn = count * geometry_.head_dim / kHeadDim;
    Fill(rows.data(), static_cast<std::uint32_t>(drawn), geometry_.type);
    return rows;
  }
  void AddLane(std::uint64_t most_runs) {
    for (std::uint64_t run = dice_.Between(0, most_runs); run > 0; --run) {
      const std::uint64_t entries = dice_.Between(1, 90);
      if (dice_.OneIn(4)) {
        AddRows(entries);
      } else {
        ASSERT_NO_FATAL_FAILURE(AddTiles(entries));
      }
    }
  }

  std::unique_ptr<LaneKeys> Load() {
    absl::StatusOr<std::unique_ptr<LaneKeys>> keys = device_->LoadKeys(geometry_, runs_);
    EXPECT_TRUE(keys.ok()) << keys.status();
    // The sources are not read again.
    if (keys.ok()) std::memset(pool_.data(), 0xff, used_);
    for (std::vector<std::byte>& rows : rows_) std::fill(rows.begin(), rows.end(), std::byte{0xff});
    return keys.ok() ? *std::move(keys) : nullptr;
  }
  // The keys as loaded.
  std::vector<Row> Loaded(LaneKeys& keys) {
    std::vector<std::byte> rows(expected_.size() * row_bytes());
    EXPECT_TRUE(keys.Read(rows.data()).ok());
    std::vector<Row> read(expected_.size(), Row(geometry_.head_dim));
    for (std::size_t t = 0; t < read.size(); ++t) {
      for (std::uint32_t d = 0; d < geometry_.head_dim; ++d) {
        read[t][d] = ElementAt(rows.data() + t * row_bytes(), d, geometry_.type);
      }
    }
    return read;
  }

  // ---- Observations

  struct Look {
    std::vector<std::byte> queries;
    std::vector<double> before;
    std::vector<double> sums;
    KeyObservation look;
  };
  Look AnyLook(std::uint64_t keys) {
    Look made;
    const std::uint64_t first = dice_.Between(0, keys);
    const std::uint64_t count = dice_.Between(0, keys - first);
    const std::uint64_t queries = dice_.OneIn(8) ? 0 : dice_.Between(1, 40);
    made.look = {.first = first, .logits = dice_.OneIn(2)};
    if (keys != 0 && dice_.OneIn(4)) {
      made.look.key = dice_.Below(keys);
    } else {
      made.queries = RandomRows(queries);
      made.look.queries = {.rows = made.queries.data(), .count = queries};
    }
    for (std::uint64_t q = 0; q < made.look.query_count(); ++q) {
      const std::uint64_t begin = dice_.OneIn(2) ? 0 : dice_.Between(0, count);
      made.look.visible.begin.push_back(begin);
      made.look.visible.end.push_back(dice_.Between(dice_.OneIn(3) ? begin : 0, count));
    }
    for (std::uint64_t t = 0; t < count; ++t) {
      made.before.push_back(static_cast<double>(dice_.Below(5)));
    }
    made.sums = made.before;
    return made;
  }
  void Judge(const Look& made, const std::vector<Row>& keys) {
    const KeyObservation& look = made.look;
    std::vector<double> expected = made.before;
    std::vector<double> mass(expected.size());
    for (std::uint64_t q = 0; q < look.query_count(); ++q) {
      Row query;
      for (std::uint32_t d = 0; d < geometry_.head_dim; ++d) {
        query.push_back(look.key.has_value()
                            ? keys[*look.key][d]
                            : ElementAt(made.queries.data() + q * row_bytes(), d, geometry_.type));
      }
      double total = 0;
      std::vector<double> paid(expected.size());
      for (std::uint64_t t = look.visible.begin[q]; t < look.visible.end[q]; ++t) {
        double product = 0;
        for (std::size_t d = 0; d < query.size(); ++d) {
          product += query[d] * keys[look.first + t][d];
          mass[t] += std::fabs(query[d] * keys[look.first + t][d]);
        }
        double logit = geometry_.scale * product;
        const double cap = geometry_.logit_softcap;
        if (cap != 0) logit = cap * std::tanh(logit / cap);
        paid[t] = look.logits ? product : std::exp(logit);
        total += paid[t];
      }
      for (std::uint64_t t = look.visible.begin[q]; t < look.visible.end[q]; ++t) {
        expected[t] += look.logits ? paid[t] : paid[t] / total;
      }
    }
    for (std::size_t t = 0; t < expected.size(); ++t) {
      const double slack =
          look.logits ? kernels::kObservedProductError * mass[t] : kShareError * expected[t];
      ASSERT_NEAR(made.sums[t], expected[t], slack + 1e-12)
          << "key " << look.first << " + " << t << " of " << keys.size()
          << (look.logits ? ", logits" : "");
    }
  }

  static constexpr std::uint64_t kPoolBytes = 4 * kPiece;
  TestRandom dice_;
  const Pool pool_ = PoolMemory(kPoolBytes);
  std::uint64_t used_ = 0;
  kernels::LayerGeometry geometry_;
  std::vector<KeyRun> runs_;
  std::vector<Expected> expected_;
  // Memory that runs point to.
  std::deque<std::vector<const std::byte*>> tiles_;
  std::deque<std::vector<std::byte>> rows_;
};

TEST_P(KeysTest, AreThoseOfTheirTilesInEveryForm) {
  for (const std::uint32_t head_dim : kernels::kHeadDims) {
    for (const ElementType type : kTypes) {
      Begin(head_dim, type);
      ASSERT_NO_FATAL_FAILURE(AddLane(3));
      const std::unique_ptr<LaneKeys> keys = Load();
      ASSERT_NE(keys, nullptr);
      const std::vector<Row> loaded = Loaded(*keys);
      for (std::size_t t = 0; t < loaded.size(); ++t) {
        for (std::uint32_t d = 0; d < head_dim; ++d) {
          ASSERT_LE(std::fabs(loaded[t][d] - expected_[t].key[d]), expected_[t].slack[d])
              << "key " << t << " of " << loaded.size() << " dim " << d << ": " << loaded[t][d]
              << " is not " << expected_[t].key[d];
        }
      }
    }
  }
}

// x = R^T z + mu: what a key in planes is, and not its distance from the mean.
TEST_P(KeysTest, OfPlanesHaveTheirMean) {
  if (!device_->description().reads_host_memory) GTEST_SKIP() << "GPUs refuse planes";
  for (const std::uint32_t head_dim : kernels::kHeadDims) {
    Begin(head_dim, dice_.Pick(kTypes));
    const TileShape shape = kernels::PlanesShape(head_dim, {6, 4}, {4, 0});
    const kernels::TestBook book(shape, dice_);
    const std::uint64_t bytes = std::uint64_t{head_dim} * head_dim * 2;
    std::byte* const rotation = Take(bytes);
    std::memcpy(rotation, book.view().key, bytes);
    std::byte* const mean = Take(2 * head_dim);
    std::memcpy(mean, book.view().key_mean, 2 * head_dim);
    const std::vector<std::byte> tile = kernels::AnyTile(shape, kTileEntries, dice_);
    std::byte* const at = Take(tile.size());
    std::memcpy(at, tile.data(), tile.size());
    std::vector<float> z(kTileEntries * head_dim);
    std::vector<float> values(z.size());
    kernels::OperationsOf(*kernels::FindImplementation("reference"))
        .decode({.tile = at,
                 .shape = shape,
                 .layout = kernels::LayoutOf(shape),
                 .rows = kTileEntries,
                 .padded_channels = kernels::PaddedChannels(shape),
                 .keys = z.data(),
                 .values = values.data()});
    for (std::uint32_t r = 0; r < kTileEntries; ++r) {
      Expected exact = {.key = Row(head_dim), .slack = Row(head_dim)};
      for (std::uint32_t d = 0; d < head_dim; ++d) {
        exact.key[d] = ElementAt(mean, d, ElementType::kBf16);
        double mass = std::fabs(exact.key[d]);
        for (std::uint32_t c = 0; c < head_dim; ++c) {
          const double part = z[r * kernels::PaddedChannels(shape) + c] *
                              ElementAt(rotation, c * head_dim + d, ElementType::kBf16);
          exact.key[d] += part;
          mass += std::fabs(part);
        }
        const kernels::Rounding rounding = kernels::RoundingOf(geometry_.type);
        exact.slack[d] =
            1.01 * (kRotationError * mass + rounding.relative * std::fabs(exact.key[d])) +
            rounding.absolute;
      }
      expected_.push_back(std::move(exact));
    }
    tiles_.push_back({at});
    runs_.push_back(
        {.entries = kTileEntries,
         .tiles = tiles_.back(),
         .strategy = {
             .shape = shape,
             .rotation = {.key = rotation, .type = ElementType::kBf16, .key_mean = mean}}});
    const std::unique_ptr<LaneKeys> keys = Load();
    ASSERT_NE(keys, nullptr);
    const std::vector<Row> loaded = Loaded(*keys);
    for (std::size_t t = 0; t < loaded.size(); ++t) {
      for (std::uint32_t d = 0; d < head_dim; ++d) {
        ASSERT_NEAR(loaded[t][d], expected_[t].key[d], expected_[t].slack[d]) << t << ", " << d;
      }
    }
  }
}

TEST_P(KeysTest, LooksAddWhatTheirQueriesPay) {
  for (int round = 0; round < 6; ++round) {
    Begin(dice_.OneIn(3) ? 128 : 64, dice_.Pick(kTypes));
    ASSERT_NO_FATAL_FAILURE(AddLane(3));
    const std::unique_ptr<LaneKeys> keys = Load();
    ASSERT_NE(keys, nullptr);
    const std::vector<Row> loaded = Loaded(*keys);
    std::vector<Look> made;
    for (std::uint64_t i = dice_.Between(1, 5); i > 0; --i) made.push_back(AnyLook(loaded.size()));
    std::vector<KeyObservation> looks;
    for (Look& look : made) {
      look.look.sums = look.sums;
      looks.push_back(look.look);
    }
    ASSERT_TRUE(keys->Look(looks).ok());
    for (const Look& look : made) ASSERT_NO_FATAL_FAILURE(Judge(look, loaded));

    std::vector<double> lengths(loaded.size() - dice_.Between(0, loaded.size()), 1.0);
    ASSERT_TRUE(keys->AddSquaredLengths(lengths).ok());
    for (std::size_t t = 0; t < lengths.size(); ++t) {
      double length = 0;
      for (const double element : loaded[t]) length += element * element;
      ASSERT_NEAR(lengths[t], 1 + length, 1e-5 * (1 + length)) << "key " << t;
    }
  }
}

// Also with more keys than one launch takes in one piece.
TEST_P(KeysTest, ChannelsWeighTheSquaresOfTheFirstKeys) {
  for (const std::uint32_t rows : {0u, 1u, 70u, 4200u}) {
    Begin(dice_.OneIn(3) ? 128 : 64, dice_.Pick(kTypes));
    ASSERT_NO_FATAL_FAILURE(AddTiles(static_cast<std::uint32_t>(dice_.Between(1, 60))));
    if (rows != 0) AddRows(rows);
    const std::unique_ptr<LaneKeys> keys = Load();
    ASSERT_NE(keys, nullptr);
    const std::vector<Row> loaded = Loaded(*keys);
    const std::uint64_t count =
        loaded.size() - dice_.Between(0, std::min<std::size_t>(loaded.size(), 50));
    std::vector<double> sums(geometry_.head_dim, 1.0);
    ASSERT_TRUE(keys->AddChannelSquares(count, sums).ok());
    std::vector<double> expected(sums.size(), 1.0);
    for (std::uint64_t t = 0; t < count; ++t) {
      for (std::size_t d = 0; d < sums.size(); ++d) expected[d] += loaded[t][d] * loaded[t][d];
    }
    for (std::size_t d = 0; d < sums.size(); ++d) {
      ASSERT_NEAR(sums[d], expected[d], 1e-5 * expected[d]) << "channel " << d;
    }
  }
}

// More scratch than one launch takes (64 MiB), if all were processed at once.
TEST_P(KeysTest, MoreLooksThanOneLaunchHolds) {
  Begin(64, ElementType::kBf16);
  AddRows(3000);
  const std::unique_ptr<LaneKeys> keys = Load();
  ASSERT_NE(keys, nullptr);
  const std::vector<std::byte> query = RandomRows(1);
  std::vector<std::vector<double>> sums(200, std::vector<double>(3000));
  std::vector<KeyObservation> looks;
  for (std::uint64_t i = 0; i < sums.size(); ++i) {
    looks.push_back({.queries = {.rows = query.data(), .count = 1},
                     .visible = {.begin = {7 * i}, .end = {7 * i + 1}},
                     .sums = sums[i]});
  }
  ASSERT_TRUE(keys->Look(looks).ok());
  for (std::uint64_t i = 0; i < sums.size(); ++i) {
    std::vector<double> expected(3000);
    expected[7 * i] = 1;
    ASSERT_EQ(sums[i], expected) << i;
  }
}

TEST_P(KeysTest, NothingIsNothing) {
  Begin(64, ElementType::kBf16);
  const std::unique_ptr<LaneKeys> keys = Load();
  ASSERT_NE(keys, nullptr);
  EXPECT_TRUE(keys->Look({}).ok());
  const KeyObservation looks[] = {{}, {.logits = true}};
  EXPECT_TRUE(keys->Look(looks).ok());
  EXPECT_TRUE(keys->AddSquaredLengths({}).ok());
}

TEST_P(KeysTest, ALookBeyondTheKeysIsABug) {
  Begin(64, ElementType::kBf16);
  AddRows(5);
  const std::unique_ptr<LaneKeys> keys = Load();
  ASSERT_NE(keys, nullptr);
  std::vector<double> sums(6);
  const KeyObservation look = {.key = 0, .visible = kernels::FullRanges(1, 6), .sums = sums};
  EXPECT_DEATH((void)keys->Look({&look, 1}), "beyond the last key");
  EXPECT_DEATH((void)keys->AddSquaredLengths(sums), "more keys than there are");
}

// How a GPU shares its memory makes no difference for keys.
INSTANTIATE_TEST_SUITE_P(Devices, KeysTest, testing::Values(Kind::kCpu, Kind::kGpuByDescriptor),
                         KindName);

// ---- Specific to GPUs: failures and lack of memory

class CudaKeysTest : public KeysTest {
 protected:
  std::unique_ptr<CudaDevice> Open(const tests::EmulatedRuntimeOptions& options) {
    gpus_.options = options;
    auto gpu = CudaDevice::Create(
        {.calls = &memory_,
         .gpus = &gpus_,
         .ordinal = 0,
         .on_failure = [this](const absl::Status& why) { failures_.push_back(why); }});
    EXPECT_TRUE(gpu.ok()) << gpu.status();
    return *std::move(gpu);
  }
};

TEST_P(CudaKeysTest, AFailureAtAnyCallRetiresTheDevice) {
  Begin(64, ElementType::kBf16);
  ASSERT_NO_FATAL_FAILURE(AddTiles(40));
  AddRows(3);
  std::vector<double> sums(43);
  const std::vector<std::byte> query = RandomRows(1);
  const KeyObservation look = {.queries = {.rows = query.data(), .count = 1},
                               .visible = kernels::FullRanges(1, 43),
                               .sums = sums};
  int loads = 0;
  int looks = 0;
  for (int good = 0;; ++good) {
    failures_.clear();
    const std::unique_ptr<CudaDevice> gpu = Open({.fails_after = good});
    auto keys = gpu->LoadKeys(geometry_, runs_);
    absl::Status status = keys.status();
    loads += keys.ok() ? 0 : 1;
    if (keys.ok()) {
      status = (*keys)->Look({&look, 1});
      looks += status.ok() ? 0 : 1;
    }
    EXPECT_EQ(gpu->health(), status);
    EXPECT_EQ(failures_.size(), status.ok() ? 0u : 1u);
    if (status.ok()) break;
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_EQ(gpu->LoadKeys(geometry_, {}).status(), status);
    if (keys.ok()) {
      EXPECT_EQ((*keys)->Look({}), status);
      EXPECT_EQ((*keys)->AddSquaredLengths({}), status);
    }
  }
  EXPECT_GE(loads, 5);  // a copy, two uploads, a launch, a wait
  EXPECT_GE(looks, 5);
}

// The error states the needed size, and the device remains usable.
TEST_P(CudaKeysTest, WithoutMemoryItSaysHowMuchItTakes) {
  Begin(64, ElementType::kFp32);
  AddRows(2000);
  const std::uint64_t bytes = 2000 * 64 * 4;
  const std::vector<std::byte> query = RandomRows(1);
  std::vector<double> sums(2000);
  const KeyObservation look = {.queries = {.rows = query.data(), .count = 1},
                               .visible = kernels::FullRanges(1, 2000),
                               .sums = sums};
  {
    const std::unique_ptr<CudaDevice> gpu = Open({.memory_bytes = bytes / 2});
    const absl::Status status = gpu->LoadKeys(geometry_, runs_).status();
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr(std::to_string(bytes) + " bytes"));
    EXPECT_TRUE(gpu->health().ok());
  }
  const std::unique_ptr<CudaDevice> gpu = Open({.memory_bytes = bytes + (100 << 10)});
  {
    const auto keys = gpu->LoadKeys(geometry_, runs_);
    ASSERT_TRUE(keys.ok()) << keys.status();
    const absl::Status status = (*keys)->Look({&look, 1});
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(status.message(), HasSubstr("of a lane need "));
    EXPECT_TRUE(absl::IsResourceExhausted(gpu->LoadKeys(geometry_, runs_).status()));
  }
  // All memory was released.
  EXPECT_TRUE(gpu->LoadKeys(geometry_, runs_).ok());
  EXPECT_TRUE(gpu->health().ok());
  EXPECT_TRUE(failures_.empty());
}

INSTANTIATE_TEST_SUITE_P(Devices, CudaKeysTest, testing::Values(Kind::kGpuByDescriptor), KindName);

}  // namespace
}  // namespace tessera::device
