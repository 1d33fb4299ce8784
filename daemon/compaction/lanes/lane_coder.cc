#include "daemon/compaction/lanes/lane_coder.h"

#include <algorithm>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/policies/plan.h"
#include "kernels/strategy/candidates.h"

namespace tessera::compaction {

using cache::LaneSwap;
using cache::Segment;
using kernels::kTileEntries;

namespace {

// Adds positions and weights to the rows.
cache::HostRows WithList(cache::HostRows rows, const cache::EntryList* list) {
  if (list == nullptr) return rows;
  rows.positions = list->positions.data();
  if (!list->weights.empty()) rows.weights = list->weights.data();
  return rows;
}

}  // namespace

LaneCoder::LaneCoder(const Options& options, const cache::OpenRun& run)
    : options_(options),
      run_(run),
      tile_(options.model->layout().tile(run.layer)),
      geometry_(options.model->geometry(run.layer)) {
  options_.state->Meet(run);
}

// ---- Forms

// The segment's form, if new rows can take it.
std::optional<LaneCoder::Form> LaneCoder::FormOf(const cache::Segment* segment) {
  if (segment == nullptr || !segment->shape().packed() || segment->shape().planes()) {
    return std::nullopt;
  }
  kernels::TileShape shape = segment->shape();
  // New rows are consecutive tokens of weight 1.
  shape.weights = shape.positions = false;
  return Form{shape, segment->shared_rotations(), segment->loss()};
}

std::optional<LaneCoder::Form> LaneCoder::FormBefore() const { return FormOf(run_.previous.get()); }

std::optional<LaneCoder::Form> LaneCoder::FormOfNewTiles() const {
  const policies::Policy& policy = *options_.policy;
  if (policy.key_channels.has_value()) {
    return FormOf(KeyChannelFormOf(run_, policy, geometry_));
  }
  if (policy.mosaic.has_value()) return FormBefore();
  // Summaries are only useful for a selection.
  if (!policies::SelectionOf(policy, run_.layer).has_value()) return std::nullopt;
  const kernels::TileShape shape = policies::SummaryShape(policy, geometry_);
  if (shape.summary == kernels::Summary::kNone) return std::nullopt;
  return Form{.shape = shape, .rotations = nullptr, .loss = {}};
}

bool LaneCoder::MayBeSealed() const {
  if (run_.first_position < options_.chosen_before) return false;
  if (!FitsALane(run_.provisional_entries() + run_.plain_entries()).ok()) return false;
  const std::uint64_t older = OlderOf(run_.provisional_entries() + run_.plain_entries());
  return FullTiles(older - SinksAmong(older)) >= options_.policy->mosaic->segments.min_tokens;
}

std::uint64_t LaneCoder::OlderOf(std::uint64_t entries) const {
  if (!options_.policy->mosaic.has_value() || options_.decision != nullptr) return entries;
  const std::uint64_t recent = options_.policy->mosaic->segments.recent;
  return recent == 0 ? entries : FullTiles(entries - std::min(entries, recent));
}

// Whole tiles: a dense tile takes as many bytes for one token as for 32.
std::uint64_t LaneCoder::SinksAmong(std::uint64_t entries) const {
  if (options_.decision != nullptr) return 0;
  const std::uint64_t sinks = options_.policy->mosaic->segments.sinks;
  return EntriesBefore(FullTiles(sinks + kTileEntries - 1), entries);
}

// The limit is the policy's threshold, or the strategy's loss on its own rows if that is larger,
// plus the margin: drift is detected even in lanes that never meet the threshold.
bool LaneCoder::LossIsTooHigh(const Form& form) const {
  const policies::MosaicPolicy& mosaic = *options_.policy->mosaic;
  const std::optional<kernels::Loss> loss = options_.state->WindowLoss(mosaic.segments.loss_window);
  if (!loss.has_value()) return false;
  return !kernels::IsWithin(
      *loss,
      {.key = std::max(mosaic.strategy.threshold.key, form.loss.key) + mosaic.segments.margin.key,
       .value = std::max(mosaic.strategy.threshold.value, form.loss.value) +
                mosaic.segments.margin.value});
}

// ---- New tiles

// Whether the run begins with rows that a seal left dense.
bool LaneCoder::LeftPlain() const {
  const std::vector<cache::HeldSegment>& first =
      run_.provisional.empty() ? run_.plain : run_.provisional;
  return !first.empty() && first.front().segment->IsKeptDense(options_.policy->text);
}

std::uint64_t LaneCoder::EncodableRows() const {
  const std::uint64_t plain = run_.plain_entries();
  if (plain == 0) return 0;
  const std::uint64_t first = run_.plain.front().segment->first_position();
  return std::min(plain, options_.encode_before - std::min(options_.encode_before, first));
}

std::uint64_t LaneCoder::CountForNewTiles() const {
  const std::uint64_t plain = EncodableRows();
  const std::optional<policies::KeyChannelPolicy>& channels = options_.policy->key_channels;
  if (channels.has_value()) return FullTiles(plain - std::min(plain, channels->recent));
  return FullTiles(OlderOf(plain));
}

LaneCoder::Swap LaneCoder::EncodeTiles() {
  if (options_.policy->uses_books()) return EncodeWithBook();
  const std::optional<Form> form = LeftPlain() ? std::nullopt : FormOfNewTiles();
  if (!form.has_value()) {
    wants_seal_ = options_.policy->mosaic.has_value() && MayBeSealed();
    return std::nullopt;
  }
  const std::uint64_t all = CountForNewTiles();
  if (all == 0) return std::nullopt;
  // Tiles after those without raw copies are encoded separately.
  const std::uint64_t entries_without_raw = options_.state->entries_without_raw;
  const std::uint64_t full = entries_without_raw == 0
                                 ? all
                                 : std::min(all, FullTiles(entries_without_raw + kTileEntries - 1));
  leaves_tiles_ = full < all;
  const absl::StatusOr<HostLaneRows> rows = HostLaneRows::OfPlain(*options_.memory, tile_, run_);
  if (!rows.ok()) return rows.status();
  if (options_.policy->mosaic.has_value() && !DecideAboutRaw(full)) {
    wants_seal_ = true;
    return std::nullopt;
  }
  LaneSwap swap = {.growing = true};
  const absl::StatusOr<std::optional<std::size_t>> unfit =
      EncodeProvisional(*form, *rows, full, swap);
  if (!unfit.ok()) return unfit.status();
  if (unfit->has_value()) {
    // The rows stay dense for good, in sealed segments, and so do the rows before them.
    DropRaw();
    SealPlainAt(**unfit);
    options_.counters->left_plain.fetch_add(1, std::memory_order_relaxed);
    return std::nullopt;
  }
  absl::Status status = AddPlain(*rows, full, run_.plain_entries() - full, swap);
  if (!status.ok()) return status;
  if (options_.policy->mosaic.has_value()) {
    const std::uint64_t entries = run_.provisional_entries() + full;
    const policies::SegmentOptions& segments = options_.policy->mosaic->segments;
    wants_seal_ =
        keeps_raw_ && MayBeSealed() &&
        (entries >= segments.tokens || (entries >= segments.min_tokens && LossIsTooHigh(*form)));
  }
  return swap;
}

// Rows that are encoded with the previous strategy keep raw copies while the budget lasts.
bool LaneCoder::DecideAboutRaw(std::uint64_t count) {
  // If the policy drops entries while decoding, kept rows keep the previous strategy for good.
  if (policies::Continues(*options_.policy)) return true;
  LaneState& state = *options_.state;
  if (state.entries_without_raw != 0) {
    state.entries_without_raw -= std::min(state.entries_without_raw, count);
    options_.counters->raw_rows_dropped.fetch_add(count, std::memory_order_relaxed);
    return true;
  }
  // A lane at the segment limit cannot be sealed, so raw copies would be useless.
  if (FitsALane(run_.provisional_entries() + count).ok()) {
    const absl::StatusOr<pool::Charge> room = options_.memory->raw_copies->Reserve(
        pool::MemoryTag::kRawCopies, 2 * count * tile_.row_bytes());
    keeps_raw_ = room.ok();
    if (keeps_raw_) return true;
    if (MayBeSealed()) return false;
  }
  GiveUpRaw();
  options_.counters->raw_rows_dropped.fetch_add(count, std::memory_order_relaxed);
  return true;
}

// Makes the provisional tiles final, and those of the next min_tokens tokens, so that the lane does
// not alternate from tile to tile while the budget is nearly used up.
void LaneCoder::GiveUpRaw() {
  DropRaw();
  options_.state->entries_without_raw = options_.policy->mosaic->segments.min_tokens;
}

void LaneCoder::DropRaw() {
  for (const cache::HeldSegment& held : run_.provisional) {
    if (held.segment->raw()->dropped()) continue;  // by an earlier, failed attempt
    options_.counters->raw_rows_dropped.fetch_add(held.entries, std::memory_order_relaxed);
    held.segment->raw()->Drop();
  }
  options_.state->Reset();
}

absl::StatusOr<std::optional<std::size_t>> LaneCoder::EncodeProvisional(const Form& form,
                                                                        const HostLaneRows& rows,
                                                                        std::uint64_t count,
                                                                        LaneSwap& swap) {
  const cache::TenantMemory& memory = *options_.memory;
  std::vector<device::WordStore> words;
  std::vector<device::TilePlace> tiles;
  std::uint64_t done = 0;
  const Segment* const previous = run_.previous.get();
  const bool previous_keeps =
      previous != nullptr && previous->raw() != nullptr && !previous->raw()->dropped();
  const bool grows = run_.grows && previous->shape() == form.shape &&
                     previous->shared_rotations() == form.rotations && previous_keeps == keeps_raw_;
  const std::uint64_t room = grows ? cache::kMaxSegmentEntries - run_.grows_at : 0;
  if (const std::uint64_t some = std::min(FullTiles(room), count); some > 0) {
    absl::StatusOr<cache::SegmentGrowth> growth =
        cache::ReserveGrowth(memory, run_.previous, some / kTileEntries, words);
    if (!growth.ok()) return growth.status();
    tiles = growth->tiles.places();
    swap.growth = *std::move(growth);
    done = some;
  }
  while (done < count) {
    const std::uint64_t some = std::min<std::uint64_t>(count - done, cache::kMaxSegmentEntries);
    std::shared_ptr<cache::RawRows> raw;
    if (keeps_raw_) {
      raw = std::make_shared<cache::RawRows>(tile_, memory.raw_copies);
      const cache::HostRows kept = rows.host(done, some);
      absl::Status status = raw->Put(0, kept.keys, kept.values, some / kTileEntries);
      if (!status.ok()) return status;
    }
    auto segment = std::make_shared<Segment>(form.shape, rows.positions()[done], form.rotations,
                                             std::move(raw));
    segment->set_loss(form.loss);
    absl::Status status =
        cache::ReserveTiles(memory, static_cast<std::uint32_t>(some), *segment, words);
    if (!status.ok()) return status;
    const std::vector<device::TilePlace> places = segment->Places();
    tiles.insert(tiles.end(), places.begin(), places.end());
    swap.segments.push_back(std::move(segment));
    done += some;
  }
  const absl::StatusOr<std::optional<std::size_t>> unfit =
      cache::EncodeRows(memory, {form.shape, form.rotations.get()}, rows.host(0, count), tiles);
  if (!unfit.ok() || unfit->has_value()) return unfit;
  if (absl::Status status = memory.device->StoreWords(words); !status.ok()) return status;
  options_.counters->tiles_encoded.fetch_add(tiles.size(), std::memory_order_relaxed);
  if (!keeps_raw_) return std::nullopt;
  if (swap.growth.has_value()) {
    // Done last, so that earlier failures leave no raw rows behind.
    const cache::HostRows raw = rows.host(0, swap.growth->entries());
    absl::Status status = previous->raw()->Put(run_.grows_at / kTileEntries, raw.keys, raw.values,
                                               swap.growth->tiles.size());
    if (!status.ok()) return status;
  }
  if (absl::Status status = ObserveTiles(form, rows, tiles); !status.ok()) return status;
  return std::nullopt;
}

// Seals the last dense segment that has rows of this tile, which also closes all earlier segments.
// Earlier segments may be shared with a fork that does not hold the unrepresentable value.
void LaneCoder::SealPlainAt(std::size_t tile) {
  std::uint64_t entries = 0;
  for (const cache::HeldSegment& held : run_.plain) {
    entries += held.entries;
    if (entries < (tile + 1) * kTileEntries && &held != &run_.plain.back()) continue;
    held.segment->SealDense();
    return;
  }
}

// Measures, tile by tile, what the strategy loses of rows that it was not made from.
absl::Status LaneCoder::ObserveTiles(const Form& form, const HostLaneRows& rows,
                                     const std::vector<device::TilePlace>& tiles) {
  const std::uint64_t window = options_.policy->mosaic->segments.loss_window;
  const std::uint64_t bytes = kernels::LayoutOf(form.shape).bytes;
  std::vector<std::byte> copy(bytes);
  for (std::size_t i = 0; i < tiles.size(); ++i) {
    absl::Status status = options_.memory->device->Read(copy.data(), tiles[i].tile, bytes);
    if (!status.ok()) return status;
    options_.state->ObserveLoss(kernels::LossOfTile(rows.lane(i * kTileEntries, kTileEntries),
                                                    form.shape, copy.data(), *options_.operations),
                                window);
  }
  options_.state->Observe(rows.lane(0, tiles.size() * kTileEntries), *options_.operations,
                          *options_.memory->raw_copies);
  return absl::OkStatus();
}

// ---- Decisions

LaneCoder::Swap LaneCoder::Retain() {
  const absl::StatusOr<HostLaneRows> rows = RowsThatStay();
  if (!rows.ok()) return rows.status();
  const std::uint64_t kept = CountDecided(*rows);
  LaneSwap swap = {.all = true, .whole = true, .drops = true};
  const std::optional<Form> form = FormOfNewTiles();
  absl::Status status =
      form.has_value() ? AddAs(*form, *rows, 0, kept, swap) : AddPlain(*rows, 0, kept, swap);
  if (options_.settles) Settle(swap);
  if (status.ok()) status = AddPlain(*rows, kept, rows->count() - kept, swap);
  if (!status.ok()) return status;
  return swap;
}

// Seals the dense segments of kept rows, which would otherwise look like rows that wait.
void LaneCoder::Settle(const LaneSwap& swap) {
  for (const std::shared_ptr<Segment>& segment : swap.segments) {
    if (segment->plain()) segment->SealDense();
  }
}

absl::StatusOr<HostLaneRows> LaneCoder::RowsThatStay() const {
  absl::StatusOr<HostLaneRows> rows = HostLaneRows::Of(*options_.memory, tile_, run_);
  if (!rows.ok() || options_.decision == nullptr) return rows;
  return StayOf(*rows);
}

absl::StatusOr<HostLaneRows> LaneCoder::StayOf(const HostLaneRows& rows) const {
  if (rows.count() < options_.decided ||
      (options_.decided > 0 && rows.positions().front() != options_.first_position)) {
    return absl::AbortedError("the lane was truncated while its entries were chosen; retry");
  }
  return rows.After(*options_.decision, options_.decided, options_.turning);
}

std::uint64_t LaneCoder::CountDecided(const HostLaneRows& rows) const {
  return options_.decision == nullptr ? rows.count() : options_.decision->kept.size();
}

LaneCoder::Swap LaneCoder::JoinPlain() {
  if (run_.plain.size() < 2) return std::nullopt;
  const absl::StatusOr<HostLaneRows> rows = HostLaneRows::OfPlain(*options_.memory, tile_, run_);
  if (!rows.ok()) return rows.status();
  LaneSwap swap = {.growing = run_.grows};
  if (absl::Status status = AddPlain(*rows, 0, rows->count(), swap); !status.ok()) return status;
  swap.segments.front()->TakeNotesOf(*run_.plain.front().segment);
  return swap;
}

// ---- Segments

absl::StatusOr<std::shared_ptr<Segment>> LaneCoder::Encoded(const Form& form,
                                                            const HostLaneRows& rows,
                                                            std::uint64_t first,
                                                            std::uint64_t count) {
  absl::StatusOr<EncodedOrUnfit> made = TryEncode(form, rows, first, count);
  if (!made.ok()) return made.status();
  return std::move(made->segment);
}

absl::StatusOr<LaneCoder::EncodedOrUnfit> LaneCoder::TryEncode(const Form& form,
                                                               const HostLaneRows& rows,
                                                               std::uint64_t first,
                                                               std::uint64_t count) {
  const std::shared_ptr<const cache::EntryList> list = rows.EntryListOf(first, count);
  kernels::TileShape shape = form.shape;
  shape.positions = list != nullptr;
  shape.weights = list != nullptr && !list->weights.empty();
  auto segment = std::make_shared<Segment>(shape, rows.positions()[first], form.rotations);
  segment->set_loss(form.loss);
  segment->set_entry_list(list);
  std::vector<device::WordStore> words;
  absl::Status status =
      cache::ReserveTiles(*options_.memory, static_cast<std::uint32_t>(count), *segment, words);
  if (!status.ok()) return status;
  const absl::StatusOr<std::optional<std::size_t>> unfit =
      cache::EncodeRows(*options_.memory, {shape, form.rotations.get(), form.limits},
                        WithList(rows.host(first, count), list.get()), segment->Places());
  if (!unfit.ok()) return unfit.status();
  if (unfit->has_value()) return EncodedOrUnfit{.segment = nullptr, .unfit_tile = **unfit};
  if (status = options_.memory->device->StoreWords(words); !status.ok()) return status;
  return EncodedOrUnfit{.segment = std::move(segment)};
}

absl::Status LaneCoder::AddPlain(const HostLaneRows& rows, std::uint64_t first, std::uint64_t count,
                                 LaneSwap& swap) {
  const Form as_they_are = {
      .shape = kernels::DenseShape(tile_.head_dim, tile_.type), .rotations = nullptr, .loss = {}};
  return AddAs(as_they_are, rows, first, count, swap);
}

// Adds rows in a form that does not pack them.
absl::Status LaneCoder::AddAs(const Form& form, const HostLaneRows& rows, std::uint64_t first,
                              std::uint64_t count, LaneSwap& swap) {
  for (std::uint64_t done = 0; done < count;) {
    const std::uint64_t some = std::min<std::uint64_t>(count - done, cache::kMaxSegmentEntries);
    absl::StatusOr<std::shared_ptr<Segment>> segment = Encoded(form, rows, first + done, some);
    if (!segment.ok()) return segment.status();
    TESSERA_CHECK(*segment != nullptr, "unpacked rows fit in any form");
    swap.segments.push_back(*std::move(segment));
    done += some;
  }
  return absl::OkStatus();
}

}  // namespace tessera::compaction
