#include "daemon/compaction/lanes/lane_rows.h"

#include <algorithm>
#include <cstring>

#include "daemon/base/check.h"
#include "daemon/compaction/lanes/element.h"

namespace tessera::compaction {

HostLaneRows::HostLaneRows(const kernels::DenseTile& tile, std::uint64_t count)
    : tile_(tile),
      count_(count),
      bytes_(std::make_unique_for_overwrite<std::byte[]>(2 * count * tile.row_bytes())) {
  positions_.reserve(count);
}

absl::StatusOr<HostLaneRows> HostLaneRows::Of(const cache::TenantMemory& memory,
                                              const kernels::DenseTile& tile,
                                              const cache::OpenRun& run) {
  HostLaneRows rows(tile, run.settled_entries() + run.provisional_entries() + run.plain_entries());
  absl::Status status = rows.AddDense(memory, run.settled);
  if (status.ok()) status = rows.AddProvisional(run);
  if (status.ok()) status = rows.AddDense(memory, run.plain);
  if (!status.ok()) return status;
  return rows;
}

absl::StatusOr<HostLaneRows> HostLaneRows::OfPlain(const cache::TenantMemory& memory,
                                                   const kernels::DenseTile& tile,
                                                   const cache::OpenRun& run) {
  HostLaneRows rows(tile, run.plain_entries());
  if (absl::Status status = rows.AddDense(memory, run.plain); !status.ok()) return status;
  return rows;
}

void HostLaneRows::AddPositions(const cache::HeldSegment& held) {
  const cache::EntryList* const list = held.segment->entry_list();
  if (list != nullptr) merged_until_ = std::max(merged_until_, list->merged_until);
  if (list != nullptr && !list->weights.empty()) weights_.resize(filled_, 1.0f);
  for (std::uint32_t entry = 0; entry < held.entries; ++entry) {
    positions_.push_back(held.segment->PositionOf(entry));
    if (list != nullptr && !list->weights.empty()) weights_.push_back(list->weights[entry]);
  }
  filled_ += held.entries;
  if (!weights_.empty()) weights_.resize(filled_, 1.0f);
}

absl::Status HostLaneRows::AddProvisional(const cache::OpenRun& run) {
  for (const cache::HeldSegment& held : run.provisional) {
    const std::size_t at = filled_ * tile_.row_bytes();
    if (!held.segment->raw()->CopyTo(held.entries, keys() + at, values() + at)) {
      return absl::AbortedError("the raw copies of the rows were dropped meanwhile; retry");
    }
    AddPositions(held);
  }
  return absl::OkStatus();
}

absl::Status HostLaneRows::AddDense(const cache::TenantMemory& memory,
                                    const std::vector<cache::HeldSegment>& segments) {
  for (const cache::HeldSegment& held : segments) {
    if (held.segment->shape().packed()) {
      return absl::FailedPreconditionError(
          "the lane holds packed rows, from which tokens cannot be chosen");
    }
    const std::size_t at = filled_ * tile_.row_bytes();
    absl::Status status = cache::ReadDense(memory, held, tile_, keys() + at, values() + at);
    if (!status.ok()) return status;
    AddPositions(held);
  }
  return absl::OkStatus();
}

HostLaneRows HostLaneRows::After(const policies::LaneDecision& decision, std::uint64_t decided,
                                 const Turning& turning) const {
  TESSERA_CHECK(decided <= count_, "the decision is about more rows than there are");
  const std::uint64_t kept = decision.kept.size();
  HostLaneRows after(tile_, kept + count_ - decided);
  after.merged_until_ = merged_until_;
  if (decision.merges() || !weights_.empty()) after.weights_.resize(after.count_, 1.0f);
  const std::size_t row_bytes = tile_.row_bytes();
  const auto copy = [&](std::uint64_t from, std::uint64_t to) {
    std::memcpy(after.keys() + to * row_bytes, keys() + from * row_bytes, row_bytes);
    std::memcpy(after.values() + to * row_bytes, values() + from * row_bytes, row_bytes);
    if (turning.moved != nullptr) {
      turning.moved->Turn(after.keys() + to * row_bytes,
                          static_cast<std::int64_t>(to) - static_cast<std::int64_t>(from));
    }
    if (!weights_.empty()) after.weights_[to] = weights_[from];
    after.positions_.push_back(positions_[from]);
  };
  for (std::uint64_t i = 0; i < kept; ++i) {
    copy(decision.kept[i], i);
    if (!decision.merges()) continue;
    const std::span<const std::uint32_t> members(decision.members.data() + decision.begins[i],
                                                 decision.members.data() + decision.begins[i + 1]);
    if (members.size() > 1) after.Merge(*this, members, i, turning.merged);
  }
  for (std::uint64_t from = decided; from < count_; ++from) copy(from, kept + from - decided);
  after.filled_ = after.count_;
  return after;
}

void HostLaneRows::Merge(const HostLaneRows& from, std::span<const std::uint32_t> members,
                         std::uint64_t to, const RopeShift* turner) {
  const std::size_t row_bytes = tile_.row_bytes();
  const std::uint32_t dim = tile_.head_dim;
  std::vector<double> key(dim);
  std::vector<double> keys_sum(dim);
  std::vector<double> values_sum(dim);
  double tokens = 0;
  for (const std::uint32_t member : members) {
    const double weight = from.weights_.empty() ? 1.0 : static_cast<double>(from.weights_[member]);
    tokens += weight;
    merged_until_ = std::max(merged_until_, from.positions_[member] + 1);
    const std::byte* const stored = from.keys() + member * row_bytes;
    if (turner != nullptr) {
      turner->ShiftInto(stored,
                        static_cast<std::int64_t>(positions_[to]) -
                            static_cast<std::int64_t>(from.positions_[member]),
                        key);
    }
    for (std::uint32_t d = 0; d < dim; ++d) {
      keys_sum[d] += weight * (turner != nullptr ? key[d] : ElementAt(stored, tile_.type, d));
      values_sum[d] += weight * ElementAt(from.values() + member * row_bytes, tile_.type, d);
    }
  }
  for (std::uint32_t d = 0; d < dim; ++d) {
    SetElement(keys() + to * row_bytes, tile_.type, d, static_cast<float>(keys_sum[d] / tokens));
    SetElement(values() + to * row_bytes, tile_.type, d,
               static_cast<float>(values_sum[d] / tokens));
  }
  weights_[to] = static_cast<float>(tokens);
}

kernels::LaneRows HostLaneRows::lane(std::uint64_t first, std::uint64_t count) const {
  const cache::HostRows rows = host(first, count);
  return {.keys = {rows.keys, count, tile_.head_dim, tile_.type},
          .values = {rows.values, count, tile_.head_dim, tile_.type}};
}

cache::HostRows HostLaneRows::host(std::uint64_t first, std::uint64_t count) const {
  const std::size_t at = first * tile_.row_bytes();
  return {.keys = keys() + at, .values = values() + at, .count = count, .tile = tile_};
}

std::shared_ptr<const cache::EntryList> HostLaneRows::EntryListOf(std::uint64_t first,
                                                                  std::uint64_t count) const {
  const std::uint64_t from = positions_[first];
  const auto weights = weights_.begin();
  const bool weighted = !weights_.empty() && std::any_of(weights + first, weights + first + count,
                                                         [](float weight) { return weight != 1; });
  if (!weighted && positions_[first + count - 1] - from == count - 1) return nullptr;
  auto list = std::make_shared<cache::EntryList>();
  list->positions.reserve(count);
  for (std::uint64_t i = first; i < first + count; ++i) {
    list->positions.push_back(static_cast<std::uint32_t>(positions_[i] - from));
  }
  if (weighted) {
    list->weights.assign(weights + first, weights + first + count);
    list->merged_until = merged_until_;
  }
  return list;
}

}  // namespace tessera::compaction
