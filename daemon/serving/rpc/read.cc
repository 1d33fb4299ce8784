#include "daemon/serving/rpc/read.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "daemon/base/error_cause.h"
#include "daemon/base/strings.h"
#include "daemon/cache/segment/decode.h"
#include "daemon/serving/rpc/attend_item.h"
#include "proto/shm/resolve.h"

namespace tessera::serving {

namespace {

using kernels::kTileEntries;

// Per entry: a varint of a position, and a weight.
constexpr std::uint64_t kListBytes = 10 + sizeof(float);

class Reading {
 public:
  Reading(const Services& services, const Caller& caller, const v1::ReadRequest& request)
      : services_(services), caller_(caller), request_(request) {}

  absl::Status Run(v1::ReadResponse& response) {
    absl::StatusOr<cache::Residence> sequence = FindLive(caller_, request_.sequence_id());
    if (!sequence.ok()) return sequence.status();
    sequence_ = *std::move(sequence);
    absl::Status status = CheckRequest();
    if (status.ok()) status = TakeLanes();
    if (status.ok()) status = CheckSize();
    if (!status.ok()) return status;
    decoder_ = std::make_unique<cache::RowDecoder>(*services_.device);
    for (std::uint32_t i = 0; i < heads_; ++i) {
      status = Fill(first_head_ + i, *response.add_lanes());
      if (!status.ok()) return status;
    }
    response.set_tokens(tokens_);
    return absl::OkStatus();
  }

 private:
  // Part of a lane.
  struct Range {
    std::uint64_t begin;
    std::uint64_t end;
    std::uint64_t size() const { return end - begin; }
  };

  absl::Status CheckRequest() {
    absl::StatusOr<kernels::LayerGeometry> geometry =
        FindLayer(sequence_->model(), request_.layer());
    if (!geometry.ok()) return geometry.status();
    geometry_ = *geometry;
    first_head_ = request_.first_kv_head();
    if (first_head_ >= geometry_.kv_heads) {
      return absl::InvalidArgumentError(Concat("first_kv_head is ", first_head_, "; layer ",
                                               request_.layer(), " has ", geometry_.kv_heads,
                                               " kv heads"));
    }
    const std::uint32_t left = geometry_.kv_heads - first_head_;
    if (request_.kv_heads() > left) {
      return absl::InvalidArgumentError(
          Concat("kv_heads is ", request_.kv_heads(), " from first_kv_head ", first_head_,
                 "; layer ", request_.layer(), " has ", geometry_.kv_heads, " kv heads"));
    }
    heads_ = request_.kv_heads() == 0 ? left : request_.kv_heads();
    return ChooseType();
  }

  absl::Status ChooseType() {
    const absl::StatusOr<kernels::ElementType> type =
        AnswerType(request_.dtype(), "dtype", geometry_);
    if (type.ok()) type_ = *type;
    return type.status();
  }

  std::uint64_t TailEntries(const cache::OpenRun& run) const {
    return committed_ > run.tokens ? committed_ - run.tokens : 0;
  }
  static std::uint64_t SegmentEntries(const cache::OpenRun& run) {
    return run.settled_entries() + run.provisional_entries() + run.plain_entries();
  }
  std::uint64_t LaneEntries(const cache::OpenRun& run) const {
    return SegmentEntries(run) + TailEntries(run);
  }
  Range Asked(const cache::OpenRun& run) const {
    const std::uint64_t all = LaneEntries(run);
    const std::uint64_t begin = std::min<std::uint64_t>(request_.first_entry(), all);
    const std::uint64_t most = request_.entries() == 0 ? all : request_.entries();
    return {begin, begin + std::min(most, all - begin)};
  }

