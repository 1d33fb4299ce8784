// How rows enter a sequence: plan and reserve for all lanes, fill, then publish.

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/cache/sequence/join.h"
#include "daemon/cache/sequence/sequence.h"

namespace tessera::cache {

using kernels::kTileEntries;

namespace {
// Bounds the run lists of a long prompt; a device takes this many in one launch.
constexpr std::size_t kRunsAtOnce = 16384;
}  // namespace

absl::StatusOr<std::uint64_t> Sequence::Append(const AppendSpan& span, const RowSource& rows,
                                               absl::FunctionRef<void()> before_seen) {
  MutexLock lock(mutex_);
  if (absl::Status status = Resident(); !status.ok()) return status;
  TESSERA_CHECK(span.layers > 0 && span.first_layer + span.layers <= model_->layers(),
                "the caller checked the layers");
  if (span.position_shift.value_or(moved_.shift) != moved_.shift) {
    return absl::FailedPreconditionError(
        Concat(id_.ToString(), " has moved its tokens by ", moved_.shift,
               " positions, but these rows were computed for a shift of ", *span.position_shift));
  }
  // Checked before the tail is closed, so that a refused append leaves the sequence decoding.
  absl::StatusOr<std::uint64_t> committed = CommittedLocked();
  if (!committed.ok()) return committed.status();
  // A prompt may arrive layer by layer, and each layer may be compressed on arrival. No append may
  // go beyond the tokens that the other layers have moved.
  const std::uint64_t ahead = TokensMovedAhead();
  if (ahead != 0 && span.first_token + span.tokens > ahead) return PartlyMovedError();
  for (std::uint32_t layer = span.first_layer; layer < span.first_layer + span.layers; ++layer) {
    if (IsOnlyMovedLayer(layer)) return PartlyMovedError();
  }
  absl::Status status = CheckFirstToken(span, *committed);
  if (status.ok()) status = CloseTailLocked();
  // Checked again, because the worker may have committed tokens in the meantime.
  const std::uint64_t before = TokensInSegments();
  if (status.ok()) status = CheckFirstToken(span, before);
  Replaced replaced;
  if (status.ok()) status = AppendLocked(span, rows, before_seen, replaced);
  if (!status.ok()) return status;
  step_end_ = span.first_token + span.tokens;
  step_begin_ = span.decoded ? span.first_token : step_end_;
  FinishPublication(std::move(replaced));
  const std::uint64_t tokens = TokensInSegments();
  memory_.counters->tokens_appended.fetch_add(tokens - before, std::memory_order_relaxed);
  return tokens;
}

std::uint64_t Sequence::step_begin() const {
  MutexLock lock(mutex_);
  std::uint64_t tokens = 0;
  for (const Lane& lane : lanes_) tokens = std::max(tokens, lane.tail_start);
  return tokens > step_end_ ? tokens : std::min(step_begin_, tokens);
}

// `committed`: tokens that every layer holds, including those in the tail.
absl::Status Sequence::CheckFirstToken(const AppendSpan& span, std::uint64_t committed) {
  for (std::uint32_t layer = span.first_layer; layer < span.first_layer + span.layers; ++layer) {
    const std::uint64_t held =
        std::max(committed, LaneAt(model_->layout().lane(layer, 0)).tail_start);
    if (held != span.first_token) {
      return absl::OutOfRangeError(Concat("first_token is ", span.first_token, "; layer ", layer,
                                          " of ", id_.ToString(), " holds ", held, " tokens"));
    }
  }
  return absl::OkStatus();
}

absl::Status Sequence::AppendLocked(const AppendSpan& span, const RowSource& rows,
                                    absl::FunctionRef<void()> before_seen, Replaced& replaced) {
  const bool first_rows = lanes_.empty();
  absl::Status status = MakeLanes();
  if (status.ok()) status = AppendToLanes(span, rows, before_seen, replaced);
  if (!status.ok() && first_rows) DropLanes();
  return status;
}

absl::Status Sequence::AppendToLanes(const AppendSpan& span, const RowSource& rows,
                                     absl::FunctionRef<void()> before_seen, Replaced& replaced) {
  // If memory is short, retry without the copies that joining needs.
  absl::StatusOr<std::vector<LanePlan>> plans = PlanAll(span, /*joins=*/true);
  if (!plans.ok()) plans = PlanAll(span, /*joins=*/false);
  if (!plans.ok()) return plans.status();
  if (absl::Status status = Fill(*plans, rows, span.first_token); !status.ok()) return status;
  before_seen();
  for (LanePlan& plan : *plans) Commit(plan, span.tokens, replaced);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Sequence::LanePlan>> Sequence::PlanAll(const AppendSpan& span,
                                                                  bool joins) {
  std::vector<LanePlan> plans;
  for (std::uint32_t layer = span.first_layer; layer < span.first_layer + span.layers; ++layer) {
    for (std::uint32_t head = 0; head < model_->layout().kv_heads(layer); ++head) {
      absl::StatusOr<LanePlan> plan = Plan(layer, head, span.tokens, joins);
      if (!plan.ok()) return plan.status();
      plans.push_back(*std::move(plan));
    }
  }
  return plans;
}

absl::StatusOr<Sequence::LanePlan> Sequence::Plan(std::uint32_t layer, std::uint32_t kv_head,
                                                  std::uint64_t tokens, bool joins) {
  LanePlan plan = {
      .lane = model_->layout().lane(layer, kv_head), .layer = layer, .kv_head = kv_head};
  Lane& lane = lanes_[plan.lane];
  lane.open = lane.open || lane.MayReopen();
  const bool begins_one = !lane.open || lane.segments.back().entries == kMaxSegmentEntries;
  if (joins && tokens > 0 && begins_one && MayJoin(lane)) plan.taken_over = CountToJoin(lane);
  if (absl::Status status = Reserve(plan, tokens); !status.ok()) return status;
  return plan;
}

// No joining while a packing or a recoding is running: it looks for its segments when it publishes.
bool Sequence::MayJoin(const Lane& lane) const { return !packing_ && !lane.recoding; }

absl::Status Sequence::JoinForFork(Sequence& child, std::uint64_t tail_tokens) {
  if (lanes_.empty()) return absl::OkStatus();
  std::vector<LanePlan> plans;
  for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) {
    for (std::uint32_t head = 0; head < model_->layout().kv_heads(layer); ++head) {
      LanePlan plan = {.lane = model_->layout().lane(layer, head), .layer = layer, .kv_head = head};
      if (!MayJoin(lanes_[plan.lane])) continue;
      plan.taken_over = CountToJoinForForks(lanes_[plan.lane]);
      if (plan.taken_over > 0) plans.push_back(std::move(plan));
    }
  }
  if (plans.empty()) return absl::OkStatus();
  absl::Status status = ReserveAlongside(child, tail_tokens, plans);
  // Without room for copies, the child shares the segments as they are.
  if (absl::IsResourceExhausted(status)) return absl::OkStatus();
  if (!status.ok()) return status;
  status = FillTakenOver(plans);
  std::vector<device::WordStore> words;
  for (const LanePlan& plan : plans) {
    const Growth& growth = plan.growths.front();
    growth.segment->ListTableWords(growth.tiles, growth.table, words);
  }
  if (status.ok()) status = memory_.device->StoreWords(words);
  if (!status.ok()) return status;
  Replaced replaced;
  for (LanePlan& plan : plans) Commit(plan, 0, replaced);
  FinishPublication(std::move(replaced));
  return absl::OkStatus();
}

// Reserves for the plans while the child still gets what it needs: snapshots for a cut, and the
// tail.
absl::Status Sequence::ReserveAlongside(Sequence& child, std::uint64_t tail_tokens,
                                        std::vector<LanePlan>& plans) {
  const absl::StatusOr<std::vector<pool::Block>> cut = ReserveSnapshots(0);
  if (!cut.ok()) return cut.status();
  absl::StatusOr<std::vector<pool::Block>> appended;
  absl::StatusOr<std::vector<LanePlan>> tail;
  if (tail_tokens > 0) {
    appended = ReserveSnapshots(1 + tail_tokens / kMaxSegmentEntries);
    if (!appended.ok()) return appended.status();
    tail = child.PlanAll({0, model_->layers(), 0, tail_tokens}, /*joins=*/false);
    if (!tail.ok()) return tail.status();
  }
  for (LanePlan& plan : plans) {
    if (absl::Status status = Reserve(plan, 0); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Sequence::Reserve(LanePlan& plan, std::uint64_t tokens) {
  const Lane& lane = lanes_[plan.lane];
  std::uint64_t position = lane.tail_start;
  std::size_t segments = lane.segments.size() - plan.taken_over;
  if (plan.taken_over == 0 && lane.open && lane.segments.back().entries < kMaxSegmentEntries) {
    const HeldSegment& last = lane.segments.back();
    const std::uint32_t count = static_cast<std::uint32_t>(
        std::min<std::uint64_t>(tokens, kMaxSegmentEntries - last.entries));
    plan.growths.push_back({last.segment, false, last.entries, count, {}, {}});
    tokens -= count;
    position += count;
  }
  std::uint32_t copied = 0;
  for (std::size_t i = segments; i < lane.segments.size(); ++i) copied += lane.segments[i].entries;
  while (tokens + copied > 0) {
    const std::uint32_t count =
        static_cast<std::uint32_t>(std::min<std::uint64_t>(tokens, kMaxSegmentEntries - copied));
    const kernels::DenseTile tile = model_->layout().tile(plan.layer);
    auto segment =
        std::make_shared<Segment>(kernels::DenseShape(tile.head_dim, tile.type), position - copied);
    if (copied > 0) segment->TakeNotesOf(*lane.segments[segments].segment);
    plan.growths.push_back({std::move(segment), true, copied, count, {}, {}});
    tokens -= count;
    position += count;
    copied = 0;
    ++segments;
  }
  for (Growth& growth : plan.growths) {
    if (absl::Status status = ReserveGrowth(growth); !status.ok()) return status;
  }
  absl::StatusOr<pool::Block> snapshot =
      memory_.directory->AllocateSnapshot(static_cast<std::uint32_t>(segments));
  if (!snapshot.ok()) return snapshot.status();
  plan.snapshot = *std::move(snapshot);
  return absl::OkStatus();
}

absl::Status Sequence::ReserveGrowth(Growth& growth) {
  const Segment& segment = *growth.segment;
  const std::size_t needed = (growth.first_entry + growth.count + kTileEntries - 1) / kTileEntries;
  if (needed > segment.tiles()) {
    absl::StatusOr<Tiles> tiles =
        Tiles::Allocate(*memory_.pool, segment.shape(), needed - segment.tiles());
    if (!tiles.ok()) return tiles.status();
    growth.tiles = *std::move(tiles);
  }
  if (!segment.TableHolds(needed)) {
    absl::StatusOr<pool::Block> table = memory_.pool->Allocate(
        segment.TableBytes(needed), pool::Fit::kRounded, pool::MemoryTag::kTables);
    if (!table.ok()) return table.status();
    growth.table = *std::move(table);
  }
  return absl::OkStatus();
}

std::byte* Sequence::Growth::TileOf(std::uint32_t entry) const {
  const std::size_t tile = entry / kTileEntries;
  const std::size_t present = segment->tiles();
  return tile < present ? segment->TileData(tile) : tiles.tile(tile - present);
}

// Writes only memory that no snapshot shows: free rows of the last tile, new tiles, and their words
// in the table. If a value is not usable or the device fails, nothing visible has changed.
absl::Status Sequence::Fill(const std::vector<LanePlan>& plans, const RowSource& rows,
                            std::uint64_t first_token) {
  if (absl::Status status = FillTakenOver(plans); !status.ok()) return status;
  FillBatch batch;
  for (const LanePlan& plan : plans) {
    AddToBatch(plan, rows, first_token, batch);
    if (batch.runs.size() < kRunsAtOnce) continue;
    if (absl::Status status = Flush(rows.place(), batch); !status.ok()) return status;
  }
  return Flush(rows.place(), batch);
}

// Runs before new rows are written: it writes all bytes of a tile, even of one that is to take some
// of them.
absl::Status Sequence::FillTakenOver(const std::vector<LanePlan>& plans) {
  std::vector<RowsCopy> copies;
  for (const LanePlan& plan : plans) {
    if (plan.taken_over == 0) continue;
    RowsCopy& copy = copies.emplace_back();
    copy.from = std::span(lanes_[plan.lane].segments).last(plan.taken_over);
    const Growth& growth = plan.growths.front();
    for (std::uint32_t entry = 0; entry < growth.first_entry; entry += kTileEntries) {
      copy.tiles.push_back({.tile = growth.TileOf(entry)});
    }
  }
  return CopyRows(memory_, copies);
}

void Sequence::AddToBatch(const LanePlan& plan, const RowSource& rows, std::uint64_t first_token,
                          FillBatch& batch) {
  const kernels::DenseTile tile = model_->layout().tile(plan.layer);
  std::uint64_t done = 0;
  for (const Growth& growth : plan.growths) {
    growth.segment->ListTableWords(growth.tiles, growth.table, batch.words);
    for (std::uint32_t entry = growth.first_entry; entry < growth.first_entry + growth.count;) {
      const std::uint32_t row = entry % kTileEntries;
      const std::uint32_t room =
          std::min(kTileEntries - row, growth.first_entry + growth.count - entry);
      const RowSpan from = rows.At(plan.layer, plan.kv_head, done, room);
      std::byte* const target = growth.TileOf(entry);
      batch.runs.push_back({.key = from.key,
                            .value = from.value,
                            .stride = from.stride,
                            .key_target = target + tile.key_offset(row),
                            .value_target = target + tile.value_offset(row),
                            .rows = from.rows,
                            .row_bytes = static_cast<std::uint32_t>(tile.row_bytes())});
      batch.origins.push_back({plan.layer, plan.kv_head, first_token + done});
      entry += from.rows;
      done += from.rows;
    }
  }
}

absl::Status Sequence::Flush(device::Place source, FillBatch& batch) {
  const absl::StatusOr<std::optional<device::UnusableRow>> unusable =
      memory_.device->StoreRows(source, model_->spec().type, batch.runs);
  if (!unusable.ok()) return unusable.status();
  if (unusable->has_value()) {
    const device::UnusableRow& row = **unusable;
    const FillBatch::Origin& origin = batch.origins[row.run];
    return Fail(Concat(row.of_value ? "V" : "K", " of layer ", origin.layer, ", kv head ",
                       origin.kv_head, ", token ", origin.first_token + row.row, ", channel ",
                       row.channel, " is not finite or has a magnitude of 2^63 or more"));
  }
  if (absl::Status status = memory_.device->StoreWords(batch.words); !status.ok()) return status;
  batch = FillBatch();
  return absl::OkStatus();
}

void Sequence::Commit(LanePlan& plan, std::uint64_t tokens, Replaced& replaced) {
  Lane& lane = lanes_[plan.lane];
  for (std::size_t i = 0; i < plan.taken_over; ++i) {
    replaced.segments.push_back(std::move(lane.segments.back().segment));
    lane.segments.pop_back();
  }
  for (Growth& growth : plan.growths) {
    memory_.counters->tiles_written.fetch_add(growth.tiles.size(), std::memory_order_relaxed);
    pool::Block old = growth.segment->AddTiles(std::move(growth.tiles), std::move(growth.table));
    if (growth.first_entry < growth.segment->filled()) {
      growth.segment->CountRewrite(growth.first_entry);
    }
    growth.segment->set_filled(growth.first_entry + growth.count);
    if (old.valid()) replaced.blocks.push_back(std::move(old));
    if (growth.fresh) {
      lane.segments.push_back({std::move(growth.segment), growth.first_entry + growth.count});
    } else {
      lane.segments.back().entries += growth.count;
    }
  }
  lane.open = lane.open || !plan.growths.empty();
  lane.entries += tokens;
  lane.tail_start += tokens;
  PublishLane(plan.lane, std::move(plan.snapshot), replaced);
}

void Sequence::PublishLane(std::uint32_t index, pool::Block block, Replaced& replaced) {
  Lane& lane = lanes_[index];
  const shm::Snapshot header = {.magic = shm::kSnapshotMagic,
                                .segment_count = static_cast<std::uint32_t>(lane.segments.size()),
                                .entries = lane.entries,
                                .tail_start = lane.tail_start,
                                .reserved = 0};
  std::byte* at = block.data();
  std::memcpy(at, &header, sizeof header);
  at += sizeof header;
  for (const HeldSegment& held : lane.segments) {
    const shm::SegmentRef ref = held.Ref();
    std::memcpy(at, &ref, sizeof ref);
    at += sizeof ref;
  }
  if (lane.snapshot.valid()) replaced.blocks.push_back(std::move(lane.snapshot));
  lane.snapshot = std::move(block);
  lane_words()[index].store(shm::LaneWord::Pack(++lane.generation, lane.snapshot.offset()));
  memory_.counters->snapshots_published.fetch_add(1, std::memory_order_relaxed);
}

void Sequence::FinishPublication(Replaced replaced, pool::Epochs::Garbage also) {
  if (!freed_) {
    // While layers arrive one after another, layers that have no tokens yet have moved none either.
    const std::uint64_t tokens = TokensInSegments();
    published_tokens_.store(tokens, std::memory_order_relaxed);
    block().next_position.store(tokens - std::min(tokens, moved_.shift));
  }
  block().version.fetch_add(1);
  const std::uint64_t bytes = replaced.bytes();
  if (bytes == 0 && !also && replaced.segments.empty()) return;
  memory_.epochs->Retire(
      [replaced = std::move(replaced), also = std::move(also)]() mutable {
        if (also) std::move(also)();
      },
      bytes);
}

}  // namespace tessera::cache
