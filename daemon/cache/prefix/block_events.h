// What routers want to know of published prefixes: which blocks of 32 tokens a worker finds here.
// Only of prefixes that match at each block: a block must be of use by itself.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "daemon/cache/model/prefix_hash.h"

namespace tessera::cache {

// The low words of hashes of the chain name blocks.
struct BlockEvent {
  bool stored = false;  // or removed
  std::uint64_t hash = 0;
  std::optional<std::uint64_t> parent;            // of a stored block; nullopt: the chain's first
  std::array<std::uint32_t, kPrefixBlock> ids{};  // of a stored block
};

// A worker as routers know it: by the name that it gave, which is unique within its tenant.
struct BlockReader {
  std::string tenant;
  std::string worker;
};

// Is told under a lock, so that it hears of changes in their order: it must only take notes.
// Thread-safe.
class BlockEventSink {
 public:
  virtual ~BlockEventSink() = default;
  // The reader now finds, or no longer finds, blocks of `model`. Parents come before their children
  // when they are stored, and after them when they are removed.
  virtual void Changed(const BlockReader& reader, const std::string& model,
                       const std::vector<BlockEvent>& events) = 0;
  // Whatever was said of this reader is void. What it finds is told anew.
  virtual void Cleared(const BlockReader& reader) = 0;
  // Its last session has ended.
  virtual void Left(const BlockReader& reader) = 0;
};

}  // namespace tessera::cache
