// A worker that changes shared memory while the daemon reads it. The daemon must use exactly the
// bytes that it has checked.

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "daemon/platform/memfd.h"
#include "kernels/format/element.h"
#include "proto/shm/lane_layout.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_mapping.h"
#include "tests/fakes/raw_worker.h"
#include "tests/fakes/seed.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::RawMapping;
using fakes::RawWorker;
using shm::DescriptorKind;

constexpr int kLayers = 2;
constexpr std::size_t kRowBytes = 2 * 64 * 2;                       // of K or V, both kv heads
constexpr std::uint16_t kGood = 0x3e80;                             // 0.25
constexpr std::uint16_t kBad[] = {0x7fc0, 0x7f80, 0xff80, 0x7f7f};  // NaN, +inf, -inf, too large
// How often each outcome must occur, and the maximum number of attempts.
constexpr int kEnough = 20;
constexpr int kAttempts = 20000;

// Writes a bad value to random words and removes it again, as fast as possible.
class Flipper {
 public:
  Flipper(std::byte* memory, std::size_t bytes, std::uint64_t seed)
      : words_(reinterpret_cast<std::uint16_t*>(memory)), count_(bytes / 2), thread_([this, seed] {
          std::mt19937_64 random(seed);
          while (!stop_.load(std::memory_order_relaxed)) {
            std::atomic_ref<std::uint16_t> word(words_[random() % count_]);
            const std::uint16_t good = word.load(std::memory_order_relaxed);
            word.store(kBad[random() % std::size(kBad)], std::memory_order_relaxed);
            for (std::uint64_t i = random() % 2048; i > 0; --i) word.load();
            word.store(good, std::memory_order_relaxed);
            for (std::uint64_t i = random() % 2048; i > 0; --i) word.load();
          }
        }) {}
  ~Flipper() {
    stop_.store(true);
    thread_.join();
  }

 private:
  std::uint16_t* const words_;
  const std::size_t count_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

class HostileMemory : public testing::Test {
 protected:
  HostileMemory() : daemon_(DaemonProcess::Start({})), seed_(TestSeed()) {
    worker_ = std::make_unique<RawWorker>(daemon_->Connect());
    EXPECT_TRUE(worker_->Attach().ok());
    EXPECT_TRUE(worker_->OpenDescriptors().ok());
    v1::RegisterModelRequest model;
    *model.mutable_model() = fakes::SmallModel(kLayers);
    v1::RegisterModelResponse registered;
    EXPECT_TRUE(worker_->RegisterModel(model, &registered).ok());
    model_ = registered.model_id();
  }

