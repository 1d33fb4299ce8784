#include "tessera/read.h"

#include <utility>

#include "client/error/error_info.h"
#include "client/step/read_engine.h"

namespace tessera::client {

Read::Read(std::shared_ptr<ReadEngine> engine) : engine_(std::move(engine)), began_(true) {}

Read::Read(Read&& other) noexcept
    : engine_(std::move(other.engine_)),
      ended_by_(std::move(other.ended_by_)),
      began_(std::exchange(other.began_, false)) {}

Read& Read::operator=(Read&& other) noexcept {
  if (this != &other) {
    Abandon();
    engine_ = std::move(other.engine_);
    ended_by_ = std::move(other.ended_by_);
    began_ = std::exchange(other.began_, false);
  }
  return *this;
}

bool Read::open() const { return engine_ != nullptr && engine_->open(); }

absl::Status Read::NotOpen(const char* call) const {
  if (!began_) return BadArgument(call, "the read is empty (default-constructed or moved from)");
  if (!ended_by_.ok()) return ended_by_;
  return absl::FailedPreconditionError("the read is over; begin a new one");
}

absl::Status Read::After(absl::Status status) {
  if (!engine_->open()) {
    ended_by_ = status;
    std::exchange(engine_, nullptr)->Release();
  }
  return status;
}

absl::Status Read::Attend(std::uint32_t layer, const ReadTensors& tensors) {
  return open() ? After(engine_->AttendRead(layer, tensors)) : NotOpen("Read::Attend");
}

absl::Status Read::End() { return open() ? After(engine_->EndRead()) : NotOpen("Read::End"); }

void Read::Abandon() {
  if (engine_ == nullptr) return;
  engine_->Abandon();
  std::exchange(engine_, nullptr)->Release();
}

}  // namespace tessera::client
