// A worker may ask for more time than others before its reads are given up for memory.

#include <gmock/gmock.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "tessera/tessera.h"
#include "tests/e2e/tokens/token_lanes.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;

class PinLimit : public Tokens {
 protected:
  PinLimit() : Tokens(DaemonProcess::Start({.flags = {"--pin-limit-ms=100"}}), nullptr) {}

  std::unique_ptr<client::Worker> Attach(milliseconds limit) {
    auto worker = client::Worker::Attach({.address = daemon_->address(), .pin_limit = limit});
    EXPECT_TRUE(worker.ok()) << worker.status();
    return worker.ok() ? *std::move(worker) : nullptr;
  }
  v1::TenantStats Stats() { return client::StatsMessage(*mapped_)->tenants(0); }
  bool Becomes(const std::function<bool(const v1::TenantStats&)>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!condition(Stats())) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }
};

TEST_F(PinLimit, IsThatOfTheWorkerThatReads) {
  Shape({.layers = 1, .query_heads = 2, .kv_heads = 1, .head_dim = 64});
  EXPECT_EQ(mapped_->daemon().pin_limit, milliseconds(100));
  const auto patient = Attach(milliseconds(600'000));
  ASSERT_NE(patient, nullptr);
  EXPECT_EQ(patient->daemon().pin_limit, milliseconds(600'000));
  std::vector<client::Sequence> sequences;
  std::vector<client::Step> steps;
  for (client::Worker* worker : {mapped_.get(), patient.get()}) {
    auto sequence = worker->CreateSequence(*worker->RegisterModel(shape_.Geometry()));
    ASSERT_TRUE(sequence.ok()) << sequence.status();
    sequences.push_back(*std::move(sequence));
    client::Sequence* const batch[] = {&sequences.back()};
    auto step = worker->BeginStep(batch);
    ASSERT_TRUE(step.ok()) << step.status();
    SyntheticSequence truth(shape_, random_.Bits());
    truth.Grow(1);
    ASSERT_TRUE(
        step->Append(0, std::as_bytes(truth.Key(0, 0, 1)), std::as_bytes(truth.Value(0, 0, 1)))
            .ok());
    steps.push_back(*std::move(step));
  }
  // Memory that both steps may read is freed.
  SyntheticSequence truth(shape_, random_.Bits());
  {
    auto other = remote_->CreateSequence(*remote_->RegisterModel(shape_.Geometry()));
    ASSERT_TRUE(other.ok()) << other.status();
    Append(*other, truth, 100, /*observe=*/false);
    ASSERT_TRUE(other->Free().ok());
  }
  EXPECT_TRUE(Becomes([](const auto& stats) { return stats.pins_revoked() == 1; }));
  EXPECT_GT(Stats().retired_bytes(), 0u) << "the other step still reads";
  EXPECT_TRUE(absl::IsAborted(steps[0].End()));
  const absl::Status ended = steps[1].End();
  EXPECT_TRUE(ended.ok()) << ended;
  EXPECT_EQ(sequences[1].tokens(), 1u);
  EXPECT_TRUE(Becomes([](const auto& stats) { return stats.retired_bytes() == 0; }));
  EXPECT_EQ(Stats().pins_revoked(), 1u);
}

TEST_F(PinLimit, HasBounds) {
  for (const int wrong : {-5, 1, 9, 600'001}) {
    const auto worker =
        client::Worker::Attach({.address = daemon_->address(), .pin_limit = milliseconds(wrong)});
    EXPECT_TRUE(absl::IsInvalidArgument(worker.status())) << wrong << worker.status();
    EXPECT_THAT(worker.status().ToString(), HasSubstr("it is 0 or from 10 to 600000"));
  }
  const std::string address = daemon_->address();
  tessera_attach_options attach = TESSERA_ATTACH_OPTIONS_INIT;
  attach.address = address.c_str();
  attach.pin_limit_ms = 5000;
  tessera_worker* worker = nullptr;
  tessera_error error;
  ASSERT_EQ(tessera_attach(&attach, &worker, &error), TESSERA_OK) << error.message;
  tessera_text json = nullptr;
  ASSERT_EQ(tessera_welcome_json(worker, &json, &error), TESSERA_OK);
  EXPECT_THAT(std::string(json), HasSubstr("\"pin_limit_ms\":5000"));
  tessera_free_text(json);
  tessera_detach(worker);
}

}  // namespace
}  // namespace tessera
