// Positions at which chunks of a lane's text have ended.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace tessera::policies {

// Immutable ascending list of positions in the sequence. Copies share its memory, so the forks of a
// sequence have one list until one of them decides anew.
class ChunkEnds {
 public:
  using value_type = std::uint64_t;
  using const_iterator = std::vector<std::uint64_t>::const_iterator;
  using iterator = const_iterator;

  ChunkEnds() = default;
  ChunkEnds(std::initializer_list<std::uint64_t> ends) : ChunkEnds(std::vector(ends)) {}
  explicit ChunkEnds(std::vector<std::uint64_t> ends) {
    if (ends.empty()) return;
    ends.shrink_to_fit();
    ends_ = std::make_shared<const std::vector<std::uint64_t>>(std::move(ends));
  }

  const_iterator begin() const { return list().begin(); }
  const_iterator end() const { return list().end(); }
  std::size_t size() const { return list().size(); }
  bool empty() const { return list().empty(); }
  std::span<const std::uint64_t> span() const { return list(); }
  // Whether both lists share their memory.
  bool Shares(const ChunkEnds& other) const { return ends_ == other.ends_; }
  bool operator==(const ChunkEnds& other) const { return list() == other.list(); }

  // The sequence was truncated to `tokens`. An end at exactly `tokens` is kept: its chunk is whole.
  void CutTo(std::uint64_t tokens) {
    const auto last = std::ranges::upper_bound(list(), tokens);
    if (last != end()) *this = ChunkEnds(std::vector(begin(), last));
  }

 private:
  const std::vector<std::uint64_t>& list() const {
    static const std::vector<std::uint64_t> kNone;
    return ends_ == nullptr ? kNone : *ends_;
  }

  std::shared_ptr<const std::vector<std::uint64_t>> ends_;  // null: empty
};

}  // namespace tessera::policies
