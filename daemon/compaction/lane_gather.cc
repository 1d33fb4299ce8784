#include "daemon/compaction/lane_gather.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/cache/build.h"
#include "kernels/strategy/aligned_bytes.h"

namespace tessera::compaction {

using cache::HeldSegment;
using cache::Segment;
using kernels::kTileEntries;

namespace {

// Of a segment made here: an entry dropped later costs at most so many rows that are copied.
constexpr std::size_t kMostEntries = 1024;

std::vector<HeldSegment> AllOf(const cache::OpenRun& run) {
  std::vector<HeldSegment> all = run.settled;
  all.insert(all.end(), run.provisional.begin(), run.provisional.end());
  all.insert(all.end(), run.plain.begin(), run.plain.end());
  return all;
}

bool SameForm(const Segment& a, const Segment& b) {
  return a.shape() == b.shape() && a.shared_rotations() == b.shared_rotations();
}

}  // namespace

LaneGather::LaneGather(const Options& options, const cache::OpenRun& run)
    : options_(options), sources_(AllOf(run)), growing_(run.grows ? run.previous.get() : nullptr) {}

absl::StatusOr<std::optional<cache::LaneSwap>> LaneGather::Keep(
    const policies::LaneDecision& decision, std::uint64_t decided) {
  TESSERA_CHECK(!decision.merges(), "entries that are merged are encoded anew");
  cache::LaneSwap swap = {.whole = true, .drops = true};
  std::uint64_t first = 0;  // entry of the lane that the segment begins with
  std::size_t next = 0;     // of decision.kept
  for (const HeldSegment& held : sources_) {
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
  TESSERA_CHECK(first >= decided && next == decision.kept.size(), "the decision fits the lane");
  if (absl::Status status = Flush(swap.held); !status.ok()) return status;
  // New tiles go on growing the segment that they grew: else each would be a segment of its own.
  const auto last = std::find_if(swap.held.rbegin(), swap.held.rend(),
                                 [](const HeldSegment& held) { return !held.segment->plain(); });
  swap.growing = growing_ != nullptr && last != swap.held.rend() && last->segment.get() == growing_;
  return swap;
}

absl::Status LaneGather::Flush(std::vector<HeldSegment>& held) {
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

absl::StatusOr<std::shared_ptr<Segment>> LaneGather::NewSegment(std::size_t first,
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
      cache::ReserveTiles(*options_.memory, static_cast<std::uint32_t>(count), *segment, words);
  for (std::size_t done = 0; status.ok() && done < count; done += kTileEntries) {
    status = FillTile(*segment, first + done,
                      static_cast<std::uint32_t>(std::min<std::size_t>(kTileEntries, count - done)),
                      segment->TileData(done / kTileEntries));
  }
  if (status.ok()) status = options_.memory->device->StoreWords(words);
  if (!status.ok()) return status;
  return segment;
}

absl::Status LaneGather::FillTile(const Segment& segment, std::size_t first, std::uint32_t count,
                                  std::byte* target) {
  copies_.clear();
  std::vector<kernels::GatherRow> rows;
  for (std::size_t i = first; i < first + count; ++i) {
    const absl::StatusOr<const std::byte*> tile = TileOf(rows_[i]);
    if (!tile.ok()) return tile.status();
    rows.push_back({.tile = *tile,
                    .row = rows_[i].entry % kTileEntries,
                    .position = static_cast<std::uint32_t>(
                        rows_[i].from->PositionOf(rows_[i].entry) - segment.first_position())});
  }
  const kernels::TileLayout layout = kernels::LayoutOf(segment.shape());
  // Whole words, as they are stored; blocks of the pool have room for them.
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  kernels::AlignedBytes tile((layout.bytes + kWord - 1) / kWord * kWord);
  options_.operations->gather({.rows = rows.data(),
                               .row_count = count,
                               .from = form_->shape(),
                               .from_layout = kernels::LayoutOf(form_->shape()),
                               .to = segment.shape(),
                               .to_layout = layout,
                               .tile = tile.data()});
  std::vector<device::WordStore> stores;
  for (std::size_t at = 0; at < tile.size(); at += kWord) {
    std::uint64_t word;
    std::memcpy(&word, tile.data() + at, kWord);
    stores.push_back({target + at, word});
  }
  return options_.memory->device->StoreWords(stores);
}

absl::StatusOr<const std::byte*> LaneGather::TileOf(const Row& row) {
  const std::byte* const tile = row.from->TileData(row.entry / kTileEntries);
  if (options_.memory->device->description().reads_host_memory) return tile;
  // Rows come in order: a tile that was copied before was copied last.
  if (copies_.empty() || copies_.back().of != tile) {
    Copy copy = {.of = tile,
                 .bytes = std::vector<std::byte>(kernels::LayoutOf(row.from->shape()).bytes)};
    absl::Status status = options_.memory->device->Read(copy.bytes.data(), tile, copy.bytes.size());
    if (!status.ok()) return status;
    copies_.push_back(std::move(copy));
  }
  return copies_.back().bytes.data();
}

}  // namespace tessera::compaction
