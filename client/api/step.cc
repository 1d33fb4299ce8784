#include "tessera/step.h"

#include <string>
#include <utility>

#include "client/error/error_info.h"
#include "client/step/step_engine.h"

namespace tessera::client {

Step::Step(std::shared_ptr<StepEngine> engine) : engine_(std::move(engine)), began_(true) {}

Step::Step(Step&& other) noexcept
    : engine_(std::move(other.engine_)),
      ended_by_(std::move(other.ended_by_)),
      began_(std::exchange(other.began_, false)) {}

Step& Step::operator=(Step&& other) noexcept {
  if (this != &other) {
    Abandon();
    engine_ = std::move(other.engine_);
    ended_by_ = std::move(other.ended_by_);
    began_ = std::exchange(other.began_, false);
  }
  return *this;
}

bool Step::open() const { return engine_ != nullptr && engine_->open(); }

absl::Status Step::NotOpen(const char* call) const {
  if (!began_) return BadArgument(call, "the step is empty (default-constructed or moved from)");
  if (!ended_by_.ok()) return ended_by_;
  return absl::FailedPreconditionError("the step is over; begin a new one");
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
  return open() ? After(engine_->Append(layer, key, value)) : NotOpen("Step::Append");
}

absl::Status Step::Attend(std::uint32_t layer, const StepTensors& tensors) {
  return open() ? After(engine_->Attend(layer, tensors)) : NotOpen("Step::Attend");
}

absl::Status Step::AppendAndAttend(std::uint32_t layer, const StepTensors& tensors) {
  return open() ? After(engine_->AppendAndAttend(layer, tensors))
                : NotOpen("Step::AppendAndAttend");
}

absl::Status Step::End(std::span<const std::uint32_t> accepted) {
  return open() ? After(engine_->End(accepted)) : NotOpen("Step::End");
}

void Step::Abandon() {
  if (engine_ == nullptr) return;
  engine_->Abandon();
  std::exchange(engine_, nullptr)->Release();
}

}  // namespace tessera::client
