// What both `Simd` vocabularies share. Internal linkage throughout: see ../README.md.
#pragma once

// Forced inlining keeps vector arguments in registers in every build type, and keeps ISA code out
// of functions that the linker could merge with baseline ones.
#define TESSERA_MEMBER inline __attribute__((always_inline))
#define TESSERA_SIMD static TESSERA_MEMBER
#define TESSERA_INLINE_LAMBDA __attribute__((always_inline))
// For what runs once per pass over up to 32 rows: there a call costs nothing, while a copy in each
// instantiation of its callers would double the code.
#define TESSERA_PER_PASS static __attribute__((noinline))

// For loops over registers: an array of vectors is kept in registers only if its loops are
// unrolled.
#if defined(__clang__)
#define TESSERA_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TESSERA_UNROLL _Pragma("GCC unroll 16")
#endif

namespace tessera::kernels {
namespace {

// 2^f for |f| <= 1/2: the polynomial that interpolates 2^f at the Chebyshev points. Relative error
// 2.6e-9 before rounding; the constant term is exactly 1.
template <class Simd>
TESSERA_SIMD typename Simd::Floats Exp2Fraction(typename Simd::Floats f) {
  auto power = Simd::Splat(0.000154614447f);
  power = Simd::MultiplyAdd(power, f, Simd::Splat(0.00134004282f));
  power = Simd::MultiplyAdd(power, f, Simd::Splat(0.00961805668f));
  power = Simd::MultiplyAdd(power, f, Simd::Splat(0.0555032723f));
  power = Simd::MultiplyAdd(power, f, Simd::Splat(0.240226509f));
  power = Simd::MultiplyAdd(power, f, Simd::Splat(0.693147207f));
  return Simd::MultiplyAdd(power, f, Simd::Splat(1.0f));
}

// log2 of a positive finite number: its exponent plus an odd polynomial in (m - 1) / (m + 1) of its
// mantissa m in [sqrt(1/2), sqrt(2)). Absolute error under 2^-22 x max(1, |log2|). 0 gives
// -infinity, negative numbers give NaN.
template <class Simd>
TESSERA_SIMD typename Simd::Floats Log2(typename Simd::Floats value) {
  const auto split = Simd::SplitExponent(value);
  const auto one = Simd::Splat(1.0f);
  const auto t = Simd::Divide(Simd::Subtract(split.mantissa, one), Simd::Add(split.mantissa, one));
  const auto square = Simd::Multiply(t, t);
  auto series = Simd::Splat(0.32059888f);
  series = Simd::MultiplyAdd(series, square, Simd::Splat(0.41219859f));
  series = Simd::MultiplyAdd(series, square, Simd::Splat(0.57707802f));
  series = Simd::MultiplyAdd(series, square, Simd::Splat(0.96179669f));
  series = Simd::MultiplyAdd(series, square, Simd::Splat(2.88539008f));
  return Simd::LogOrLimit(value, Simd::MultiplyAdd(series, t, split.exponent));
}

}  // namespace
}  // namespace tessera::kernels
