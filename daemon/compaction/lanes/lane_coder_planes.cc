// planes and signs: codes full tiles of dense rows, once and for good, with the book of the lane.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/compaction/lanes/lane_coder.h"
#include "daemon/policies/plan.h"
#include "kernels/format/element.h"
#include "kernels/strategy/book.h"

namespace tessera::compaction {

using cache::LaneSwap;
using cache::Segment;
using kernels::kTileEntries;

namespace {
// Pieces that a few refused tiles cut a lane into. Rows behind so many stay dense.
constexpr std::size_t kMostPieces = 16;

// The largest error of a row that is coded, given the mean error. `encode` also asks whether the
// error is a large share of the row's energy. Where it is of every row, a long row is no worse than
// others, so only errors far above the mean are refused.
float ErrorLimit(const cache::SideOfBook& side, float mean_error) {
  constexpr float kOfNarrowCodes = 4;
  const bool narrow = kernels::kRefusedErrors * mean_error > kernels::kRefusedShare * side.spread;
  return kernels::kRefusedErrors * mean_error * (narrow ? kOfNarrowCodes : 1);
}

cache::SideOfBook SideOf(kernels::BookSide made, const std::byte* mean, std::uint32_t head_dim) {
  cache::SideOfBook side;
  side.spread = std::accumulate(made.eigenvalues.begin(), made.eigenvalues.end(), 0.0);
  side.energy = side.spread;
  for (std::uint32_t d = 0; d < head_dim; ++d) {
    std::uint16_t element = 0;
    std::memcpy(&element, mean + d * sizeof element, sizeof element);
    const double value = kernels::Bf16ToFloat(element);
    side.energy += value * value;
  }
  made.eigenvalues = {};
  side.errors = std::move(made);
  return side;
}

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

absl::StatusOr<std::optional<LaneCoder::Form>> LaneCoder::BookForm(const policies::BookPlan& plan,
                                                                   const HostLaneRows& rows,
                                                                   std::uint64_t first,
                                                                   std::uint64_t count) {
  const cache::BookShelf::Key key = {
      .model = options_.model->id(), .lane = run_.lane, .planes = plan.planes};
  std::shared_ptr<const cache::LaneBook> book = options_.memory->books->Find(key);
  if (book == nullptr) {
    if (count < plan.book_rows) return std::nullopt;
    absl::StatusOr<std::shared_ptr<const cache::LaneBook>> made =
        MakeBook(rows.lane(first, plan.book_rows), key);
    if (!made.ok()) return made.status();
    book = *std::move(made);
  }
  if (!plan.shape.planes()) return Form{.shape = plan.shape, .rotations = book->rotations};
  const float key_error = book->key.errors.Error(plan.shape.key_planes);
  const float value_error = book->value.errors.Error(plan.shape.value_planes);
  const auto share = [](float error, double energy) { return energy > 0 ? error / energy : 0; };
  return Form{.shape = plan.shape,
              .rotations = book->rotations,
              .loss = {.key = share(key_error, book->key.energy),
                       .value = share(value_error, book->value.energy)},
              .limits = {.key = ErrorLimit(book->key, key_error),
                         .value = ErrorLimit(book->value, value_error)}};
}

absl::StatusOr<std::shared_ptr<const cache::LaneBook>> LaneCoder::MakeBook(
    const kernels::LaneRows& sample, const cache::BookShelf::Key& key) {
  const std::string problem = kernels::BookProblem(sample, key.planes, *options_.operations);
  TESSERA_CHECK(problem.empty(), problem);
  kernels::Book book = kernels::MakeBook(sample, key.planes, *options_.operations);
  absl::StatusOr<std::shared_ptr<const cache::Rotations>> stored =
      cache::StoreBook(*options_.memory, book.bytes);
  if (!stored.ok()) return stored.status();
  options_.counters->strategies_made.fetch_add(1, std::memory_order_relaxed);
  const kernels::RotationView view = book.view();
  return options_.memory->books->Add(
      key, {.rotations = *std::move(stored),
            .key = SideOf(std::move(book.key), view.key_mean, tile_.head_dim),
            .value = SideOf(std::move(book.value), view.value_mean, tile_.head_dim)});
}

absl::Status LaneCoder::AddDenseForGood(const HostLaneRows& rows, std::uint64_t first,
                                        std::uint64_t count, LaneSwap& swap) {
  const std::size_t before = swap.segments.size();
  absl::Status status = AddPlain(rows, first, count, swap);
  for (std::size_t i = before; i < swap.segments.size(); ++i) swap.segments[i]->SealDense();
  return status;
}

// Returns how many rows the last segment takes.
absl::StatusOr<std::uint64_t> LaneCoder::GrowInPlanes(const Form& form, const HostLaneRows& rows,
                                                      std::uint64_t count, LaneSwap& swap) {
  const Segment* const previous = run_.previous.get();
  if (!run_.grows || previous->shape() != form.shape ||
      previous->shared_rotations() != form.rotations) {
    return 0;
  }
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
  swap.growth = *std::move(growth);
  return some;
}

// If the codes represent a row badly, its tile stays dense.
absl::Status LaneCoder::AddPlanes(const Form& form, const HostLaneRows& rows, std::uint64_t first,
                                  std::uint64_t count, LaneSwap& swap) {
  for (std::uint64_t done = 0; done < count;) {
    if (swap.segments.size() >= kMostPieces) {
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
      done += tile;
      continue;
    }
    options_.counters->tiles_encoded.fetch_add((coded + kTileEntries - 1) / kTileEntries,
                                               std::memory_order_relaxed);
    swap.segments.push_back(std::move(made->segment));
    done += coded;
  }
  return absl::OkStatus();
}

}  // namespace tessera::compaction
