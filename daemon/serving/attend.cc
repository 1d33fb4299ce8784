#include "daemon/serving/attend.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/cache/sequence.h"
#include "daemon/serving/convert.h"
#include "kernels/dispatch/attend.h"
#include "proto/shm/resolve.h"

namespace tessera::serving {

namespace {

using cache::Sequence;

// One item of the request while it is served. Holds what its LaneViews point into.
struct Item {
  std::shared_ptr<Sequence> sequence;
  std::shared_ptr<const cache::TailHandle> tail;
  std::vector<std::byte> query;  // copied: a staging query may change while we read it
  std::uint32_t queries = 0;
  std::uint64_t first_position = 0;
  std::uint64_t tokens = 0;
  std::vector<kernels::SegmentView> segments;
  std::vector<kernels::LaneView> lanes;
};

absl::Status TakeQuery(const Services& services, const v1::AttendItem& asked, const Caller& caller,
                       std::uint32_t layer, Item& item) {
  const cache::Model& model = item.sequence->model();
  const kernels::LayerGeometry geometry = model.geometry(layer);
  absl::StatusOr<TensorBytes> query =
      Resolve(asked.query(),
              {.name = "query",
               .type = geometry.type,
               .shape = {0, geometry.query_heads, geometry.head_dim},
               .layout = "[queries][query_heads][head_dim]"},
              *caller.session);
  if (!query.ok()) return query.status();
  constexpr std::uint64_t kMaxQueries = 65536;
  if (query->shape[0] > kMaxQueries) {
    return absl::InvalidArgumentError(
        Concat("query has ", query->shape[0], " rows; the limit is ", kMaxQueries));
  }
  item.queries = static_cast<std::uint32_t>(query->shape[0]);
  item.query.resize(query->bytes);
  if (query->place == device::Place::kDevice) {
    return services.device->Read(item.query.data(), query->data, query->bytes);
  }
  std::memcpy(item.query.data(), query->data, query->bytes);
  return absl::OkStatus();
}

// Order matters: the caller has pinned; the tail comes before the lane words, so that whatever is
// absorbed in between is seen in the segments at least.
absl::Status ReadLanes(cache::Tenant& tenant, std::uint32_t layer, const shm::Word* words,
                       Item& item) {
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
    // The committed count is the worker's word: believed only within the ring.
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

// A tail that closes between the two reads, and rows that are appended after it, would make a lane
// that never was: new segments, then old ring rows. The version tells, and they are read again.
absl::Status ResolveLanes(cache::Tenant& tenant, std::uint32_t layer, Item& item) {
  const shm::SequenceBlock* block = nullptr;
  const shm::Word* words =
      shm::LaneWords(tenant.directory().mapped(), item.sequence->directory_offset(), &block);
  for (;;) {
    if (words == nullptr || block->sequence_id.load() != item.sequence->id().value()) {
      return absl::NotFoundError(Concat(item.sequence->id().ToString(), " has been freed"));
    }
    const std::uint64_t version = block->version.load();
    if (absl::Status status = ReadLanes(tenant, layer, words, item); !status.ok()) return status;
    if (block->version.load() == version) return absl::OkStatus();
    item.segments.clear();
    item.lanes.clear();
    item.tokens = 0;
  }
}

absl::Status CheckBatch(const v1::AttendRequest& request, const std::vector<Item>& items) {
  const cache::Model& model = items.front().sequence->model();
  for (const Item& item : items) {
    if (item.sequence->model().id() != model.id()) {
      return absl::InvalidArgumentError(
          Concat("a batch has one model; ", items.front().sequence->id().ToString(), " is of ",
                 model.id().ToString(), ", ", item.sequence->id().ToString(), " of ",
                 item.sequence->model().id().ToString()));
    }
  }
  if (request.layer() >= model.layers()) {
    return absl::InvalidArgumentError(
        Concat("layer is ", request.layer(), "; the model has ", model.layers(), " layers"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Item>> FindItems(const Services& services, const Caller& caller,
                                            const v1::AttendRequest& request) {
  if (request.items().empty()) {
    return absl::InvalidArgumentError("the batch has no items; at least one is needed");
  }
  std::vector<Item> items(request.items_size());
  for (int i = 0; i < request.items_size(); ++i) {
    absl::StatusOr<std::shared_ptr<Sequence>> sequence =
        caller.tenant->FindSequence(SequenceId(request.items(i).sequence_id()));
    if (!sequence.ok()) return sequence.status();
    if ((*sequence)->failed()) {
      return absl::FailedPreconditionError(Concat((*sequence)->id().ToString(), " has failed: ",
                                                  (*sequence)->Describe(/*lanes=*/false).failure));
    }
    items[i].sequence = *std::move(sequence);
  }
  if (absl::Status status = CheckBatch(request, items); !status.ok()) return status;
  for (int i = 0; i < request.items_size(); ++i) {
    absl::Status status = TakeQuery(services, request.items(i), caller, request.layer(), items[i]);
    if (!status.ok()) return status;
  }
  return items;
}

absl::Status SetPosition(const v1::AttendItem& asked, Item& item) {
  if (asked.has_first_query_position()) {
    item.first_position = asked.first_query_position();
  } else if (item.queries > item.tokens) {
    return absl::InvalidArgumentError(Concat("query has ", item.queries, " rows, ",
                                             item.sequence->id().ToString(), " ", item.tokens,
                                             " tokens; name first_query_position"));
  } else {
    item.first_position = item.tokens - item.queries;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Attend(const Services& services, const Caller& caller,
                    const v1::AttendRequest& request, v1::AttendResponse& response) {
  absl::StatusOr<std::vector<Item>> items = FindItems(services, caller, request);
  if (!items.ok()) return items.status();
  const cache::Model& model = items->front().sequence->model();
  kernels::AttendBatch batch = {.geometry = model.geometry(request.layer()),
                                .causal = !request.non_causal(),
                                .output_type = model.spec().type};
  if (request.output_dtype() != v1::DTYPE_UNSPECIFIED) {
    absl::StatusOr<kernels::ElementType> type =
        ToElementType(request.output_dtype(), "output_dtype");
    if (!type.ok()) return type.status();
    if (*type != model.spec().type && *type != kernels::ElementType::kFp32) {
      return absl::InvalidArgumentError(Concat("output_dtype is ", kernels::ElementName(*type),
                                               "; served are fp32 and the "
                                               "model's ",
                                               kernels::ElementName(model.spec().type)));
    }
    batch.output_type = *type;
  }

  const cache::Tenant::Reader pinned(*caller.tenant);
  std::vector<kernels::AttendItem> kernel_items;
  std::uint64_t output_bytes = 0;
  for (int i = 0; i < request.items_size(); ++i) {
    Item& item = (*items)[i];
    absl::Status status = ResolveLanes(*caller.tenant, request.layer(), item);
    if (status.ok()) status = SetPosition(request.items(i), item);
    if (!status.ok()) return status;
    const std::uint64_t rows = std::uint64_t{item.queries} * batch.geometry.query_heads;
    const std::uint64_t bytes =
        rows * batch.geometry.head_dim * kernels::ElementBytes(batch.output_type);
    output_bytes += bytes + rows * sizeof(float);
    if (output_bytes > services.max_message_bytes) {
      return absl::InvalidArgumentError(
          Concat("the answer would have more than ", services.max_message_bytes,
                 " bytes, the largest message; ask for fewer queries at a time"));
    }
    v1::AttendOutput& output = *response.add_outputs();
    output.set_tokens(item.tokens);
    output.mutable_output()->set_dtype(ToDType(batch.output_type));
    for (std::uint64_t dimension :
         {std::uint64_t{item.queries}, std::uint64_t{batch.geometry.query_heads},
          std::uint64_t{batch.geometry.head_dim}}) {
      output.mutable_output()->add_shape(dimension);
    }
    std::string& bytes_out = *output.mutable_output()->mutable_inline_();
    bytes_out.resize(bytes);
    output.mutable_lse()->Resize(static_cast<int>(rows), 0.0f);
    for (std::uint32_t head = 0; head < batch.geometry.kv_heads; ++head) {
      kernel_items.push_back({.lane = &item.lanes[head],
                              .kv_head = head,
                              .queries = item.queries,
                              .first_query_position = item.first_position,
                              .query = item.query.data(),
                              .output = bytes_out.data(),
                              .lse = output.mutable_lse()->mutable_data()});
    }
  }
  batch.items = kernel_items;
  absl::StatusOr<std::string_view> implementation =
      services.device->Attend(batch, caller.tenant->pool().View());
  if (!implementation.ok()) return implementation.status();
  response.set_implementation(std::string(*implementation));
  caller.tenant->counters().attend_requests.fetch_add(1, std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace tessera::serving
