// Random tile shapes, rows and rotations, and a device to encode them on, for tests of the tile
// operations.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/host/tile_ops.h"
#include "kernels/reference/packed.h"
#include "kernels/reference/tile_row.h"
#include "tests/fakes/seed.h"
#include "tests/unit/kernels/cuda/lanes.h"

namespace tessera::tests {

using kernels::ElementBytes;
using kernels::ElementType;
using kernels::kTileEntries;
using kernels::LayoutOf;
using kernels::Summary;
using kernels::TileFormat;
using kernels::TileLayout;
using kernels::TileShape;

// Aligned host memory, 0xff until written, to copy to and from a device.
class Bytes {
 public:
  explicit Bytes(std::size_t size = 0) : bytes_(Make(size)), size_(size) {}
  std::byte* data() const { return bytes_.get(); }
  std::size_t size() const { return size_; }
  bool operator==(const Bytes& other) const {
    return size_ == other.size_ && std::memcmp(data(), other.data(), size_) == 0;
  }

 private:
  struct Deleter {
    void operator()(std::byte* bytes) const { operator delete(bytes, std::align_val_t(64)); }
  };
  static std::unique_ptr<std::byte, Deleter> Make(std::size_t size) {
    auto* bytes = static_cast<std::byte*>(operator new(size, std::align_val_t(64)));
    std::memset(bytes, 0xff, size);
    return std::unique_ptr<std::byte, Deleter>(bytes);
  }
  std::unique_ptr<std::byte, Deleter> bytes_;
  std::size_t size_;
};

struct TileGpu {
  std::unique_ptr<kernels::cuda::Runtime> runtime;  // null: no device; `reason` says why
  std::unique_ptr<kernels::cuda::Queue> queue;
  std::string reason;
};

// The device of this test program: the emulated GPU or a real one. Each program links one
// definition.
TileGpu OpenTileGpu(std::uint64_t seed);

// Skips the tests if the program's device is missing.
class TileOpsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    gpu_ = OpenTileGpu(random_.Bits());
    if (gpu_.runtime == nullptr) GTEST_SKIP() << gpu_.reason;
    calls_.emplace(*gpu_.runtime, *gpu_.queue);
  }
  void TearDown() override {
    calls_.reset();
    for (void* address : memory_) gpu_.runtime->Free(address);
  }

  // Device memory of exactly this size, which lives as long as the test.
  std::uint64_t Put(const Bytes& bytes) {
    void* address = nullptr;
    if (bytes.size() == 0) return 0;
    EXPECT_TRUE(gpu_.runtime->Allocate(bytes.size(), &address).ok());
    memory_.push_back(address);
    EXPECT_TRUE(gpu_.queue->Copy(address, bytes.data(), bytes.size()).ok());
    return reinterpret_cast<std::uint64_t>(address);
  }
  void Get(std::uint64_t address, Bytes& bytes) {
    const auto* from = reinterpret_cast<const void*>(address);
    EXPECT_TRUE(gpu_.queue->Copy(bytes.data(), from, bytes.size()).ok());
    EXPECT_TRUE(gpu_.queue->Wait().ok());
  }
  kernels::cuda::TileCalls& calls() { return *calls_; }

  TestRandom random_;

 private:
  TileGpu gpu_;
  std::optional<kernels::cuda::TileCalls> calls_;
  std::vector<void*> memory_;
};

// ---- Shapes ------------------------------------------------------------------------------------

inline std::string Describe(const TileShape& shape) {
  return "format " + std::to_string(static_cast<int>(shape.format)) + " head_dim " +
         std::to_string(shape.head_dim) + " keys " + std::to_string(shape.key.kept) + " of " +
         std::to_string(shape.key.channels) + " values " + std::to_string(shape.value.kept) +
         " of " + std::to_string(shape.value.channels) + " group " + std::to_string(shape.group) +
         " summary " + std::to_string(static_cast<int>(shape.summary)) + " block " +
         std::to_string(shape.block);
}

inline void AddRandomExtras(TestRandom& random, TileShape& shape) {
  shape.summary = static_cast<Summary>(random.Below(3));
  const std::uint8_t blocks[] = {4, 8, 16};
  shape.block = shape.summary == Summary::kNone ? std::uint8_t{0} : random.Pick(blocks);
  shape.weights = random.OneIn(2);
  shape.positions = random.OneIn(2);
}

inline kernels::RowShape RandomRow(TestRandom& random, std::uint16_t head_dim, std::uint8_t group,
                                   bool cut) {
  const std::uint64_t groups = head_dim / group;
  const std::uint64_t covered = !cut              ? groups
                                : random.OneIn(2) ? groups * 3 / 4
                                                  : random.Between(1, groups);
  const std::uint64_t kept[] = {covered, 1, random.Between(1, covered),
                                std::max<std::uint64_t>(covered / 4, 1)};
  return {.channels = static_cast<std::uint16_t>(covered * group),
          .kept = static_cast<std::uint16_t>(random.Pick(kept) * group)};
}

