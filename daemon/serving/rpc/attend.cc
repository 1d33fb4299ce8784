#include "daemon/serving/rpc/attend.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "daemon/serving/rpc/attend_item.h"
#include "kernels/dispatch/per_head.h"

namespace tessera::serving {

namespace {

constexpr int kMaxItems = 4096;
constexpr std::uint64_t kMaxQueries = 65536;
// Parts computed under one pin: some tenths of a second, and a few megabytes of scratch. Between
// two pieces the call checks whether it was cancelled.
constexpr std::uint64_t kPartsAtOnce = 256;

// A range of an item's queries.
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
      const v1::AttendItem& asked = request_.items(static_cast<int>(i));
      if (status.ok()) {
        status = SetPosition(asked.has_first_query_position()
                                 ? std::optional(asked.first_query_position())
                                 : std::nullopt,
                             items_[i]);
      }
      if (status.ok()) status = CheckScores(geometry_, items_[i]);
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
      absl::StatusOr<cache::Residence> sequence =
          FindLive(caller_, request_.items(static_cast<int>(i)).sequence_id());
      if (!sequence.ok()) return sequence.status();
      items_[i].sequence = *std::move(sequence);
    }
    return CheckModel();
  }

  absl::Status CheckModel() {
    const cache::Model& model = items_.front().sequence->model();
    for (const AttendItem& item : items_) {
      if (item.sequence->model().id() == model.id()) continue;
      return absl::InvalidArgumentError(
          Concat("all items of a batch must have the same model; ",
                 items_.front().sequence->id().ToString(), " is of ", model.id().ToString(), ", ",
                 item.sequence->id().ToString(), " of ", item.sequence->model().id().ToString()));
    }
    absl::StatusOr<kernels::LayerGeometry> geometry = FindLayer(model, request_.layer());
    if (!geometry.ok()) return geometry.status();
    geometry_ = *geometry;
    return absl::OkStatus();
  }

  absl::Status ChooseOutputType() {
    const absl::StatusOr<kernels::ElementType> type =
        AnswerType(request_.output_dtype(), "output_dtype", geometry_);
    if (type.ok()) output_type_ = *type;
    return type.status();
  }

  // Checks all sizes before the first byte is copied.
  absl::Status TakeQueries() {
    std::uint64_t answer_bytes = 0;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      AttendItem& item = items_[i];
      const v1::AttendItem& asked = request_.items(static_cast<int>(i));
      absl::Status status = TakeRule(asked, item);
      const std::uint64_t most = item.rule.has_value() ? kMaxSelectingQueries : kMaxQueries;
      if (status.ok()) {
        status = FindQuery(asked.query(), geometry_, most, *caller_.session, item);
      }
      if (!status.ok()) return status;
      // More queries than a selection supports are a prompt, which reads everything.
      if (!item.rule.has_value() && item.queries <= kMaxSelectingQueries) {
        item.rule = compaction::Compactor::SelectionOf(*item.sequence, request_.layer());
      }
      answer_bytes += item.queries * (OutputRowBytes() + geometry_.query_heads * sizeof(float));
      if (answer_bytes > services_.max_message_bytes) {
        return absl::InvalidArgumentError(
            Concat("the answer would have more than max_message_bytes, ",
                   services_.max_message_bytes, " bytes; send fewer queries at a time"));
      }
    }
    for (AttendItem& item : items_) {
      if (absl::Status status = TakeQuery(*services_.device, item); !status.ok()) return status;
    }
    return absl::OkStatus();
  }

  static absl::Status TakeRule(const v1::AttendItem& asked, AttendItem& item) {
    if (!asked.has_selection()) return absl::OkStatus();
    absl::StatusOr<kernels::SelectionRule> rule = ToSelectionRule(asked.selection());
    if (rule.ok()) item.rule = *rule;
    return rule.status();
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

  // Splits the request into pieces of at most kPartsAtOnce parts, but at least one kernel cell.
  // Pieces end between cells, so the split does not change any bit of the result. An item with a
  // selection is never split, because its queries share one choice.
  std::vector<std::vector<Slice>> Cut() const {
    const std::uint32_t group = geometry_.group();
    const std::uint32_t aligned = kernels::kMaxPartRows / std::gcd(kernels::kMaxPartRows, group);
    std::vector<std::vector<Slice>> pieces(1);
    std::uint64_t parts = 0;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      const std::uint64_t parts_of_cell = PartsOf(items_[i]);
      for (std::uint32_t first = 0; first < items_[i].queries;) {
        const std::uint32_t queries = items_[i].rule.has_value()
                                          ? items_[i].queries
                                          : std::min(aligned, items_[i].queries - first);
        const std::uint64_t cells = CellsOf(items_[i], queries);
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

  // Kernel cells of one kv head.
  std::uint64_t CellsOf(const AttendItem& item, std::uint64_t queries) const {
    const auto of_rows = [](std::uint64_t rows) {
      return (rows + kernels::kMaxPartRows - 1) / kernels::kMaxPartRows;
    };
    const bool each_head = item.rule.has_value() && item.rule->each_head;
    if (item.rule.has_value() && item.rule->each_query) {
      return queries * (each_head ? geometry_.group() : of_rows(geometry_.group()));
    }
    return each_head ? geometry_.group() * of_rows(queries) : of_rows(queries * geometry_.group());
  }

  // Parts of all kv heads.
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

  // Called between two pieces: fails if the call was cancelled or a sequence has changed.
  absl::Status GoOn(const std::vector<Slice>& piece) {
    if (caller_.cancelled()) return absl::CancelledError("the caller has cancelled the call");
    if (services_.stopping.load())
      return WithCause(absl::UnavailableError("the daemon is stopping"), ErrorCause::kDraining);
    for (const Slice& slice : piece) {
      absl::Status status = ResolveLanesAgain(*caller_.tenant, request_.layer(),
                                              !request_.non_causal(), items_[slice.item]);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status Compute(const std::vector<Slice>& piece, v1::AttendResponse& response) {
    const kernels::AttendBatch whole = {
        .geometry = geometry_, .causal = !request_.non_causal(), .output_type = output_type_};
    kernels::PerHeadItems kernel_items;
    for (const Slice& slice : piece) {
      const AttendItem& item = items_[slice.item];
      v1::AttendOutput& output = *response.mutable_outputs(static_cast<int>(slice.item));
      const std::uint64_t first = slice.first_query;
      for (std::uint32_t head = 0; head < geometry_.kv_heads; ++head) {
        kernel_items.Add(
            whole, {.lane = &item.lanes[head],
                    .kv_head = head,
                    .queries = slice.queries,
                    .first_query_position = item.first_position + first,
                    .query = item.query.data() + first * QueryRowBytes(),
                    .output = output.mutable_output()->mutable_inline_()->data() +
                              first * OutputRowBytes(),
                    .lse = output.mutable_lse()->mutable_data() + first * geometry_.query_heads,
                    .selection = item.rule.has_value() ? &*item.rule : nullptr});
      }
    }
    using Implementation = absl::StatusOr<std::string_view>;
    const Implementation implementation = kernel_items.ForEachBatch(
        whole,
        [&](const kernels::AttendBatch& batch) {
          return services_.device->Attend(batch, caller_.tenant->pool().View());
        },
        [](const Implementation& ran) { return ran.ok(); });
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
