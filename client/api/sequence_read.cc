// Sequence::Read: as many messages as the rows need.

#include <algorithm>
#include <utility>

#include "client/api/lease_core.h"
#include "client/error/error_info.h"
#include "client/sequence/bulk_append.h"
#include "client/session/kernel_types.h"
#include "client/session/session.h"
#include "daemon/base/strings.h"
#include "tessera/sequence.h"

namespace tessera::client {

namespace {

// What the daemon counts of an answer besides rows: of each entry, and of each lane.
constexpr std::uint64_t kEntryBytes = 14;
constexpr std::uint64_t kLaneBytes = 128;
// Fewer lanes per message before fewer entries than this.
constexpr std::uint64_t kEntriesAtOnce = 32;
// Of a lane that changes between two messages.
constexpr int kAttempts = 4;

class RowReader {
 public:
  RowReader(Session& session, const SequenceState& sequence, const RowRange& range)
      : session_(session), sequence_(sequence), range_(range) {}

  absl::StatusOr<SequenceRows> Run() {
    if (absl::Status status = Plan(); !status.ok()) return status;
    absl::Status status;
    for (int i = 0; i < kAttempts; ++i) {
      rows_ = {.type = range_.type.value_or(FromKernels(sequence_.model->type()))};
      status = ReadAll();
      if (!absl::IsAborted(status)) break;
    }
    if (!status.ok()) return status;
    return std::move(rows_);
  }

 private:
  absl::Status Plan() {
    const BoundModel& model = *sequence_.model;
    if (range_.layer >= model.layers()) {
      return absl::InvalidArgumentError(
          Concat("layer is ", range_.layer, "; the model has ", model.layers(), " layers"));
    }
    const kernels::LayerGeometry& geometry = model.geometry(range_.layer);
    if (range_.first_kv_head >= geometry.kv_heads ||
        range_.kv_heads > geometry.kv_heads - range_.first_kv_head) {
      return absl::InvalidArgumentError(Concat("kv heads are ", range_.kv_heads, " from ",
                                               range_.first_kv_head, "; layer ", range_.layer,
                                               " has ", geometry.kv_heads));
    }
    heads_ = range_.kv_heads != 0 ? range_.kv_heads : geometry.kv_heads - range_.first_kv_head;
    const ElementType type = range_.type.value_or(FromKernels(model.type()));
    const std::uint64_t entry = 2 * geometry.head_dim * ElementBytes(type) + kEntryBytes;
    const std::uint64_t message = session_.welcome().max_message_bytes();
    heads_at_once_ =
        std::clamp<std::uint64_t>(message / (kEntriesAtOnce * entry + kLaneBytes), 1, heads_);
    const std::uint64_t lanes = heads_at_once_ * kLaneBytes;
    entries_at_once_ =
        std::max<std::uint64_t>(1, (message - std::min(message, lanes)) / (heads_at_once_ * entry));
    return absl::OkStatus();
  }

  absl::Status ReadAll() {
    for (std::uint32_t done = 0; done < heads_;) {
      const auto count =
          static_cast<std::uint32_t>(std::min<std::uint64_t>(heads_at_once_, heads_ - done));
      if (absl::Status status = ReadHeads(range_.first_kv_head + done, count); !status.ok()) {
        return status;
      }
      done += count;
    }
    return absl::OkStatus();
  }

  // All entries that were asked for, of some heads.
  absl::Status ReadHeads(std::uint32_t first_head, std::uint32_t heads) {
    const std::size_t first_lane = rows_.lanes.size();
    for (std::uint64_t done = 0;;) {
      const std::uint64_t left = range_.entries == 0 ? entries_at_once_ : range_.entries - done;
      v1::ReadRequest request;
      request.set_sequence_id(sequence_.id.value());
      request.set_layer(range_.layer);
      request.set_first_kv_head(first_head);
      request.set_kv_heads(heads);
      request.set_first_entry(range_.first_entry + done);
      request.set_entries(std::min(left, entries_at_once_));
      request.set_dtype(ToDType(ToKernels(rows_.type)));
      v1::ReadResponse response;
      if (absl::Status status = session_.Call(request, response); !status.ok()) return status;
      if (absl::Status status = Check(request, response); !status.ok()) return status;
      if (absl::Status status = Take(response, first_lane, heads); !status.ok()) return status;
      done += request.entries();
      const bool all = std::ranges::all_of(response.lanes(), [&](const v1::LaneRows& lane) {
        const std::uint64_t first =
            std::min<std::uint64_t>(range_.first_entry, lane.lane_entries());
        return lane.lane_entries() - first <= done;
      });
      if (all || done == range_.entries) return absl::OkStatus();
    }
  }

