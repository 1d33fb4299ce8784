// The operations of one instruction set: what its source file exports.
#pragma once

#include "kernels/cpu/attend/attend_packed-inl.h"
#include "kernels/cpu/attend/attend_part-inl.h"
#include "kernels/cpu/attend/attend_planes-inl.h"
#if defined(__AVX512BF16__)
#define TESSERA_DOT_ENGINE
#include "kernels/cpu/attend/dot_engine-inl.h"
#endif
#include "kernels/cpu/encode/first_unusable-inl.h"
#include "kernels/cpu/encode/observe-inl.h"
#include "kernels/cpu/encode/rotate-inl.h"
#include "kernels/cpu/select/score-inl.h"
#include "kernels/cpu/select/select-inl.h"
#include "kernels/cpu/select/signs-inl.h"
#include "kernels/cpu/tile_jobs-inl.h"
#include "kernels/format/operations.h"

namespace tessera::kernels {
namespace {

// The engine that computes with packed values after expansion.
#if defined(TESSERA_DOT_ENGINE)
template <ValueType kValues>
struct EngineFor {
  using Type = DotEngine;
};
template <>
struct EngineFor<ValueType::kFp16> {
  using Type = FloatEngine<ElementType::kFp16>;
};
#else
template <ValueType kValues>
struct EngineFor {
  using Type = FloatEngine<kExpandedType<kValues> >;
};
#endif

static const char* AttendPartEntry(const AttendPart& part, const PartialRows& partial) {
  if (part.shape.format == TileFormat::kPlanes) {
    AttendPlanes(part, partial);
    return Simd::kName;
  }
  Scratch scratch;
  const PartContext context = {.part = &part,
                               .partial = &partial,
                               .scratch = &scratch,
                               .logits = LogitsOf(part.scale, part.logit_softcap)};
  switch (part.shape.format) {
    case TileFormat::kDenseBf16:
      AttendDense<ElementType::kBf16>(context);
      break;
    case TileFormat::kDenseFp16:
      AttendDense<ElementType::kFp16>(context);
      break;
    case TileFormat::kDenseFp32:
      AttendDense<ElementType::kFp32>(context);
      break;
    default:
      WithValues(part.shape, [&]<ValueType kValues, int kGroup>() {
        AttendPacked<typename EngineFor<kValues>::Type, kValues, kGroup>(context);
      });
  }
  return Simd::kName;
}

static const char* RotateEntry(const RotateJob& job) {
  RotateSimd(job);
  return Simd::kName;
}

static const char* UnrotateEntry(const UnrotateJob& job) {
  UnrotateSimd(job);
  return Simd::kName;
}

static const char* ScorePartEntry(const ScorePart& part) {
  if (part.shape.summary == Summary::kSigns) {
    ScoreSigns(part);
  } else {
    ScorePartSimd(part);
  }
  return Simd::kName;
}

static const char* SelectEntry(const SelectJob& job) {
  SelectSimd(job);
  return Simd::kName;
}

static const char* DecodeEntry(const DecodeJob& job) {
  DecodeSimd(job);
  return Simd::kName;
}

static const char* GatherEntry(const GatherJob& job) {
  GatherSimd(job);
  return Simd::kName;
}

static const char* MomentsEntry(const MomentsJob& job) {
  MomentsSimd(job);
  return Simd::kName;
}

static const char* ObserveEntry(const ObserveJob& job) {
  ObserveSimd(job);
  return Simd::kName;
}

constexpr Operations kOperations = {.attend_part = AttendPartEntry,
                                    .rotate = RotateEntry,
                                    .unrotate = UnrotateEntry,
                                    .score_part = ScorePartEntry,
                                    .select = SelectEntry,
                                    .prepared_bytes = PreparedBytesSimd,
                                    .prepare_encode = PrepareEncodeSimd,
                                    .encode = EncodeSimd,
                                    .decode = DecodeEntry,
                                    .gather = GatherEntry,
                                    .moments = MomentsEntry,
                                    .observe = ObserveEntry,
                                    .first_unusable = FirstUnusableSimd};

}  // namespace
}  // namespace tessera::kernels
