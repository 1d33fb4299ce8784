// The GPU instructions that the kernels use. Under nvcc they are PTX. Other compilers see
// declarations only; tests implement them with an emulated warp machine, so that the kernel source
// also runs on machines without a GPU.
#pragma once

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cuda/common/target.h"
#include "kernels/format/element.h"

namespace tessera::kernels::cuda::gpu {

struct alignas(16) Chunk {
  std::uint32_t words[4];
};

#if defined(__CUDACC__)

TESSERA_DEVICE std::uint32_t Thread() { return threadIdx.x; }
TESSERA_DEVICE std::uint32_t Threads() { return blockDim.x; }
TESSERA_DEVICE std::uint32_t BlockX() { return blockIdx.x; }
TESSERA_DEVICE std::uint32_t BlockY() { return blockIdx.y; }
TESSERA_DEVICE std::uint32_t BlockZ() { return blockIdx.z; }
TESSERA_DEVICE std::uint32_t GridX() { return gridDim.x; }

TESSERA_DEVICE std::byte* SharedMemory() {
  extern __shared__ __align__(128) std::byte shared_memory[];
  return shared_memory;
}
TESSERA_DEVICE std::uint32_t SharedAddress(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

TESSERA_DEVICE void SyncBlock() { __syncthreads(); }
TESSERA_DEVICE void SyncWarp() { __syncwarp(); }
TESSERA_DEVICE std::uint32_t Ballot(bool predicate) { return __ballot_sync(~0u, predicate); }
TESSERA_DEVICE std::uint64_t Shuffle(std::uint64_t value, std::uint32_t lane) {
  return __shfl_sync(~0u, static_cast<unsigned long long>(value), static_cast<int>(lane));
}
TESSERA_DEVICE float ShuffleXor(float value, std::uint32_t mask) {
  return __shfl_xor_sync(~0u, value, static_cast<int>(mask));
}

// Copies 16 bytes to shared memory asynchronously. If `live` is false it writes zeros and does not
// read `source`.
TESSERA_DEVICE void CopyChunk(std::byte* shared, const std::byte* source, bool live) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SharedAddress(shared)),
               "l"(source), "r"(live ? 16 : 0)
               : "memory");
}
// Copies 4 bytes to shared memory asynchronously.
TESSERA_DEVICE void CopyWord(std::byte* shared, const std::byte* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(SharedAddress(shared)), "l"(source)
               : "memory");
}
TESSERA_DEVICE void CommitCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's committed copy groups are in flight.
template <std::uint32_t kPending>
TESSERA_DEVICE void WaitCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

