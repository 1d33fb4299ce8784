#include "daemon/serving/rpc/select.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/serving/rpc/attend_item.h"
#include "kernels/dispatch/per_head.h"
#include "kernels/dispatch/plan.h"

namespace tessera::serving {

namespace {

// The positions of a segment's entries, read from its tiles.
class EntryPositions {
 public:
  static absl::StatusOr<EntryPositions> Read(device::Device& device,
                                             const kernels::SegmentView& segment) {
    EntryPositions positions(segment);
    if (!segment.shape.positions) return positions;
    const std::uint32_t tiles =
        (segment.entries + kernels::kTileEntries - 1) / kernels::kTileEntries;
    const kernels::TileLayout layout = kernels::LayoutOf(segment.shape);
    std::vector<std::uint64_t> offsets(tiles);
    absl::Status status = device.Read(reinterpret_cast<std::byte*>(offsets.data()),
                                      reinterpret_cast<const std::byte*>(segment.tile_offsets),
                                      tiles * sizeof(std::uint64_t));
    if (!status.ok()) return status;
    positions.words_.resize(std::size_t{tiles} * kernels::kTileEntries);
    for (std::uint32_t tile = 0; tile < tiles; ++tile) {
      if (segment.arena_bytes < layout.bytes ||
          offsets[tile] > segment.arena_bytes - layout.bytes) {
        return absl::InternalError(Concat("tile ", tile, " of a segment is out of bounds"));
      }
      std::uint32_t* const to = positions.words_.data() + std::size_t{tile} * kernels::kTileEntries;
      status = device.Read(reinterpret_cast<std::byte*>(to),
                           segment.arena + offsets[tile] + layout.positions,
                           kernels::kTileEntries * sizeof(std::uint32_t));
      if (!status.ok()) return status;
    }
    return positions;
  }

  std::uint64_t At(std::uint32_t entry) const {
    return segment_->first_position + (words_.empty() ? entry : words_[entry]);
  }
  std::uint64_t Seen(const kernels::PositionRange& visible) const {
    std::uint64_t seen = 0;
    for (std::uint32_t entry = 0; entry < segment_->entries; ++entry) {
      seen += At(entry) >= visible.begin && At(entry) < visible.end;
    }
    return seen;
  }

 private:
  explicit EntryPositions(const kernels::SegmentView& segment) : segment_(&segment) {}
  const kernels::SegmentView* segment_;
  std::vector<std::uint32_t> words_;  // empty: consecutive positions
};

// Records the selected runs per item; its index is the kv head, or the query head.
class Recorder final : public kernels::SelectionSink {
 public:
  explicit Recorder(std::size_t heads) : runs_(heads) {}
  void Take(std::uint32_t index, const kernels::SelectedRun& run) override {
    runs_[index].push_back(run);
  }
  const std::vector<kernels::SelectedRun>& runs(std::size_t head) const { return runs_[head]; }

 private:
  std::vector<std::vector<kernels::SelectedRun>> runs_;
};

// Adds a run to `head`, split where positions are not consecutive.
void AddRuns(const EntryPositions& positions, const kernels::SelectedRun& run,
             v1::HeadSelection& head) {
  v1::PositionRun* last = nullptr;
  for (std::uint32_t entry = run.first_entry; entry < run.first_entry + run.entries; ++entry) {
    const std::uint64_t position = positions.At(entry);
    if (last == nullptr || last->first_position() + last->entries() != position) {
      last = head.add_runs();
      last->set_first_position(position);
    }
    last->set_entries(last->entries() + 1);
  }
  head.set_selected_entries(head.selected_entries() + run.entries);
}

// The entry positions of each segment of a lane.
absl::StatusOr<std::vector<EntryPositions>> PositionsOf(device::Device& device,
                                                        const kernels::LaneView& lane) {
  std::vector<EntryPositions> all;
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    absl::StatusOr<EntryPositions> positions = EntryPositions::Read(device, lane.segments[s]);
    if (!positions.ok()) return positions.status();
    all.push_back(*std::move(positions));
  }
  return all;
}

// Fills in what was selected of a lane, and what the queries see of it.
void Tell(const kernels::LaneView& lane, const std::vector<EntryPositions>& positions,
          const kernels::PositionRange& visible, const std::vector<kernels::SelectedRun>& taken,
          v1::HeadSelection& head) {
  std::uint64_t with_summary = 0;
  std::uint64_t without = 0;
  auto next = taken.begin();
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    const bool summed_up = kernels::BlocksOf(lane.segments[s]) != 0;
    (summed_up ? with_summary : without) += positions[s].Seen(visible);
    for (; next != taken.end() && next->segment == s; ++next) AddRuns(positions[s], *next, head);
  }
  const std::uint64_t tail_begin = std::max(lane.tail.begin, visible.begin);
  const std::uint64_t tail_end = std::min(lane.tail.end, visible.end);
  const std::uint64_t tail = tail_end > tail_begin ? tail_end - tail_begin : 0;
  head.set_entries_without_summary(without);
  head.set_tail_entries(tail);
  head.set_visible_entries(with_summary + without + tail);
}

