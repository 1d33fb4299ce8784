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
                              .os_saves_avx = true,
                              .os_saves_avx512 = true};

TEST(CpuFeatures, AllSupportsBoth) {
  EXPECT_TRUE(Avx2Support(kAll).supported);
  EXPECT_TRUE(Avx512Support(kAll).supported);
  EXPECT_EQ(Avx512Support(kAll).reason, "");
}

// Every single feature is necessary for what needs it, and the reason names it.
TEST(CpuFeatures, EachMissingFeatureIsNamed) {
  struct Case {
    bool CpuFeatures::*feature;
    bool needed_by_avx2;
    const char* named;
  };
  for (const Case& c :
       {Case{&CpuFeatures::avx2, true, "AVX2"}, Case{&CpuFeatures::fma, true, "FMA"},
        Case{&CpuFeatures::f16c, true, "F16C"},
        Case{&CpuFeatures::os_saves_avx, true, "operating system"},
        Case{&CpuFeatures::avx512f, false, "AVX-512F"},
        Case{&CpuFeatures::avx512bw, false, "AVX-512BW"},
        Case{&CpuFeatures::avx512dq, false, "AVX-512DQ"},
        Case{&CpuFeatures::avx512vl, false, "AVX-512VL"},
        Case{&CpuFeatures::os_saves_avx512, false, "operating system"}}) {
    CpuFeatures features = kAll;
    features.*c.feature = false;
    const Support avx2 = Avx2Support(features);
    const Support avx512 = Avx512Support(features);
    EXPECT_EQ(avx2.supported, !c.needed_by_avx2) << c.named;
    EXPECT_FALSE(avx512.supported) << c.named;
    EXPECT_NE(avx512.reason.find(c.named), std::string_view::npos) << avx512.reason;
  }
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
#else
  EXPECT_FALSE(Avx2Support(features).supported);
#endif
}

}  // namespace
}  // namespace tessera::kernels
