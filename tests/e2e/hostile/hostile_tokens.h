// A hostile worker, attached, with a model, and an honest stranger beside it.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_worker.h"
#include "tests/fakes/seed.h"

namespace tessera {

using fakes::DaemonProcess;
using fakes::RawWorker;
using fakes::SmallModel;
using fakes::SmallRows;
using grpc::StatusCode;
using testing::HasSubstr;

inline constexpr char kConfig[] = R"({"tenants": [{"name": "default"},
                                           {"name": "other", "token": "sesame"}]})";
inline constexpr int kLayers = 2;
inline constexpr int kHeads = 4;
inline constexpr int kKvHeads = 2;
inline constexpr int kHeadDim = 64;
inline constexpr int kTokens = 100;
inline constexpr std::uint64_t kHuge = std::numeric_limits<std::uint64_t>::max();

inline v1::Tensor Numbers(v1::DType type, std::vector<std::uint64_t> shape,
                          std::size_t bytes = kHuge) {
  v1::Tensor tensor;
  tensor.set_dtype(type);
  std::size_t all = type == v1::DTYPE_FP32 ? 4 : 2;
  for (const std::uint64_t dimension : shape) {
    tensor.add_shape(dimension);
    all *= dimension;
  }
  tensor.set_inline_(std::string(bytes == kHuge ? all : bytes, '\1'));
  return tensor;
}

class HostileTokens : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(daemon_, nullptr);
    v1::Hello hello = RawWorker::GoodHello();
    ASSERT_TRUE(worker_.Attach(hello).ok());
    ASSERT_TRUE(worker_.OpenDescriptors().ok());
    ASSERT_TRUE(worker_.Fetch(shm::DescriptorKind::kStaging, 0).ok());
    hello.set_tenant_token("sesame");
    ASSERT_TRUE(stranger_.Attach(hello).ok());
    model_ = Register(worker_);
  }
  void TearDown() override {
    // The daemon still works.
    const std::uint64_t sequence = NewSequence("snapkv:tokens=24,window=8");
    Append(sequence, 0, kTokens);
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const grpc::Status shown = Observe(GoodObserve(sequence, layer));
      EXPECT_TRUE(shown.ok()) << shown.error_message();
    }
    const grpc::Status compressed = Compress(worker_, sequence);
    EXPECT_TRUE(compressed.ok()) << compressed.error_message();
    v1::DescribeRequest describe;
    describe.set_sequence_id(sequence);
    describe.set_entries(true);
    v1::DescribeResponse described;
    EXPECT_TRUE(worker_.Describe(describe, &described).ok());
    for (const v1::LaneDescription& lane : described.lane()) EXPECT_EQ(lane.position_size(), 24);
    EXPECT_EQ(TenantStats().observation_bytes(), 0u);
  }

  static std::uint64_t Register(RawWorker& worker) {
    v1::RegisterModelRequest request;
    *request.mutable_model() = SmallModel(kLayers);
    v1::RegisterModelResponse response;
    EXPECT_TRUE(worker.RegisterModel(request, &response).ok());
    return response.model_id();
  }
  std::uint64_t NewSequence(const std::string& policy) {
    v1::CreateSequenceRequest request;
    request.set_model_id(model_);
    request.set_policy(policy);
    v1::CreateSequenceResponse response;
    const grpc::Status status = worker_.CreateSequence(request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.sequence_id();
  }
  grpc::Status Append(std::uint64_t sequence, std::uint64_t first, int count) {
    v1::AppendRequest request;
    request.set_sequence_id(sequence);
    request.set_first_token(first);
    *request.mutable_key() = SmallRows(kLayers, count, 1);
    *request.mutable_value() = SmallRows(kLayers, count, 2);
    v1::AppendResponse response;
    return worker_.Append(request, &response);
  }
  v1::ObserveRequest GoodObserve(std::uint64_t sequence, std::uint32_t layer = 0) {
    v1::ObserveRequest request;
    *request.mutable_session() = worker_.key();
    request.set_sequence_id(sequence);
    request.set_layer(layer);
    *request.mutable_last_queries() = Numbers(v1::DTYPE_BF16, {8, kHeads, kHeadDim});
    request.set_first_query_position(kTokens - 8);
    return request;
  }
  grpc::Status Observe(const v1::ObserveRequest& request) {
    v1::ObserveResponse response;
    grpc::ClientContext context;
    return worker_.stub().Observe(&context, request, &response);
  }
  static grpc::Status Compress(RawWorker& worker, std::uint64_t sequence) {
    v1::CompressRequest request;
    *request.mutable_session() = worker.key();
    request.set_sequence_id(sequence);
    grpc::ClientContext context;
    v1::CompressResponse response;
    return worker.stub().Compress(&context, request, &response);
  }
  v1::TenantStats TenantStats() {
    v1::StatsRequest request;
    *request.mutable_session() = worker_.key();
    v1::StatsResponse stats;
    grpc::ClientContext context;
    EXPECT_TRUE(worker_.stub().Stats(&context, request, &stats).ok());
    for (const v1::TenantStats& tenant : stats.tenants()) {
      if (tenant.name() == "default") return tenant;
    }
    return {};
  }

  TestRandom random_;
  std::unique_ptr<DaemonProcess> daemon_ =
      DaemonProcess::Start({.flags = {"--max-message-bytes=1MiB"}, .config_json = kConfig});
  RawWorker worker_{daemon_->Connect()};
  RawWorker stranger_{daemon_->Connect()};
  std::uint64_t model_ = 0;
};

}  // namespace tessera
