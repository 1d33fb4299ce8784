#include "client/bench/workload/local_cache.h"

#include <sys/mman.h>

#include <cmath>
#include <cstdlib>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::cli::bench {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace

LocalCache::LocalCache(const llm::Config& config, std::uint32_t sequences, std::uint32_t max_tokens)
    : config_(config), sequences_(sequences), max_tokens_(max_tokens) {
  const kernels::DenseTile tile = {config.head_dim, kernels::ElementType::kBf16};
  const std::uint32_t tiles = (max_tokens + kernels::kTileEntries - 1) / kernels::kTileEntries;
  for (std::uint32_t i = 0; i < tiles; ++i) offsets_.push_back(i * tile.bytes());
  const std::size_t bytes = tiles * tile.bytes();
  const std::size_t lanes = std::size_t{config.layers} * sequences * config.kv_heads;
  const std::size_t whole = (lanes * bytes + kHugePage - 1) / kHugePage * kHugePage;
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kHugePage, whole)));
  TESSERA_CHECK(memory_ != nullptr, Concat("cannot allocate ", whole, " bytes"));
  ::madvise(memory_.get(), whole, MADV_HUGEPAGE);  // as in a pool
  for (std::size_t i = 0; i < lanes; ++i) {
    auto lane = std::make_unique<Lane>();
    lane->ring = {memory_.get() + i * bytes, tiles, tile};
    lane->segment = {.arena = lane->ring.base,
                     .arena_bytes = bytes,
                     .tile_offsets = offsets_.data(),
                     .shape = kernels::DenseShape(config.head_dim, kernels::ElementType::kBf16)};
    lane->view = {.segments = &lane->segment,
                  .tail = {.ring = lane->ring.base, .ring_tiles = tiles}};
    lanes_.push_back(std::move(lane));
  }
}

// As in a pool: whole tiles belong to the segment, the last one to the tail.
void LocalCache::Append(Lane& lane, std::uint32_t token, const std::uint16_t* key,
                        const std::uint16_t* value) {
  shm::StoreRow(lane.ring, token, key, value);
  lane.segment.entries = token / kernels::kTileEntries * kernels::kTileEntries;
  lane.view.segment_count = lane.segment.entries == 0 ? 0 : 1;
  lane.view.tail.begin = lane.segment.entries;
  lane.view.tail.end = token + 1;
}

void LocalCache::Fill(const std::vector<std::vector<std::uint16_t>>& keys,
                      const std::vector<std::vector<std::uint16_t>>& values) {
  TESSERA_CHECK(tokens_ == 0, "Fill is called once");
  const std::size_t row = config_.kv_row();
  tokens_ = static_cast<std::uint32_t>(keys.at(0).size() / row);
  TESSERA_CHECK(tokens_ <= max_tokens_, "the prompt fits");
  for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
    for (std::uint32_t sequence = 0; sequence < sequences_; ++sequence) {
      for (std::uint32_t head = 0; head < config_.kv_heads; ++head) {
        for (std::uint32_t token = 0; token < tokens_; ++token) {
          const std::size_t at = token * row + std::size_t{head} * config_.head_dim;
          Append(lane(layer, sequence, head), token, &keys[layer][at], &values[layer][at]);
        }
      }
    }
  }
}

absl::Status LocalCache::Attend(const llm::LayerRows& rows, std::span<float> output) {
  const std::size_t kv_row = config_.kv_row(), query_row = config_.query_row();
  TESSERA_CHECK(rows.key.size() == sequences_ * kv_row, "one token per sequence");
  TESSERA_CHECK(tokens_ < max_tokens_, "room for another token");
  items_.clear();
  for (std::uint32_t sequence = 0; sequence < sequences_; ++sequence) {
    for (std::uint32_t head = 0; head < config_.kv_heads; ++head) {
      Lane& own = lane(rows.layer, sequence, head);
      const std::size_t at = sequence * kv_row + std::size_t{head} * config_.head_dim;
      Append(own, tokens_, &rows.key[at], &rows.value[at]);
      items_.push_back({.lane = &own.view,
                        .kv_head = head,
                        .first_query_position = tokens_,
                        .query = &rows.query[sequence * query_row],
                        .output = &output[sequence * query_row]});
    }
  }
  const kernels::AttendBatch batch = {
      .geometry = {.query_heads = config_.query_heads,
                   .kv_heads = config_.kv_heads,
                   .head_dim = config_.head_dim,
                   .scale = 1 / std::sqrt(static_cast<float>(config_.head_dim))},
      .items = items_};
  const std::size_t needed = kernels::AttendWorkspaceBytes(batch) + kAlignment;
  if (workspace_.size() < needed) workspace_.resize(needed * 2);
  void* start = workspace_.data();
  std::size_t space = workspace_.size();
  std::align(kAlignment, needed - kAlignment, start, space);
  kernels::InlineExecutor executor;
  const kernels::AttendResult result = kernels::Attend(
      kernels::BestImplementation(), batch, {static_cast<std::byte*>(start), space}, executor);
  TESSERA_CHECK(result.status == kernels::AttendStatus::kOk, "the baseline attends");
  if (rows.layer + 1 == config_.layers) ++tokens_;
  return absl::OkStatus();
}

}  // namespace tessera::cli::bench
