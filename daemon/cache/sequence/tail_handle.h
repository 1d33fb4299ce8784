// `TailHandle` is the open tail of a decoding sequence: its rings and committed count, written by
// the worker. Shared by the sequence and by readers that still use it; thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "daemon/base/mutex.h"
#include "daemon/cache/tail/control.h"
#include "daemon/cache/tail/tail.h"
#include "daemon/pool/pool.h"

namespace tessera::cache {

class TailHandle {
 public:
  TailHandle(TailRegion region, CommitSlot commit_slot, std::uint32_t generation,
             std::shared_ptr<pool::Block> block)
      : region_(std::move(region)),
        commit_slot_(std::move(commit_slot)),
        block_(std::move(block)),
        generation_(generation) {}

  const TailRegion& region() const { return region_; }
  std::uint32_t generation() const { return generation_; }

  // Reads the worker's word once. nullopt if it belongs to an earlier tail: nothing is committed.
  std::optional<std::uint64_t> CommittedTokens() const;

  // True if the worker marks the sequence as being in a step.
  bool InStep() const;

  // Allows the worker to overwrite ring rows before `token`. No effect once closed.
  void PublishRingStart(std::uint64_t token);
  void Close();

 private:
  const TailRegion region_;
  const CommitSlot commit_slot_;
  const std::shared_ptr<pool::Block> block_;
  const std::uint32_t generation_;
  Mutex mutex_;
  bool closed_ TESSERA_GUARDED_BY(mutex_) = false;
};

}  // namespace tessera::cache
