// A dense cache in this process's memory, read by the same kernels as a daemon's pool: the baseline
// of a worker without Tessera.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "client/model/attention.h"
#include "kernels/dispatch/attend.h"
#include "proto/shm/tail_ring.h"

namespace tessera::cli::bench {

// Decodes a batch, one token of each sequence per step.
class LocalCache final : public llm::Attention {
 public:
  LocalCache(const llm::Config& config, std::uint32_t sequences, std::uint32_t max_tokens);

  // Fills every sequence of the batch with the same prompt: for each layer,
  // [tokens][kv_heads][head_dim]. Called once.
  void Fill(const std::vector<std::vector<std::uint16_t>>& keys,
            const std::vector<std::vector<std::uint16_t>>& values);
  absl::Status Attend(const llm::LayerRows& rows, std::span<float> output) override;
  std::uint32_t tokens() const { return tokens_; }

 private:
  static constexpr std::size_t kAlignment = 64;
  struct Free {
    void operator()(std::byte* bytes) const { std::free(bytes); }
  };
  struct Lane {
    shm::TailRing ring;  // holds the whole lane; never wraps around
    kernels::SegmentView segment;
    kernels::LaneView view;
  };
  Lane& lane(std::uint32_t layer, std::uint32_t sequence, std::uint32_t head) {
    return *lanes_[(std::size_t{layer} * sequences_ + sequence) * config_.kv_heads + head];
  }
  void Append(Lane& lane, std::uint32_t token, const std::uint16_t* key,
              const std::uint16_t* value);

  const llm::Config config_;
  const std::uint32_t sequences_;
  const std::uint32_t max_tokens_;
  std::unique_ptr<std::byte[], Free> memory_;  // tiles of all lanes
  std::vector<std::unique_ptr<Lane>> lanes_;   // stable addresses: views point into the lane
  std::vector<std::uint64_t> offsets_;         // tile offsets, the same in every lane
  std::vector<kernels::AttendItem> items_;
  std::vector<std::byte> workspace_;
  std::uint32_t tokens_ = 0;
};

}  // namespace tessera::cli::bench
