// planes and signs: codes full tiles of dense rows, once and for good, with the book of the lane.

#include <algorithm>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/compaction/lanes/lane_coder.h"
#include "daemon/policies/plan.h"
#include "kernels/strategy/reduce/crumbs.h"
#include "proto/shm/layout.h"

namespace tessera::compaction {

using cache::LaneSwap;
using cache::Segment;
using kernels::kTileEntries;

namespace {
// Each refused tile is a segment of its own, and cuts the codes around it. Behind so many segments
// a lane's rows stay dense, well before the limit of segments.
constexpr std::size_t kMostPieces = shm::kMaxSegments / 4;

}  // namespace

LaneCoder::Swap LaneCoder::EncodeWithBook() {
  const policies::BookPlan plan = policies::BookPlanOf(*options_.policy, geometry_);
  const std::uint64_t plain = EncodableRows();
  // A lane begins with its sinks, unless they were set apart before.
  const std::uint64_t sinks =
      run_.before == 0 ? std::min(FullTiles(plan.sinks + kTileEntries - 1), plain) : 0;
  // A policy that drops tokens while decoding would leave pieces of dense rows behind.
  const std::uint64_t recent = policies::Continues(*options_.policy) ? 0 : plan.recent;
  const std::uint64_t older = plain - std::min(plain, recent);
  const std::uint64_t count = FullTiles(older - std::min(older, sinks));
  if (count == 0) return std::nullopt;
  const absl::StatusOr<HostLaneRows> rows = HostLaneRows::OfPlain(*options_.memory, tile_, run_);
  if (!rows.ok()) return rows.status();
  const absl::StatusOr<std::optional<Form>> form = BookForm(plan, *rows, sinks, count);
  if (!form.ok()) return form.status();
  if (!form->has_value()) return std::nullopt;  // too few rows for a book: they wait
  LaneSwap swap = {.growing = true};
  absl::Status status = AddDenseForGood(*rows, 0, sinks, swap);
  if (!status.ok()) return status;
  std::uint64_t done = 0;
  if (sinks == 0) {
    const absl::StatusOr<std::uint64_t> grown = GrowInPlanes(**form, *rows, count, swap);
    if (!grown.ok()) return grown.status();
    done = *grown;
  }
  status = AddPlanes(**form, *rows, sinks + done, count - done, swap);
  const std::uint64_t coded = sinks + count;
  if (status.ok()) status = AddPlain(*rows, coded, run_.plain_entries() - coded, swap);
  if (!status.ok()) return status;
  return swap;
}

LaneCoder::Swap LaneCoder::RetainWithBook() {
  TESSERA_CHECK(options_.decision != nullptr, "there is a choice of rows");
  const policies::BookPlan plan = policies::BookPlanOf(*options_.policy, geometry_);
  const std::uint64_t sinks_end = FullTiles(plan.sinks + kTileEntries - 1);
  const absl::StatusOr<HostLaneRows> all = HostLaneRows::Of(*options_.memory, tile_, run_);
  if (!all.ok()) return all.status();
  const absl::StatusOr<HostLaneRows> rows = StayOf(*all);
  if (!rows.ok()) return rows.status();
  const auto sinks_of = [&](const HostLaneRows& some, std::uint64_t count) {
    if (run_.before > 0) return std::uint64_t{0};
    const auto positions = some.positions().first(count);
    return static_cast<std::uint64_t>(std::ranges::lower_bound(positions, sinks_end) -
                                      positions.begin());
  };
  const std::uint64_t first = sinks_of(*all, options_.decided);
  const absl::StatusOr<std::optional<Form>> form =
      BookForm(plan, *all, first, options_.decided - first);
  if (!form.ok()) return form.status();
  const std::uint64_t kept = CountDecided(*rows);
  if (!form->has_value() && !options_.settles && kept == options_.decided) return std::nullopt;
  LaneSwap swap = {.all = true, .whole = true, .drops = true};
  absl::Status status;
  if (form->has_value()) {
    const std::uint64_t sinks = sinks_of(*rows, kept);
    status = AddDenseForGood(*rows, 0, sinks, swap);
    if (status.ok()) status = AddPlanes(**form, *rows, sinks, kept - sinks, swap);
  } else {
    status = AddPlain(*rows, 0, kept, swap);
  }
  if (options_.settles) Settle(swap);
  if (status.ok()) status = AddPlain(*rows, kept, rows->count() - kept, swap);
  if (!status.ok()) return status;
  return swap;
}

absl::Status LaneCoder::AddDenseForGood(const HostLaneRows& rows, std::uint64_t first,
                                        std::uint64_t count, LaneSwap& swap) {
  const std::size_t before = swap.segments.size();
  absl::Status status = AddPlain(rows, first, count, swap);
  for (std::size_t i = before; i < swap.segments.size(); ++i) swap.segments[i]->SealDense();
  return status;
}

// Returns how many rows the last segment takes.
absl::StatusOr<std::uint64_t> LaneCoder::GrowInPlanes(const Form& wanted, const HostLaneRows& rows,
                                                      std::uint64_t count, LaneSwap& swap) {
  if (!run_.grows || run_.previous->shared_rotations() != wanted.rotations) return 0;
  const kernels::TileShape shape = run_.previous->shape();
  // A segment that has lost bits under memory pressure goes on without them.
  if (shape != wanted.shape && shape != kernels::ShapeWithoutCrumbs(wanted.shape)) return 0;
  const Form form = shape == wanted.shape ? wanted : PlanesForm(shape, wanted.book);
  const std::uint64_t some = std::min(FullTiles(cache::kMaxSegmentEntries - run_.grows_at), count);
  if (some == 0) return 0;
  std::vector<device::WordStore> words;
  absl::StatusOr<cache::SegmentGrowth> growth =
      cache::ReserveGrowth(*options_.memory, run_.previous, some / kTileEntries, words);
  if (!growth.ok()) return growth.status();
  const absl::StatusOr<std::optional<std::size_t>> unfit =
      cache::EncodeRows(*options_.memory, {form.shape, form.rotations.get(), form.limits},
                        rows.host(0, some), growth->tiles.places());
  if (!unfit.ok()) return unfit.status();
  if (unfit->has_value()) return 0;  // AddPlanes sets the tile apart
  if (absl::Status status = options_.memory->device->StoreWords(words); !status.ok()) return status;
  options_.counters->tiles_encoded.fetch_add(some / kTileEntries, std::memory_order_relaxed);
  absl::Status status =
      ObserveDrift(form, rows.lane(0, some), growth->tiles.places(), run_.grows_at / kTileEntries);
  if (!status.ok()) return status;
  swap.growth = *std::move(growth);
  return some;
}

// If the codes represent a row badly, its tile stays dense.
absl::Status LaneCoder::AddPlanes(const Form& form, const HostLaneRows& rows, std::uint64_t first,
                                  std::uint64_t count, LaneSwap& swap) {
  for (std::uint64_t done = 0; done < count;) {
    if (run_.segments_before + swap.segments.size() >= kMostPieces) {
      return AddDenseForGood(rows, first + done, count - done, swap);
    }
    const std::uint64_t some = std::min<std::uint64_t>(count - done, cache::kMaxSegmentEntries);
    absl::StatusOr<EncodedOrUnfit> made = TryEncode(form, rows, first + done, some);
    if (!made.ok()) return made.status();
    std::uint64_t coded = some;
    if (made->segment == nullptr && made->unfit_tile > 0) {
      coded = made->unfit_tile * kTileEntries;
      made = TryEncode(form, rows, first + done, coded);
      if (!made.ok()) return made.status();
      TESSERA_CHECK(made->segment != nullptr, "these tiles were coded before");
    } else if (made->segment == nullptr) {
      const std::uint64_t tile = std::min<std::uint64_t>(kTileEntries, count - done);
      absl::Status status = AddDenseForGood(rows, first + done, tile, swap);
      if (!status.ok()) return status;
      options_.counters->left_plain.fetch_add(1, std::memory_order_relaxed);
      ObserveRefusal(form);
      done += tile;
      continue;
    }
    options_.counters->tiles_encoded.fetch_add((coded + kTileEntries - 1) / kTileEntries,
                                               std::memory_order_relaxed);
    absl::Status status =
        ObserveDrift(form, rows.lane(first + done, coded), made->segment->Places(), 0);
    if (!status.ok()) return status;
    swap.segments.push_back(std::move(made->segment));
    done += coded;
  }
  return absl::OkStatus();
}

}  // namespace tessera::compaction
