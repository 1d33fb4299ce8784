// Synthetic K and V rows. Each token has a stamp, and a row is a function of stamp and place, so
// that an oracle needs one number per token and detects any mix-up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <span>
#include <vector>

#include "daemon/cache/segment/row_source.h"
#include "kernels/format/dense_tile.h"

namespace tessera::cache {

enum class RowKind : std::uint8_t { kKey, kValue };

struct RowPlace {
  std::uint32_t layer = 0;
  std::uint32_t kv_head = 0;
  RowKind kind = RowKind::kKey;
};

// The top bit of each exponent is clear: every element is finite and below 2.
inline std::uint64_t FiniteMask(kernels::ElementType type) {
  return type == kernels::ElementType::kFp32 ? 0xbfffffffbfffffff : 0xbfffbfffbfffbfff;
}

inline void MakeRow(std::uint64_t stamp, const RowPlace& place, kernels::DenseTile tile,
                    std::byte* out) {
  std::uint64_t state = stamp * 0x9e3779b97f4a7c15 + (std::uint64_t{place.layer} << 40) +
                        (std::uint64_t{place.kv_head} << 20) +
                        static_cast<std::uint64_t>(place.kind);
  const std::uint64_t mask = FiniteMask(tile.type);
  for (std::size_t at = 0; at < tile.row_bytes(); at += 8) {
    state += 0x9e3779b97f4a7c15;
    std::uint64_t word = state;
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9;
    word = (word ^ (word >> 27)) * 0x94d049bb133111eb;
    word = (word ^ (word >> 31)) & mask;
    std::memcpy(out + at, &word, 8);
  }
}

inline bool IsRow(const std::byte* row, std::uint64_t stamp, const RowPlace& place,
                  kernels::DenseTile tile) {
  std::byte expected[256 * 4];
  MakeRow(stamp, place, tile, expected);
  return std::memcmp(row, expected, tile.row_bytes()) == 0;
}

// Rows that are generated on request.
class MadeRows : public RowSource {
 public:
  explicit MadeRows(const shm::LaneLayout& layout) : layout_(layout) {}

  // Generates K and V rows of consecutive tokens of a lane, in order.
  virtual void Make(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first,
                    std::uint32_t count, std::byte* key, std::byte* value) const = 0;

  device::Place place() const override { return device::Place::kHost; }
  RowSpan At(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first,
             std::uint32_t count) const override {
    const std::uint64_t row = layout_.tile(layer).row_bytes();
    made_.emplace_back(2 * count * row);
    std::byte* const key = made_.back().data();
    Make(layer, kv_head, first, count, key, key + count * row);
    return {key, key + count * row, row, count};
  }

 protected:
  const shm::LaneLayout& layout_;

 private:
  mutable std::deque<std::vector<std::byte>> made_;
};

// The rows of tokens with these stamps, as in a request.
class StampedRows final : public MadeRows {
 public:
  StampedRows(const shm::LaneLayout& layout, std::vector<std::uint64_t> stamps)
      : MadeRows(layout), stamps_(std::move(stamps)) {}

  void Make(std::uint32_t layer, std::uint32_t kv_head, std::uint64_t first, std::uint32_t count,
            std::byte* key, std::byte* value) const override {
    const kernels::DenseTile tile = layout_.tile(layer);
    for (std::uint32_t i = 0; i < count; ++i) {
      MakeRow(stamps_[first + i], {layer, kv_head, RowKind::kKey}, tile,
              key + i * tile.row_bytes());
      MakeRow(stamps_[first + i], {layer, kv_head, RowKind::kValue}, tile,
              value + i * tile.row_bytes());
    }
  }

 private:
  const std::vector<std::uint64_t> stamps_;
};

}  // namespace tessera::cache
