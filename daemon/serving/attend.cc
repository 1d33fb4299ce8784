#include "daemon/serving/attend.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/serving/attend_item.h"
#include "kernels/dispatch/attend.h"

namespace tessera::serving {

namespace {

constexpr int kMaxItems = 4096;
constexpr std::uint64_t kMaxQueries = 65536;
// Parts that are computed under one pin: some tenths of a second, and a few megabytes of scratch.
// In between the call looks whether anybody still wants its answer.
constexpr std::uint64_t kPartsAtOnce = 256;

// Some queries of an item.
struct Slice {
  std::size_t item;
  std::uint32_t first_query;
  std::uint32_t queries;
};

class Attention {
 public:
  Attention(const Services& services, const Caller& caller, const v1::AttendRequest& request)
      : services_(services), caller_(caller), request_(request) {}

  absl::Status Run(v1::AttendResponse& response) {
    absl::Status status = FindItems();
    if (status.ok()) status = ChooseOutputType();
    if (status.ok()) status = TakeQueries();
    if (!status.ok()) return status;
    std::optional<cache::Tenant::Reader> pinned(std::in_place, *caller_.tenant);
    for (std::size_t i = 0; i < items_.size() && status.ok(); ++i) {
      status = ResolveLanes(*caller_.tenant, request_.layer(), items_[i]);
      if (status.ok()) status = SetPosition(request_.items(static_cast<int>(i)), items_[i]);
    }
    if (!status.ok()) return status;
    MakeOutputs(response);
    const std::vector<std::vector<Slice>> pieces = Cut();
    for (std::size_t i = 0; i < pieces.size() && status.ok(); ++i) {
      if (i > 0) {
        pinned.reset();
        pinned.emplace(*caller_.tenant);
        status = GoOn(pieces[i]);
      }
      if (status.ok()) status = Compute(pieces[i], response);
    }
    return status;
  }

 private:
  absl::Status FindItems() {
    if (request_.items().empty()) {
      return absl::InvalidArgumentError("the batch has no items; at least one is needed");
    }
    if (request_.items_size() > kMaxItems) {
      return absl::InvalidArgumentError(
          Concat("the batch has ", request_.items_size(), " items; the limit is ", kMaxItems));
    }
    items_.resize(request_.items_size());
    for (std::size_t i = 0; i < items_.size(); ++i) {
      absl::StatusOr<std::shared_ptr<cache::Sequence>> sequence = caller_.tenant->FindSequence(
          SequenceId(request_.items(static_cast<int>(i)).sequence_id()));
      if (!sequence.ok()) return sequence.status();
      if ((*sequence)->failed()) {
        return absl::FailedPreconditionError(
            Concat((*sequence)->id().ToString(),
                   " has failed: ", (*sequence)->Describe(/*lanes=*/false).failure));
      }
      items_[i].sequence = *std::move(sequence);
    }
    return CheckModel();
  }

  absl::Status CheckModel() {
    const cache::Model& model = items_.front().sequence->model();
    for (const AttendItem& item : items_) {
      if (item.sequence->model().id() == model.id()) continue;
      return absl::InvalidArgumentError(
          Concat("a batch has one model; ", items_.front().sequence->id().ToString(), " is of ",
                 model.id().ToString(), ", ", item.sequence->id().ToString(), " of ",
                 item.sequence->model().id().ToString()));
    }
    if (request_.layer() >= model.layers()) {
      return absl::InvalidArgumentError(
          Concat("layer is ", request_.layer(), "; the model has ", model.layers(), " layers"));
    }
    geometry_ = model.geometry(request_.layer());
    return absl::OkStatus();
  }

