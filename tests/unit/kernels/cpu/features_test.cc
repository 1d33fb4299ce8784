#include "kernels/cpu/features.h"

#include "gtest/gtest.h"

namespace tessera::kernels {
namespace {

constexpr CpuFeatures kAll = {.avx2 = true,
                              .fma = true,
                              .f16c = true,
                              .avx512f = true,
                              .avx512bw = true,
                              .avx512dq = true,
                              .avx512vl = true,
                              .avx512vbmi = true,
                              .avx512vbmi2 = true,
                              .avx512vnni = true,
                              .avx512bf16 = true,
                              .os_saves_avx = true,
                              .os_saves_avx512 = true};

TEST(CpuFeatures, AllSupportsEverything) {
  EXPECT_TRUE(Avx2Support(kAll).supported);
  EXPECT_TRUE(Avx512Support(kAll).supported);
  EXPECT_TRUE(Avx512Vbmi2Support(kAll).supported);
  EXPECT_TRUE(Avx512Bf16Support(kAll).supported);
  EXPECT_EQ(Avx512Support(kAll).reason, "");
}

// Every feature of a level is required, and the reason names a missing one.
TEST(CpuFeatures, EachMissingFeatureIsNamed) {
  enum Level { kAvx2, kAvx512, kVbmi2, kBf16 };
  struct Case {
    bool CpuFeatures::*feature;
    Level lowest;  // that requires it
    const char* named;
  };
  for (const Case& c :
       {Case{&CpuFeatures::avx2, kAvx2, "AVX2"}, Case{&CpuFeatures::fma, kAvx2, "FMA"},
        Case{&CpuFeatures::f16c, kAvx2, "F16C"},
        Case{&CpuFeatures::os_saves_avx, kAvx2, "operating system"},
        Case{&CpuFeatures::avx512f, kAvx512, "AVX-512F"},
        Case{&CpuFeatures::avx512bw, kAvx512, "AVX-512BW"},
        Case{&CpuFeatures::avx512dq, kAvx512, "AVX-512DQ"},
        Case{&CpuFeatures::avx512vl, kAvx512, "AVX-512VL"},
        Case{&CpuFeatures::os_saves_avx512, kAvx512, "operating system"},
        Case{&CpuFeatures::avx512vbmi2, kVbmi2, "VBMI2"},
        Case{&CpuFeatures::avx512vnni, kVbmi2, "VNNI"},
        Case{&CpuFeatures::avx512vbmi, kBf16, "VBMI"},
        Case{&CpuFeatures::avx512bf16, kBf16, "BF16"}}) {
    CpuFeatures features = kAll;
    features.*c.feature = false;
    const Support levels[] = {Avx2Support(features), Avx512Support(features),
                              Avx512Vbmi2Support(features), Avx512Bf16Support(features)};
    for (int level = kAvx2; level <= kBf16; ++level) {
      EXPECT_EQ(levels[level].supported, level < c.lowest) << c.named << " " << level;
      if (level < c.lowest) continue;
      EXPECT_NE(levels[level].reason.find(c.named), std::string_view::npos) << levels[level].reason;
    }
  }
}

TEST(CpuFeatures, CoresAreAskedHowTheyWantTheirLines) {
  CpuFeatures features = kAll;
  const Lookahead others = BestLookahead(features);
  EXPECT_FALSE(others.into_l1);
  EXPECT_EQ(others.bytes, Lookahead().bytes);
  features.amd = true;
  const Lookahead zen4 = BestLookahead(features);
  EXPECT_FALSE(zen4.into_l1);
  EXPECT_EQ(zen4.bytes, 8192u);
  features.zen5 = true;
  const Lookahead zen5 = BestLookahead(features);
  EXPECT_TRUE(zen5.into_l1);
  EXPECT_EQ(zen5.bytes, 8192u);
  // AMD without bf16 pair dots: never measured.
  features.zen5 = false;
  features.avx512bf16 = false;
  EXPECT_EQ(BestLookahead(features).bytes, others.bytes);
}

// The compiler's own detection agrees.
TEST(CpuFeatures, DetectionAgreesWithTheCompiler) {
  const CpuFeatures features = DetectCpuFeatures();
#if defined(__x86_64__)
  EXPECT_EQ(Avx2Support(features).supported,
            __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"));
  EXPECT_EQ(Avx512Support(features).supported,
            __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"));
  EXPECT_EQ(features.avx512vbmi2, __builtin_cpu_supports("avx512vbmi2") != 0);
  EXPECT_EQ(features.avx512vnni, __builtin_cpu_supports("avx512vnni") != 0);
  EXPECT_EQ(features.avx512vbmi, __builtin_cpu_supports("avx512vbmi") != 0);
  EXPECT_EQ(features.avx512bf16, __builtin_cpu_supports("avx512bf16") != 0);
#else
  EXPECT_FALSE(Avx2Support(features).supported);
#endif
}

}  // namespace
}  // namespace tessera::kernels
