// LaneCoder::Seal: cuts an open run into segments with their own strategies.

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/cache/segment/sealed_rows.h"
#include "daemon/compaction/lanes/lane_coder.h"
#include "kernels/strategy/aligned_bytes.h"
#include "kernels/strategy/candidates.h"
#include "proto/shm/layout.h"

namespace tessera::compaction {

using cache::LaneSwap;
using cache::Segment;
using kernels::kTileEntries;

namespace {

// One call stops after the segment that reaches either limit.
constexpr std::uint64_t kTokensAtOnce = 16 * 1024;
constexpr int kSegmentsAtOnce = 8;
constexpr std::uint64_t kSpareSegments = 64;

std::uint64_t TilesOf(std::uint64_t entries) { return (entries + kTileEntries - 1) / kTileEntries; }

std::uint64_t EntriesOf(const std::vector<std::shared_ptr<Segment>>& segments) {
  std::uint64_t entries = 0;
  for (const std::shared_ptr<Segment>& segment : segments) entries += segment->filled();
  return entries;
}

std::uint64_t TileBytes(const kernels::TileShape& shape, std::uint64_t entries) {
  return cache::Tiles::PoolBytes(shape, TilesOf(entries));
}

}  // namespace

// The segments that forks have made from the first rows of the run.
std::vector<std::shared_ptr<Segment>> LaneCoder::SealedElsewhere(std::uint64_t most) const {
  if (options_.decision != nullptr) return {};
  const std::vector<cache::HeldSegment> sources = run_.Waiting();
  if (sources.empty()) return {};
  const std::shared_ptr<const cache::SealedRows> known = sources.front().segment->sealed_rows();
  if (known == nullptr || known->policy() != options_.policy->text) return {};
  return known->For(sources, most);
}

// Publishes the sealed segments, so that forks that share the rows adopt them. If a fork has sealed
// the same rows meanwhile, adopts its segments instead.
void LaneCoder::TellOthers(std::uint64_t done, LaneSwap& swap) const {
  std::vector<std::shared_ptr<Segment>> theirs = SealedElsewhere(done);
  if (EntriesOf(theirs) == done) {
    swap.segments = std::move(theirs);
    swap.taken_over = swap.segments.size();
    return;
  }
  const std::vector<cache::HeldSegment> sources = run_.Waiting();
  // Keep published segments that cover more rows.
  const std::shared_ptr<const cache::SealedRows> known = sources.front().segment->sealed_rows();
  if (known != nullptr && known->policy() == options_.policy->text &&
      known->EntriesHeld() >= done) {
    return;
  }
  sources.front().segment->set_sealed_rows(
      std::make_shared<cache::SealedRows>(options_.policy->text, sources, swap.segments));
}

// Adopts the segments that exist for the first rows of the run: made by a fork, or by earlier jobs
// of this seal.
void LaneCoder::TakeWhatIsMade(std::uint64_t most, LaneSwap& swap) const {
  swap.segments = SealedElsewhere(most);
  swap.taken_over = swap.segments.size();
  const std::optional<LaneState::ContinuedSeal>& begun = options_.state->begun;
  if (!begun.has_value() || swap.drops) return;
  std::vector<std::shared_ptr<Segment>> own = begun->rows.For(run_.Waiting(), most);
  if (EntriesOf(own) <= EntriesOf(swap.segments)) return;
  swap.segments = std::move(own);
  swap.taken_over = std::min(begun->taken_over, swap.segments.size());
}

LaneCoder::Swap LaneCoder::Seal(const SealRequest& wish) {
  const policies::SegmentOptions& segments = options_.policy->mosaic->segments;
  const std::uint64_t waiting = run_.provisional_entries() + run_.plain_entries();
  const std::uint64_t given = OlderOf(waiting);
  std::uint64_t ended = EntriesBefore(wish.all_before, given);
  const std::uint64_t decoded = EntriesBefore(wish.decoded_before, given);
  const std::uint64_t dense = SinksAmong(given);
  if (ended == 0 && given - dense < segments.tokens &&
      (decoded <= dense || decoded - dense < segments.min_tokens)) {
    options_.state->begun.reset();  // the run was truncated since
    return std::nullopt;
  }
  const bool drops = options_.decision != nullptr;
  LaneSwap swap = {.all = true, .whole = drops, .drops = drops};
  absl::Status fits = FitsALane(drops ? options_.decision->kept.size() : given);
  if (!fits.ok()) return fits;
  TakeWhatIsMade(given, swap);
  std::uint64_t done = EntriesOf(swap.segments);
  left_dense_.emplace();
  if (done == waiting) {
    options_.state->Reset();
    return swap;
  }
  const absl::StatusOr<HostLaneRows> rows = RowsThatStay();
  if (!rows.ok()) return rows.status();
  const std::uint64_t total = OlderOf(CountDecided(*rows));
  if (swap.drops) ended = total;
  // Sinks get their segment with the first packed one: if nothing packs, all rows stay together.
  const std::uint64_t sinks = swap.segments.empty() ? SinksAmong(total) : 0;
  done += sinks;
  std::optional<Form> before = FormBefore();
  for (const std::shared_ptr<Segment>& segment : swap.segments) {
    if (std::optional<Form> form = FormOf(segment.get())) before = std::move(form);
  }
  std::optional<std::uint64_t> left_plain;  // index of the first row
  const std::uint64_t begun_at = done;
  for (int made = 0; done < total; ++made) {
    if (!swap.drops && (made == kSegmentsAtOnce || done - begun_at >= kTokensAtOnce)) {
      goes_on_ = true;
      break;
    }
    const bool of_end = done < ended;
    std::uint64_t count = std::min(segments.tokens, (of_end ? ended : total) - done);
    if (!of_end && count < segments.tokens) count = FullTiles(decoded - std::min(decoded, done));
    if (count == 0) break;
    std::optional<Form> form;
    if (count < segments.min_tokens && count < segments.tokens) {
      if (!of_end) break;
      absl::StatusOr<std::optional<Form>> short_end = FormOfShortEnd(*rows, done, count, before);
      if (!short_end.ok()) return short_end.status();
      if (!short_end->has_value()) {
        // Treat the rows as decoded: with later rows they may be long enough for a segment.
        left_plain = done;
        ended = done;
        continue;
      }
      form = *std::move(short_end);
    } else {
      absl::StatusOr<Form> own = MakeForm(*rows, done, count);
      if (!own.ok()) return own.status();
      form = *std::move(own);
    }
    if (absl::Status status = AddSinks(*rows, sinks, swap); !status.ok()) return status;
    const absl::StatusOr<bool> sealed = AddSealed(*form, *rows, done, count, swap);
    if (!sealed.ok()) return sealed.status();
    if (*sealed) before = std::move(form);
    done += count;
  }
  if (goes_on_) {
    TellOthers(done, swap);
    options_.state->begun.emplace(LaneState::ContinuedSeal{
        .rows = cache::SealedRows(options_.policy->text, run_.Waiting(), swap.segments),
        .segments = swap.segments,
        .taken_over = swap.taken_over});
    return std::nullopt;
  }
  NoteWaiting(*rows, done, total);
  if (left_plain == done) options_.counters->left_plain.fetch_add(1, std::memory_order_relaxed);
  const bool none_sealed = swap.segments.empty();
  if (none_sealed && !swap.drops) {
    options_.state->begun.reset();
    if (left_plain == done) {
      run_.Waiting().front().segment->MarkKeptDense(options_.policy->text);
    }
    return std::nullopt;
  }
  if (!swap.drops) TellOthers(done, swap);
  // Chosen rows keep their positions; later rows are consecutive tokens.
  const std::uint64_t chosen = swap.drops ? total : done;
  const std::size_t sealed = swap.segments.size();
  const std::uint64_t first_left = none_sealed ? 0 : done;
  absl::Status status = AddPlain(*rows, first_left, chosen - first_left, swap);
  if (swap.drops) Settle(swap);
  if (status.ok()) status = AddPlain(*rows, chosen, rows->count() - chosen, swap);
  if (!status.ok()) return status;
  options_.state->Reset();
  if (left_plain == done) swap.segments[sealed]->MarkKeptDense(options_.policy->text);
  return swap;
}

// FAILED_PRECONDITION, not RESOURCE_EXHAUSTED: more memory would not help, and deferred seals would
// wait for it in vain.
absl::Status LaneCoder::FitsALane(std::uint64_t entries) const {
  const std::uint64_t tokens = options_.policy->mosaic->segments.tokens;
  const std::uint64_t segments = run_.segments_before + (entries + tokens - 1) / tokens;
  // Leaves spare segments for later rows.
  if (segments <= shm::kMaxSegments - kSpareSegments) return absl::OkStatus();
  return absl::FailedPreconditionError(Concat(
      "sealing ", entries, " entries of a lane would make ", segments, " segments; the limit is ",
      shm::kMaxSegments - kSpareSegments, "; set a policy with a longer segment"));
}

// Adds the sinks, the lane's first rows, as a dense segment before the first packed one.
absl::Status LaneCoder::AddSinks(const HostLaneRows& rows, std::uint64_t count, LaneSwap& swap) {
  if (count == 0 || !swap.segments.empty()) return absl::OkStatus();
  absl::Status status = AddPlain(rows, 0, count, swap);
  Settle(swap);
  return status;
}

// False: the form cannot represent a value, and the rows stay dense for good.
absl::StatusOr<bool> LaneCoder::AddSealed(const Form& form, const HostLaneRows& rows,
                                          std::uint64_t first, std::uint64_t count,
                                          LaneSwap& swap) {
  absl::StatusOr<std::shared_ptr<Segment>> segment = Encoded(form, rows, first, count);
  if (!segment.ok()) return segment.status();
  if (*segment != nullptr) {
    swap.segments.push_back(*std::move(segment));
    options_.counters->segments_sealed.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  if (absl::Status status = AddPlain(rows, first, count, swap); !status.ok()) return status;
  swap.segments.back()->SealDense();
  options_.counters->left_plain.fetch_add(1, std::memory_order_relaxed);
  left_dense_ = DenseRows{.reason = DenseReason::kValueOutOfRange,
                          .first_position = rows.positions()[first],
                          .tokens = count};
  return false;
}

DenseRows LaneCoder::WhyDense(const HostLaneRows& rows, std::uint64_t first, std::uint64_t count,
                              const kernels::Strategy& own) const {
  const policies::MosaicPolicy& mosaic = *options_.policy->mosaic;
  DenseRows dense = {.first_position = rows.positions()[first], .tokens = count};
  if (!own.within_threshold) {
    const kernels::Loss& most = mosaic.strategy.threshold;
    // Report the side that exceeds its limit by more.
    dense.of_value = own.loss.value - most.value > own.loss.key - most.key;
    dense.loss = dense.of_value ? own.loss.value : own.loss.key;
    dense.limit = dense.of_value ? most.value : most.key;
    dense.reason = DenseReason::kLossAboveLimit;
    dense.needs = dense.min_segment = std::min(mosaic.segments.min_tokens, mosaic.segments.tokens);
    return dense;
  }
  dense.reason = DenseReason::kSegmentOverhead;
  const std::uint64_t plain = TileBytes(kernels::DenseShape(tile_.head_dim, tile_.type), 1);
  const std::uint64_t packed = TileBytes(own.shape, 1);
  if (packed >= plain) return dense;
  const std::uint64_t rotations = kernels::RotationBytes(own.shape, own.rotation_type);
  dense.needs = (rotations / (plain - packed) + 1) * kTileEntries;
  return dense;
}

void LaneCoder::NoteWaiting(const HostLaneRows& rows, std::uint64_t done, std::uint64_t total) {
  if (left_dense_->reason != DenseReason::kNone || done == rows.count()) return;
  const policies::SegmentOptions& segments = options_.policy->mosaic->segments;
  *left_dense_ = {.reason = done < total ? DenseReason::kWaiting : DenseReason::kNewest,
                  .first_position = rows.positions()[done],
                  .tokens = rows.count() - done};
  if (done < total) left_dense_->needs = std::min(segments.min_tokens, segments.tokens);
}

absl::StatusOr<LaneCoder::Form> LaneCoder::MakeForm(const HostLaneRows& rows, std::uint64_t first,
                                                    std::uint64_t count) {
  const kernels::Strategy strategy = MakeStrategyOf(rows, first, count);
  return Store(strategy);
}

kernels::Strategy LaneCoder::MakeStrategyOf(const HostLaneRows& rows, std::uint64_t first,
                                            std::uint64_t count) {
  const kernels::LaneRows lane = rows.lane(first, count);
  const std::uint64_t seen = run_.provisional_entries();
  const LaneMoments* const known = options_.decision == nullptr && first == 0 && seen <= count
                                       ? options_.state->MomentsOf(seen)
                                       : nullptr;
  LaneMoments moments = known != nullptr ? *known : LaneMoments(tile_.head_dim);
  const std::uint64_t covered = known != nullptr ? seen : 0;
  moments.Add(rows.lane(first + covered, count - covered), *options_.operations);
  options_.counters->strategies_made.fetch_add(1, std::memory_order_relaxed);
  return kernels::MakeStrategy(lane, moments.key, moments.value, options_.policy->mosaic->strategy,
                               *options_.operations);
}

absl::StatusOr<LaneCoder::Form> LaneCoder::Store(const kernels::Strategy& strategy) {
  return Store(strategy.shape, strategy.view(), {strategy.loss.key, strategy.loss.value});
}

absl::StatusOr<LaneCoder::Form> LaneCoder::Store(const kernels::TileShape& shape,
                                                 const kernels::RotationView& matrices,
                                                 cache::SegmentLoss loss) {
  absl::StatusOr<std::shared_ptr<const cache::Rotations>> rotations =
      cache::ReserveRotations(*options_.memory, shape, matrices);
  if (!rotations.ok()) return rotations.status();
  const cache::RotationStore store = {
      .rotations = rotations->get(), .shape = shape, .matrices = matrices};
  if (absl::Status status = cache::StoreRotations(*options_.memory, {&store, 1}); !status.ok()) {
    return status;
  }
  return Form{shape, *std::move(rotations), loss};
}

// For the end of a prompt that is shorter than min_tokens: its own strategy, the previous one, or
// none, whichever takes the fewest bytes among those within the loss threshold. nullopt: the rows
// stay dense.
absl::StatusOr<std::optional<LaneCoder::Form>> LaneCoder::FormOfShortEnd(
    const HostLaneRows& rows, std::uint64_t first, std::uint64_t count,
    const std::optional<Form>& before) {
  const kernels::Loss& threshold = options_.policy->mosaic->strategy.threshold;
  std::uint64_t smallest = TileBytes(kernels::DenseShape(tile_.head_dim, tile_.type), count);
  std::optional<Form> best;
  if (before.has_value() && TileBytes(before->shape, count) < smallest) {
    const absl::StatusOr<kernels::Loss> loss = LossOf(*before, rows.lane(first, count));
    if (!loss.ok()) return loss.status();
    if (kernels::IsWithin(*loss, threshold)) {
      smallest = TileBytes(before->shape, count);
      best = before;
      best->loss = {loss->key, loss->value};
    }
  }
  const kernels::Strategy own = MakeStrategyOf(rows, first, count);
  const std::uint64_t bytes =
      TileBytes(own.shape, count) + kernels::RotationBytes(own.shape, own.rotation_type);
  if (!own.within_threshold || bytes >= smallest) {
    if (!best.has_value()) left_dense_ = WhyDense(rows, first, count, own);
    return best;
  }
  absl::StatusOr<Form> stored = Store(own);
  if (!stored.ok()) return stored.status();
  return *std::move(stored);
}

absl::StatusOr<kernels::Loss> LaneCoder::LossOf(const Form& form, const kernels::LaneRows& rows) {
  if (form.rotations == nullptr) {
    return kernels::LossUnder(rows, form.shape, {}, *options_.operations);
  }
  kernels::RotationView stored = cache::ViewOf(form.rotations.get(), form.shape);
  kernels::AlignedBytes copies[2];
  const auto copy = [&](const kernels::RowShape& side, const std::byte*& matrix,
                        kernels::AlignedBytes& to) {
    if (matrix == nullptr) return absl::OkStatus();
    to.resize(kernels::RotationBytes(form.shape, side, stored.type));
    absl::Status status = options_.memory->device->Read(to.data(), matrix, to.size());
    matrix = to.data();
    return status;
  };
  absl::Status status = copy(form.shape.key, stored.key, copies[0]);
  if (status.ok()) status = copy(form.shape.value, stored.value, copies[1]);
  if (!status.ok()) return status;
  return kernels::LossUnder(rows, form.shape, stored, *options_.operations);
}

}  // namespace tessera::compaction
