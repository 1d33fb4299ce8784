#include "client/session/tensor_carrier.h"

#include <utility>

#include "client/mapped/mapped_memory.h"
#include "daemon/base/strings.h"

namespace tessera::client {

namespace {

constexpr std::uint64_t kCarriedAlignment = 64;
// Bytes of the session's key and of the framing of tensors in a message.
constexpr std::uint64_t kFrame = 256;

}  // namespace

void TensorCarrier::Add(v1::Tensor& tensor, std::span<const std::byte> bytes) {
  loads_.push_back({&tensor, bytes, bytes_});
  bytes_ += (bytes.size() + kCarriedAlignment - 1) / kCarriedAlignment * kCarriedAlignment;
}

absl::Status TensorCarrier::Carry(std::string_view what, std::uint64_t rest) {
  MappedMemory* const mapped = session_.mapped_memory();
  // The daemon would have to copy from a GPU's arena back to the host.
  const bool prefers_arena =
      mapped != nullptr && mapped->gpu() == nullptr && bytes_ >= kMinStagedBytes;
  const std::uint64_t message = session_.welcome().max_message_bytes();
  const bool fits_message = bytes_ + rest + kFrame <= message;
  std::uint64_t arena = 0;
  if (mapped != nullptr && (prefers_arena || !fits_message)) {
    const absl::StatusOr<StagingRing*> staging = mapped->staging();
    // At most half of it, so that a request never waits for all others to finish.
    if (staging.ok()) arena = (*staging)->bytes() / 2;
    if (bytes_ <= arena) return Stage(**staging);
  }
  if (!fits_message) {
    return absl::ResourceExhaustedError(
        Concat(what, " has ", bytes_, " bytes; the daemon's largest message has ", message,
               arena == 0 ? " (max_message_bytes), and the session has no staging arena"
                          : Concat(" (max_message_bytes), and half of the staging arena ", arena,
                                   " (staging_bytes)")));
  }
  for (const Load& load : loads_) {
    load.tensor->set_inline_(reinterpret_cast<const char*>(load.bytes.data()), load.bytes.size());
  }
  return absl::OkStatus();
}

absl::Status TensorCarrier::Stage(StagingRing& staging) {
  absl::StatusOr<StagingRing::Place> place = staging.Take(bytes_);
  if (!place.ok()) {
    // The arena closes with the lease, whose status has the reason.
    const absl::Status reason = session_.status();
    return reason.ok() ? place.status() : reason;
  }
  place_ = *std::move(place);
  GateHold hold(session_.mapped_memory()->gate(), Gate::kSharedLane);
  if (!hold) return session_.status();
  std::vector<MappedMemory::StagingCopy> copies;
  for (const Load& load : loads_) {
    const std::uint64_t offset = place_.offset() + load.offset;
    copies.push_back({offset, load.bytes.data(), load.bytes.size()});
    load.tensor->mutable_staging()->set_offset(offset);
    load.tensor->mutable_staging()->set_bytes(load.bytes.size());
  }
  return session_.mapped_memory()->CopyToStaging(copies);
}

}  // namespace tessera::client
