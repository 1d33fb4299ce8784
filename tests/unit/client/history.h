// The expected content of a sequence in arrays, and the expected attention over it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "client/session/bound_model.h"
#include "gtest/gtest.h"
#include "kernels/reference/oracle.h"
#include "tessera/model.h"
#include "tests/fakes/seed.h"

namespace tessera::client {

inline std::vector<std::byte> RandomRows(TestRandom& random, std::size_t elements,
                                         kernels::ElementType type) {
  std::vector<std::byte> bytes(elements * kernels::ElementBytes(type));
  for (std::size_t i = 0; i < elements; ++i) {
    const float value = static_cast<float>(static_cast<double>(random.Below(2001)) / 500.0 - 2.0);
    const std::uint16_t half = type == kernels::ElementType::kBf16 ? kernels::FloatToBf16(value)
                                                                   : kernels::FloatToFp16(value);
    std::byte* at = bytes.data() + i * kernels::ElementBytes(type);
    type == kernels::ElementType::kFp32 ? std::memcpy(at, &value, sizeof value)
                                        : std::memcpy(at, &half, sizeof half);
  }
  return bytes;
}

inline ModelGeometry RandomGeometry(TestRandom& random) {
  ModelGeometry model;
  model.name = "test";
  model.type = static_cast<ElementType>(random.Between(1, 3));
  const std::uint64_t layers = random.Between(1, 3);
  for (std::uint64_t i = 0; i < layers; ++i) {
    LayerGeometry layer;
    layer.kv_heads = static_cast<std::uint32_t>(random.Between(1, 3));
    layer.query_heads = layer.kv_heads * static_cast<std::uint32_t>(random.Between(1, 3));
    layer.head_dim = random.OneIn(2) ? 64 : 128;
    if (random.OneIn(3)) layer.sliding_window = static_cast<std::uint32_t>(random.Between(1, 90));
    if (random.OneIn(3)) layer.logit_softcap = 5;
    if (random.OneIn(3)) layer.sinks.assign(layer.query_heads, 0.25f);
    model.layers.push_back(layer);
  }
  return model;
}

class History {
 public:
  explicit History(const ModelGeometry& geometry)
      : bound_(std::make_shared<BoundModel>(ModelId(1), geometry, 4)),
        keys_(geometry.layers.size()),
        values_(keys_) {}

  const BoundModel& model() const { return *bound_; }
  std::uint64_t tokens(std::uint32_t layer = 0) const {
    return keys_[layer].size() / bound_->token_bytes(layer);
  }
  // Rows of one layer, [tokens][kv_heads][head_dim].
  void Append(std::uint32_t layer, std::span<const std::byte> key,
              std::span<const std::byte> value) {
    keys_[layer].insert(keys_[layer].end(), key.begin(), key.end());
    values_[layer].insert(values_[layer].end(), value.begin(), value.end());
  }
  void Truncate(std::uint64_t tokens) {
    for (std::uint32_t i = 0; i < keys_.size(); ++i) {
      keys_[i].resize(std::min(keys_[i].size(), tokens * bound_->token_bytes(i)));
      values_[i].resize(keys_[i].size());
    }
  }
  std::vector<std::byte> KeysOf(std::uint32_t layer, std::uint32_t kv_head) const {
    return LaneRows(keys_[layer], layer, kv_head);
  }

  // Checks the fp32 attention output of `queries` queries, the first at `first_position`.
  void Check(std::uint32_t layer, std::uint64_t first_position, std::uint32_t queries, bool causal,
             const std::byte* query, const float* output, const float* lse) const {
    const kernels::LayerGeometry& geometry = bound_->geometry(layer);
    std::vector<double> expected(geometry.head_dim);
    for (std::uint32_t kv = 0; kv < geometry.kv_heads; ++kv) {
      const ReferenceLane lane(LaneRows(keys_[layer], layer, kv),
                               LaneRows(values_[layer], layer, kv), bound_->layout().tile(layer));
      for (std::uint32_t q = 0; q < queries; ++q) {
        for (std::uint32_t g = 0; g < geometry.group(); ++g) {
          const std::size_t row = std::size_t{q} * geometry.query_heads + kv * geometry.group() + g;
          const kernels::OracleAnswer answer =
              kernels::AttendByDefinition({.geometry = &geometry,
                                           .lane = &lane.view,
                                           .row = query + row * bound_->row_bytes(layer),
                                           .query_head = kv * geometry.group() + g,
                                           .position = first_position + q,
                                           .causal = causal},
                                          expected.data());
          const double bound = 1e-4 * (1 + answer.value_peak);
          for (std::uint32_t c = 0; c < geometry.head_dim; ++c) {
            ASSERT_NEAR(output[row * geometry.head_dim + c], expected[c], bound)
                << "layer " << layer << ", query " << q << ", head " << kv * geometry.group() + g
                << ", channel " << c << ", tokens " << tokens(layer);
          }
          if (lse == nullptr) continue;
          if (std::isinf(answer.lse)) {
            ASSERT_EQ(lse[row], answer.lse);
          } else {
            ASSERT_NEAR(lse[row], answer.lse, 1e-3);
          }
        }
      }
    }
  }

 private:
  // All tokens of a lane in one array of tiles.
  struct ReferenceLane {
    ReferenceLane(const std::vector<std::byte>& keys, const std::vector<std::byte>& values,
                  kernels::DenseTile tile) {
      const std::size_t row = tile.row_bytes();
      const std::uint64_t tokens = keys.size() / row;
      const std::uint64_t tiles = (tokens + kernels::kTileEntries - 1) / kernels::kTileEntries;
      arena.resize(tiles * tile.bytes());
      for (std::uint64_t t = 0; t < tiles; ++t) offsets.push_back(t * tile.bytes());
      for (std::uint64_t token = 0; token < tokens; ++token) {
        std::byte* at = arena.data() + token / kernels::kTileEntries * tile.bytes();
        const std::uint32_t r = token % kernels::kTileEntries;
        std::memcpy(at + tile.key_offset(r), keys.data() + token * row, row);
        std::memcpy(at + tile.value_offset(r), values.data() + token * row, row);
      }
      segment = {.arena = arena.data(),
                 .arena_bytes = arena.size(),
                 .tile_offsets = offsets.data(),
                 .first_position = 0,
                 .entries = static_cast<std::uint32_t>(tokens),
                 .shape = kernels::DenseShape(tile.head_dim, tile.type)};
      view = {.segments = &segment, .segment_count = tokens == 0 ? 0u : 1u};
    }
    std::vector<std::byte> arena;
    std::vector<std::uint64_t> offsets;
    kernels::SegmentView segment;
    kernels::LaneView view;
  };

  std::vector<std::byte> LaneRows(const std::vector<std::byte>& rows, std::uint32_t layer,
                                  std::uint32_t kv_head) const {
    const std::size_t row = bound_->row_bytes(layer);
    const std::size_t token = bound_->token_bytes(layer);
    std::vector<std::byte> lane;
    for (std::size_t at = kv_head * row; at < rows.size(); at += token) {
      lane.insert(lane.end(), rows.begin() + static_cast<std::ptrdiff_t>(at),
                  rows.begin() + static_cast<std::ptrdiff_t>(at + row));
    }
    return lane;
  }

  std::shared_ptr<const BoundModel> bound_;
  std::vector<std::vector<std::byte>> keys_;  // per layer
  std::vector<std::vector<std::byte>> values_;
};

}  // namespace tessera::client
