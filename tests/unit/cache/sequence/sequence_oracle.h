// What the property test remembers of each sequence and of each pinned reader.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tests/unit/cache/world.h"

namespace tessera::cache {

using Stamps = std::vector<std::uint64_t>;

struct Known {
  std::shared_ptr<Sequence> sequence;
  std::vector<Stamps> layers;  // what every lane of the layer holds, including the committed tail
  std::size_t owner;           // session index
  std::optional<TestWorker::OpenTail> tail;
  Stamps written;  // in the ring after the committed count

  std::uint64_t Tokens() const {
    std::uint64_t tokens = layers.front().size();
    for (const Stamps& layer : layers) tokens = std::min<std::uint64_t>(tokens, layer.size());
    return tokens;
  }
  bool Even() const {
    return std::all_of(layers.begin(), layers.end(),
                       [&](const Stamps& layer) { return layer.size() == layers[0].size(); });
  }
};

// A reader that stays pinned for any number of steps, and must always see the same rows.
struct Pinned {
  std::shared_ptr<SessionState> session;
  std::uint32_t slot;
  std::uint64_t word;
  Clock::TimePoint since;
  std::shared_ptr<const Model> model;
  SequenceView view;
  std::vector<Stamps> stamps;
};

struct Setup {
  const char* name;
  kernels::ElementType type;
  std::uint64_t tenant_limit;
  int steps;
  bool packs = false;
  bool offloads = false;
};

}  // namespace tessera::cache
