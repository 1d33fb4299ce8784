// A lane of any form on a device, and what its keys are in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/format/error_bound.h"
#include "tests/contract/pack/pack_data.h"
#include "tests/unit/device/devices.h"

namespace tessera::device {

using kernels::Content;
using kernels::KeyObservation;
using kernels::kTileEntries;
using kernels::TileShape;

inline constexpr ElementType kTypes[] = {ElementType::kBf16, ElementType::kFp16,
                                         ElementType::kFp32};
// Maximum error of a key rotated back, relative to sum_c |R_cd y_c|.
inline constexpr double kRotationError = 0x1p-16;
// Maximum error of a share on any device, for logits of some tens.
inline constexpr double kShareError = 1e-4;

inline double ElementAt(const std::byte* row, std::size_t index, ElementType type) {
  if (type == ElementType::kFp32) {
    float element;
    std::memcpy(&element, row + 4 * index, 4);
    return element;
  }
  std::uint16_t bits;
  std::memcpy(&bits, row + 2 * index, 2);
  return type == ElementType::kBf16 ? kernels::Bf16ToFloat(bits) : kernels::Fp16ToFloat(bits);
}

using Row = std::vector<double>;

class KeysTest : public DeviceTest {
 protected:
  // A key as stored in its tile, and its allowed error once loaded.
  struct Expected {
    Row key;
    Row slack;
  };

  std::byte* Take(std::uint64_t bytes) {
    std::byte* const at = pool_.data() + used_;
    used_ += (bytes + 63) / 64 * 64;
    EXPECT_LE(used_, kPoolBytes);
    return at;
  }

  void Begin(std::uint32_t head_dim, ElementType type) {
    used_ = 0;
    runs_.clear();
    expected_.clear();
    tiles_.clear();
    rows_.clear();
    geometry_ = {.query_heads = 1,
                 .kv_heads = 1,
                 .head_dim = head_dim,
                 .type = type,
                 .scale = static_cast<float>(1 / std::sqrt(double{1} * head_dim)),
                 .logit_softcap = dice_.OneIn(3) ? 2.0f : 0.0f};
  }
  std::size_t row_bytes() const {
    return geometry_.head_dim * kernels::ElementBytes(geometry_.type);
  }

