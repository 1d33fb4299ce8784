// `SealedRows` records which sealed segments replaced a range of rows in some lane. Another holder
// of the same rows, such as a fork, adopts these segments instead of encoding the rows again.
// Attached to the first segment of the rows; keeps no segment alive.
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
  // `policy` is in canonical form. `segments` replace the first rows of `sources`.
  SealedRows(std::string policy, std::span<const HeldSegment> sources,
             std::span<const std::shared_ptr<Segment>> segments);

  const std::string& policy() const { return policy_; }
  // Number of leading rows whose sealed segments still exist.
  std::uint64_t EntriesHeld() const;
  // The leading sealed segments that still exist and whose rows all lie within the first `most`
  // rows of `held`.
  std::vector<std::shared_ptr<Segment>> For(std::span<const HeldSegment> held,
                                            std::uint64_t most) const;

 private:
  struct Source {
    std::weak_ptr<const Segment> segment;
    std::uint64_t rewrites;
    std::uint32_t entries;
  };
  // Number of leading rows of `held` that are the sealed rows.
  std::uint64_t CommonWith(std::span<const HeldSegment> held) const;

  const std::string policy_;
  std::vector<Source> sources_;
  std::vector<std::weak_ptr<Segment>> segments_;
};

}  // namespace tessera::cache
