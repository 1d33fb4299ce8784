// The two products of a group of 16 rows in planes: logits from K, and the output from V. The words
// in shared memory are those of the tile.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend/planes_part.cuh"
#include "kernels/cuda/common/gpu.cuh"
#include "kernels/cuda/common/planes_index.h"
#include "kernels/cuda/common/slices.cuh"

namespace tessera::kernels::cuda {

// Two neighbouring words: those of a lane's two rows of K.
struct WordPair {
  std::uint32_t low;
  std::uint32_t high;
};

TESSERA_DEVICE WordPair LoadPair(const std::byte* shared) {
  const auto both = *reinterpret_cast<const std::uint64_t*>(shared);
  return {.low = static_cast<std::uint32_t>(both), .high = static_cast<std::uint32_t>(both >> 32)};
}

TESSERA_DEVICE float Bf16At(const std::byte* shared, std::uint32_t half) {
  const std::uint32_t pair = *reinterpret_cast<const std::uint32_t*>(shared);
  return std::bit_cast<float>(half == 0 ? pair << 16 : pair & 0xffff0000u);
}

template <class Shape>
TESSERA_DEVICE void MultiplyCodes(const QuadOperand& key, std::uint32_t half, std::uint32_t step,
                                  const QuadState<Shape>& state,
                                  std::int32_t (&dots)[Shape::kColumnTiles][4]) {
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    gpu::MmaBytes(dots[t], key.a, state.query[t][half][step]);
  }
}

// dots[t]: 16 rows x 8 columns of one half. `quad` is the lane's quad, from its first slot on.
template <class Shape>
TESSERA_DEVICE void ScoreHalf(const HalfPlane& plane, const std::byte* quad, std::uint32_t half,
                              const QuadState<Shape>& state,
                              std::int32_t (&dots)[Shape::kColumnTiles][4]) {
  constexpr std::uint32_t kWordBytes = kQuadRows * 4;
  const std::uint32_t first = KeyStepOf(Shape::kHeadDim, gpu::Lane(), 0);
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    TESSERA_UNROLL
    for (std::uint32_t i = 0; i < 4; ++i) dots[t][i] = 0;
  }
  if (plane.has_nibbles()) {
    const std::byte* words = quad + plane.words + first * kWordBytes;
    TESSERA_UNROLL
    for (std::uint32_t s = 0; s < Shape::kKeySteps; ++s) {
      const WordPair pair = LoadPair(words + s * kWordBytes);
      MultiplyCodes<Shape>(KeyNibbles(pair.low, pair.high), half, s, state, dots);
    }
    if (plane.has_crumbs()) {
      TESSERA_UNROLL
      for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
        TESSERA_UNROLL
        for (std::uint32_t i = 0; i < 4; ++i) dots[t][i] *= 4;
      }
    }
  }
  if (plane.has_crumbs()) {
    const std::byte* words = quad + plane.crumbs + first / 2 * kWordBytes;
    TESSERA_UNROLL
    for (std::uint32_t s = 0; s < Shape::kKeySteps; ++s) {
      const WordPair pair = LoadPair(words + s / 2 * kWordBytes);
      const std::uint32_t shift = 4 * ((Shape::kKeySteps == 1 ? first : s) % 2);
      MultiplyCodes<Shape>(KeyCrumbs(pair.low, pair.high, shift), half, s, state, dots);
    }
  }
  if (plane.has_bytes()) {
    const std::byte* words = quad + plane.words + 2 * first * kWordBytes;
    TESSERA_UNROLL
    for (std::uint32_t s = 0; s < Shape::kKeySteps; ++s) {
      const WordPair front = LoadPair(words + 2 * s * kWordBytes);
      const WordPair back = LoadPair(words + (2 * s + 1) * kWordBytes);
      MultiplyCodes<Shape>({{front.low, front.high, back.low, back.high}}, half, s, state, dots);
    }
  }
}

