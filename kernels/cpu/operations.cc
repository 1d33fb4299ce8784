#include "kernels/cpu/operations.h"

#include "kernels/cpu/isa.h"

namespace tessera::kernels {
namespace {

#if defined(__x86_64__)
constexpr Operations kAvx2 = {.attend_part = AttendPartAvx2, .first_unusable = FirstUnusableAvx2};
constexpr Operations kAvx512 = {.attend_part = AttendPartAvx512,
                                .first_unusable = FirstUnusableAvx512};
#else
constexpr Operations kAvx2 = {};  // never called: its Support says no
constexpr Operations kAvx512 = {};
#endif

}  // namespace

const Operations& Avx2Operations() { return kAvx2; }
const Operations& Avx512Operations() { return kAvx512; }

}  // namespace tessera::kernels
