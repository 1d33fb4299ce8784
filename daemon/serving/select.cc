#include "daemon/serving/select.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/serving/attend_item.h"
#include "kernels/dispatch/plan.h"

namespace tessera::serving {

namespace {

// The entries at [first, first + count) that the range covers.
std::uint64_t SeenOf(std::uint64_t first, std::uint64_t count,
                     const kernels::PositionRange& visible) {
  const std::uint64_t begin = std::max(first, visible.begin);
  const std::uint64_t end = std::min(first + count, visible.end);
  return end > begin ? end - begin : 0;
}

// Writes down what is taken: item i of the batch is kv head i.
class Recorder final : public kernels::SelectionSink {
 public:
  Recorder(const AttendItem& item, v1::SelectResponse& response)
      : item_(item), response_(response) {}

  void Take(std::uint32_t index, const kernels::SelectedRun& run) override {
    v1::HeadSelection& head = *response_.mutable_heads(static_cast<int>(index));
    v1::PositionRun& taken = *head.add_runs();
    // Entry e of a segment stands at its first position + e: none here has positions of its own.
    taken.set_first_position(item_.lanes[index].segments[run.segment].first_position +
                             run.first_entry);
    taken.set_entries(run.entries);
    head.set_selected_entries(head.selected_entries() + run.entries);
  }

 private:
  const AttendItem& item_;
  v1::SelectResponse& response_;
};

// What the queries see of a lane, and where.
void CountVisible(const kernels::LaneView& lane, const kernels::PositionRange& visible,
                  v1::HeadSelection& head) {
  std::uint64_t with_summary = 0;
  std::uint64_t without = 0;
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    const kernels::SegmentView& segment = lane.segments[s];
    const std::uint64_t seen = SeenOf(segment.first_position, segment.entries, visible);
    (kernels::BlocksOf(segment) == 0 ? without : with_summary) += seen;
  }
  const std::uint64_t tail = SeenOf(lane.tail.begin, lane.tail.end - lane.tail.begin, visible);
  head.set_entries_without_summary(without);
  head.set_tail_entries(tail);
  head.set_visible_entries(with_summary + without + tail);
}

absl::Status Choose(const Services& services, const Caller& caller,
                    const v1::SelectRequest& request, const kernels::LayerGeometry& geometry,
                    const AttendItem& item, v1::SelectResponse& response) {
  std::vector<kernels::AttendItem> items;
  for (std::uint32_t head = 0; head < geometry.kv_heads; ++head) {
    items.push_back({.lane = &item.lanes[head],
                     .kv_head = head,
                     .queries = item.queries,
                     .first_query_position = item.first_position,
                     .query = item.query.data(),
                     .selection = &*item.rule});
    response.add_heads()->set_kv_head(head);
  }
  const kernels::AttendBatch batch = {
      .geometry = geometry, .causal = !request.non_causal(), .items = items};
  Recorder recorder(item, response);
  absl::StatusOr<std::string_view> implementation =
      services.device->Select(batch, caller.tenant->pool().View(), recorder);
  if (!implementation.ok()) return implementation.status();
  response.set_implementation(std::string(*implementation));
  for (std::uint32_t head = 0; head < geometry.kv_heads; ++head) {
    CountVisible(item.lanes[head], kernels::VisibleFromItem(batch, items[head]),
                 *response.mutable_heads(static_cast<int>(head)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Select(const Services& services, const Caller& caller,
                    const v1::SelectRequest& request, v1::SelectResponse& response) {
  absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence =
      FindLive(caller, request.sequence_id());
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
      Concat("the answer would have ", response.ByteSizeLong(), " bytes; the largest message is ",
             services.max_message_bytes, "; ask for fewer entries, or pack with larger blocks"));
}

}  // namespace tessera::serving