// logits[t]: 16 rows x 8 columns, in log2 units and without the soft-cap.
template <class Shape>
TESSERA_DEVICE void ScoreGroup(const QuadPart& part, const std::byte* quads, std::uint32_t group,
                               const QuadState<Shape>& state,
                               float (&logits)[Shape::kColumnTiles][4]) {
  const std::uint32_t slot = KeySlotOf(gpu::Lane());
  const std::byte* quad = quads + (group * kGroupQuads + KeyQuadOf(gpu::Lane())) * part.quad_bytes;
  TESSERA_UNROLL
  for (std::uint32_t h = 0; h < kHalves; ++h) {
    std::int32_t dots[Shape::kColumnTiles][4];
    ScoreHalf<Shape>(part.key[h], quad + slot * 4, h, state, dots);
    const std::byte* scales = quad + part.key[h].scales + slot * 2;
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) {
        const float centred =
            static_cast<float>(dots[t][i]) * state.scale[t][h][i % 2] - state.offset[t][h][i % 2];
        logits[t][i] =
            centred * Bf16At(scales, i / 2) + (h == 0 ? state.mean[t][i % 2] : logits[t][i]);
      }
    }
  }
}

// The B operand of weights x scales of a group of rows.
struct WeightOperand {
  std::uint32_t b[2];
};

TESSERA_DEVICE WeightOperand ScaleWeights(const float (&weights)[4], const float (&scales)[2],
                                          float factor) {
  float scaled[4];
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < 4; ++i) scaled[i] = weights[i] * (scales[i / 2] * factor);
  WeightOperand operand;
  TransposeWeights<ElementType::kBf16>(scaled, operand.b);
  return operand;
}

template <class Shape>
TESSERA_DEVICE void AddCodes(const std::uint32_t (&value)[4], std::uint32_t step,
                             const WeightOperand (&weights)[Shape::kColumnTiles],
                             QuadState<Shape>& state) {
  TESSERA_UNROLL
  for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
    gpu::Mma<ElementType::kBf16>(state.output[t][step], value, weights[t].b);
  }
}

// Words of one run of a lane.
template <std::uint32_t kCount>
TESSERA_DEVICE void LoadWords(const std::byte* shared, std::uint32_t (&words)[kCount]) {
  struct alignas(kCount % 4 == 0 ? 16 : kCount * 4) Run {
    std::uint32_t words[kCount];
  };
  const Run run = *reinterpret_cast<const Run*>(shared);
  TESSERA_UNROLL
  for (std::uint32_t i = 0; i < kCount; ++i) words[i] = run.words[i];
}

// Adds one half of a group of rows: output += codes of V x weights. `upper` are the weights times
// UpperFactor. `quad` is the lane's quad.
template <class Shape>
TESSERA_DEVICE void AddHalf(const HalfPlane& plane, const std::byte* quad, std::uint32_t half,
                            const WeightOperand (&weights)[Shape::kColumnTiles],
                            const WeightOperand (&upper)[Shape::kColumnTiles],
                            QuadState<Shape>& state) {
  constexpr std::uint32_t kRun = ValueRun(Shape::kHeadDim);
  const std::uint32_t ones = gpu::InRegister(kExponents);
  const auto nibble = [&](std::uint32_t word) { return gpu::AndOr<kNibblePair>(word, ones); };
  const auto crumb = [&](std::uint32_t word) { return gpu::AndOr<kCrumbPair>(word, ones); };
  TESSERA_UNROLL
  for (std::uint32_t run = 0; run < Shape::kValueSteps / kRun; ++run) {
    const std::uint32_t pair = ChannelPairOf(Shape::kHeadDim, gpu::Lane(), run * kRun);
    const std::uint32_t step = half * Shape::kValueSteps + run * kRun;
    if (plane.has_nibbles()) {
      std::uint32_t words[kRun];
      LoadWords(quad + plane.words + pair * 4, words);
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kRun; ++i) {
        const std::uint32_t w = words[i];
        AddCodes<Shape>({nibble(w), nibble(w >> 4), nibble(w >> 8), nibble(w >> 12)}, step + i,
                        upper, state);
      }
    }
    if (plane.has_crumbs()) {
      std::uint32_t words[kRun / 2];
      LoadWords(quad + plane.crumbs + pair / 2 * 4, words);
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kRun; ++i) {
        const std::uint32_t w = words[i / 2] >> (4 * (i % 2));
        AddCodes<Shape>({crumb(w), crumb(w >> 2), crumb(w >> 8), crumb(w >> 10)}, step + i, weights,
                        state);
      }
    }
    if (plane.has_bytes()) {
      std::uint32_t words[2 * kRun];
      LoadWords(quad + plane.words + 2 * pair * 4, words);
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < kRun; ++i) {
        const std::uint32_t u = words[2 * i];
        const std::uint32_t v = words[2 * i + 1];
        AddCodes<Shape>({nibble(u >> 4), nibble(v >> 4), nibble(u >> 12), nibble(v >> 12)},
                        step + i, upper, state);
        AddCodes<Shape>({nibble(u), nibble(v), nibble(u >> 8), nibble(v >> 8)}, step + i, weights,
                        state);
      }
    }
  }
}

