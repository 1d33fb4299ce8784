#include "kernels/cpu/operations.h"

#include "kernels/cpu/simd/isa.h"

namespace tessera::kernels {

#if defined(__x86_64__)
const Operations& Avx2() { return kAvx2Operations; }
const Operations& Avx512() { return kAvx512Operations; }
const Operations& Avx512Vbmi2() { return kAvx512Vbmi2Operations; }
const Operations& Avx512Bf16() { return kAvx512Bf16Operations; }
#else
namespace {
constexpr Operations kNone = {};  // never called: Support is false
}
const Operations& Avx2() { return kNone; }
const Operations& Avx512() { return kNone; }
const Operations& Avx512Vbmi2() { return kNone; }
const Operations& Avx512Bf16() { return kNone; }
#endif

}  // namespace tessera::kernels
