// Rows into tiles, words into tables, and the search for unusable elements.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/cuda/common/lane_index.h"
#include "kernels/cuda/common/params.h"
#include "tests/fakes/gpu/emulated_kernels.h"
#include "tests/fakes/seed.h"
#include "tests/unit/kernels/cuda/lanes.h"

namespace tessera::kernels::cuda {
namespace {

struct alignas(64) Line {
  std::byte bytes[64];
};

// Copies runs of rows from strided tensors to contiguous rows at random places.
class StoreRowsTest : public ::testing::TestWithParam<ElementType> {
 protected:
  static constexpr std::uint32_t kHeadDim = 128, kSourceRows = 80, kTargetRows = 400;

  StoreRowsTest() : random_(seed_) {
    for (std::vector<Line>* memory : {&key_, &value_, &pool_}) {
      memory->resize((memory == &pool_ ? kTargetRows : kSourceRows) * row_bytes_ / 64);
    }
    const std::vector<float> fine = Fine();
    for (std::vector<Line>* rows : {&key_, &value_}) {
      for (std::uint32_t i = 0; i < kSourceRows * kHeadDim; ++i) {
        Set(*rows, i, fine[random_() % fine.size()]);
      }
    }
    expected_ = pool_;
  }

  std::vector<float> Fine() const {
    std::vector<float> fine = {0, -0.0f, 1, 65000, -65000, 0x1p-20f};
    if (type_ != ElementType::kFp16) fine.insert(fine.end(), {0x1.fp62f, -0x1.fp62f});
    return fine;
  }
  std::vector<float> Bad() const {
    const float infinity = std::numeric_limits<float>::infinity();
    std::vector<float> bad = {infinity, -infinity, std::nanf("")};
    if (type_ != ElementType::kFp16) bad.insert(bad.end(), {0x1p63f, -0x1p63f, 0x1p100f});
    return bad;
  }
  void Set(std::vector<Line>& rows, std::uint64_t element, float value) const {
    tests::StoreElement(type_, value, rows.data()->bytes + element * ElementBytes(type_));
  }
  static std::uint64_t At(const std::vector<Line>& rows, std::uint64_t byte) {
    return reinterpret_cast<std::uint64_t>(rows.data()->bytes + byte);
  }

  // Adds a run of up to 32 rows with targets from pool row `target` on. Returns the number of rows.
  std::uint32_t AddRun(std::uint32_t target) {
    const std::uint64_t stride = 1 + random_() % 3;
    const auto rows = static_cast<std::uint32_t>(1 + random_() % (kSourceRows / 2 / stride));
    const std::uint32_t count = std::min(rows, 32u);
    const std::uint64_t first = random_() % (kSourceRows - (count - 1) * stride);
    runs_.push_back({.key = At(key_, first * row_bytes_),
                     .value = At(value_, first * row_bytes_),
                     .stride = stride * row_bytes_,
                     .key_target = At(pool_, target * row_bytes_),
                     .value_target = At(pool_, (target + count) * row_bytes_),
                     .rows = count,
                     .row_bytes = static_cast<std::uint32_t>(row_bytes_)});
    for (std::uint32_t r = 0; r < count; ++r) {
      const std::uint64_t from = (first + r * stride) * row_bytes_;
      std::byte* const to = expected_.data()->bytes + (target + r) * row_bytes_;
      std::memcpy(to, key_.data()->bytes + from, row_bytes_);
      std::memcpy(to + count * row_bytes_, value_.data()->bytes + from, row_bytes_);
    }
    return count;
  }