// output += V x weights for a group of 16 rows. Rows that are not live have weight 0; their scale
// may be anything and counts as 0.
template <class Shape>
TESSERA_DEVICE void AddGroup(const QuadPart& part, const std::byte* quads, std::uint32_t group,
                             const bool (&live)[2], const float (&weights)[Shape::kColumnTiles][4],
                             QuadState<Shape>& state) {
  constexpr std::uint32_t kOne = 0x3f803f80u;  // a pair
  constexpr std::uint32_t kOnes[4] = {kOne, 0, kOne, 0};
  const std::byte* first = quads + group * kGroupQuads * part.quad_bytes;
  const std::byte* rows =
      first + KeyQuadOf(gpu::Lane()) * part.quad_bytes + KeySlotOf(gpu::Lane()) * 2;
  const std::byte* values = first + ValueQuadOf(gpu::Lane()) * part.quad_bytes;
  WeightOperand operand[Shape::kColumnTiles] = {};
  float scales[2] = {};
  TESSERA_UNROLL
  for (std::uint32_t h = 0; h < kHalves; ++h) {
    const HalfPlane& plane = part.value[h];
    if (h == 0 || part.two_values) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 2; ++i) {
        scales[i] = live[i] ? Bf16At(rows + plane.scales, i) : 0;
      }
      TESSERA_UNROLL
      for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
        operand[t] = ScaleWeights(weights[t], scales, 1);
        gpu::Mma<ElementType::kBf16>(state.weights[t][h], kOnes, operand[t].b);
      }
    }
    WeightOperand upper[Shape::kColumnTiles];
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      upper[t] = operand[t];
      if (plane.width > 4) {
        upper[t] = ScaleWeights(weights[t], scales, UpperFactor(plane.width));
      }
    }
    AddHalf<Shape>(plane, values, h, operand, upper, state);
  }
}

// Takes the constants of the operands away from the output.
template <class Shape>
TESSERA_DEVICE void CentreOutput(const QuadPart& part, QuadState<Shape>& state) {
  TESSERA_UNROLL
  for (std::uint32_t h = 0; h < kHalves; ++h) {
    const float centre = ValueCentre(part.value[h].width);
    TESSERA_UNROLL
    for (std::uint32_t t = 0; t < Shape::kColumnTiles; ++t) {
      TESSERA_UNROLL
      for (std::uint32_t i = 0; i < 4; ++i) {
        const float sum = part.two_values ? state.weights[t][h][i % 2] : state.weights[t][0][i % 2];
        TESSERA_UNROLL
        for (std::uint32_t s = 0; s < Shape::kValueSteps; ++s) {
          state.output[t][h * Shape::kValueSteps + s][i] -= centre * sum;
        }
      }
    }
  }
}

}  // namespace tessera::kernels::cuda
