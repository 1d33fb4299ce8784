// Attend calls with more work than one pin may cover: computed in pieces, with the same result, and
// stopped when the caller cancels.

#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kernels/format/element.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::RawWorker;

constexpr std::uint64_t kRowElements = 4 * 64;

class AttendRpc : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(daemon_, nullptr);
    ASSERT_TRUE(worker_.Attach().ok());
    v1::RegisterModelRequest model;
    *model.mutable_model() = fakes::SmallModel(1);
    v1::RegisterModelResponse registered;
    ASSERT_TRUE(worker_.RegisterModel(model, &registered).ok());
    v1::CreateSequenceRequest create;
    create.set_model_id(registered.model_id());
    v1::CreateSequenceResponse created;
    ASSERT_TRUE(worker_.CreateSequence(create, &created).ok());
    sequence_ = created.sequence_id();
  }

  void Append(int tokens, int times = 1) {
    v1::AppendRequest append;
    append.set_sequence_id(sequence_);
    *append.mutable_key() = fakes::SmallRows(1, tokens, 1);
    *append.mutable_value() = fakes::SmallRows(1, tokens, 2);
    v1::AppendResponse appended;
    for (int i = 0; i < times; ++i) {
      append.set_first_token(static_cast<std::uint64_t>(i) * tokens);
      ASSERT_TRUE(worker_.Append(append, &appended).ok());
    }
  }

  // Asks with queries [first, first + count), each at the position of its number.
  v1::AttendRequest Ask(std::uint64_t first, std::uint64_t count) const {
    v1::AttendRequest request;
    *request.mutable_session() = worker_.key();
    request.set_output_dtype(v1::DTYPE_FP32);
    v1::AttendItem& item = *request.add_items();
    item.set_sequence_id(sequence_);
    item.set_first_query_position(first);
    item.mutable_query()->set_dtype(v1::DTYPE_BF16);
    for (const std::uint64_t dimension : {count, std::uint64_t{4}, std::uint64_t{64}}) {
      item.mutable_query()->add_shape(dimension);
    }
    item.mutable_query()->set_inline_(queries_.data() + first * kRowElements,
                                      count * kRowElements * sizeof(std::uint16_t));
    return request;
  }

  void MakeQueries(std::uint64_t count) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    queries_.resize(count * kRowElements);
    for (std::uint16_t& value : queries_) value = kernels::FloatToBf16(normal(random));
  }

  std::unique_ptr<DaemonProcess> daemon_ =
      DaemonProcess::Start({.flags = {"--max-message-bytes=32MiB", "--drain-limit-ms=500"}});
  RawWorker worker_{daemon_->Connect()};
  std::uint64_t sequence_ = 0;
  std::vector<std::uint16_t> queries_;
};

TEST_F(AttendRpc, AnAnswerInPiecesHasTheBitsOfManySmallOnes) {
  Append(500);
  MakeQueries(3000);
  v1::AttendResponse whole;
  ASSERT_TRUE(worker_.Attend(Ask(0, 3000), &whole).ok());
  ASSERT_EQ(whole.outputs_size(), 1);
  const std::string& rows = whole.outputs(0).output().inline_();
  ASSERT_EQ(rows.size(), 3000 * kRowElements * sizeof(float));
  // 16 queries fill one cell of the kernel: with 2 query heads per kv head they make 32 rows.
  for (std::uint64_t first = 0; first < 3000; first += 16 * 13) {
    v1::AttendResponse small;
    ASSERT_TRUE(worker_.Attend(Ask(first, 16), &small).ok());
    const std::string& part = small.outputs(0).output().inline_();
    ASSERT_EQ(
        std::memcmp(part.data(), rows.data() + first * kRowElements * sizeof(float), part.size()),
        0)
        << "from query " << first;
    for (int i = 0; i < 16 * 4; ++i) {
      ASSERT_EQ(small.outputs(0).lse(i), whole.outputs(0).lse(static_cast<int>(first) * 4 + i));
    }
  }
}

TEST_F(AttendRpc, NobodyWaitsForAnAnswerThatNobodyWants) {
  Append(4000, 10);
  MakeQueries(25000);
  const v1::AttendRequest request = Ask(0, 25000);
  for (int i = 0; i < 2; ++i) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
    v1::AttendResponse response;
    EXPECT_EQ(worker_.stub().Attend(&context, request, &response).error_code(),
              grpc::StatusCode::DEADLINE_EXCEEDED);
  }
  worker_.Leave();
  daemon_->Kill(SIGTERM);
  EXPECT_EQ(daemon_->WaitForExit(10), 0) << daemon_->Log();
}

TEST_F(AttendRpc, SizesAreRefusedBeforeAnythingIsCopied) {
  Append(10);
  MakeQueries(16);
  v1::AttendRequest request = Ask(0, 1);
  for (int i = 0; i < 4096; ++i) *request.add_items() = request.items(0);
  v1::AttendResponse response;
  const grpc::Status many = worker_.Attend(request, &response);
  EXPECT_EQ(many.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(many.error_message().find("4097 items; the limit is 4096"), std::string::npos)
      << many.error_message();
  request = Ask(0, 16);
  request.mutable_items(0)->set_first_query_position(~std::uint64_t{0} - 3);
  const grpc::Status far = worker_.Attend(request, &response);
  EXPECT_EQ(far.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(far.error_message().find("first_query_position is 18446744073709551612"),
            std::string::npos)
      << far.error_message();
}

}  // namespace
}  // namespace tessera