  // Takes segments and tail as they are at one moment: see ResolveLanes for the order. Segments are
  // shared from here on, but the worker overwrites rows of the ring once they are absorbed, so they
  // are copied under a pin.
  absl::Status TakeLanes() {
    const cache::Tenant::Reader pinned(*caller_.tenant);
    const shm::SequenceBlock* block = nullptr;
    const shm::Word* words =
        shm::LaneWords(caller_.tenant->directory().mapped(), sequence_->directory_offset(), &block);
    for (;;) {
      if (words == nullptr || block->sequence_id.load() != sequence_->id().value()) {
        return absl::NotFoundError(Concat(sequence_->id().ToString(), " has been freed"));
      }
      const std::uint64_t version = block->version.load();
      const std::shared_ptr<const cache::TailHandle> tail = sequence_->tail();
      committed_ = tail == nullptr ? 0 : tail->CommittedTokens().value_or(0);
      absl::StatusOr<std::vector<cache::OpenRun>> runs =
          sequence_->LookAt(request_.layer(), /*whole=*/true);
      if (!runs.ok()) return runs.status();
      if (block->version.load() != version) continue;
      runs_ = *std::move(runs);
      return CopyTail(tail.get());
    }
  }

  absl::Status CopyTail(const cache::TailHandle* tail) {
    const shm::LaneLayout& layout = sequence_->model().layout();
    tail_rows_.resize(heads_);
    // The worker writes the committed count, so it is trusted only within the ring.
    for (const cache::OpenRun& run : runs_) {
      tokens_ = std::max(tokens_, run.tokens);
      if (TailEntries(run) > layout.ring_capacity()) committed_ = 0;
    }
    tokens_ = std::max(tokens_, committed_);
    for (std::uint32_t i = 0; i < heads_ && tail != nullptr; ++i) {
      const cache::OpenRun& run = runs_[first_head_ + i];
      const shm::TailRing ring =
          layout.ring(tail->region().data(), request_.layer(), first_head_ + i);
      absl::Status status = CopyRing(ring, run.tokens, TailEntries(run), tail_rows_[i]);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Appends K rows, then V rows.
  absl::Status CopyRing(const shm::TailRing& ring, std::uint64_t first, std::uint64_t count,
                        std::vector<std::byte>& rows) const {
    const std::size_t row_bytes = ring.tile.row_bytes();
    rows.resize(2 * count * row_bytes);
    for (std::uint64_t at = 0; at < count;) {
      const std::uint64_t token = first + at;
      const std::uint64_t here = std::min(count - at, kTileEntries - token % kTileEntries);
      const std::uint64_t bytes = here * row_bytes;
      std::byte* const to = rows.data() + at * row_bytes;
      absl::Status status = services_.device->Read(to, ring.Key(token), bytes);
      if (status.ok()) {
        status = services_.device->Read(to + count * row_bytes, ring.Value(token), bytes);
      }
      if (!status.ok()) return status;
      at += here;
    }
    return absl::OkStatus();
  }

  std::size_t RowBytes() const { return geometry_.head_dim * kernels::ElementBytes(type_); }

  absl::Status CheckSize() const {
    std::uint64_t bytes = 0;
    for (std::uint32_t i = 0; i < heads_; ++i) {
      bytes += 128 + Asked(runs_[first_head_ + i]).size() * (2 * RowBytes() + kListBytes);
    }
    if (bytes <= services_.max_message_bytes) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        Concat("the rows would have about ", bytes, " bytes; max_message_bytes is ",
               services_.max_message_bytes, "; ask for fewer entries or kv heads"));
  }

  absl::Status Fill(std::uint32_t head, v1::LaneRows& lane) {
    const cache::OpenRun& run = runs_[head];
    const Range asked = Asked(run);
    lane.set_kv_head(head);
    lane.set_lane_entries(LaneEntries(run));
    for (v1::Tensor* tensor : {lane.mutable_key(), lane.mutable_value()}) {
      tensor->set_dtype(ToDType(type_));
      tensor->add_shape(asked.size());
      tensor->add_shape(geometry_.head_dim);
      tensor->mutable_inline_()->resize(asked.size() * RowBytes());
    }
    weighted_ = false;
    absl::Status status = FillSegments(run, asked, lane);
    if (!status.ok()) return status;
    FillTail(run, asked, tail_rows_[head - first_head_], lane);
    if (!weighted_) lane.clear_weight();
    return absl::OkStatus();
  }

  absl::Status FillSegments(const cache::OpenRun& run, const Range& asked, v1::LaneRows& lane) {
    std::size_t tile = 0;
    std::uint64_t first = 0;  // entry of the lane
    for (const auto* segments : {&run.settled, &run.provisional, &run.plain}) {
      for (const cache::HeldSegment& held : *segments) {
        for (std::uint32_t entry = 0; entry < held.entries; entry += kTileEntries, ++tile) {
          const std::uint32_t rows = std::min(kTileEntries, held.entries - entry);
          const Range here = {std::max(first + entry, asked.begin),
                              std::min(first + entry + rows, asked.end)};
          if (here.begin >= here.end) continue;
          absl::Status status = GoOn();
          if (status.ok())
            status = decoder_->Decode(*held.segment, run.tiles[tile], rows, keys_, values_);
          if (!status.ok()) return status;
          const std::uint64_t skipped = here.begin - first - entry;
          Store(here, asked, keys_ + skipped * geometry_.head_dim,
                values_ + skipped * geometry_.head_dim, lane);
          for (std::uint64_t i = here.begin - first; i < here.end - first; ++i) {
            List(*held.segment, static_cast<std::uint32_t>(i), lane);
          }
        }
        first += held.entries;
      }
    }
    return absl::OkStatus();
  }

  void List(const cache::Segment& segment, std::uint32_t entry, v1::LaneRows& lane) {
    const cache::EntryList* const list = segment.entry_list();
    lane.add_position(segment.PositionOf(entry));
    const float weight = list == nullptr || list->weights.empty() ? 1 : list->weights[entry];
    lane.add_weight(weight);
    weighted_ = weighted_ || weight != 1;
  }

  void FillTail(const cache::OpenRun& run, const Range& asked, const std::vector<std::byte>& rows,
                v1::LaneRows& lane) {
    const std::uint64_t first = SegmentEntries(run);
    const std::uint64_t count = TailEntries(run);
    const std::size_t row_bytes = geometry_.head_dim * kernels::ElementBytes(geometry_.type);
    for (std::uint64_t i = std::max(first, asked.begin); i < asked.end; ++i) {
      const std::byte* const key = rows.data() + (i - first) * row_bytes;
      cache::ToFloats(key, geometry_.type, geometry_.head_dim, keys_);
      cache::ToFloats(key + count * row_bytes, geometry_.type, geometry_.head_dim, values_);
      Store({i, i + 1}, asked, keys_, values_, lane);
      lane.add_position(run.tokens + (i - first));
      lane.add_weight(1);
    }
  }

  void Store(const Range& here, const Range& asked, const float* keys, const float* values,
             v1::LaneRows& lane) const {
    const std::size_t at = (here.begin - asked.begin) * RowBytes();
    const std::size_t count = here.size() * geometry_.head_dim;
    const auto to = [at](v1::Tensor& tensor) {
      return reinterpret_cast<std::byte*>(tensor.mutable_inline_()->data()) + at;
    };
    cache::FromFloats(keys, type_, count, to(*lane.mutable_key()));
    cache::FromFloats(values, type_, count, to(*lane.mutable_value()));
  }

  absl::Status GoOn() const {
    if (caller_.cancelled()) return absl::CancelledError("the caller has cancelled the call");
    if (!services_.stopping.load()) return absl::OkStatus();
    return WithCause(absl::UnavailableError("the daemon is stopping"), ErrorCause::kDraining);
  }

  const Services& services_;
  const Caller& caller_;
  const v1::ReadRequest& request_;
  cache::Residence sequence_;
  kernels::LayerGeometry geometry_;
  kernels::ElementType type_{};
  std::uint32_t first_head_ = 0;
  std::uint32_t heads_ = 0;
  std::vector<cache::OpenRun> runs_;  // of the layer, by kv head
  std::uint64_t committed_ = 0;       // tokens, those of the tail included; 0: there is no tail
  std::uint64_t tokens_ = 0;
  std::vector<std::vector<std::byte>> tail_rows_;  // K, then V, of each head that was asked for
  std::unique_ptr<cache::RowDecoder> decoder_;
  bool weighted_ = false;  // an entry of the lane stands for several tokens
  float keys_[kTileEntries * kernels::kLargestHeadDim];
  float values_[kTileEntries * kernels::kLargestHeadDim];
};

}  // namespace

absl::Status Read(const Services& services, const Caller& caller, const v1::ReadRequest& request,
                  v1::ReadResponse& response) {
  return std::make_unique<Reading>(services, caller, request)->Run(response);
}

}  // namespace tessera::serving
