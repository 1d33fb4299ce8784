#include "client/bench/workload/decode_loop.h"

#include <chrono>
#include <utility>

#include "client/api/worker_access.h"
#include "client/bench/measure/syscalls.h"

namespace tessera::cli::bench {

namespace {

// Minimum time per step, shorter than any model's. Without it the loop would outrun a compactor
// that shares its core, and system calls of waits for ring space would be counted.
constexpr std::chrono::microseconds kStepPeriod{200};

}  // namespace

absl::StatusOr<std::unique_ptr<DecodeLoop>> DecodeLoop::Open(const std::string& address,
                                                             std::uint64_t longest) {
  std::unique_ptr<DecodeLoop> loop(new DecodeLoop(longest));
  absl::StatusOr<std::unique_ptr<client::Worker>> worker =
      client::Worker::Attach({.address = address, .worker_name = "bench"});
  if (!worker.ok()) return worker.status();
  loop->worker_ = *std::move(worker);
  absl::StatusOr<client::Model> model = loop->worker_->RegisterModel(kShape.Geometry());
  if (!model.ok()) return model.status();
  absl::StatusOr<client::Sequence> sequence = loop->worker_->CreateSequence(*model);
  if (!sequence.ok()) return sequence.status();
  loop->sequence_ = *std::move(sequence);
  SyntheticSequence prompt(kShape, 1);
  prompt.Grow(kPrompt);
  const std::vector<std::uint16_t> key = prompt.KeysOfAllLayers(0, kPrompt);
  const std::vector<std::uint16_t> value = prompt.ValuesOfAllLayers(0, kPrompt);
  absl::Status status =
      loop->sequence_.Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = kPrompt})
          .status();
  if (!status.ok()) return status;
  return loop;
}

absl::Status DecodeLoop::Step(absl::FunctionRef<void(absl::FunctionRef<void()>)> around) {
  client::Sequence* batch[] = {&sequence_};
  absl::StatusOr<client::Step> step = worker_->BeginStep(batch);
  if (!step.ok()) return step.status();
  absl::Status status;
  for (std::uint32_t layer = 0; layer < kShape.layers && status.ok(); ++layer) {
    const client::StepTensors tensors = {.key = BytesOf(row_),
                                         .value = BytesOf(row_),
                                         .query = BytesOf(row_),
                                         .output = WritableBytesOf(output_),
                                         .lse = lse_};
    around([&] { status = step->AppendAndAttend(layer, tensors); });
  }
  if (!status.ok()) return status;
  if (status = step->End(); !status.ok()) return status;
  return sequence_.tokens() < longest_ ? absl::OkStatus() : sequence_.Truncate(kPrompt);
}

v1::AttendRequest DecodeLoop::AttendRequest() const {
  v1::AttendRequest request;
  *request.mutable_session() = client::WelcomeMessage(*worker_).session();
  v1::AttendItem& item = *request.add_items();
  item.set_sequence_id(sequence_.id().value());
  item.mutable_query()->set_dtype(v1::DTYPE_BF16);
  for (int dimension : {1, 1, 64}) item.mutable_query()->add_shape(dimension);
  item.mutable_query()->set_inline_(row_.data(), row_.size() * sizeof row_[0]);
  return request;
}

absl::Status RunDecodeLoop(const std::string& address, std::uint64_t steps) {
  absl::StatusOr<std::unique_ptr<DecodeLoop>> loop = DecodeLoop::Open(address, ~std::uint64_t{0});
  if (!loop.ok()) return loop.status();
  absl::Status status;
  const auto run = [&](std::uint64_t count) {
    for (std::uint64_t i = 0; i < count && status.ok(); ++i) {
      const auto begun = std::chrono::steady_clock::now();
      status = (*loop)->Step([](const auto& act) { act(); });
      while (std::chrono::steady_clock::now() - begun < kStepPeriod) {
      }
    }
  };
  run(100);  // warm-up: opens the tail, wakes the compactor, grows all buffers
  MarkBegin();
  run(steps);
  MarkEnd();
  return status;
}

}  // namespace tessera::cli::bench
