// Steps on the CPU: copies rows into the tail rings, and runs attention on the mapped tiles.
#pragma once

#include <memory>
#include <vector>

#include "client/step/step_backend.h"
#include "kernels/dispatch/per_head.h"

namespace tessera::client {

class HostBackend final : public StepBackend {
 public:
  explicit HostBackend(const kernels::Implementation& implementation)
      : implementation_(implementation) {}

  absl::Status Begin(const StepBatch& batch, const StepOptions& options) override;
  absl::Status Append(const StepBatch& batch, std::uint32_t layer, std::span<const std::byte> key,
                      std::span<const std::byte> value) override;
  absl::Status Attend(const StepBatch& batch, std::uint32_t layer,
                      const StepTensors& tensors) override;
  absl::Status Settle(const StepBatch&) override { return absl::OkStatus(); }
  std::span<const std::byte> SettledQueries(std::uint32_t) const override { return {}; }

 private:
  kernels::AttendResult Run(const kernels::AttendBatch& batch);

  const kernels::Implementation& implementation_;
  // Adapts the caller's executor to the kernels' interface; without one, uses the calling thread.
  class CallersExecutor final : public kernels::Executor {
   public:
    void Use(client::Executor* executor) { executor_ = executor; }
    void ParallelFor(std::uint32_t tasks, Task task, void* context) override {
      if (executor_ != nullptr) return executor_->ParallelFor(tasks, task, context);
      for (std::uint32_t i = 0; i < tasks; ++i) task(context, i);
    }

   private:
    client::Executor* executor_ = nullptr;
  };

  CallersExecutor executor_;
  kernels::PerHeadItems items_;
  struct FreeAligned {
    void operator()(std::byte* bytes) const;
  };
  std::unique_ptr<std::byte, FreeAligned> workspace_;
  std::size_t workspace_bytes_ = 0;
};

}  // namespace tessera::client
