// 2^x and ln x in double precision from additions, multiplications and divisions only. Both
// transports must merge to the same bits, although the worker may use a different C library than
// the daemon. Compile without contraction into fused multiply-adds.
#pragma once

namespace tessera::kernels {

double Exp2(double x);  // 0 below 2^-1022; relative error under 1e-15
double Ln(double x);    // x is positive and finite, 0 (gives -infinity) or NaN
inline constexpr double kLn2 = 0.69314718055994530942;
inline constexpr double kLog2E = 1.44269504088896340736;

}  // namespace tessera::kernels
