#include "daemon/serving/rpc/compress.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "daemon/base/error_cause.h"
#include "daemon/base/mutex.h"
#include "daemon/base/strings.h"
#include "daemon/serving/call/resident.h"
#include "daemon/serving/convert/convert.h"
#include "daemon/serving/convert/outcomes.h"
#include "daemon/serving/convert/rotations.h"

namespace tessera::serving {

namespace {

absl::Status GoOn(const Services& services, const Caller& caller) {
  if (caller.cancelled()) return absl::CancelledError("the caller has cancelled the call");
  if (services.stopping.load())
    return WithCause(absl::UnavailableError("the daemon is stopping"), ErrorCause::kDraining);
  return absl::OkStatus();
}

// Totals over all lanes of a sequence.
struct Sums {
  std::uint64_t packed = 0;  // packed or summarized entries, also provisional ones
  std::uint64_t tile_bytes = 0;
  std::uint64_t rotation_bytes = 0;
  std::uint64_t entries = 0;
};
Sums SumsOf(const cache::Sequence& sequence) {
  Sums sums;
  for (const cache::SegmentRun& run : sequence.Form()) {
    if (run.shape.packed() || run.shape.summary != kernels::Summary::kNone) {
      sums.packed += run.entries;
    }
    sums.entries += run.entries;
    sums.tile_bytes += run.tile_bytes;
    sums.rotation_bytes += run.rotation_bytes;
  }
  return sums;
}

class Compression {
 public:
  Compression(const Services& services, const Caller& caller, const v1::CompressRequest& request,
              cache::Sequence& sequence)
      : services_(services),
        caller_(caller),
        request_(request),
        sequence_(sequence),
        model_(sequence.model()) {}

  absl::StatusOr<cache::PackOutcome> Run() {
    absl::StatusOr<std::uint32_t> layers =
        CountLayers(model_, request_.first_layer(), request_.layers());
    if (!layers.ok()) return layers.status();
    spec_.first_layer = request_.first_layer();
    for (std::uint32_t i = 0; i < *layers; ++i) {
      absl::StatusOr<kernels::TileShape> shape = ToTileShape(
          request_.packing(), model_.geometry(spec_.first_layer + i), request_.has_rotations());
      if (!shape.ok()) return shape.status();
      spec_.shapes.push_back(*shape);
    }
    if (request_.has_rotations()) {
      if (absl::Status status = TakeRotations(); !status.ok()) return status;
    }
    return sequence_.Pack(spec_, [this] { return GoOn(); });
  }

 private:
  absl::Status GoOn() const { return serving::GoOn(services_, caller_); }

  absl::Status TakeRotations() {
    const auto layers = static_cast<std::uint32_t>(spec_.shapes.size());
    if (absl::Status status = CheckSameShape(model_, spec_.first_layer, layers); !status.ok()) {
      return status;
    }
    const v1::Rotations& rotations = request_.rotations();
    absl::StatusOr<kernels::ElementType> type =
        ToElementType(rotations.key().dtype(), "rotations.key");
    if (!type.ok()) return type.status();
    if (*type == kernels::ElementType::kFp16) {
      return absl::InvalidArgumentError("rotations.key is fp16; rotations are bf16 or fp32");
    }
    if (rotations.value().dtype() != rotations.key().dtype()) {
      return absl::InvalidArgumentError(
          Concat("rotations.value has dtype ", static_cast<int>(rotations.value().dtype()),
                 ", rotations.key ", static_cast<int>(rotations.key().dtype()),
                 "; both must have the same"));
    }
    spec_.rotation_type = *type;
    absl::Status status =
        TakeMatrices("rotations.key", rotations.key(), copies_[0], &spec_.key_rotations);
    if (!status.ok()) return status;
    return TakeMatrices("rotations.value", rotations.value(), copies_[1], &spec_.value_rotations);
  }