inline TileShape RandomPackedShape(TestRandom& random, TileFormat format, std::uint16_t head_dim,
                                   std::uint8_t group, bool cut) {
  TileShape shape = {.format = format, .head_dim = head_dim, .group = group};
  shape.key = RandomRow(random, head_dim, group, cut);
  shape.value = random.OneIn(2) ? shape.key : RandomRow(random, head_dim, group, cut);
  AddRandomExtras(random, shape);
  return shape;
}

inline TileShape RandomDenseShape(TestRandom& random, ElementType type, std::uint16_t head_dim) {
  TileShape shape = kernels::DenseShape(head_dim, type);
  AddRandomExtras(random, shape);
  return shape;
}

// ---- Rows --------------------------------------------------------------------------------------

// All finite, and such that any signed selection of channels scaled by powers of two within 2^-2 ..
// 2^2 is exact in fp32.
class RandomRows {
 public:
  // `calm`: within the range of fp16, for any type.
  RandomRows(TestRandom& random, std::uint32_t rows, std::uint32_t head_dim, ElementType type,
             std::uint64_t stride, bool calm)
      : type_(type),
        calm_(calm || type == ElementType::kFp16),
        stride_(stride),
        bytes_(stride_ * (rows - 1) + head_dim * ElementBytes(type)) {
    for (std::uint32_t r = 0; r < rows; ++r) {
      const std::uint64_t kind = random.Below(8);
      for (float& value : shared_) value = Unit(random);
      for (std::uint32_t c = 0; c < head_dim; ++c) Set(r, c, Element(random, kind));
    }
  }

  void Set(std::uint32_t row, std::uint32_t channel, float value) {
    StoreElement(type_, value, bytes_.data() + At(row, channel));
  }
  float Get(std::uint32_t row, std::uint32_t channel) const {
    return LoadElement(type_, bytes_.data() + At(row, channel));
  }
  std::uint64_t stride() const { return stride_; }
  const Bytes& bytes() const { return bytes_; }
  const std::byte* data() const { return bytes_.data(); }

 private:
  std::size_t At(std::uint32_t row, std::uint32_t channel) const {
    return row * stride_ + channel * ElementBytes(type_);
  }
  float Element(TestRandom& random, std::uint64_t kind) const {
    const float unit = Unit(random);
    const float sign = random.OneIn(2) ? -1.0f : 1.0f;
    const float few[] = {0.0f, -0.0f, 1.0f, -1.0f, 0.5f, -3.0f};
    const float wide = calm_ ? 4.0f : 100.0f;
    switch (kind) {
      case 0:  // many ties
        return sign * 1.5f;
      case 1:
        return random.Pick(few);
      case 2:
        return sign * 0.0f;
      case 3:  // tiny: below the smallest scale, subnormal in fp16
        return sign * unit * (calm_ ? 0x1p-20f : 0x1p-119f);
      case 4:  // huge
        return sign * unit * (calm_ ? 2000.0f : 0x1p61f);
      case 5:
        return sign * std::exp2(wide * (unit - 0.5f));
      case 6:  // groups of the same elements in other orders, which differ only in the last bit
        return sign * random.Pick(shared_);
      default:
        return sign * unit;
    }
  }
  // From 0 to 1 in 2^20 steps.
  static float Unit(TestRandom& random) {
    return static_cast<float>(random.Between(0, 1u << 20)) * 0x1p-20f;
  }

  ElementType type_;
  bool calm_;
  std::uint64_t stride_;
  Bytes bytes_;
  float shared_[3] = {};
};

// ---- Rotations ---------------------------------------------------------------------------------

enum class RotationKind {
  kNone,
  kSelection,  // one element per row, a power of two: every sum is exact
  kReal,
};

inline Bytes RandomRotation(TestRandom& random, const TileShape& shape,
                            const kernels::RowShape& side, ElementType type, RotationKind kind) {
  const std::uint32_t dim = shape.head_dim;
  Bytes bytes(std::size_t{side.channels} * dim * ElementBytes(type));
  std::vector<std::uint32_t> order(dim);
  for (std::uint32_t i = 0; i < dim; ++i) order[i] = i;
  for (std::uint32_t i = dim; i > 1; --i) std::swap(order[i - 1], order[random.Below(i)]);
  for (std::uint32_t c = 0; c < side.channels; ++c) {
    for (std::uint32_t d = 0; d < dim; ++d) {
      const float uniform = static_cast<float>(random.Between(0, 2000)) / 1000.0f - 1.0f;
      float value = uniform / std::sqrt(static_cast<float>(dim) / 3);
      if (kind == RotationKind::kSelection) {
        const float sign = random.OneIn(2) ? -1.0f : 1.0f;
        const float power = std::exp2(static_cast<float>(random.Below(5)) - 2);
        value = order[c] == d ? sign * power : 0.0f;
      }
      StoreElement(type, value, bytes.data() + (std::size_t{c} * dim + d) * ElementBytes(type));
    }
  }
  return bytes;
}

