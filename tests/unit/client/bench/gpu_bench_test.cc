// The GPU kernel benchmark at small sizes on the emulated GPU: attention equals the CPU's, and
// every variant has its row.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "client/bench/gpu/gpu.h"
#include "tests/fakes/gpu/emulated_runtime.h"

namespace tessera::cli::bench {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::Field;
using testing::Gt;
using testing::HasSubstr;
using testing::Not;

constexpr std::uint64_t kTokens = 256;

GpuBenchSize Small() {
  return {.head_dim = 64,
          .kv_heads = 2,
          .contexts = {kTokens},
          .groups = {1, 3},
          .least_dense_bytes = 3 * kTokens * 64 * 4 * 2,  // three sequences
          .rounds = 1,
          .replays = 1};
}

TEST(GpuBench, EveryVariantIsMeasuredAndRight) {
  tests::EmulatedGpus gpus;
  const absl::StatusOr<Report> report = RunGpuOn(gpus, Small());
  ASSERT_TRUE(report.ok()) << report.status();
  std::vector<std::string> names;
  for (const Row& row : report->rows) names.push_back(row.name);
  for (const char* const name : {"copy", "d64_g1_ctx256_b3_dense", "d64_g1_ctx256_b1_packed25_e1",
                                 "d64_g3_ctx256_b3_select625", "d64_g3_ctx256_b1_select625_choice",
                                 "d64_g3_ctx256_b3_int8_e2_rate", "encode_packed25_e1",
                                 "keys_packed25_e1", "observe_32_queries", "moments_4096_rows"}) {
    EXPECT_THAT(names, Contains(name));
  }
  EXPECT_THAT(report->rows, Each(Field(&Row::value, Gt(0))));
  EXPECT_THAT(report->notes, Contains(HasSubstr("kernels cuda_emulated")));
}

TEST(GpuBench, WithoutAGpuItSaysSo) {
  class None final : public kernels::cuda::RuntimeSource {
    std::unique_ptr<kernels::cuda::Runtime> Open(int, std::string* reason) override {
      *reason = "nothing there";
      return nullptr;
    }
  } none;
  const absl::StatusOr<Report> report = RunGpuOn(none, Small());
  EXPECT_TRUE(absl::IsFailedPrecondition(report.status()));
  EXPECT_THAT(report.status().ToString(), HasSubstr("cuda:0: nothing there"));
}

TEST(GpuBench, AFailingGpuIsAnError) {
  tests::EmulatedGpus gpus;
  gpus.options.fails_after = 400;
  EXPECT_THAT(RunGpuOn(gpus, Small()).status().ToString(), HasSubstr("has failed"));
}

}  // namespace
}  // namespace tessera::cli::bench