  TileShape AnyShape() {
    for (;;) {
      const TileShape shape = kernels::RandomShape(dice_, {.cut = true, .dense = true});
      if (shape.head_dim != geometry_.head_dim) continue;
      if (shape.packed() || kernels::ElementsOf(shape.format) == geometry_.type) return shape;
    }
  }
  // Adds entries in tiles of some form.
  void AddTiles(std::uint64_t entries) {
    const TileShape shape = AnyShape();
    const bool identity =
        !shape.packed() || (kernels::HasRequiredRotations(shape, {}) && dice_.OneIn(3));
    const ElementType rotation_type = dice_.OneIn(2) ? ElementType::kBf16 : ElementType::kFp32;
    kernels::RotationView rotation;
    if (!identity) {
      const kernels::Rotations made(shape, rotation_type, dice_);
      const kernels::RotationView some = kernels::SomeOf(made.view(), shape, dice_);
      const auto take = [&](const std::byte* matrix, const kernels::RowShape& row) {
        if (matrix == nullptr) return static_cast<std::byte*>(nullptr);
        const std::uint64_t bytes = kernels::RotationBytes(shape, row, rotation_type);
        std::byte* const at = Take(bytes);
        std::memcpy(at, matrix, bytes);
        return at;
      };
      rotation = {.key = take(some.key, shape.key),
                  .value = take(some.value, shape.value),
                  .type = rotation_type};
    }
    std::vector<const std::byte*>& tiles = tiles_.emplace_back();
    for (std::uint64_t first = 0; first < entries; first += kTileEntries) {
      const auto live =
          static_cast<std::uint32_t>(std::min<std::uint64_t>(kTileEntries, entries - first));
      const auto tile = kernels::EncodeTile(
          kernels::OperationsOf(*kernels::FindImplementation("reference")), shape,
          kernels::TileInput(shape, geometry_.type, live, Content::kNormal, dice_), rotation);
      ASSERT_TRUE(tile.has_value());
      std::byte* const at = Take(tile->size());
      std::memcpy(at, tile->data(), tile->size());
      kernels::PoisonDeadRows(shape, live, at);
      tiles.push_back(at);
      for (std::uint32_t r = 0; r < live; ++r) expected_.push_back(Exact(shape, rotation, at, r));
    }
    runs_.push_back(
        {.entries = entries, .tiles = tiles, .strategy = {.shape = shape, .rotation = rotation}});
  }
  Expected Exact(const TileShape& shape, const kernels::RotationView& rotation,
                 const std::byte* tile, std::uint32_t row) {
    const Row stored = kernels::ReadByDefinition(shape, tile, kernels::Array::kKeys, row).elements;
    Expected exact = {.key = Row(shape.head_dim), .slack = Row(shape.head_dim)};
    const kernels::Rounding rounding = kernels::RoundingOf(geometry_.type);
    for (std::uint32_t d = 0; d < shape.head_dim; ++d) {
      for (std::uint32_t c = 0; c < shape.key.channels; ++c) {
        const double weight =
            rotation.key == nullptr
                ? (c == d ? 1.0 : 0.0)
                : ElementAt(rotation.key, std::size_t{c} * shape.head_dim + d, rotation.type);
        exact.key[d] += weight * stored[c];
        if (rotation.key != nullptr)
          exact.slack[d] += kRotationError * std::fabs(weight * stored[c]);
      }
      if (shape.packed()) {
        exact.slack[d] = 1.01 * (exact.slack[d] + rounding.relative * std::fabs(exact.key[d])) +
                         rounding.absolute;
      }
    }
    return exact;
  }
  // Adds entries in the daemon's own memory.
  void AddRows(std::uint64_t entries) {
    std::vector<std::byte>& rows = rows_.emplace_back(RandomRows(entries));
    for (std::uint64_t r = 0; r < entries; ++r) {
      Expected exact = {.key = {}, .slack = Row(geometry_.head_dim)};
      for (std::uint32_t d = 0; d < geometry_.head_dim; ++d) {
        exact.key.push_back(ElementAt(rows.data() + r * row_bytes(), d, geometry_.type));
      }
      expected_.push_back(std::move(exact));
    }
    runs_.push_back({.entries = entries, .rows = rows.data()});
  }
  std::vector<std::byte> RandomRows(std::uint64_t count) {
    std::vector<std::byte> rows(count * row_bytes());
    const std::uint64_t drawn = count * geometry_.head_dim / kHeadDim;
    Fill(rows.data(), static_cast<std::uint32_t>(drawn), geometry_.type);
    return rows;
  }
  void AddLane(std::uint64_t most_runs) {
    for (std::uint64_t run = dice_.Between(0, most_runs); run > 0; --run) {
      const std::uint64_t entries = dice_.Between(1, 90);
      if (dice_.OneIn(4)) {
        AddRows(entries);
      } else {
        ASSERT_NO_FATAL_FAILURE(AddTiles(entries));
      }
    }
  }

  std::unique_ptr<LaneKeys> Load() {
    absl::StatusOr<std::unique_ptr<LaneKeys>> keys = device_->LoadKeys(geometry_, runs_);
    EXPECT_TRUE(keys.ok()) << keys.status();
    // The sources are not read again.
    if (keys.ok()) std::memset(pool_.data(), 0xff, used_);
    for (std::vector<std::byte>& rows : rows_) std::fill(rows.begin(), rows.end(), std::byte{0xff});
    return keys.ok() ? *std::move(keys) : nullptr;
  }
  // The keys as loaded.
  std::vector<Row> Loaded(LaneKeys& keys) {
    std::vector<std::byte> rows(expected_.size() * row_bytes());
    EXPECT_TRUE(keys.Read(rows.data()).ok());
    std::vector<Row> read(expected_.size(), Row(geometry_.head_dim));
    for (std::size_t t = 0; t < read.size(); ++t) {
      for (std::uint32_t d = 0; d < geometry_.head_dim; ++d) {
        read[t][d] = ElementAt(rows.data() + t * row_bytes(), d, geometry_.type);
      }
    }
    return read;
  }

