// What this CPU and its operating system let us run.
#pragma once

#include "kernels/format/operations.h"

namespace tessera::kernels {

// An instruction set counts only where the operating system also saves its registers.
struct CpuFeatures {
  bool avx2 = false;
  bool fma = false;
  bool f16c = false;
  bool avx512f = false;
  bool avx512bw = false;
  bool avx512dq = false;
  bool avx512vl = false;
  bool avx512vbmi = false;
  bool avx512vbmi2 = false;
  bool avx512bf16 = false;
  bool os_saves_avx = false;
  bool os_saves_avx512 = false;
  bool amd = false;
  bool zen5 = false;  // or newer of AMD
};

// Asks CPUID and XGETBV; all false on other architectures.
CpuFeatures DetectCpuFeatures();

Support Avx2Support(const CpuFeatures& features);
Support Avx512Support(const CpuFeatures& features);
Support Avx512Vbmi2Support(const CpuFeatures& features);
Support Avx512Bf16Support(const CpuFeatures& features);

// By measurement, what was not measured as Sapphire Rapids: Zen 5 wants lines in L1, Zen 4 in L2
// and near, Sapphire Rapids in L2, a tile ahead.
Lookahead BestLookahead(const CpuFeatures& features);

}  // namespace tessera::kernels