  // The caller's arrays have room for what was asked for, and no more.
  absl::Status Check(const v1::ReadRequest& request, const v1::ReadResponse& response) const {
    if (response.lanes_size() != static_cast<int>(request.kv_heads())) {
      return absl::InternalError(
          Concat("the daemon answered ", response.lanes_size(), " lanes of ", request.kv_heads()));
    }
    const kernels::LayerGeometry& geometry = sequence_.model->geometry(range_.layer);
    const std::uint64_t row = geometry.head_dim * ElementBytes(rows_.type);
    for (int i = 0; i < response.lanes_size(); ++i) {
      const v1::LaneRows& lane = response.lanes(i);
      const std::uint64_t first =
          std::min<std::uint64_t>(request.first_entry(), lane.lane_entries());
      const std::uint64_t entries =
          std::min<std::uint64_t>(request.entries(), lane.lane_entries() - first);
      const auto positions = static_cast<std::uint64_t>(lane.position_size());
      const auto weights = static_cast<std::uint64_t>(lane.weight_size());
      const bool fits = positions == entries && lane.key().inline_().size() == entries * row &&
                        lane.value().inline_().size() == entries * row &&
                        (weights == 0 || weights == entries);
      if (lane.kv_head() == request.first_kv_head() + static_cast<std::uint32_t>(i) && fits)
        continue;
      return absl::InternalError(Concat("the daemon answered ", positions, " entries of kv head ",
                                        lane.kv_head(), ", or rows of another size; ", entries,
                                        " of kv head ", request.first_kv_head() + i,
                                        " were asked for"));
    }
    return absl::OkStatus();
  }

  absl::Status Take(const v1::ReadResponse& response, std::size_t first_lane, std::uint32_t heads) {
    const bool first = rows_.lanes.size() == first_lane;
    if (rows_.lanes.empty()) rows_.tokens = response.tokens();
    bool changed = response.tokens() != rows_.tokens;
    for (std::uint32_t i = 0; i < heads; ++i) {
      const v1::LaneRows& from = response.lanes(static_cast<int>(i));
      if (first) {
        rows_.lanes.push_back({.kv_head = from.kv_head(), .lane_entries = from.lane_entries()});
      }
      LaneRows& to = rows_.lanes[first_lane + i];
      changed = changed || to.lane_entries != from.lane_entries();
      Add(from, to);
    }
    if (!changed) return absl::OkStatus();
    return absl::AbortedError(Concat(sequence_.id.ToString(),
                                     " was compressed while its rows were read; read them again"));
  }

  static void Add(const v1::LaneRows& from, LaneRows& to) {
    const auto add = [](const std::string& rows, std::vector<std::byte>& all) {
      const auto* const bytes = reinterpret_cast<const std::byte*>(rows.data());
      all.insert(all.end(), bytes, bytes + rows.size());
    };
    add(from.key().inline_(), to.key);
    add(from.value().inline_(), to.value);
    if (!to.weights.empty() || from.weight_size() > 0) {
      to.weights.resize(to.positions.size(), 1.0f);
      to.weights.insert(to.weights.end(), from.weight().begin(), from.weight().end());
    }
    to.positions.insert(to.positions.end(), from.position().begin(), from.position().end());
    if (!to.weights.empty()) to.weights.resize(to.positions.size(), 1.0f);
  }

  Session& session_;
  const SequenceState& sequence_;
  const RowRange& range_;
  std::uint32_t heads_ = 0;
  std::uint64_t heads_at_once_ = 0;
  std::uint64_t entries_at_once_ = 0;
  SequenceRows rows_;
};

}  // namespace

absl::StatusOr<SequenceRows> Sequence::Read(const RowRange& range) {
  if (state_ == nullptr) {
    return BadArgument("Sequence::Read",
                       "the sequence is an empty handle (default-constructed or moved from)");
  }
  const absl::StatusOr<SequenceUse> use = SequenceUse::Take(state_);
  if (!use.ok()) return use.status();
  const absl::StatusOr<std::shared_ptr<Session>> session = core_->session();
  if (!session.ok()) return session.status();
  if (absl::Status cut = CutAbandonedRows(**session, *state_); !cut.ok()) return cut;
  return RowReader(**session, *state_, range).Run();
}

}  // namespace tessera::client
