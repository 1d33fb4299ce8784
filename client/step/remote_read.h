// A read without mapped memory: queries travel in RPCs.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "client/session/session.h"
#include "client/step/read_engine.h"
#include "client/step/step_batch.h"

namespace tessera::client {

class RemoteRead final : public ReadEngine {
 public:
  explicit RemoteRead(std::shared_ptr<Session> session) : session_(std::move(session)) {}

  absl::Status Begin(std::span<Sequence* const> sequences);

  absl::Status AttendRead(std::uint32_t layer, const ReadTensors& tensors) override;
  absl::Status EndRead() override;
  bool open() const override { return open_; }
  void Abandon() override;
  void Release() override {}

 private:
  const std::shared_ptr<Session> session_;
  StepBatch batch_;
  bool open_ = false;
};

}  // namespace tessera::client
