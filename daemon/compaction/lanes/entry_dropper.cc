#include "daemon/compaction/lanes/entry_dropper.h"

#include <algorithm>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/cache/segment/build.h"

namespace tessera::compaction {

using cache::HeldSegment;
using cache::Segment;
using kernels::kTileEntries;

namespace {

// Limits new segments, because dropping an entry later copies the rest of its segment.
constexpr std::size_t kMostEntries = 1024;

std::vector<HeldSegment> SettledOf(const cache::OpenRun& run) {
  std::vector<HeldSegment> settled = run.settled;
  settled.insert(settled.end(), run.provisional.begin(), run.provisional.end());
  return settled;
}

bool SameForm(const Segment& a, const Segment& b) {
  return a.shape() == b.shape() && a.shared_rotations() == b.shared_rotations();
}

}  // namespace

EntryDropper::EntryDropper(const cache::TenantMemory& memory, const cache::OpenRun& run)
    : memory_(memory),
      settled_(SettledOf(run)),
      plain_(run.plain),
      growing_(run.grows ? run.previous.get() : nullptr) {}

absl::StatusOr<std::optional<cache::LaneSwap>> EntryDropper::Keep(
    const policies::LaneDecision& decision, std::uint64_t decided) {
  TESSERA_CHECK(!decision.merges(), "merged entries must be re-encoded");
  cache::LaneSwap swap = {.whole = true, .drops = true};
  std::uint64_t first = 0;  // lane index of the segment's first entry
  std::size_t next = 0;     // index in decision.kept
  for (const HeldSegment& held : settled_) {
    std::vector<std::uint32_t> kept;
    for (std::uint32_t entry = 0; entry < held.entries; ++entry) {
      const bool named = next < decision.kept.size() && decision.kept[next] == first + entry;
      next += named;
      if (named || first + entry >= decided) kept.push_back(entry);
    }
    first += held.entries;
    if (kept.size() == held.entries) {
      if (absl::Status status = Flush(swap.held); !status.ok()) return status;
      swap.held.push_back(held);
      continue;
    }
    if (kept.empty()) continue;
    if (form_ != nullptr && !SameForm(*form_, *held.segment)) {
      if (absl::Status status = Flush(swap.held); !status.ok()) return status;
    }
    form_ = held.segment;
    for (const std::uint32_t entry : kept) rows_.push_back({held.segment.get(), entry});
  }
  const std::span<const std::uint32_t> left = std::span(decision.kept).subspan(next);
  absl::Status status = KeepPlain(left, first, decided - std::min(decided, first), swap.held);
  if (status.ok()) status = Flush(swap.held);
  if (!status.ok()) return status;
  // New tiles keep growing the same segment: otherwise each would become a segment of its own.
  const auto last = std::find_if(swap.held.rbegin(), swap.held.rend(),
                                 [](const HeldSegment& held) { return !held.segment->plain(); });
  swap.growing = growing_ != nullptr && last != swap.held.rend() && last->segment.get() == growing_;
  return swap;
}

// The dense rows that take appends, as one: how they lie in segments depends on when they came.
// `kept` counts from the lane's entry `first` on, and covers the first `decided` of them.
absl::Status EntryDropper::KeepPlain(std::span<const std::uint32_t> kept, std::uint64_t first,
                                     std::uint64_t decided, std::vector<HeldSegment>& to) {
  if (kept.size() == decided) {  // they stay as they are
    absl::Status status = Flush(to);
    to.insert(to.end(), plain_.begin(), plain_.end());
    return status;
  }
  auto next = kept.begin();
  for (const HeldSegment& held : plain_) {
    const auto covered = static_cast<std::uint32_t>(std::min<std::uint64_t>(decided, held.entries));
    if (covered > 0 && form_ != nullptr && !SameForm(*form_, *held.segment)) {
      if (absl::Status status = Flush(to); !status.ok()) return status;
    }
    if (covered > 0) form_ = held.segment;
    for (; next != kept.end() && *next < first + covered; ++next) {
      rows_.push_back({held.segment.get(), static_cast<std::uint32_t>(*next - first)});
    }
    first += held.entries;
    decided -= covered;
    if (covered == held.entries) continue;
    if (absl::Status status = Flush(to); !status.ok()) return status;
    if (covered == 0) {
      to.push_back(held);
      continue;
    }
    absl::StatusOr<std::shared_ptr<Segment>> rest =
        cache::CopyEntries(memory_, *held.segment, covered, held.entries);
    if (!rest.ok()) return rest.status();
    to.push_back({*std::move(rest), held.entries - covered});
  }
  TESSERA_CHECK(decided == 0 && next == kept.end(), "the decision fits the lane");
  return absl::OkStatus();
}

absl::Status EntryDropper::Flush(std::vector<HeldSegment>& held) {
  for (std::size_t first = 0; first < rows_.size(); first += kMostEntries) {
    const std::size_t count = std::min(kMostEntries, rows_.size() - first);
    absl::StatusOr<std::shared_ptr<Segment>> segment = NewSegment(first, count);
    if (!segment.ok()) return segment.status();
    held.push_back({*std::move(segment), static_cast<std::uint32_t>(count)});
  }
  rows_.clear();
  form_ = nullptr;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Segment>> EntryDropper::NewSegment(std::size_t first,
                                                                  std::size_t count) {
  auto list = std::make_shared<cache::EntryList>();
  const std::uint64_t position = rows_[first].from->PositionOf(rows_[first].entry);
  for (std::size_t i = first; i < first + count; ++i) {
    const Row& row = rows_[i];
    list->positions.push_back(
        static_cast<std::uint32_t>(row.from->PositionOf(row.entry) - position));
    const cache::EntryList* const from = row.from->entry_list();
    if (from == nullptr || from->weights.empty()) continue;
    list->weights.push_back(from->weights[row.entry]);
    list->merged_until = std::max(list->merged_until, from->merged_until);
  }
  kernels::TileShape shape = form_->shape();
  TESSERA_CHECK(list->weights.size() == (shape.weights ? count : 0), "rows of one form");
  shape.positions = true;
  auto segment = std::make_shared<Segment>(shape, position, form_->shared_rotations());
  segment->set_loss(form_->loss());
  segment->set_entry_list(std::move(list));
  std::vector<device::WordStore> words;
  absl::Status status =
      cache::ReserveTiles(memory_, static_cast<std::uint32_t>(count), *segment, words);
  if (status.ok()) status = FillTiles(*segment, first, count);
  if (status.ok()) status = memory_.device->StoreWords(words);
  if (!status.ok()) return status;
  return segment;
}

absl::Status EntryDropper::FillTiles(const Segment& segment, std::size_t first, std::size_t count) {
  std::vector<kernels::GatherRow> rows;
  for (std::size_t i = first; i < first + count; ++i) {
    const Row& row = rows_[i];
    rows.push_back({.tile = row.from->TileData(row.entry / kTileEntries),
                    .row = row.entry % kTileEntries,
                    .position = static_cast<std::uint32_t>(row.from->PositionOf(row.entry) -
                                                           segment.first_position()),
                    .summaries = row.from->PlaceOf(row.entry / kTileEntries).summaries});
  }
  return cache::GatherRows(memory_, form_->shape(), rows, segment);
}

}  // namespace tessera::compaction
