// Detects what this CPU and operating system can run.
#pragma once

#include "kernels/format/operations.h"

namespace tessera::kernels {

// An instruction set counts only if the operating system also saves its registers.
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
  bool avx512vnni = false;
  bool avx512bf16 = false;
  bool os_saves_avx = false;
  bool os_saves_avx512 = false;
  bool amd = false;
  bool zen5 = false;  // Zen 5 or newer AMD
};

// Queries CPUID and XGETBV; all false on other architectures.
CpuFeatures DetectCpuFeatures();

Support Avx2Support(const CpuFeatures& features);
Support Avx512Support(const CpuFeatures& features);
Support Avx512Vbmi2Support(const CpuFeatures& features);
Support Avx512Bf16Support(const CpuFeatures& features);

// The measured best setting. Zen 5: into L1. Zen 4: into L2, at a short distance. Sapphire Rapids
// and CPUs that were not measured: into L2, one tile ahead.
Lookahead BestLookahead(const CpuFeatures& features);

}  // namespace tessera::kernels
