// planes and signs: which book a lane is coded with, and when rows have drifted from it.

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/cache/segment/book_library.h"
#include "daemon/compaction/lanes/lane_coder.h"
#include "daemon/policies/plan.h"
#include "kernels/format/element.h"
#include "kernels/strategy/book.h"

namespace tessera::compaction {

using kernels::kTileEntries;

namespace {
// One of so many tiles is decoded again, to notice that rows have drifted from their book.
constexpr std::uint64_t kMeasuredTiles = 8;

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

// nullopt: rows [first, first + count) are too few to make the book that is missing.
absl::StatusOr<std::optional<LaneCoder::Form>> LaneCoder::BookForm(const policies::BookPlan& plan,
                                                                   const HostLaneRows& rows,
                                                                   std::uint64_t first,
                                                                   std::uint64_t count) {
  BookOrWait found = plan.book == policies::kOwnBook ? OwnBook(plan, rows, first, count)
                                                     : SharedBook(plan, rows, first, count);
  if (!found.ok()) return found.status();
  if (*found == nullptr) return std::nullopt;
  if (!plan.shape.planes()) return Form{.shape = plan.shape, .rotations = (*found)->rotations};
  return PlanesForm(plan.shape, *std::move(found));
}

LaneCoder::Form LaneCoder::PlanesForm(const kernels::TileShape& shape,
                                      std::shared_ptr<const cache::LaneBook> book) {
  const float key_error = book->key.errors.Error(shape.key_planes);
  const float value_error = book->value.errors.Error(shape.value_planes);
  const auto share = [](float error, double energy) { return energy > 0 ? error / energy : 0; };
  return Form{.shape = shape,
              .rotations = book->rotations,
              .loss = {.key = share(key_error, book->key.energy),
                       .value = share(value_error, book->value.energy)},
              .limits = {.key = ErrorLimit(book->key, key_error),
                         .value = ErrorLimit(book->value, value_error)},
              .book = std::move(book)};
}

cache::BookShelf::Key LaneCoder::BookKey(const policies::BookPlan& plan) const {
  return {
      .model = options_.model->id(), .lane = run_.lane, .planes = plan.planes, .source = plan.book};
}

// A book of the tenant: of a file, or made from the first rows. A lane that has seen it drift waits
// for the next version; rows that a token policy retains were coded before, and never wait.
LaneCoder::BookOrWait LaneCoder::SharedBook(const policies::BookPlan& plan,
                                            const HostLaneRows& rows, std::uint64_t first,
                                            std::uint64_t count) {
  cache::BookShelf& shelf = *options_.memory->books;
  const cache::BookShelf::Key key = BookKey(plan);
  const cache::BookShelf::Held held = shelf.Find(key);
  LaneState& state = *options_.state;
  if (!held.has_drifted) state.waits_for_book = false;
  const bool retains = options_.decision != nullptr;
  const bool has_rows = count >= plan.book_rows;
  if (held.book != nullptr && (retains || !held.has_drifted || !has_rows)) {
    return state.waits_for_book && !retains ? nullptr : held.book;
  }
  absl::StatusOr<cache::LaneBook> made;
  if (plan.has_book_of_file()) {
    const kernels::BookFile* const file =
        options_.memory->loaded_books->Find(plan.book, *options_.model);
    TESSERA_CHECK(file != nullptr, "CheckFitsRows has found it, and the library never changes");
    made = StoreBook(file->BookOf(run_.lane, plan.planes));
  } else if (has_rows) {
    made = MakeBook(plan, rows.lane(first, plan.book_rows));
  } else {
    return nullptr;
  }
  if (!made.ok()) return made.status();
  state.waits_for_book = false;
  return shelf.Put(key, held.book.get(), *std::move(made));
}

// The book of the segment that grows, or one from these rows for a new segment. What a token policy
// retains keeps the lane's book: a choice is made every few tokens.
LaneCoder::BookOrWait LaneCoder::OwnBook(const policies::BookPlan& plan, const HostLaneRows& rows,
                                         std::uint64_t first, std::uint64_t count) {
  std::shared_ptr<const cache::LaneBook>& own = options_.state->own_book;
  const bool retains = options_.decision != nullptr;
  const bool grows =
      run_.grows && own != nullptr && run_.previous->shared_rotations() == own->rotations;
  if (grows || (retains && own != nullptr)) return own;
  if (count < plan.book_rows) return nullptr;
  absl::StatusOr<cache::LaneBook> made =
      MakeBook(plan, rows.lane(first, std::min<std::uint64_t>(count, cache::kMaxSegmentEntries)));
  if (!made.ok()) return made.status();
  own = std::make_shared<const cache::LaneBook>(*std::move(made));
  return own;
}

absl::StatusOr<cache::LaneBook> LaneCoder::MakeBook(const policies::BookPlan& plan,
                                                    const kernels::LaneRows& sample) {
  const std::string problem = kernels::BookProblem(sample, plan.planes, *options_.operations);
  TESSERA_CHECK(problem.empty(), problem);
  options_.counters->strategies_made.fetch_add(1, std::memory_order_relaxed);
  return StoreBook(kernels::MakeBook(sample, plan.planes, *options_.operations));
}

absl::StatusOr<cache::LaneBook> LaneCoder::StoreBook(kernels::Book book) {
  absl::StatusOr<std::shared_ptr<const cache::Rotations>> stored =
      cache::StoreBook(*options_.memory, book.bytes);
  if (!stored.ok()) return stored.status();
  const kernels::RotationView view = book.view();
  return cache::LaneBook{.rotations = *std::move(stored),
                         .key = SideOf(std::move(book.key), view.key_mean, tile_.head_dim),
                         .value = SideOf(std::move(book.value), view.value_mean, tile_.head_dim)};
}

// Only books of a model have versions; those of files and of segments have none. What a token
// policy retains was measured when it was first coded.
bool LaneCoder::MeasuresDrift() const {
  return options_.decision == nullptr && options_.policy->planes.has_value() &&
         options_.policy->planes->book == policies::kAutoBook;
}

// Measures some of the tiles that were just coded from these rows, against the book's own error.
// `at`: the index of the first tile in its segment.
absl::Status LaneCoder::ObserveDrift(const Form& form, const kernels::LaneRows& rows,
                                     const std::vector<device::TilePlace>& tiles,
                                     std::uint64_t at) {
  if (!MeasuresDrift()) return absl::OkStatus();
  const auto rows_of = [&rows](std::size_t tile) {
    const std::uint64_t first = tile * kTileEntries;
    const std::uint64_t count = std::min<std::uint64_t>(kTileEntries, rows.keys.count - first);
    return kernels::LaneRows{rows.keys.Slice(first, count), rows.values.Slice(first, count)};
  };
  const std::uint64_t bytes = kernels::LayoutOf(form.shape).bytes;
  kernels::AlignedBytes copy(bytes);
  kernels::CodeErrors errors;
  std::uint64_t measured = 0;
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    if ((at + i) % kMeasuredTiles != 0) continue;
    absl::Status status = options_.memory->device->Read(copy.data(), tiles[i].tile, bytes);
    if (!status.ok()) return status;
    const kernels::CodeErrors of_tile = kernels::ErrorsOfTile(
        rows_of(i), form.shape, cache::ViewOf(form.rotations.get(), form.shape), copy.data(),
        *options_.operations);
    errors.key += of_tile.key;
    errors.value += of_tile.value;
    measured += kTileEntries;
  }
  // A measured tile stands for its neighbours, too.
  const auto multiple = [](double error, float mean) {
    return mean > 0 ? kMeasuredTiles * error / mean : 0;
  };
  const kernels::TileShape& shape = form.shape;
  Drifted(form, {.key = multiple(errors.key, form.book->key.errors.Error(shape.key_planes)),
                 .value = multiple(errors.value, form.book->value.errors.Error(shape.value_planes)),
                 .rows = kMeasuredTiles * measured});
  return absl::OkStatus();
}

// A tile stayed dense: it counts as one of rows at the limit.
void LaneCoder::ObserveRefusal(const Form& form) {
  if (!MeasuresDrift()) return;
  const double errors = kernels::kRefusedErrors * kTileEntries;
  Drifted(form, {.key = errors, .value = errors, .rows = kTileEntries});
}

void LaneCoder::Drifted(const Form& form, const cache::DriftSums& sums) {
  const cache::BookShelf::Key key = BookKey(policies::BookPlanOf(*options_.policy, geometry_));
  if (options_.memory->books->Observe(key, form.book.get(), sums)) {
    options_.state->waits_for_book = true;
  }
}

}  // namespace tessera::compaction