  // Takes one matrix per lane. Data in the staging arena is copied first, because the worker can
  // change it.
  absl::Status TakeMatrices(std::string_view name, const v1::Tensor& tensor,
                            std::vector<std::byte>& copy, const std::byte** matrices) {
    const kernels::TileShape& shape = spec_.shapes.front();
    const std::uint32_t heads = model_.layout().kv_heads(spec_.first_layer);
    absl::StatusOr<TensorBytes> asked =
        Resolve(tensor,
                {.name = name,
                 .type = spec_.rotation_type,
                 .shape = {spec_.shapes.size(), heads, shape.key.channels, shape.head_dim},
                 .layout = "[layers][kv_heads][channels][head_dim]"},
                *caller_.session);
    if (!asked.ok()) return asked.status();
    *matrices = asked->data;
    if (asked->place == device::Place::kDevice) {
      copy.resize(asked->bytes);
      absl::Status status = services_.device->Read(copy.data(), asked->data, asked->bytes);
      if (!status.ok()) return status;
      *matrices = copy.data();
    }
    const std::uint64_t matrix_bytes = asked->bytes / (spec_.shapes.size() * heads);
    for (std::uint32_t i = 0; i < spec_.shapes.size() * heads; ++i) {
      absl::Status status = GoOn();
      if (status.ok()) {
        status =
            CheckRotation(*matrices + i * matrix_bytes, spec_.rotation_type, shape.key.channels,
                          shape.head_dim, {name, spec_.first_layer + i / heads, i % heads});
      }
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  const Services& services_;
  const Caller& caller_;
  const v1::CompressRequest& request_;
  cache::Sequence& sequence_;
  const cache::Model& model_;
  cache::PackSpec spec_;
  std::vector<std::byte> copies_[2];  // of the rotations: K, V
};

}  // namespace

namespace {

// How often a waiting call checks whether it was cancelled.
constexpr std::chrono::milliseconds kBetweenLooks{20};

// The result of the jobs. Shared with them, because the caller may return earlier.
struct Outcome {
  Mutex mutex;
  CondVar known;
  std::optional<absl::Status> status TESSERA_GUARDED_BY(mutex);
};

void Answer(const cache::PackOutcome& outcome, v1::CompressResponse& response) {
  response.set_entries_packed(outcome.entries_packed);
  response.set_entries_left(outcome.entries_left);
  response.set_tile_bytes_before(outcome.tile_bytes_before);
  response.set_tile_bytes_after(outcome.tile_bytes_after);
  response.set_rotation_bytes(outcome.rotation_bytes);
}

std::vector<cache::Sequence::LaneDescription> LanesOf(const cache::Sequence& sequence,
                                                      std::uint32_t first_layer,
                                                      std::uint32_t layers) {
  std::vector<cache::Sequence::LaneDescription> lanes =
      sequence.Describe(cache::Sequence::Detail::kLanes).lanes;
  std::erase_if(lanes, [&](const cache::Sequence::LaneDescription& lane) {
    return lane.layer < first_layer || lane.layer >= first_layer + layers;
  });
  return lanes;
}

}  // namespace

absl::Status CompressByPolicy(const Services& services, const PolicyCompression& compression,
                              const v1::CompressRequest& request, v1::CompressResponse& response) {
  const std::shared_ptr<cache::Sequence>& sequence = compression.sequence;
  const absl::StatusOr<std::uint32_t> layers =
      CountLayers(sequence->model(), request.first_layer(), request.layers());
  if (!layers.ok()) return layers.status();
  const Sums before = SumsOf(*sequence);
  const std::vector<cache::Sequence::LaneDescription> lanes_before =
      LanesOf(*sequence, request.first_layer(), *layers);
  const auto outcome = std::make_shared<Outcome>();
  services.compactor->Compress(sequence,
                               {.first_layer = request.first_layer(),
                                .layers = *layers,
                                .all_shown = compression.by_worker,
                                .amid_steps = compression.amid_steps},
                               [outcome](absl::Status status) {
                                 MutexLock lock(outcome->mutex);
                                 outcome->status = std::move(status);
                                 outcome->known.NotifyAll();
                               });
  {
    MutexLock lock(outcome->mutex);
    while (!outcome->status.has_value()) {
      if (absl::Status status = compression.go_on(); !status.ok()) return status;
      outcome->known.WaitUntil(outcome->mutex, std::chrono::steady_clock::now() + kBetweenLooks);
    }
    // Too few tokens for the policy are not an error: the answer says how many more are needed.
    const bool answered = policies::LeavesWhole(*outcome->status) && !compression.all_or_nothing;
    if (!outcome->status->ok() && !answered) return *outcome->status;
  }
  const Sums after = SumsOf(*sequence);
  Answer({.entries_packed = after.packed > before.packed ? after.packed - before.packed : 0,
          .entries_left = std::min(before.packed, after.packed),
          .tile_bytes_before = before.tile_bytes,
          .tile_bytes_after = after.tile_bytes,
          .rotation_bytes = after.rotation_bytes},
         response);
  const std::vector<cache::Sequence::LaneDescription> lanes =
      LanesOf(*sequence, request.first_layer(), *layers);
  std::vector<compaction::LaneOutcome> outcomes =
      compaction::Compactor::OutcomesOf(*sequence, lanes);
  NoteNothingNew(lanes_before, lanes, outcomes);
  *response.mutable_outcomes() = GroupOutcomes(lanes, outcomes);
  response.set_position_shift(sequence->position_shift());
  const std::vector<std::uint64_t> decided = compaction::Compactor::DecidedByLayer(*sequence);
  for (std::uint32_t layer = 0; layer < *layers && !decided.empty(); ++layer) {
    response.add_decided_tokens(decided[request.first_layer() + layer]);
  }
  // Entries appended meanwhile hide as many dropped ones.
  response.set_entries_dropped(before.entries > after.entries ? before.entries - after.entries : 0);
  return absl::OkStatus();
}

absl::Status Compress(const Services& services, const Caller& caller,
                      const v1::CompressRequest& request, v1::CompressResponse& response) {
  if (!request.has_packing() && request.has_rotations()) {
    return absl::InvalidArgumentError("rotations are set without a packing that uses them");
  }
  if (request.end_prompt() && request.has_packing()) {
    return absl::InvalidArgumentError(
        "packing and end_prompt are both set, but end_prompt compresses by the sequence's policy");
  }
  const absl::StatusOr<cache::Residence> sequence =
      FindResident(*caller.tenant, SequenceId(request.sequence_id()));
  if (!sequence.ok()) return sequence.status();
  const policies::Policy policy = compaction::Compactor::PolicyOf(**sequence);
  if (request.has_packing() && !policy.dense()) {
    return absl::FailedPreconditionError(
        Concat((*sequence)->id().ToString(), " has the policy ", Quoted(policy.text),
               ", which packs rows; leave out the packing, or set the policy \"dense\""));
  }
  if (request.end_prompt()) {
    const absl::StatusOr<std::uint32_t> layers =
        CountLayers((*sequence)->model(), request.first_layer(), request.layers());
    if (!layers.ok()) return layers.status();
    response.set_position_shift((*sequence)->position_shift());
    return services.compactor->EndPrompt(sequence->sequence(), request.first_layer(), *layers);
  }
  if (!request.has_packing()) {
    return CompressByPolicy(services,
                            {.sequence = sequence->sequence(),
                             .by_worker = true,
                             .go_on = [&] { return GoOn(services, caller); }},
                            request, response);
  }
  const absl::StatusOr<cache::PackOutcome> outcome =
      Compression(services, caller, request, **sequence).Run();
  if (!outcome.ok()) return outcome.status();
  Answer(*outcome, response);
  return absl::OkStatus();
}

}  // namespace tessera::serving
