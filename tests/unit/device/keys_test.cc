// Keys of a lane and the attention that queries pay to them, on every device, compared with double.

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "tests/unit/device/keys_fixture.h"

namespace tessera::device {
namespace {

using testing::HasSubstr;

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
