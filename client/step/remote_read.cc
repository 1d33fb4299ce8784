#include "client/step/remote_read.h"

#include <vector>

#include "client/sequence/bulk_append.h"
#include "client/session/kernel_types.h"
#include "client/step/attend_rpc.h"

namespace tessera::client {

absl::Status RemoteRead::Begin(std::span<Sequence* const> sequences) {
  absl::Status status = batch_.TakeForReading(sequences);
  for (const StepItem& item : batch_.items()) {
    if (status.ok()) status = CutAbandonedRows(*session_, *item.sequence);
  }
  if (!status.ok()) {
    batch_.Release();
    return status;
  }
  open_ = true;
  return absl::OkStatus();
}

absl::Status RemoteRead::AttendRead(std::uint32_t layer, const ReadTensors& tensors) {
  absl::Status status = batch_.SetQueries(tensors).status();
  const StepTensors shared = AsStepTensors(tensors);
  if (status.ok()) status = batch_.CheckAttend(layer, shared);
  if (!status.ok()) return status;
  const std::vector<AttendRow> rows = batch_.Rows(layer, shared);
  return AttendByRpc(*session_, {.model = &batch_.model(),
                                 .layer = layer,
                                 .output_type = ToKernels(tensors.output_type),
                                 .causal = tensors.causal,
                                 .selection = RuleOf(shared),
                                 .rows = rows});
}

absl::Status RemoteRead::EndRead() {
  Abandon();
  return absl::OkStatus();
}

void RemoteRead::Abandon() {
  open_ = false;
  batch_.Release();
}

}  // namespace tessera::client
