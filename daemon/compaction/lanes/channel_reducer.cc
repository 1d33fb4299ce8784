#include "daemon/compaction/lanes/channel_reducer.h"

#include <algorithm>
#include <utility>

#include "daemon/cache/segment/build.h"
#include "kernels/strategy/reduce/crumbs.h"

namespace tessera::compaction {

using cache::HeldSegment;
using cache::Segment;
using kernels::kTileEntries;

absl::StatusOr<std::optional<cache::LaneSwap>> ChannelReducer::Thin() {
  cache::LaneSwap swap = {.whole = true, .by_hand = true};
  absl::Status full;
  for (const HeldSegment& held : run_.settled) {
    swap.held.push_back(held);
    if (!full.ok() || reduced_.bytes >= options_.bytes || IsShared(held)) continue;
    absl::StatusOr<std::shared_ptr<Segment>> thinner = Thinner(held);
    if (absl::IsResourceExhausted(thinner.status())) {
      full = thinner.status();
      continue;
    }
    if (!thinner.ok()) return thinner.status();
    if (*thinner == nullptr) continue;
    reduced_.bytes += held.segment->tile_bytes() - (*thinner)->tile_bytes();
    ++reduced_.segments;
    previous_grows_ |= held.segment == run_.previous && (*thinner)->shape().planes();
    swap.held.back().segment = *std::move(thinner);
  }
  if (reduced_.segments == 0 && !full.ok()) return full;
  if (reduced_.segments == 0) return std::nullopt;
  swap.held.insert(swap.held.end(), run_.provisional.begin(), run_.provisional.end());
  swap.held.insert(swap.held.end(), run_.plain.begin(), run_.plain.end());
  // New tiles still go into the growing segment, unless it was re-encoded with fewer channels.
  previous_grows_ |= std::any_of(swap.held.begin(), swap.held.end(),
                                 [&](const auto& h) { return h.segment == run_.previous; });
  swap.growing = run_.grows && previous_grows_;
  return swap;
}

std::optional<kernels::TileShape> ChannelReducer::ThinnerShape(
    const kernels::TileShape& shape) const {
  if (shape.planes()) {
    return options_.drops_crumbs ? kernels::ShapeWithoutCrumbs(shape) : std::nullopt;
  }
  return options_.share > 0 ? kernels::ReducedShape(shape, options_.share) : std::nullopt;
}

kernels::Stays ChannelReducer::ThinTile(const kernels::ReduceJob& job) const {
  return job.from.planes() ? kernels::DropCrumbs(job, *options_.operations)
                           : kernels::ReduceTile(job);
}

// Whether there are references besides those of the lane, the run and the swap.
bool ChannelReducer::IsShared(const HeldSegment& held) const {
  const long own = 2 + (held.segment == run_.previous) + (held.segment == run_.packed);
  return held.segment.use_count() > own + 1;  // + 1: the swap
}

absl::StatusOr<std::shared_ptr<Segment>> ChannelReducer::Thinner(const HeldSegment& held) const {
  const std::optional<kernels::TileShape> shape = ThinnerShape(held.segment->shape());
  if (!shape.has_value()) return std::shared_ptr<Segment>();
  auto thinner = std::make_shared<Segment>(*shape, held.segment->first_position(),
                                           held.segment->shared_rotations());
  thinner->set_entry_list(held.segment->shared_entry_list());
  std::vector<device::WordStore> words;
  absl::Status status = cache::ReserveTiles(*options_.memory, held.entries, *thinner, words);
  // Tile sizes are rounded up to 64 bytes, so fewer channels may not save anything.
  if (status.ok() && thinner->tile_bytes() >= held.segment->tile_bytes()) {
    return std::shared_ptr<Segment>();
  }
  if (status.ok()) status = FillTiles(held, *thinner);
  if (status.ok()) status = options_.memory->device->StoreWords(words);
  if (!status.ok()) return status;
  return thinner;
}

absl::Status ChannelReducer::FillTiles(const HeldSegment& held, Segment& thinner) const {
  device::Device& device = *options_.memory->device;
  const kernels::TileLayout from = kernels::LayoutOf(held.segment->shape());
  const kernels::TileLayout to = kernels::LayoutOf(thinner.shape());
  std::vector<std::byte> tile(from.bytes);
  std::vector<std::byte> summaries(from.summary_bytes);
  std::vector<std::byte> thinned(to.bytes);
  std::vector<std::byte> thinned_summaries(to.summary_bytes);
  kernels::Stays stays = {0, 0};
  for (std::uint32_t first = 0; first < held.entries; first += kTileEntries) {
    const std::size_t at = first / kTileEntries;
    const std::uint32_t rows = std::min<std::uint32_t>(kTileEntries, held.entries - first);
    const device::TilePlace source = held.segment->PlaceOf(at);
    const device::TilePlace target = thinner.PlaceOf(at);
    absl::Status status = device.Read(tile.data(), source.tile, from.bytes);
    if (status.ok() && !summaries.empty()) {
      status = device.Read(summaries.data(), source.summaries, from.summary_bytes);
    }
    if (!status.ok()) return status;
    const kernels::Stays of_tile = ThinTile({.from = held.segment->shape(),
                                             .tile = tile.data(),
                                             .summaries = summaries.data(),
                                             .rows = rows,
                                             .to = thinner.shape(),
                                             .thinned = thinned.data(),
                                             .thinned_summaries = thinned_summaries.data()});
    stays.key += of_tile.key * rows;
    stays.value += of_tile.value * rows;
    status = device.Write(target.tile, thinned.data(), to.bytes);
    if (status.ok() && !thinned_summaries.empty()) {
      status = device.Write(target.summaries, thinned_summaries.data(), to.summary_bytes);
    }
    if (!status.ok()) return status;
  }
  // Compose the losses, using the mean over all rows: (1 - old loss) x (kept share).
  const cache::SegmentLoss before = held.segment->loss();
  thinner.set_loss({.key = 1 - (1 - before.key) * stays.key / held.entries,
                    .value = 1 - (1 - before.value) * stays.value / held.entries});
  return absl::OkStatus();
}

}  // namespace tessera::compaction
