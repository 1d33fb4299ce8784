#include "daemon/serving/rpc/observe.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/serving/convert/convert.h"
#include "daemon/serving/rpc/attend_item.h"

namespace tessera::serving {

namespace {

class Showing {
 public:
  Showing(const Services& services, const Caller& caller, const v1::ObserveRequest& request,
          cache::Sequence& sequence)
      : services_(services), caller_(caller), request_(request), sequence_(sequence) {}

  absl::Status Run() {
    const bool layer = request_.has_last_queries() || request_.has_norm_queries() ||
                       request_.has_first_norm_token() || request_.has_attention_sums();
    if (!layer && request_.token_ids().empty()) {
      return absl::InvalidArgumentError(
          "the request has no queries, attention sums or token ids; set at least one");
    }
    absl::Status status = CheckTokenIds();
    // Token ids first: if they are refused, nothing that needs memory was kept.
    if (status.ok() && !request_.token_ids().empty()) {
      status = services_.compactor->ObserveTokens(
          sequence_, request_.first_token_id(),
          std::span(request_.token_ids().data(),
                    static_cast<std::size_t>(request_.token_ids().size())));
    }
    return status.ok() && layer ? TakeLayer() : status;
  }

 private:
  absl::Status CheckTokenIds() {
    const absl::StatusOr<kernels::LayerGeometry> geometry =
        FindLayer(sequence_.model(), request_.layer());
    if (!geometry.ok()) return geometry.status();
    geometry_ = *geometry;
    const absl::StatusOr<std::uint64_t> tokens = sequence_.TokensOfLayer(request_.layer());
    if (!tokens.ok()) return tokens.status();
    shown_.layer = request_.layer();
    shown_.tokens = *tokens;
    for (const auto& [first, name] :
         {std::pair(request_.first_token_id(), "first_token_id"),
          std::pair(request_.first_query_position(), "first_query_position"),
          std::pair(request_.first_norm_token(), "first_norm_token"),
          std::pair(request_.norm_token_end(), "norm_token_end"),
          std::pair(request_.first_sum_position(), "first_sum_position")}) {
      if (first <= *tokens) continue;
      return absl::OutOfRangeError(Concat(name, " is ", first, "; layer ", request_.layer(), " of ",
                                          sequence_.id().ToString(), " holds ", *tokens,
                                          " tokens"));
    }
    const auto ids = static_cast<std::uint64_t>(request_.token_ids().size());
    if (ids <= *tokens - request_.first_token_id()) return absl::OkStatus();
    return absl::OutOfRangeError(Concat(ids, " token ids from token ", request_.first_token_id(),
                                        " on; ", sequence_.id().ToString(), " holds ", *tokens,
                                        " tokens"));
  }

  absl::Status TakeLayer() {
    const std::uint64_t heads = geometry_.query_heads;
    absl::Status status;
    if (request_.has_last_queries()) {
      status = Take(request_.last_queries(),
                    {.name = "last_queries",
                     .type = geometry_.type,
                     .shape = {0, heads, geometry_.head_dim},
                     .layout = "[rows][query_heads][head_dim]"},
                    last_);
      shown_.last = {request_.first_query_position(), last_.shape.front(), last_.bytes.data()};
    }
    if (status.ok() && request_.has_norm_queries()) status = TakeNorm(heads);
    shown_.norm.first_token = request_.first_norm_token();
    if (request_.has_norm_token_end()) shown_.norm.end = request_.norm_token_end();
    shown_.norm.none = request_.has_first_norm_token() && shown_.norm.count == 0;
    if (status.ok() && request_.has_attention_sums()) {
      status = Take(request_.attention_sums(),
                    {.name = "attention_sums",
                     .type = kernels::ElementType::kFp32,
                     .shape = {geometry_.kv_heads, 0},
                     .layout = "[kv_heads][tokens]"},
                    sums_);
      shown_.sums = {request_.first_sum_position(), sums_.shape.back(),
                     reinterpret_cast<const float*>(sums_.bytes.data())};
    }
    return status.ok() ? services_.compactor->Observe(sequence_, shown_) : status;
  }

  absl::Status TakeNorm(std::uint64_t heads) {
    absl::Status status = Take(request_.norm_queries(),
                               {.name = "norm_queries",
                                .type = geometry_.type,
                                .shape = {heads, 0, geometry_.head_dim},
                                .layout = "[query_heads][rows][head_dim]"},
                               norm_);
    if (!status.ok()) return status;
    const auto positions = static_cast<std::uint64_t>(request_.norm_positions().size());
    if (positions != heads * norm_.shape[1]) {
      return absl::InvalidArgumentError(Concat("norm_positions has ", positions,
                                               " values; norm_queries has ", heads, " x ",
                                               norm_.shape[1], " rows"));
    }
    shown_.norm = {.count = norm_.shape[1],
                   .positions = std::span(request_.norm_positions().data(), positions),
                   .rows = norm_.bytes.data(),
                   .all = request_.all_norms()};
    return absl::OkStatus();
  }

  // A copy in the daemon's memory, which the worker cannot change.
  struct Copy {
    std::vector<std::uint64_t> shape = {0, 0, 0};
    std::vector<std::byte> bytes;
  };
  absl::Status Take(const v1::Tensor& tensor, const TensorRule& rule, Copy& copy) {
    absl::StatusOr<TensorBytes> asked = Resolve(tensor, rule, *caller_.session);
    if (!asked.ok()) return asked.status();
    copy.shape = asked->shape;
    copy.bytes.resize(asked->bytes);
    if (asked->place == device::Place::kDevice) {
      return services_.device->Read(copy.bytes.data(), asked->data, asked->bytes);
    }
    std::memcpy(copy.bytes.data(), asked->data, asked->bytes);
    return absl::OkStatus();
  }

  const Services& services_;
  const Caller& caller_;
  const v1::ObserveRequest& request_;
  cache::Sequence& sequence_;
  kernels::LayerGeometry geometry_;
  compaction::ObservedLayer shown_;
  Copy last_;
  Copy norm_;
  Copy sums_;
};

}  // namespace

absl::Status Observe(const Services& services, const Caller& caller,
                     const v1::ObserveRequest& request, v1::ObserveResponse& response) {
  const absl::StatusOr<cache::Residence> sequence = FindLive(caller, request.sequence_id());
  if (!sequence.ok()) return sequence.status();
  absl::Status status = Showing(services, caller, request, **sequence).Run();
  const std::vector<std::uint64_t> decided = compaction::Compactor::DecidedByLayer(**sequence);
  if (request.layer() < decided.size()) response.set_decided_tokens(decided[request.layer()]);
  const bool by_norm = request.has_norm_queries() || request.has_first_norm_token();
  if (!status.ok() || !by_norm) return status;
  const absl::StatusOr<std::uint64_t> from =
      services.compactor->NormsFrom(**sequence, request.layer());
  if (!from.ok()) return from.status();
  response.set_norms_from(*from);
  return absl::OkStatus();
}

}  // namespace tessera::serving
