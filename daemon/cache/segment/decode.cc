#include "daemon/cache/segment/decode.h"

#include <cstring>

#include "daemon/cache/segment/build.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::cache {

void ToFloats(const std::byte* from, kernels::ElementType type, std::size_t count, float* to) {
  if (type == kernels::ElementType::kFp32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    std::uint16_t bits;
    std::memcpy(&bits, from + i * sizeof bits, sizeof bits);
    to[i] = type == kernels::ElementType::kBf16 ? kernels::Bf16ToFloat(bits)
                                                : kernels::Fp16ToFloat(bits);
  }
}

void FromFloats(const float* from, kernels::ElementType type, std::size_t count, std::byte* to) {
  if (type == kernels::ElementType::kFp32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint16_t bits = type == kernels::ElementType::kBf16 ? kernels::FloatToBf16(from[i])
                                                                   : kernels::FloatToFp16(from[i]);
    std::memcpy(to + i * sizeof bits, &bits, sizeof bits);
  }
}

RowDecoder::RowDecoder(device::Device& device)
    : device_(device), operations_(kernels::OperationsOf(kernels::BestImplementation())) {}

absl::Status RowDecoder::Prepare(const Segment& segment) {
  if (prepared_ == &segment) return absl::OkStatus();
  prepared_ = nullptr;
  shape_ = segment.shape();
  layout_ = kernels::LayoutOf(shape_);
  tile_.resize(layout_.bytes);
  if (!shape_.packed()) {
    prepared_ = &segment;
    return absl::OkStatus();
  }
  padded_ = kernels::PaddedChannels(shape_);
  if (absl::Status status = LoadRotations(segment); !status.ok()) return status;
  prepared_ = &segment;
  return absl::OkStatus();
}

absl::Status RowDecoder::LoadRotations(const Segment& segment) {
  rotation_ = {};
  const Rotations* const rotations = segment.rotations();
  if (rotations == nullptr) return absl::OkStatus();
  const kernels::RotationView there = ViewOf(rotations, shape_);
  const std::byte* const base = rotations->block.data();
  std::uint64_t bytes = rotations->is_book ? kernels::BookLayoutOf(shape_.head_dim).bytes : 0;
  if (!rotations->is_book && there.key != nullptr) {
    bytes += kernels::RotationBytes(shape_, shape_.key, rotations->type);
  }
  if (!rotations->is_book && there.value != nullptr) {
    bytes += kernels::RotationBytes(shape_, shape_.value, rotations->type);
  }
  matrices_.resize(bytes);
  if (absl::Status status = device_.Read(matrices_.data(), base, bytes); !status.ok()) {
    return status;
  }
  const auto here = [&](const std::byte* at) {
    return at == nullptr ? nullptr : matrices_.data() + (at - base);
  };
  rotation_ = {.key = here(there.key),
               .value = here(there.value),
               .type = there.type,
               .key_mean = here(there.key_mean),
               .value_mean = here(there.value_mean)};
  return absl::OkStatus();
}

void RowDecoder::TurnBack(const std::byte* rotation, const std::byte* mean,
                          const kernels::RowShape& side, const kernels::FloatRows& rows,
                          std::uint32_t count, float* output) {
  operations_.unrotate({.rotation = rotation,
                        .rotation_type = rotation_.type,
                        .channels = side.channels,
                        .head_dim = shape_.head_dim,
                        .rows = rows.elements,
                        .padded_channels = padded_,
                        .row_count = count,
                        .output = turned_.elements,
                        .mean = mean});
  std::memcpy(output, turned_.elements, std::size_t{count} * shape_.head_dim * sizeof(float));
}

absl::Status RowDecoder::Decode(const Segment& segment, const std::byte* tile, std::uint32_t rows,
                                float* keys, float* values) {
  absl::Status status = Prepare(segment);
  if (status.ok()) status = device_.Read(tile_.data(), tile, layout_.bytes);
  if (!status.ok()) return status;
  if (!shape_.packed()) {
    const kernels::ElementType type = kernels::ElementsOf(shape_.format);
    const std::size_t count = std::size_t{rows} * shape_.head_dim;
    ToFloats(tile_.data() + layout_.key_data, type, count, keys);
    ToFloats(tile_.data() + layout_.value_data, type, count, values);
    return absl::OkStatus();
  }
  operations_.decode({.tile = tile_.data(),
                      .shape = shape_,
                      .layout = layout_,
                      .rows = rows,
                      .padded_channels = padded_,
                      .keys = keys_.elements,
                      .values = values_.elements});
  TurnBack(rotation_.key, rotation_.key_mean, shape_.key, keys_, rows, keys);
  TurnBack(rotation_.value, rotation_.value_mean, shape_.value, values_, rows, values);
  return absl::OkStatus();
}

}  // namespace tessera::cache