// ---- One encode --------------------------------------------------------------------------------

// Bytes written by an encode or a gather.
struct StoredBytes {
  explicit StoredBytes(const TileLayout& layout)
      : tile(layout.bytes), summaries(layout.summary_bytes) {}
  StoredBytes() = default;
  bool operator==(const StoredBytes&) const = default;
  Bytes tile, summaries;
};

// All inputs of one encode, and the reference's result.
struct EncodeCase {
  TileShape shape;
  TileLayout layout = {};
  ElementType type = ElementType::kBf16;
  ElementType rotation_type = ElementType::kBf16;
  RotationKind rotation_kind = RotationKind::kNone;
  std::uint32_t rows = 1;
  std::optional<RandomRows> key, value;
  Bytes key_rotation, value_rotation;
  Bytes weights, positions, tile, summaries;
  bool has_weights = false, has_positions = false;

  EncodeCase(TestRandom& random, const TileShape& of_shape, ElementType row_type, RotationKind kind,
             ElementType of_rotation, bool calm = false)
      : shape(of_shape),
        layout(LayoutOf(of_shape)),
        type(row_type),
        rotation_type(of_rotation),
        rotation_kind(kind) {
    const std::uint32_t counts[] = {1, 31, 32, static_cast<std::uint32_t>(random.Between(1, 32))};
    rows = random.Pick(counts);
    const std::uint64_t stride = shape.head_dim * ElementBytes(type) + 16 * random.Below(3);
    calm |= shape.format == kernels::TileFormat::kPackedFp16;  // larger values would be refused
    key.emplace(random, rows, shape.head_dim, type, stride, calm);
    value.emplace(random, rows, shape.head_dim, type, stride, calm);
    if (kind != RotationKind::kNone) {
      key_rotation = RandomRotation(random, shape, shape.key, of_rotation, kind);
      value_rotation = RandomRotation(random, shape, shape.value, of_rotation, kind);
    }
    has_weights = random.OneIn(2);
    has_positions = random.OneIn(2);
    weights = Bytes(rows * sizeof(float));
    positions = Bytes(rows * sizeof(std::uint32_t));
    for (std::uint32_t r = 0; r < rows; ++r) {
      const auto weight = static_cast<float>(random.Between(1, 1000));
      const auto position = static_cast<std::uint32_t>(random.Bits());
      std::memcpy(weights.data() + r * 4, &weight, 4);
      std::memcpy(positions.data() + r * 4, &position, 4);
    }
    tile = Bytes(layout.bytes);
    summaries = Bytes(layout.summary_bytes);
  }

  bool Is(const StoredBytes& expected) const {
    return tile == expected.tile && summaries == expected.summaries;
  }
  void Take(StoredBytes stored) {
    tile = std::move(stored.tile);
    summaries = std::move(stored.summaries);
  }
  // The reference's tile. nullopt if it refuses.
  std::optional<StoredBytes> Expected() const {
    StoredBytes expected(layout);
    std::vector<std::byte> prepared(kernels::PreparedBytesReference(shape, type));
    const bool rotated = rotation_kind != RotationKind::kNone;
    kernels::PrepareEncodeReference(shape, type,
                                    {.key = rotated ? key_rotation.data() : nullptr,
                                     .value = rotated ? value_rotation.data() : nullptr,
                                     .type = rotation_type},
                                    prepared.data());
    const bool usable = kernels::EncodeReference(
        {.key = key->data(),
         .value = value->data(),
         .stride = key->stride(),
         .type = type,
         .rows = rows,
         .weights = has_weights ? reinterpret_cast<const float*>(weights.data()) : nullptr,
         .positions =
             has_positions ? reinterpret_cast<const std::uint32_t*>(positions.data()) : nullptr,
         .shape = shape,
         .layout = layout,
         .prepared = prepared.data(),
         .tile = expected.tile.data(),
         .summaries = expected.summaries.data()});
    if (!usable) return std::nullopt;
    return expected;
  }
};

// The first byte that differs and its array, for messages.
inline std::string FirstDifference(const TileLayout& layout, const Bytes& a, const Bytes& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a.data()[i] == b.data()[i]) continue;
    const char* array = i < layout.key_scales     ? "key bits"
                        : i < layout.key_data     ? "key scales"
                        : i < layout.value_bits   ? "key data"
                        : i < layout.value_scales ? "value bits"
                        : i < layout.value_data   ? "value scales"
                        : i < layout.weights      ? "value data"
                                                  : "weights or positions";
    return "byte " + std::to_string(i) + ", " + array + ": " +
           std::to_string(static_cast<int>(a.data()[i])) + " and " +
           std::to_string(static_cast<int>(b.data()[i]));
  }
  return "none, but for summaries";
}

}  // namespace tessera::tests