  // ---- Observations

  struct Look {
    std::vector<std::byte> queries;
    std::vector<double> before;
    std::vector<double> sums;
    KeyObservation look;
  };
  Look AnyLook(std::uint64_t keys) {
    Look made;
    const std::uint64_t first = dice_.Between(0, keys);
    const std::uint64_t count = dice_.Between(0, keys - first);
    const std::uint64_t queries = dice_.OneIn(8) ? 0 : dice_.Between(1, 40);
    made.look = {.first = first, .logits = dice_.OneIn(2)};
    if (keys != 0 && dice_.OneIn(4)) {
      made.look.key = dice_.Below(keys);
    } else {
      made.queries = RandomRows(queries);
      made.look.queries = {.rows = made.queries.data(), .count = queries};
    }
    for (std::uint64_t q = 0; q < made.look.query_count(); ++q) {
      const std::uint64_t begin = dice_.OneIn(2) ? 0 : dice_.Between(0, count);
      made.look.visible.begin.push_back(begin);
      made.look.visible.end.push_back(dice_.Between(dice_.OneIn(3) ? begin : 0, count));
    }
    for (std::uint64_t t = 0; t < count; ++t) {
      made.before.push_back(static_cast<double>(dice_.Below(5)));
    }
    made.sums = made.before;
    return made;
  }
  void Judge(const Look& made, const std::vector<Row>& keys) {
    const KeyObservation& look = made.look;
    std::vector<double> expected = made.before;
    std::vector<double> mass(expected.size());
    for (std::uint64_t q = 0; q < look.query_count(); ++q) {
      Row query;
      for (std::uint32_t d = 0; d < geometry_.head_dim; ++d) {
        query.push_back(look.key.has_value()
                            ? keys[*look.key][d]
                            : ElementAt(made.queries.data() + q * row_bytes(), d, geometry_.type));
      }
      double total = 0;
      std::vector<double> paid(expected.size());
      for (std::uint64_t t = look.visible.begin[q]; t < look.visible.end[q]; ++t) {
        double product = 0;
        for (std::size_t d = 0; d < query.size(); ++d) {
          product += query[d] * keys[look.first + t][d];
          mass[t] += std::fabs(query[d] * keys[look.first + t][d]);
        }
        double logit = geometry_.scale * product;
        const double cap = geometry_.logit_softcap;
        if (cap != 0) logit = cap * std::tanh(logit / cap);
        paid[t] = look.logits ? product : std::exp(logit);
        total += paid[t];
      }
      for (std::uint64_t t = look.visible.begin[q]; t < look.visible.end[q]; ++t) {
        expected[t] += look.logits ? paid[t] : paid[t] / total;
      }
    }
    for (std::size_t t = 0; t < expected.size(); ++t) {
      const double slack =
          look.logits ? kernels::kObservedProductError * mass[t] : kShareError * expected[t];
      ASSERT_NEAR(made.sums[t], expected[t], slack + 1e-12)
          << "key " << look.first << " + " << t << " of " << keys.size()
          << (look.logits ? ", logits" : "");
    }
  }

  static constexpr std::uint64_t kPoolBytes = 4 * kPiece;
  TestRandom dice_;
  const Pool pool_ = PoolMemory(kPoolBytes);
  std::uint64_t used_ = 0;
  kernels::LayerGeometry geometry_;
  std::vector<KeyRun> runs_;
  std::vector<Expected> expected_;
  // Memory that runs point to.
  std::deque<std::vector<const std::byte*>> tiles_;
  std::deque<std::vector<std::byte>> rows_;
};

}  // namespace tessera::device