  const std::uint64_t seed_ = TestSeed();
  const ElementType type_ = GetParam();
  const std::uint64_t row_bytes_ = kHeadDim * ElementBytes(type_);
  std::mt19937_64 random_;
  std::vector<Line> key_, value_, pool_, expected_;
  std::vector<RowRun> runs_;
};

TEST_P(StoreRowsTest, RowsLandWhereTheirRunsSay) {
  SCOPED_TRACE(seed_);
  for (std::uint32_t target = 0; target + 64 <= kTargetRows;) target += 2 * AddRun(target);
  std::uint64_t found = kNoneUnusable;
  tests::EmulateStoreRows({.runs = runs_.data(),
                           .found = &found,
                           .count = static_cast<std::uint32_t>(runs_.size()),
                           .type = type_},
                          random_());
  EXPECT_EQ(found, kNoneUnusable);
  EXPECT_EQ(std::memcmp(pool_.data(), expected_.data(), pool_.size() * 64), 0);
}

TEST_P(StoreRowsTest, NamesTheFirstUnusableRow) {
  SCOPED_TRACE(seed_);
  const std::vector<float> bad = Bad();
  for (std::uint32_t target = 0; target + 64 <= kTargetRows;) target += 2 * AddRun(target);
  for (int round = 0; round < 20; ++round) {
    const std::vector<Line> key = key_, value = value_;
    for (std::uint64_t count = random_() % 4; count > 0; --count) {
      Set(random_() % 2 == 0 ? key_ : value_, random_() % (kSourceRows * kHeadDim),
          bad[random_() % bad.size()]);
    }
    std::uint64_t expected = kNoneUnusable;
    for (std::uint32_t i = 0; i < runs_.size(); ++i) {
      for (std::uint32_t r = 0; r < 2 * runs_[i].rows; ++r) {
        const bool of_value = r >= runs_[i].rows;
        const std::uint32_t row = of_value ? r - runs_[i].rows : r;
        const std::uint64_t source =
            (of_value ? runs_[i].value : runs_[i].key) + row * runs_[i].stride;
        const auto* elements = reinterpret_cast<const std::byte*>(source);
        for (std::uint32_t c = 0; c < kHeadDim; ++c) {
          const float x = tests::LoadElement(type_, elements + c * ElementBytes(type_));
          if (std::isfinite(x) && std::fabs(x) < 0x1p63f) continue;
          expected = std::min(expected, UnusableWord::Pack(i, row, of_value));
        }
      }
    }
    std::uint64_t found = kNoneUnusable;
    tests::EmulateStoreRows({.runs = runs_.data(),
                             .found = &found,
                             .count = static_cast<std::uint32_t>(runs_.size()),
                             .type = type_},
                            random_());
    ASSERT_EQ(found, expected) << "run " << UnusableWord::Run(found) << " row "
                               << UnusableWord::Row(found);
    std::copy(key.begin(), key.end(), key_.begin());
    std::copy(value.begin(), value.end(), value_.begin());
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, StoreRowsTest,
                         ::testing::Values(ElementType::kBf16, ElementType::kFp16,
                                           ElementType::kFp32));

TEST(StoreWords, EveryWordGoesToItsAddress) {
  std::mt19937_64 random(TestSeed());
  std::vector<std::uint64_t> memory(1000, 7), expected = memory;
  std::vector<WordStore> stores;
  for (std::uint64_t i = 0; i < 300; ++i) {
    const std::uint64_t at = 3 * i + random() % 3;
    expected[at] = random();
    stores.push_back({reinterpret_cast<std::uint64_t>(&memory[at]), expected[at]});
  }
  tests::EmulateStoreWords(
      {.stores = stores.data(), .count = static_cast<std::uint32_t>(stores.size())}, random());
  EXPECT_EQ(memory, expected);
}

TEST(Params, ProblemsOfACallAreNamed) {
  alignas(16) std::byte memory[4096];
  std::uint64_t fault = kNoFault;
  const AttendCall good = {
      .geometry = {.query_heads = 4, .kv_heads = 2, .head_dim = 64, .scale = 1},
      .limits = {.batch = 1, .queries = 1, .works = 2},
      .step = memory,
      .query = memory,
      .output = memory,
      .scratch = memory,
      .scratch_bytes = sizeof memory,
      .fault = &fault};
  EXPECT_EQ(AttendCallProblem(good), "");
  const auto problem = [&](auto change) {
    AttendCall call = good;
    change(call);
    return std::string(AttendCallProblem(call));
  };
  EXPECT_NE(problem([](AttendCall& c) { c.geometry.head_dim = 96; }), "");
  EXPECT_NE(problem([](AttendCall& c) { c.geometry.kv_heads = 3; }), "");
  EXPECT_NE(problem([](AttendCall& c) { c.geometry.kv_heads = 0; }), "");
  EXPECT_NE(problem([](AttendCall& c) { c.limits.queries = 0; }), "");
  EXPECT_NE(problem([](AttendCall& c) { c.scratch_bytes = 16; }), "");
  EXPECT_NE(problem([](AttendCall& c) { c.step = nullptr; }), "");
  EXPECT_NE(problem([&](AttendCall& c) { c.query = memory + 4; }), "");
  EXPECT_NE(problem([](AttendCall& c) { c.query_stride = 257; }), "");
  EXPECT_EQ(RowsProblem(memory, memory, 256, 128), "");
  EXPECT_NE(RowsProblem(memory + 8, memory, 256, 128), "");
  EXPECT_NE(RowsProblem(memory, memory, 264, 128), "");
  EXPECT_NE(RowsProblem(memory, nullptr, 256, 128), "");
}

}  // namespace
}  // namespace tessera::kernels::cuda
