#include "daemon/serving/rpc/attend_item.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/serving/call/resident.h"
#include "kernels/dispatch/plan.h"
#include "proto/shm/resolve.h"

namespace tessera::serving {

namespace {

// The caller must hold a pin. The tail is read before the lane words, so that rows absorbed in
// between are seen at least in the segments.
absl::Status ReadLanes(cache::Tenant& tenant, std::uint32_t layer, const shm::Word* words,
                       AttendItem& item) {
  const shm::LaneLayout& layout = item.sequence->model().layout();
  item.tail = item.sequence->tail();
  std::optional<std::uint64_t> committed;
  if (item.tail != nullptr) committed = item.tail->CommittedTokens();

  const shm::MappedArena directory = tenant.directory().mapped();
  const shm::MappedArena pool = {tenant.pool().base(), tenant.pool().limit_bytes()};
  std::vector<std::size_t> first_segment;
  std::vector<shm::ResolvedLane> resolved(layout.kv_heads(layer));
  for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
    first_segment.push_back(item.segments.size());
    const std::uint64_t word = words[layout.lane(layer, head)].load();
    if (shm::ResolveLane(word, directory, pool, item.segments, resolved[head]) ==
        shm::ResolveStatus::kOutOfBounds) {
      return absl::InternalError(
          Concat("the snapshot of ", item.sequence->id().ToString(), " is out of bounds"));
    }
  }
  for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
    const shm::ResolvedLane& lane = resolved[head];
    kernels::LaneView view = {.segments = item.segments.data() + first_segment[head],
                              .segment_count = lane.segments};
    item.tokens = std::max(item.tokens, lane.tail_start);
    // The worker writes the committed count, so it is trusted only within the ring.
    if (committed.has_value() && *committed > lane.tail_start &&
        *committed - lane.tail_start <= layout.ring_capacity()) {
      const shm::TailRing ring = layout.ring(item.tail->region().data(), layer, head);
      view.tail = {
          .ring = ring.base, .ring_tiles = ring.tiles, .begin = lane.tail_start, .end = *committed};
      item.tokens = std::max(item.tokens, *committed);
    }
    item.lanes.push_back(view);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<cache::Residence> FindLive(const Caller& caller, std::uint64_t id) {
  absl::StatusOr<cache::Residence> sequence = FindResident(*caller.tenant, SequenceId(id));
  if (!sequence.ok() || !(*sequence)->failed()) return sequence;
  return absl::FailedPreconditionError(Concat((*sequence)->id().ToString(), " has failed: ",
                                              (*sequence)->Describe(/*lanes=*/false).failure));
}

absl::StatusOr<kernels::LayerGeometry> FindLayer(const cache::Model& model, std::uint32_t layer) {
  if (layer < model.layers()) return model.geometry(layer);
  return absl::InvalidArgumentError(
      Concat("layer is ", layer, "; the model has ", model.layers(), " layers"));
}

absl::StatusOr<kernels::ElementType> AnswerType(v1::DType asked, std::string_view field,
                                                const kernels::LayerGeometry& geometry) {
  if (asked == v1::DTYPE_UNSPECIFIED) return geometry.type;
  const absl::StatusOr<kernels::ElementType> type = ToElementType(asked, field);
  if (!type.ok() || *type == geometry.type || *type == kernels::ElementType::kFp32) return type;
  return absl::InvalidArgumentError(Concat(field, " is ", kernels::ElementName(*type),
                                           "; use fp32 or the model's type, ",
                                           kernels::ElementName(geometry.type)));
}

absl::Status FindQuery(const v1::Tensor& query, const kernels::LayerGeometry& geometry,
                       std::uint64_t most, const cache::SessionState& session, AttendItem& item) {
  absl::StatusOr<TensorBytes> asked =
      Resolve(query,
              {.name = "query",
               .type = geometry.type,
               .shape = {0, geometry.query_heads, geometry.head_dim},
               .layout = "[queries][query_heads][head_dim]"},
              session);
  if (!asked.ok()) return asked.status();
  if (asked->shape[0] > most) {
    return absl::InvalidArgumentError(
        Concat("query has ", asked->shape[0], " rows; the limit is ", most));
  }
  item.queries = static_cast<std::uint32_t>(asked->shape[0]);
  item.asked = *std::move(asked);
  return absl::OkStatus();
}

absl::Status TakeQuery(device::Device& device, AttendItem& item) {
  item.query.resize(item.asked.bytes);
  if (item.asked.place == device::Place::kDevice) {
    return device.Read(item.query.data(), item.asked.data, item.asked.bytes);
  }
  std::memcpy(item.query.data(), item.asked.data, item.asked.bytes);
  return absl::OkStatus();
}

absl::Status SetPosition(std::optional<std::uint64_t> first_position, AttendItem& item) {
  constexpr std::uint64_t kLastPosition = std::uint64_t{1} << 62;
  if (!first_position.has_value() && item.queries > item.tokens) {
    return absl::InvalidArgumentError(Concat("query has ", item.queries, " rows, but ",
                                             item.sequence->id().ToString(), " has ", item.tokens,
                                             " tokens; set first_query_position"));
  }
  item.first_position = first_position.value_or(item.tokens - item.queries);
  if (item.first_position <= kLastPosition) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat("first_query_position is ", item.first_position, "; the limit is ", kLastPosition));
}

absl::Status CheckScores(const kernels::LayerGeometry& geometry, const AttendItem& item) {
  if (!item.rule.has_value()) return absl::OkStatus();
  std::uint64_t blocks = 0;
  for (const kernels::LaneView& lane : item.lanes) blocks += kernels::BlocksOf(lane);
  const std::uint64_t scores = blocks * item.queries * geometry.group();
  if (scores <= kMaxScores) return absl::OkStatus();
  return absl::InvalidArgumentError(Concat(item.queries, " queries of ", geometry.group(),
                                           " heads over ", blocks, " blocks are ", scores,
                                           " scores; the limit of a selection is ", kMaxScores,
                                           "; send fewer queries at a time"));
}

// If a tail closes between reading tail and lane words, and rows are appended, the result would be
// a lane that never existed: new segments followed by old ring rows. A changed version detects
// this.
absl::Status ResolveLanes(cache::Tenant& tenant, std::uint32_t layer, AttendItem& item) {
  const shm::SequenceBlock* block = nullptr;
  const shm::Word* words =
      shm::LaneWords(tenant.directory().mapped(), item.sequence->directory_offset(), &block);
  for (;;) {
    item.segments.clear();
    item.lanes.clear();
    item.tokens = 0;
    if (words == nullptr || block->sequence_id.load() != item.sequence->id().value()) {
      return absl::NotFoundError(Concat(item.sequence->id().ToString(), " has been freed"));
    }
    const std::uint64_t version = block->version.load();
    if (absl::Status status = ReadLanes(tenant, layer, words, item); !status.ok()) return status;
    // Read after the lanes: if positions moved while the lanes were read, the version has changed.
    const absl::StatusOr<std::uint64_t> shift = item.sequence->PositionShiftOf(layer);
    if (block->version.load() != version) continue;
    if (!shift.ok()) return shift.status();
    item.position_shift = *shift;
    return absl::OkStatus();
  }
}

absl::Status ResolveLanesAgain(cache::Tenant& tenant, std::uint32_t layer, bool causal,
                               AttendItem& item) {
  const std::uint64_t before = item.tokens;
  const std::uint64_t shift_before = item.position_shift;
  if (absl::Status status = ResolveLanes(tenant, layer, item); !status.ok()) return status;
  if (item.position_shift != shift_before) {
    return absl::AbortedError(Concat(
        "entries of ", item.sequence->id().ToString(), " moved to other positions: the shift was ",
        shift_before, " when the call began and is ", item.position_shift, " now; retry"));
  }
  const std::uint64_t now = std::exchange(item.tokens, before);
  const bool sees_new = !causal || item.first_position + (item.queries - 1) >= before;
  if (now == before || (now > before && !sees_new)) return absl::OkStatus();
  return absl::AbortedError(Concat(item.sequence->id().ToString(), " held ", before,
                                   " tokens when the call began and holds ", now, " now; retry"));
}

}  // namespace tessera::serving
