// planes: codes full tiles of dense rows, once and for good, with the book of the lane.

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

LaneCoder::Swap LaneCoder::EncodePlanes() {
  const policies::PlanesPolicy& policy = *options_.policy->planes;
  const std::uint64_t plain = run_.plain_entries();
  // A lane begins with its sinks, unless they were set apart before.
  const std::uint64_t sinks =
      run_.before == 0 ? std::min(FullTiles(policy.sinks + kTileEntries - 1), plain) : 0;
  const std::uint64_t older = plain - std::min(plain, policy.recent);
  const std::uint64_t count = FullTiles(older - std::min(older, sinks));
  if (count == 0) return std::nullopt;
  const absl::StatusOr<HostLaneRows> rows = HostLaneRows::OfPlain(*options_.memory, tile_, run_);
  if (!rows.ok()) return rows.status();
  const absl::StatusOr<std::optional<Form>> form = PlanesForm(*rows, sinks, count);
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
  if (status.ok()) status = AddPlain(*rows, sinks + count, plain - sinks - count, swap);
  if (!status.ok()) return status;
  return swap;
}

absl::StatusOr<std::optional<LaneCoder::Form>> LaneCoder::PlanesForm(const HostLaneRows& rows,
                                                                     std::uint64_t first,
                                                                     std::uint64_t count) {
  const policies::PlanesPolicy& policy = *options_.policy->planes;
  const cache::BookShelf::Key key = {
      .model = options_.model->id(),
      .lane = run_.lane,
      .planes = {.key = policy.key.planes(), .value = policy.value.planes()}};
  std::shared_ptr<const cache::LaneBook> book = options_.memory->books->Find(key);
  if (book == nullptr) {
    if (count < policy.book_rows) return std::nullopt;
    absl::StatusOr<std::shared_ptr<const cache::LaneBook>> made = MakeBook(rows, first, key);
    if (!made.ok()) return made.status();
    book = *std::move(made);
  }
  const float key_error = book->key.errors.Error(policy.key);
  const float value_error = book->value.errors.Error(policy.value);
  const auto share = [](float error, double energy) { return energy > 0 ? error / energy : 0; };
  return Form{.shape = policies::PlanesShape(policy, tile_.head_dim),
              .rotations = book->rotations,
              .loss = {.key = share(key_error, book->key.energy),
                       .value = share(value_error, book->value.energy)},
              .limits = {.key = ErrorLimit(book->key, key_error),
                         .value = ErrorLimit(book->value, value_error)}};
}

absl::StatusOr<std::shared_ptr<const cache::LaneBook>> LaneCoder::MakeBook(
    const HostLaneRows& rows, std::uint64_t first, const cache::BookShelf::Key& key) {
  const kernels::LaneRows sample = rows.lane(first, options_.policy->planes->book_rows);
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
      absl::Status status = AddDenseForGood(rows, first + done, kTileEntries, swap);
      if (!status.ok()) return status;
      options_.counters->left_plain.fetch_add(1, std::memory_order_relaxed);
      done += kTileEntries;
      continue;
    }
    options_.counters->tiles_encoded.fetch_add(coded / kTileEntries, std::memory_order_relaxed);
    swap.segments.push_back(std::move(made->segment));
    done += coded;
  }
  return absl::OkStatus();
}

}  // namespace tessera::compaction