  absl::Status ChooseOutputType() {
    output_type_ = geometry_.type;
    if (request_.output_dtype() == v1::DTYPE_UNSPECIFIED) return absl::OkStatus();
    absl::StatusOr<kernels::ElementType> type =
        ToElementType(request_.output_dtype(), "output_dtype");
    if (!type.ok()) return type.status();
    if (*type != geometry_.type && *type != kernels::ElementType::kFp32) {
      return absl::InvalidArgumentError(Concat("output_dtype is ", kernels::ElementName(*type),
                                               "; served are fp32 and the model's ",
                                               kernels::ElementName(geometry_.type)));
    }
    output_type_ = *type;
    return absl::OkStatus();
  }

  // All sizes are known to be served before the first byte is copied.
  absl::Status TakeQueries() {
    std::uint64_t answer_bytes = 0;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      AttendItem& item = items_[i];
      absl::StatusOr<TensorBytes> asked =
          Resolve(request_.items(static_cast<int>(i)).query(),
                  {.name = "query",
                   .type = geometry_.type,
                   .shape = {0, geometry_.query_heads, geometry_.head_dim},
                   .layout = "[queries][query_heads][head_dim]"},
                  *caller_.session);
      if (!asked.ok()) return asked.status();
      if (asked->shape[0] > kMaxQueries) {
        return absl::InvalidArgumentError(
            Concat("query has ", asked->shape[0], " rows; the limit is ", kMaxQueries));
      }
      item.queries = static_cast<std::uint32_t>(asked->shape[0]);
      item.asked = *std::move(asked);
      answer_bytes += item.queries * (OutputRowBytes() + geometry_.query_heads * sizeof(float));
      if (answer_bytes > services_.max_message_bytes) {
        return absl::InvalidArgumentError(
            Concat("the answer would have more than ", services_.max_message_bytes,
                   " bytes, the largest message; ask for fewer queries at a time"));
      }
    }
    for (AttendItem& item : items_) {
      item.query.resize(item.asked.bytes);
      if (item.asked.place == device::Place::kHost) {
        std::memcpy(item.query.data(), item.asked.data, item.asked.bytes);
        continue;
      }
      absl::Status status =
          services_.device->Read(item.query.data(), item.asked.data, item.asked.bytes);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  static absl::Status SetPosition(const v1::AttendItem& asked, AttendItem& item) {
    if (!asked.has_first_query_position()) {
      if (item.queries > item.tokens) {
        return absl::InvalidArgumentError(Concat("query has ", item.queries, " rows, ",
                                                 item.sequence->id().ToString(), " ", item.tokens,
                                                 " tokens; name first_query_position"));
      }
      item.first_position = item.tokens - item.queries;
      return absl::OkStatus();
    }
    item.first_position = asked.first_query_position();
    constexpr std::uint64_t kLastPosition = std::uint64_t{1} << 62;
    if (item.first_position > kLastPosition) {
      return absl::InvalidArgumentError(Concat("first_query_position is ", item.first_position,
                                               "; the limit is ", kLastPosition));
    }
    return absl::OkStatus();
  }

  std::uint64_t QueryRowBytes() const {
    return std::uint64_t{geometry_.query_heads} * geometry_.head_dim *
           kernels::ElementBytes(geometry_.type);
  }
  std::uint64_t OutputRowBytes() const {
    return std::uint64_t{geometry_.query_heads} * geometry_.head_dim *
           kernels::ElementBytes(output_type_);
  }

  void MakeOutputs(v1::AttendResponse& response) const {
    for (const AttendItem& item : items_) {
      v1::AttendOutput& output = *response.add_outputs();
      output.set_tokens(item.tokens);
      output.mutable_output()->set_dtype(ToDType(output_type_));
      for (std::uint32_t dimension : {item.queries, geometry_.query_heads, geometry_.head_dim}) {
        output.mutable_output()->add_shape(dimension);
      }
      output.mutable_output()->mutable_inline_()->resize(item.queries * OutputRowBytes());
      output.mutable_lse()->Resize(static_cast<int>(item.queries * geometry_.query_heads), 0.0f);
    }
  }

  // Pieces of at most kPartsAtOnce parts, but at least one cell of the kernel's: cut between cells,
  // so that the cut changes no bit of the result.
  std::vector<std::vector<Slice>> Cut() const {
    const std::uint32_t group = geometry_.group();
    const std::uint32_t aligned = kernels::kMaxPartRows / std::gcd(kernels::kMaxPartRows, group);
    std::vector<std::vector<Slice>> pieces(1);
    std::uint64_t parts = 0;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const std::uint64_t parts_of_cell = PartsOf(items_[i]);
      for (std::uint32_t first = 0; first < items_[i].queries;) {
        const std::uint32_t queries = std::min(aligned, items_[i].queries - first);
        const std::uint64_t cells =
            (std::uint64_t{queries} * group + kernels::kMaxPartRows - 1) / kernels::kMaxPartRows;
        if (parts > 0 && parts + cells * parts_of_cell > kPartsAtOnce) {
          pieces.emplace_back();
          parts = 0;
        }
        parts += cells * parts_of_cell;
        std::vector<Slice>& piece = pieces.back();
        if (!piece.empty() && piece.back().item == i) {
          piece.back().queries += queries;
        } else {
          piece.push_back({i, first, queries});
        }
        first += queries;
      }
    }
    return pieces;
  }

