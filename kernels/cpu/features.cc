#include "kernels/cpu/features.h"

#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tessera::kernels {
namespace {

#if defined(__x86_64__)
constexpr bool Bit(std::uint32_t word, int bit) { return (word >> bit & 1u) != 0; }

// XCR0: which register states the operating system saves. Needs OSXSAVE.
std::uint64_t SavedStates() {
  std::uint32_t low;
  std::uint32_t high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return std::uint64_t{high} << 32 | low;
}
#endif

struct Need {
  bool met;
  std::string_view reason;
};

template <std::size_t kCount>
Support AllOf(const Need (&needs)[kCount]) {
  for (const Need& need : needs) {
    if (!need.met) return {.supported = false, .reason = need.reason};
  }
  return {.supported = true};
}

}  // namespace

CpuFeatures DetectCpuFeatures() {
  CpuFeatures features;
#if defined(__x86_64__)
  std::uint32_t eax, ebx, ecx, edx;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return features;
  // The family is split over two fields from 15 on.
  const std::uint32_t family = (eax >> 8 & 0xfu) + (eax >> 20 & 0xffu);
  constexpr std::uint32_t kZen5Family = 0x1a;
  features.fma = Bit(ecx, 12);
  features.f16c = Bit(ecx, 29);
  if (Bit(ecx, 27)) {                              // OSXSAVE
    constexpr std::uint64_t kAvxStates = 0x06;     // xmm, ymm
    constexpr std::uint64_t kAvx512States = 0xe6;  // also opmask, zmm 0-15 (upper), zmm 16-31
    const std::uint64_t saved = SavedStates();
    features.os_saves_avx = (saved & kAvxStates) == kAvxStates;
    features.os_saves_avx512 = (saved & kAvx512States) == kAvx512States;
  }
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return features;
  features.avx2 = Bit(ebx, 5);
  features.avx512f = Bit(ebx, 16);
  features.avx512dq = Bit(ebx, 17);
  features.avx512bw = Bit(ebx, 30);
  features.avx512vl = Bit(ebx, 31);
  features.avx512vbmi = Bit(ecx, 1);
  features.avx512vbmi2 = Bit(ecx, 6);
  features.avx512vnni = Bit(ecx, 11);
  const std::uint32_t last_subleaf = eax;
  if (last_subleaf >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0) {
    features.avx512bf16 = Bit(eax, 5);
  }
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) != 0) {
    constexpr std::uint32_t kAmd[] = {0x68747541, 0x69746e65, 0x444d4163};  // "AuthenticAMD"
    features.amd = ebx == kAmd[0] && edx == kAmd[1] && ecx == kAmd[2];
    features.zen5 = features.amd && family >= kZen5Family;
  }
#endif
  return features;
}

Support Avx2Support(const CpuFeatures& features) {
  return AllOf({{features.avx2, "the CPU has no AVX2"},
                {features.fma, "the CPU has no FMA"},
                {features.f16c, "the CPU has no F16C"},
                {features.os_saves_avx, "the operating system does not save AVX registers"}});
}

Support Avx512Support(const CpuFeatures& features) {
  const Support avx2 = Avx2Support(features);
  return AllOf(
      {{avx2.supported, avx2.reason},
       {features.avx512f, "the CPU has no AVX-512F"},
       {features.avx512bw, "the CPU has no AVX-512BW"},
       {features.avx512dq, "the CPU has no AVX-512DQ"},
       {features.avx512vl, "the CPU has no AVX-512VL"},
       {features.os_saves_avx512, "the operating system does not save AVX-512 registers"}});
}

Support Avx512Vbmi2Support(const CpuFeatures& features) {
  const Support avx512 = Avx512Support(features);
  return AllOf({{avx512.supported, avx512.reason},
                {features.avx512vbmi2, "the CPU has no AVX-512 VBMI2"},
                {features.avx512vnni, "the CPU has no AVX-512 VNNI"}});
}

Support Avx512Bf16Support(const CpuFeatures& features) {
  const Support vbmi2 = Avx512Vbmi2Support(features);
  return AllOf({{vbmi2.supported, vbmi2.reason},
                {features.avx512vbmi, "the CPU has no AVX-512 VBMI"},
                {features.avx512bf16, "the CPU has no AVX-512 BF16"}});
}

Lookahead BestLookahead(const CpuFeatures& features) {
  constexpr std::uint32_t kNear = 8192;
  if (features.zen5) return {.into_l1 = true, .bytes = kNear};
  const bool zen4 = features.amd && features.avx512bf16;
  if (zen4) return {.bytes = kNear};
  return {};
}

}  // namespace tessera::kernels
