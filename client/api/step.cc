#include "tessera/step.h"

#include <utility>

namespace tessera::client {

absl::Status Step::Over() const {
  if (!ended_by_.ok()) return ended_by_;
  return absl::FailedPreconditionError("the step is over; begin another");
}

absl::Status Step::After(absl::Status status) {
  if (!engine_->open()) {
    ended_by_ = status;
    std::exchange(engine_, nullptr)->Release();
  }
  return status;
}

absl::Status Step::Append(std::uint32_t layer, std::span<const std::byte> key,
                          std::span<const std::byte> value) {
  return open() ? After(engine_->Append(layer, key, value)) : Over();
}

absl::Status Step::Attend(std::uint32_t layer, const StepTensors& tensors) {
  return open() ? After(engine_->Attend(layer, tensors)) : Over();
}

absl::Status Step::AppendAndAttend(std::uint32_t layer, const StepTensors& tensors) {
  return open() ? After(engine_->AppendAndAttend(layer, tensors)) : Over();
}

absl::Status Step::End(std::span<const std::uint32_t> accepted) {
  return open() ? After(engine_->End(accepted)) : Over();
}

void Step::Abandon() {
  if (engine_ == nullptr) return;
  engine_->Abandon();
  std::exchange(engine_, nullptr)->Release();
}

}  // namespace tessera::client