  void MapStaging() {
    absl::StatusOr<RawWorker::Descriptor> staging = worker_->Fetch(DescriptorKind::kStaging, 0);
    ASSERT_TRUE(staging.ok()) << staging.status();
    ASSERT_TRUE(staging->fd.valid());
    absl::StatusOr<AddressRange> range =
        AddressRange::Map(staging->fd.get(), staging->answer.bytes, Access::kReadWrite);
    ASSERT_TRUE(range.ok()) << range.status();
    staging_ = *std::move(range);
  }
  static void FillGood(std::byte* to, std::size_t bytes) {
    for (std::size_t at = 0; at < bytes; at += 2) std::memcpy(to + at, &kGood, 2);
  }
  std::uint64_t NewSequence() {
    v1::CreateSequenceRequest create;
    create.set_model_id(model_);
    v1::CreateSequenceResponse created;
    EXPECT_TRUE(worker_->CreateSequence(create, &created).ok());
    return created.sequence_id();
  }
  void Free(std::uint64_t sequence) {
    v1::FreeRequest free;
    free.add_sequence_ids(sequence);
    v1::FreeResponse freed;
    EXPECT_TRUE(worker_->Free(free, &freed).ok());
  }
  static v1::Tensor Staged(std::initializer_list<int> shape, std::size_t offset,
                           std::size_t bytes) {
    v1::Tensor tensor;
    tensor.set_dtype(v1::DTYPE_BF16);
    for (const int extent : shape) tensor.add_shape(extent);
    tensor.mutable_staging()->set_offset(offset);
    tensor.mutable_staging()->set_bytes(bytes);
    return tensor;
  }
  static v1::Tensor Query() {
    v1::Tensor query;
    query.set_dtype(v1::DTYPE_BF16);
    for (const int extent : {1, 4, 64}) query.add_shape(extent);
    std::string bytes(4 * 64 * 2, '\0');
    FillGood(reinterpret_cast<std::byte*>(bytes.data()), bytes.size());
    query.set_inline_(bytes);
    return query;
  }
  grpc::Status Attend(std::uint64_t sequence, int layer, const v1::Tensor& query,
                      v1::AttendResponse* response) {
    v1::AttendRequest request;
    request.set_layer(static_cast<std::uint32_t>(layer));
    v1::AttendItem& item = *request.add_items();
    item.set_sequence_id(sequence);
    *item.mutable_query() = query;
    return worker_->Attend(request, response);
  }
  // The sequence holds only checked rows, so that all attention over it is finite.
  void ExpectFinite(std::uint64_t sequence, float at_most = 1e18f) {
    for (int layer = 0; layer < kLayers; ++layer) {
      v1::AttendResponse response;
      const grpc::Status status = Attend(sequence, layer, Query(), &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
      const std::string& bytes = response.outputs(0).output().inline_();
      ASSERT_EQ(bytes.size(), 4u * 64 * 2);
      for (std::size_t at = 0; at < bytes.size(); at += 2) {
        std::uint16_t bits;
        std::memcpy(&bits, bytes.data() + at, 2);
        const float value = kernels::Bf16ToFloat(bits);
        ASSERT_TRUE(std::abs(value) <= at_most) << value << ": something was never judged";
      }
    }
  }

  std::unique_ptr<DaemonProcess> daemon_;
  const std::uint64_t seed_;
  std::unique_ptr<RawWorker> worker_;
  std::uint64_t model_ = 0;
  AddressRange staging_;
};

TEST_F(HostileMemory, RowsThatChangeWhileTheyAreAppended) {
  MapStaging();
  constexpr int kTokens = 64;
  constexpr std::size_t kBytes = kLayers * kTokens * kRowBytes;
  FillGood(staging_.data(), 2 * kBytes);
  const Flipper flipper(staging_.data(), 2 * kBytes, seed_);
  int taken = 0;
  int refused = 0;
  for (int i = 0; i < kAttempts && (taken < kEnough || refused < kEnough); ++i) {
    const std::uint64_t sequence = NewSequence();
    v1::AppendRequest append;
    append.set_sequence_id(sequence);
    *append.mutable_key() = Staged({kLayers, kTokens, 2, 64}, 0, kBytes);
    *append.mutable_value() = Staged({kLayers, kTokens, 2, 64}, kBytes, kBytes);
    v1::AppendResponse appended;
    const grpc::Status status = worker_->Append(append, &appended);
    if (status.ok()) {
      ++taken;
      ASSERT_NO_FATAL_FAILURE(ExpectFinite(sequence));
    } else {
      ++refused;
      ASSERT_EQ(status.error_code(), grpc::StatusCode::DATA_LOSS) << status.error_message();
    }
    Free(sequence);
  }
  EXPECT_GE(taken, kEnough);
  EXPECT_GE(refused, kEnough);
}

// Rotations that are not orthonormal could make rows arbitrarily large.
TEST_F(HostileMemory, RotationsThatChangeWhileTheyAreTaken) {
  MapStaging();
  constexpr std::size_t kSide = 64;
  constexpr std::size_t kBytes = kLayers * 2 * kSide * kSide * 2;
  constexpr std::uint16_t kOne = 0x3f80;
  std::memset(staging_.data(), 0, kBytes);
  for (std::size_t row = 0; row < kLayers * 2 * kSide; ++row) {
    std::memcpy(staging_.data() + (row * kSide + row % kSide) * 2, &kOne, 2);
  }
  const Flipper flipper(staging_.data(), kBytes, seed_);
  int taken = 0;
  int refused = 0;
  for (int i = 0; i < kAttempts && (taken < kEnough || refused < kEnough); ++i) {
    const std::uint64_t sequence = NewSequence();
    v1::AppendRequest append;
    append.set_sequence_id(sequence);
    *append.mutable_key() = fakes::SmallRows(kLayers, 40, 1);
    *append.mutable_value() = fakes::SmallRows(kLayers, 40, 2);
    v1::AppendResponse appended;
    ASSERT_TRUE(worker_->Append(append, &appended).ok());
    v1::CompressRequest compress;
    *compress.mutable_session() = worker_->key();
    compress.set_sequence_id(sequence);
    compress.mutable_packing()->set_kept_channels(16);
    for (v1::Tensor* side : {compress.mutable_rotations()->mutable_key(),
                             compress.mutable_rotations()->mutable_value()}) {
      *side = Staged({kLayers, 2, kSide, kSide}, 0, kBytes);
    }
    grpc::ClientContext context;
    v1::CompressResponse compressed;
    const grpc::Status status = worker_->stub().Compress(&context, compress, &compressed);
    taken += status.ok();
    refused += !status.ok();
    if (!status.ok()) {
      ASSERT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    }
    ASSERT_NO_FATAL_FAILURE(ExpectFinite(sequence, /*at_most=*/8));
    Free(sequence);
  }
  EXPECT_GE(taken, kEnough);
  EXPECT_GE(refused, kEnough);
}

TEST_F(HostileMemory, TailsThatChangeWhileTheyAreAbsorbed) {
  const std::unique_ptr<RawMapping> mapping = RawMapping::Map(*worker_);
  ASSERT_NE(mapping, nullptr);
  const shm::LaneLayout layout(kernels::ElementType::kBf16, worker_->welcome().tail_ring_tiles(),
                               {{2, 64}, {2, 64}});
  const std::uint64_t ring = layout.ring_capacity();
  int taken = 0;
  int failed = 0;
  for (int i = 0; i < kAttempts && (taken < kEnough || failed < kEnough); ++i) {
    const std::uint64_t sequence = NewSequence();
    ASSERT_TRUE(mapping->OpenTail(sequence));
    FillGood(mapping->tail_region(), layout.tail_bytes());
    v1::TailsClosed closed;
    {
      const Flipper flipper(mapping->tail_region(), layout.tail_bytes(), seed_ + i);
      mapping->Commit(ring);
      worker_->SignalWake();
      closed = worker_->CloseTails({sequence});
    }
    v1::DescribeRequest request;
    request.set_sequence_id(sequence);
    v1::DescribeResponse described;
    ASSERT_TRUE(worker_->Describe(request, &described).ok());
    if (described.state() == v1::SEQUENCE_STATE_FAILED) {
      ++failed;
    } else {
      ++taken;
      EXPECT_EQ(closed.code(), 0) << closed.error();
      EXPECT_EQ(described.tokens(), ring);
      ASSERT_NO_FATAL_FAILURE(ExpectFinite(sequence));
    }
    Free(sequence);
  }
  EXPECT_GE(taken, kEnough);
  EXPECT_GE(failed, kEnough);
}

}  // namespace
}  // namespace tessera