// All items of the batch have the same rule.
absl::Status ChooseFor(const Services& services, const Caller& caller,
                       const kernels::LayerGeometry& geometry, std::uint64_t first_position,
                       const kernels::AttendBatch& batch, v1::SelectResponse& response) {
  Recorder recorder(batch.items.size());
  absl::StatusOr<std::string_view> implementation =
      services.device->Select(batch, caller.tenant->pool().View(), recorder);
  if (!implementation.ok()) return implementation.status();
  response.set_implementation(std::string(*implementation));
  absl::StatusOr<std::vector<EntryPositions>> positions;
  for (std::size_t i = 0; i < batch.items.size(); ++i) {
    const kernels::AttendItem& item = batch.items[i];
    // Query heads of a group are consecutive and share a lane.
    if (i == 0 || item.lane != batch.items[i - 1].lane) {
      positions = PositionsOf(*services.device, *item.lane);
    }
    if (!positions.ok()) return positions.status();
    v1::HeadSelection& head = *response.add_heads();
    const bool each_head = item.selection->each_head;
    head.set_kv_head(each_head ? item.kv_head / geometry.group() : item.kv_head);
    if (each_head) head.set_query_head(item.kv_head);
    if (item.selection->each_query) {
      head.set_query(static_cast<std::uint32_t>(item.first_query_position - first_position));
    }
    Tell(*item.lane, *positions, kernels::VisibleFromItem(batch, item), recorder.runs(i), head);
  }
  return absl::OkStatus();
}

absl::Status Choose(const Services& services, const Caller& caller,
                    const v1::SelectRequest& request, const kernels::LayerGeometry& geometry,
                    const AttendItem& item, v1::SelectResponse& response) {
  const kernels::AttendBatch whole = {.geometry = geometry, .causal = !request.non_causal()};
  kernels::PerHeadItems items;
  for (std::uint32_t head = 0; head < geometry.kv_heads; ++head) {
    items.Add(whole, {.lane = &item.lanes[head],
                      .kv_head = head,
                      .queries = item.queries,
                      .first_query_position = item.first_position,
                      .query = item.query.data(),
                      .selection = &*item.rule});
  }
  return items.ForEachBatch(
      whole,
      [&](const kernels::AttendBatch& batch) {
        return ChooseFor(services, caller, geometry, item.first_position, batch, response);
      },
      [](const absl::Status& status) { return status.ok(); });
}

}  // namespace

absl::Status Select(const Services& services, const Caller& caller,
                    const v1::SelectRequest& request, v1::SelectResponse& response) {
  absl::StatusOr<cache::Residence> sequence = FindLive(caller, request.sequence_id());
  if (!sequence.ok()) return sequence.status();
  const absl::StatusOr<kernels::LayerGeometry> geometry =
      FindLayer((*sequence)->model(), request.layer());
  if (!geometry.ok()) return geometry.status();
  const absl::StatusOr<kernels::SelectionRule> rule = ToSelectionRule(request.selection());
  if (!rule.ok()) return rule.status();
  AttendItem item = {.sequence = *std::move(sequence), .rule = *rule};
  absl::Status status =
      FindQuery(request.query(), *geometry, kMaxSelectingQueries, *caller.session, item);
  if (status.ok()) status = TakeQuery(*services.device, item);
  if (!status.ok()) return status;
  const cache::Tenant::Reader pinned(*caller.tenant);
  status = ResolveLanes(*caller.tenant, request.layer(), item);
  if (status.ok()) {
    status = SetPosition(request.has_first_query_position()
                             ? std::optional(request.first_query_position())
                             : std::nullopt,
                         item);
  }
  if (status.ok()) status = CheckScores(*geometry, item);
  if (status.ok()) status = Choose(services, caller, request, *geometry, item, response);
  if (!status.ok()) return status;
  response.set_tokens(item.tokens);
  caller.tenant->counters().select_requests.fetch_add(1, std::memory_order_relaxed);
  if (response.ByteSizeLong() <= services.max_message_bytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat("the answer would have ", response.ByteSizeLong(), " bytes; max_message_bytes is ",
             services.max_message_bytes, "; select fewer entries, or pack with larger blocks"));
}

}  // namespace tessera::serving
