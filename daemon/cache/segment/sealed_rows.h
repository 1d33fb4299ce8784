// What rows became when some lane gave them a strategy of their own: whoever holds the same rows,
// a fork, takes it over instead of making it once more. Kept with the first segment of the rows,
// and keeps nothing alive itself.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "daemon/cache/segment/lane.h"

namespace tessera::cache {

class SealedRows {
 public:
  // `policy`: in its canonical form. `segments` stand for the first rows of `sources`.
  SealedRows(std::string policy, std::span<const HeldSegment> sources,
             std::span<const std::shared_ptr<Segment>> segments);

  const std::string& policy() const { return policy_; }
  // So many rows, from the first on, stand in segments that somebody still holds.
  std::uint64_t EntriesHeld() const;
  // Of those that are still held by somebody, the first ones whose rows are all among the first
  // `most` of `held`.
  std::vector<std::shared_ptr<Segment>> For(std::span<const HeldSegment> held,
                                            std::uint64_t most) const;

 private:
  struct Source {
    std::weak_ptr<const Segment> segment;
    std::uint64_t rewrites;
    std::uint32_t entries;
  };
  // So many of the first rows of `held` are those that were sealed.
  std::uint64_t CommonWith(std::span<const HeldSegment> held) const;

  const std::string policy_;
  std::vector<Source> sources_;
  std::vector<std::weak_ptr<Segment>> segments_;
};

}  // namespace tessera::cache