  // Of all kv heads.
  static std::uint64_t PartsOf(const AttendItem& item) {
    std::uint64_t parts = 0;
    for (const kernels::LaneView& lane : item.lanes) {
      for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
        parts += lane.segments[s].entries / kernels::kPartEntries + 1;
      }
      parts += 1 + lane.tail.ring_tiles / kernels::kMaxPartRuns;
    }
    return parts;
  }

  // Between two pieces: is the answer still wanted, and the sequence still what it was?
  absl::Status GoOn(const std::vector<Slice>& piece) {
    if (caller_.cancelled()) return absl::CancelledError("the caller has gone");
    if (services_.stopping.load()) return absl::UnavailableError("the daemon stops");
    for (const Slice& slice : piece) {
      absl::Status status = ResolveLanesAgain(*caller_.tenant, request_.layer(),
                                              !request_.non_causal(), items_[slice.item]);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Compute(const std::vector<Slice>& piece, v1::AttendResponse& response) {
    std::vector<kernels::AttendItem> kernel_items;
    for (const Slice& slice : piece) {
      const AttendItem& item = items_[slice.item];
      v1::AttendOutput& output = *response.mutable_outputs(static_cast<int>(slice.item));
      const std::uint64_t first = slice.first_query;
      for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
        kernel_items.push_back(
            {.lane = &item.lanes[head],
             .kv_head = head,
             .queries = slice.queries,
             .first_query_position = item.first_position + first,
             .query = item.query.data() + first * QueryRowBytes(),
             .output =
                 output.mutable_output()->mutable_inline_()->data() + first * OutputRowBytes(),
             .lse = output.mutable_lse()->mutable_data() + first * geometry_.query_heads});
      }
    }
    absl::StatusOr<std::string_view> implementation =
        services_.device->Attend({.geometry = geometry_,
                                  .causal = !request_.non_causal(),
                                  .output_type = output_type_,
                                  .items = kernel_items},
                                 caller_.tenant->pool().View());
    if (!implementation.ok()) return implementation.status();
    response.set_implementation(std::string(*implementation));
    return absl::OkStatus();
  }

  const Services& services_;
  const Caller& caller_;
  const v1::AttendRequest& request_;
  kernels::LayerGeometry geometry_;
  kernels::ElementType output_type_{};
  std::vector<AttendItem> items_;
};

}  // namespace

absl::Status Attend(const Services& services, const Caller& caller,
                    const v1::AttendRequest& request, v1::AttendResponse& response) {
  absl::Status status = Attention(services, caller, request).Run(response);
  if (!status.ok()) return status;
  caller.tenant->counters().attend_requests.fetch_add(1, std::memory_order_relaxed);
  return absl::OkStatus();
}

}  // namespace tessera::serving
