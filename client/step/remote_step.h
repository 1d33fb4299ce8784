// A step without mapped memory: rows and queries travel in RPCs, layer by layer.
//
// The daemon appends rows to the sequence at once. So End truncates rejected tokens, and Abandon
// truncates all of the step's tokens.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "client/session/session.h"
#include "client/step/step_batch.h"
#include "client/step/step_engine.h"

namespace tessera::client {

class RemoteStep final : public StepEngine {
 public:
  explicit RemoteStep(std::shared_ptr<Session> session) : session_(std::move(session)) {}
  ~RemoteStep() override { Abandon(); }

  absl::Status Begin(std::span<Sequence* const> sequences, const StepOptions& options);

  absl::Status Append(std::uint32_t layer, std::span<const std::byte> key,
                      std::span<const std::byte> value) override;
  absl::Status Attend(std::uint32_t layer, const StepTensors& tensors) override;
  absl::Status AppendAndAttend(std::uint32_t layer, const StepTensors& tensors) override;
  absl::Status End(std::span<const std::uint32_t> accepted) override;
  bool open() const override { return open_; }
  void Abandon() override;
  void Release() override {}

 private:
  absl::Status AppendItem(const StepItem& item, std::uint32_t layer, std::span<const std::byte> key,
                          std::span<const std::byte> value);
  absl::Status TruncateItem(StepItem& item, std::uint64_t tokens);

  const std::shared_ptr<Session> session_;
  StepBatch batch_;
  bool open_ = false;
  bool touched_ = false;  // the daemon may hold rows that are not committed
};

}  // namespace tessera::client