TESSERA_DEVICE void LoadMatrices(std::uint32_t (&fragment)[4], const std::byte* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(SharedAddress(shared_row))
               : "memory");
}
TESSERA_DEVICE void LoadMatricesTransposed(std::uint32_t (&fragment)[4],
                                           const std::byte* shared_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(SharedAddress(shared_row))
               : "memory");
}
// Transposes an 8 x 8 matrix. Each lane passes two elements of row lane / 4.
TESSERA_DEVICE std::uint32_t TransposeMatrix(std::uint32_t pair) {
  std::uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// c += a x b, m16n8k16.
template <ElementType kType>
TESSERA_DEVICE void Mma(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  static_assert(kType == ElementType::kBf16 || kType == ElementType::kFp16);
  if constexpr (kType == ElementType::kBf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// c += a x b in integers, m16n8k32: bytes of `a` are unsigned, those of `b` signed.
TESSERA_DEVICE void MmaBytes(std::int32_t (&c)[4], const std::uint32_t (&a)[4],
                             const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// (word & kMask) | bits. One instruction if `bits` is in a register; of two constants the compiler
// makes two.
template <std::uint32_t kMask>
TESSERA_DEVICE std::uint32_t AndOr(std::uint32_t word, std::uint32_t bits) {
  std::uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(word), "n"(kMask), "r"(bits));
  return result;
}
// A constant that the compiler keeps in a register.
TESSERA_DEVICE std::uint32_t InRegister(std::uint32_t constant) {
  std::uint32_t word;
  asm volatile("mov.b32 %0, %1;" : "=r"(word) : "r"(constant));
  return word;
}

// Rounds two floats to nearest even; `low` goes to the low half.
template <ElementType kType>
TESSERA_DEVICE std::uint32_t PackPair(float low, float high) {
  std::uint32_t pair;
  if constexpr (kType == ElementType::kBf16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

TESSERA_DEVICE float HalfToFloat(std::uint16_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

TESSERA_DEVICE std::uint32_t PopCount(std::uint32_t word) {
  return static_cast<std::uint32_t>(__popc(word));
}
TESSERA_DEVICE std::uint32_t RotateLeft(std::uint32_t word, std::uint32_t bits) {
  return __funnelshift_l(word, word, bits);
}
TESSERA_DEVICE float Exp2(float x) { return exp2f(x); }
// Like Exp2, in one instruction; subnormal results are 0.
TESSERA_DEVICE float FastExp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
TESSERA_DEVICE float Log2(float x) { return log2f(x); }
TESSERA_DEVICE float Tanh(float x) { return tanhf(x); }
TESSERA_DEVICE float Max(float a, float b) { return fmaxf(a, b); }

// Reads a word exactly once. Another process may be changing it.
TESSERA_DEVICE std::uint64_t LoadOnce(const std::uint64_t* word) {
  return *reinterpret_cast<const volatile std::uint64_t*>(word);
}
// Like LoadOnce: reads each of the four words exactly once.
TESSERA_DEVICE Chunk LoadChunkOnce(const Chunk* chunk) {
  Chunk loaded;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(loaded.words[0]), "=r"(loaded.words[1]), "=r"(loaded.words[2]),
                 "=r"(loaded.words[3])
               : "l"(chunk)
               : "memory");
  return loaded;
}
TESSERA_DEVICE void AtomicMin(std::uint64_t* word, std::uint64_t value) {
  atomicMin(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
}

// `word` is in shared memory.
TESSERA_DEVICE void AtomicAdd(std::uint32_t* word, std::uint32_t value) { atomicAdd(word, value); }

#else

std::uint32_t Thread();
std::uint32_t Threads();
std::uint32_t BlockX();
std::uint32_t BlockY();
std::uint32_t BlockZ();
std::uint32_t GridX();
std::byte* SharedMemory();
void SyncBlock();
void SyncWarp();
std::uint32_t Ballot(bool predicate);
std::uint64_t Shuffle(std::uint64_t value, std::uint32_t lane);
float ShuffleXor(float value, std::uint32_t mask);
void CopyChunk(std::byte* shared, const std::byte* source, bool live);
void CopyWord(std::byte* shared, const std::byte* source);
void CommitCopies();
void WaitForCopies(std::uint32_t pending);
template <std::uint32_t kPending>
void WaitCopies() {
  WaitForCopies(kPending);
}
void LoadMatrices(std::uint32_t (&fragment)[4], const std::byte* shared_row);
void LoadMatricesTransposed(std::uint32_t (&fragment)[4], const std::byte* shared_row);
std::uint32_t TransposeMatrix(std::uint32_t pair);
void MultiplyAdd(ElementType type, float (&c)[4], const std::uint32_t (&a)[4],
                 const std::uint32_t (&b)[2]);
template <ElementType kType>
void Mma(float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
  MultiplyAdd(kType, c, a, b);
}
void MmaBytes(std::int32_t (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]);
template <std::uint32_t kMask>
std::uint32_t AndOr(std::uint32_t word, std::uint32_t bits) {
  return (word & kMask) | bits;
}
inline std::uint32_t InRegister(std::uint32_t constant) { return constant; }
template <ElementType kType>
std::uint32_t PackPair(float low, float high) {
  if constexpr (kType == ElementType::kBf16) {
    return FloatToBf16(low) | static_cast<std::uint32_t>(FloatToBf16(high)) << 16;
  } else {
    return FloatToFp16(low) | static_cast<std::uint32_t>(FloatToFp16(high)) << 16;
  }
}
inline float HalfToFloat(std::uint16_t half) { return Fp16ToFloat(half); }
inline std::uint32_t PopCount(std::uint32_t word) {
  return static_cast<std::uint32_t>(std::popcount(word));
}
inline std::uint32_t RotateLeft(std::uint32_t word, std::uint32_t bits) {
  return std::rotl(word, static_cast<int>(bits % 32));
}
inline float Exp2(float x) { return std::exp2(x); }
inline float FastExp2(float x) { return std::exp2(x); }
inline float Log2(float x) { return std::log2(x); }
inline float Tanh(float x) { return std::tanh(x); }
inline float Max(float a, float b) { return std::fmax(a, b); }
std::uint64_t LoadOnce(const std::uint64_t* word);
Chunk LoadChunkOnce(const Chunk* chunk);
void AtomicMin(std::uint64_t* word, std::uint64_t value);
void AtomicAdd(std::uint32_t* word, std::uint32_t value);

#endif

TESSERA_DEVICE std::uint32_t Lane() { return Thread() % 32; }
TESSERA_DEVICE std::uint32_t Warp() { return Thread() / 32; }
TESSERA_DEVICE float NegativeInfinity() { return -INFINITY; }

}  // namespace tessera::kernels::cuda::gpu
