#include "daemon/cache/sequence/join.h"

#include <algorithm>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/cache/segment/build.h"

namespace tessera::cache {

using kernels::kTileEntries;

namespace {

// Upper bound on the rows of a lane that an append or a fork copies, and the number of segments
// that must hold them to make copying worthwhile.
constexpr std::uint64_t kMostCopied = 1024;
constexpr std::size_t kMany = 16;

// Rows copied before the old ones are freed. A larger batch would need more room at once.
constexpr std::uint64_t kMostAtOnce = 4096;

// Only segments shorter than this are joined, and only in crowded lanes. Longer ones are shared
// with forks, and a lane made of them is far from the segment limit.
constexpr std::uint32_t kShort = 1024;

// Rows that wait for a strategy with raw copies must remain in the segments that own the copies.
bool HasRawRows(const Segment& segment) {
  return segment.raw() != nullptr && !segment.raw()->dropped();
}

bool MayJoin(const HeldSegment& held) {
  return held.entries < kShort && held.segment->entry_list() == nullptr &&
         !HasRawRows(*held.segment);
}

bool FollowAlike(const HeldSegment& a, const HeldSegment& b) {
  return a.segment->shape() == b.segment->shape() &&
         a.segment->shared_rotations() == b.segment->shared_rotations() &&
         a.segment->appendable() == b.segment->appendable() &&
         a.end_position() == b.segment->first_position();
}

absl::StatusOr<HeldSegment> Joined(const TenantMemory& memory,
                                   std::span<const HeldSegment> sources) {
  const Segment& first = *sources.front().segment;
  std::uint32_t entries = 0;
  for (const HeldSegment& held : sources) entries += held.entries;
  auto segment =
      std::make_shared<Segment>(first.shape(), first.first_position(), first.shared_rotations());
  segment->set_loss(first.loss());
  segment->TakeNotesOf(first);
  if (!first.appendable()) segment->SealDense();
  std::vector<device::WordStore> words;
  if (absl::Status status = ReserveTiles(memory, entries, *segment, words); !status.ok()) {
    return status;
  }
  RowsCopy copy = {.from = sources, .tiles = {}};
  for (std::size_t i = 0; i < segment->tiles(); ++i) copy.tiles.push_back(segment->PlaceOf(i));
  absl::Status status = CopyRows(memory, {&copy, 1});
  if (status.ok()) status = memory.device->StoreWords(words);
  if (!status.ok()) return status;
  return HeldSegment{std::move(segment), entries};
}

struct Newest {
  std::size_t all = 0;      // dense segments among the newest
  std::size_t partial = 0;  // the last of them that do not fill a tile each
  bool shared = false;      // another lane holds one of them
};

Newest NewestOf(const Lane& lane) {
  Newest newest;
  std::uint64_t rows = 0;
  std::uint64_t end = lane.tail_start;
  for (std::size_t i = lane.segments.size(); i-- > 0;) {
    const HeldSegment& held = lane.segments[i];
    rows += held.entries;
    // As in Sequence::OpenRunOf: dense rows that a token policy has selected from are not joined.
    if (!held.segment->appendable() || held.end_position() != end || rows > kMostCopied) break;
    end = held.segment->first_position();
    if (newest.partial == newest.all && held.entries < kTileEntries) ++newest.partial;
    newest.shared = newest.shared || held.segment.use_count() != 1;
    ++newest.all;
  }
  return newest;
}

}  // namespace

std::size_t CountToJoin(const Lane& lane) {
  const Newest newest = NewestOf(lane);
  return newest.all >= kMany && !newest.shared ? newest.all : newest.partial;
}

std::size_t CountToJoinForForks(const Lane& lane) {
  const Newest newest = NewestOf(lane);
  return newest.all >= kMany ? newest.all : 0;
}

absl::Status CopyRows(const TenantMemory& memory, std::span<const RowsCopy> copies) {
  while (!copies.empty()) {
    const kernels::TileShape shape = copies.front().from.front().segment->shape();
    const auto end = std::find_if(copies.begin(), copies.end(), [&](const RowsCopy& copy) {
      return copy.from.front().segment->shape() != shape;
    });
    // One call for all copies: a device call costs far more than a tile.
    std::vector<kernels::GatherRow> rows;
    std::vector<std::pair<device::TilePlace, std::size_t>> tiles;  // and how many rows each gets
    for (auto copy = copies.begin(); copy != end; ++copy) {
      std::uint32_t at = 0;
      for (const HeldSegment& held : copy->from) {
        for (std::uint32_t entry = 0; entry < held.entries; ++entry, ++at) {
          if (at % kTileEntries == 0) tiles.emplace_back(copy->tiles[at / kTileEntries], 0);
          rows.push_back({.tile = held.segment->TileData(entry / kTileEntries),
                          .row = entry % kTileEntries,
                          .position = at,
                          .summaries = held.segment->PlaceOf(entry / kTileEntries).summaries});
          ++tiles.back().second;
        }
      }
    }
    std::vector<device::TileGather> jobs;
    std::span<const kernels::GatherRow> left = rows;
    for (const auto& [tile, count] : tiles) {
      jobs.push_back({.rows = left.first(count), .to = tile});
      left = left.subspan(count);
    }
    if (absl::Status status = memory.device->Gather(shape, shape, jobs); !status.ok()) {
      return status;
    }
    copies = {end, copies.end()};
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<LaneSwap>> JoinShortSegments(const TenantMemory& memory,
                                                          const OpenRun& run) {
  std::vector<HeldSegment> all = run.settled;
  const std::vector<HeldSegment> waiting = run.Waiting();
  all.insert(all.end(), waiting.begin(), waiting.end());
  // A segment that may still take tiles is left alone, because the code that grows it holds it.
  const Segment* const growing = run.grows ? run.previous.get() : nullptr;
  const auto may_join = [&](const HeldSegment& held) {
    return held.segment.get() != growing && MayJoin(held);
  };
  LaneSwap swap = {.all = true, .whole = true, .growing = run.grows};
  std::uint64_t copied = 0;
  bool any = false;
  for (std::size_t i = 0; i < all.size();) {
    std::size_t end = i + 1;
    std::uint64_t entries = all[i].entries;
    while (end < all.size() && may_join(all[end - 1]) && may_join(all[end]) &&
           FollowAlike(all[end - 1], all[end]) &&
           copied + entries + all[end].entries <= kMostAtOnce) {
      entries += all[end++].entries;
    }
    if (end == i + 1) {
      swap.held.push_back(all[i++]);
      continue;
    }
    absl::StatusOr<HeldSegment> joined = Joined(memory, std::span(all).subspan(i, end - i));
    while (absl::IsResourceExhausted(joined.status()) && !any && end - i > 2) {
      end = i + (end - i) / 2;
      joined = Joined(memory, std::span(all).subspan(i, end - i));
    }
    if (absl::IsResourceExhausted(joined.status()) && any) {
      // The sources freed by this swap make room for the next call.
      swap.held.insert(swap.held.end(), all.begin() + static_cast<std::ptrdiff_t>(i), all.end());
      break;
    }
    if (!joined.ok()) return joined.status();
    swap.held.push_back(*std::move(joined));
    copied += swap.held.back().entries;
    any = true;
    i = end;
  }
  if (!any) return std::nullopt;
  return swap;
}

}  // namespace tessera::cache
