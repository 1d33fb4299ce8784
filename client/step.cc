#include "client/step.h"

namespace tessera::client {

namespace {

absl::Status Over() {
  return absl::FailedPreconditionError("the step is over; begin another");
}

}  // namespace

absl::Status Step::Append(std::uint32_t layer, std::span<const std::byte> key,
                          std::span<const std::byte> value) {
  return open() ? engine_->Append(layer, key, value) : Over();
}

absl::Status Step::Attend(std::uint32_t layer, const StepTensors& tensors) {
  return open() ? engine_->Attend(layer, tensors) : Over();
}

absl::Status Step::AppendAndAttend(std::uint32_t layer, const StepTensors& tensors) {
  return open() ? engine_->AppendAndAttend(layer, tensors) : Over();
}

absl::Status Step::End(std::span<const std::uint32_t> accepted) {
  if (!open()) return Over();
  absl::Status status = engine_->End(accepted);
  if (!engine_->open()) engine_ = nullptr;
  return status;
}

void Step::Abandon() {
  if (open()) engine_->Abandon();
  engine_ = nullptr;
}

}  // namespace tessera::client
