// A hostile worker with packed lanes: queries that no model computes, and every call on one
// sequence at the same time. The daemon survives, and its accounts balance.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kernels/format/element.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_worker.h"
#include "tests/fakes/seed.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::RawWorker;
using fakes::SmallModel;
using fakes::SmallRows;
using grpc::StatusCode;

constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 64;

using Row = std::vector<float>;  // of kHeadDim

std::string Bf16(const Row& row, int times) {
  std::string bytes;
  for (int i = 0; i < times; ++i) {
    for (const float value : row) {
      const std::uint16_t bits = kernels::FloatToBf16(value);
      bytes.append(reinterpret_cast<const char*>(&bits), sizeof bits);
    }
  }
  return bytes;
}

class HostilePacking : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_NE(daemon_, nullptr);
    ASSERT_TRUE(worker_.Attach().ok());
    v1::RegisterModelRequest model;
    *model.mutable_model() = SmallModel(1);
    v1::RegisterModelResponse registered;
    ASSERT_TRUE(worker_.RegisterModel(model, &registered).ok());
    model_ = registered.model_id();
  }

  std::uint64_t NewSequence() {
    v1::CreateSequenceRequest create;
    create.set_model_id(model_);
    v1::CreateSequenceResponse created;
    EXPECT_TRUE(worker_.CreateSequence(create, &created).ok());
    return created.sequence_id();
  }
  // Appends `count` tokens with the same key in all heads.
  grpc::Status Append(std::uint64_t sequence, std::uint64_t first, int count, const Row& row) {
    v1::AppendRequest append;
    append.set_sequence_id(sequence);
    append.set_first_token(first);
    for (v1::Tensor* tensor : {append.mutable_key(), append.mutable_value()}) {
      tensor->set_dtype(v1::DTYPE_BF16);
      for (int dimension : {1, count, kKvHeads, kHeadDim}) tensor->add_shape(dimension);
      tensor->set_inline_(Bf16(row, count * kKvHeads));
    }
    v1::AppendResponse appended;
    return worker_.Append(append, &appended);
  }
  grpc::Status Compress(std::uint64_t sequence, const v1::Packing& packing) {
    v1::CompressRequest request;
    *request.mutable_session() = worker_.key();
    request.set_sequence_id(sequence);
    *request.mutable_packing() = packing;
    grpc::ClientContext context;
    v1::CompressResponse response;
    return worker_.stub().Compress(&context, request, &response);
  }
  // The tenant's used bytes, over all tags but that of the model, which the session holds.
  std::uint64_t UsedBytes() {
    v1::StatsRequest request;
    *request.mutable_session() = worker_.key();
    v1::StatsResponse stats;
    grpc::ClientContext context;
    EXPECT_TRUE(worker_.stub().Stats(&context, request, &stats).ok());
    std::uint64_t sum = 0;
    for (const auto& [tag, bytes] : stats.tenants(0).used_bytes_by_tag()) {
      if (tag != "models") sum += bytes;
    }
    return sum;
  }
  v1::Tensor Query(const Row& row, int queries) const {
    v1::Tensor query;
    query.set_dtype(v1::DTYPE_BF16);
    for (int dimension : {queries, kHeads, kHeadDim}) query.add_shape(dimension);
    query.set_inline_(Bf16(row, queries * kHeads));
    return query;
  }

  TestRandom random_;
  std::unique_ptr<DaemonProcess> daemon_ = DaemonProcess::Start({});
  RawWorker worker_{daemon_->Connect()};
  std::uint64_t model_ = 0;
};

// Infinite and NaN scores: the daemon never selects more blocks than the budget allows, because it
// has sized its memory by the budget.
TEST_F(HostilePacking, StrangeQueriesTakeNoMoreThanTheirBudget) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float numbers[] = {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN(),
                           3e38f,     0.0f,       1.0f};
  // Keys whose product with such a query is infinite of either sign, NaN, or zero.
  Row keys[] = {Row(kHeadDim), Row(kHeadDim), Row(kHeadDim), Row(kHeadDim)};
  keys[1][0] = keys[3][0] = 2;
  keys[2][0] = keys[3][1] = -2;
  for (int lane = 0; lane < 8; ++lane) {
    const std::uint64_t sequence = NewSequence();
    std::uint64_t tokens = 0;
    while (tokens < 12000) {
      const int count = static_cast<int>(8 * random_.Between(1, random_.OneIn(2) ? 20 : 500));
      ASSERT_TRUE(Append(sequence, tokens, count, random_.Pick(keys)).ok());
      tokens += count;
    }
    v1::Packing packing;
    packing.set_summary(random_.OneIn(2) ? v1::BLOCK_SUMMARY_MEAN : v1::BLOCK_SUMMARY_MIN_MAX);
    packing.set_block(4);
    packing.set_dense(random_.OneIn(2));
    if (!packing.dense()) packing.set_kept_channels(16);
    if (!packing.dense()) packing.set_values(static_cast<v1::ValueType>(random_.Between(1, 4)));
    const grpc::Status packed = Compress(sequence, packing);
    ASSERT_TRUE(packed.ok()) << packed.error_message();
    for (int round = 0; round < 12; ++round) {
      Row row(kHeadDim);
      row[0] = random_.Pick(numbers);
      row[1] = random_.Pick(numbers);
      const int queries = static_cast<int>(random_.OneIn(2) ? 1 : random_.Between(2, 20));
      v1::Selection selection;
      selection.set_entries(random_.Between(1, 900));
      selection.set_judge(random_.OneIn(3) ? v1::Selection::JUDGE_SHARE
                                           : v1::Selection::JUDGE_LOGIT);
      v1::SelectRequest select;
      *select.mutable_session() = worker_.key();
      select.set_sequence_id(sequence);
      *select.mutable_query() = Query(row, queries);
      *select.mutable_selection() = selection;
      grpc::ClientContext context;
      v1::SelectResponse chosen;
      const grpc::Status selected = worker_.stub().Select(&context, select, &chosen);
      ASSERT_TRUE(selected.ok()) << selected.error_message();
      for (const v1::HeadSelection& head : chosen.heads()) {
        EXPECT_LT(head.selected_entries(), selection.entries() + 4);
        EXPECT_GE(head.selected_entries(), selection.entries());
      }
      v1::AttendRequest attend;
      v1::AttendItem& item = *attend.add_items();
      item.set_sequence_id(sequence);
      *item.mutable_query() = select.query();
      *item.mutable_selection() = selection;
      v1::AttendResponse response;
      const grpc::Status status = worker_.Attend(attend, &response);
      ASSERT_TRUE(status.ok()) << status.error_message() << daemon_->Log();
    }
  }
}

// Scratch memory and time grow with queries times blocks, and no quota covers them.
TEST_F(HostilePacking, AChoiceThatIsTooLargeIsRefused) {
  constexpr int kManyHeads = 480;
  v1::RegisterModelRequest model;
  *model.mutable_model() = SmallModel(1);
  model.mutable_model()->set_name("many heads");
  model.mutable_model()->mutable_layers(0)->set_query_heads(kManyHeads);
  v1::RegisterModelResponse registered;
  ASSERT_TRUE(worker_.RegisterModel(model, &registered).ok());
  model_ = registered.model_id();
  const std::uint64_t sequence = NewSequence();
  constexpr int kTokens = 36000;
  for (int first = 0; first < kTokens; first += kTokens / 2) {
    ASSERT_TRUE(Append(sequence, first, kTokens / 2, Row(kHeadDim, 1)).ok());
  }
  v1::Packing packing;
  packing.set_kept_channels(1);
  packing.set_summary(v1::BLOCK_SUMMARY_MEAN);
  packing.set_block(4);
  ASSERT_TRUE(Compress(sequence, packing).ok());
  const auto select = [&](int queries, std::string& message) {
    v1::SelectRequest request;
    *request.mutable_session() = worker_.key();
    request.set_sequence_id(sequence);
    request.mutable_query()->set_dtype(v1::DTYPE_BF16);
    for (int dimension : {queries, kManyHeads, kHeadDim}) {
      request.mutable_query()->add_shape(dimension);
    }
    request.mutable_query()->set_inline_(std::string(queries * kManyHeads * kHeadDim * 2, '\0'));
    request.mutable_selection()->set_entries(8);
    grpc::ClientContext context;
    v1::SelectResponse chosen;
    const grpc::Status status = worker_.stub().Select(&context, request, &chosen);
    // Attend refuses it with the same words.
    v1::AttendRequest attend;
    v1::AttendItem& item = *attend.add_items();
    item.set_sequence_id(sequence);
    *item.mutable_query() = request.query();
    *item.mutable_selection() = request.selection();
    v1::AttendResponse response;
    const grpc::Status attended = worker_.Attend(attend, &response);
    EXPECT_EQ(attended.error_code(), status.error_code()) << attended.error_message();
    EXPECT_EQ(attended.error_message(), status.error_message());
    message = status.error_message();
    return status.error_code();
  };
  std::string message;
  EXPECT_EQ(select(1, message), StatusCode::OK) << message;
  EXPECT_EQ(select(62, message), StatusCode::OK) << message;
  EXPECT_EQ(select(63, message), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(message,
            "63 queries of 240 heads over 18000 blocks are 272160000 scores; the limit of a "
            "selection is 268435456; send fewer queries at a time");

  // Few scores but all entries: the partial results of each part are kept per query.
  v1::AttendRequest attend;
  v1::AttendItem& item = *attend.add_items();
  item.set_sequence_id(sequence);
  v1::Tensor& query = *item.mutable_query();
  query.set_dtype(v1::DTYPE_BF16);
  for (int dimension : {62, kManyHeads, kHeadDim}) query.add_shape(dimension);
  query.set_inline_(std::string(62 * kManyHeads * kHeadDim * 2, '\0'));
  item.mutable_selection()->set_rate(1);
  v1::AttendResponse response;
  const grpc::Status status = worker_.Attend(attend, &response);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), testing::HasSubstr("the limit is 268435456"));
}

// Every call on the same few sequences from several threads, while other threads pack them.
// Refusals must have a reason that a racing worker has to expect, and at the end nothing is left.
TEST_F(HostilePacking, EveryCallAtOnceLeavesNothingBehind) {
  RawWorker other(daemon_->Connect());
  ASSERT_TRUE(other.Attach().ok());
  const std::uint64_t by_sessions = UsedBytes();
  std::uint64_t sequences[3];
  for (std::uint64_t& sequence : sequences) {
    sequence = NewSequence();
    ASSERT_TRUE(Append(sequence, 0, 200, Row(kHeadDim, 1)).ok());
  }
  std::atomic<int> packed{0};
  std::atomic<bool> stop{false};
  const auto expected = [](const grpc::Status& status) {
    const StatusCode code = status.error_code();
    return code == StatusCode::OK || code == StatusCode::ABORTED ||
           code == StatusCode::OUT_OF_RANGE || code == StatusCode::RESOURCE_EXHAUSTED ||
           code == StatusCode::FAILED_PRECONDITION || code == StatusCode::INVALID_ARGUMENT;
  };
  const auto loop = [&](const std::function<grpc::Status(std::uint64_t, TestRandom&)>& call) {
    return std::thread([&, call, seed = random_.Bits()] {
      TestRandom random(seed);
      while (!stop) {
        const grpc::Status status = call(random.Pick(sequences), random);
        EXPECT_TRUE(expected(status)) << status.error_code() << ": " << status.error_message();
      }
    });
  };
  const auto length = [&](std::uint64_t sequence) {
    v1::DescribeRequest request;
    request.set_sequence_id(sequence);
    v1::DescribeResponse response;
    EXPECT_TRUE(worker_.Describe(request, &response).ok());
    return response.tokens();
  };
  const auto pack = [&](std::uint64_t sequence, TestRandom& random) {
    v1::Packing packing;
    packing.set_summary(static_cast<v1::BlockSummary>(random.Below(3)));
    packing.set_kept_channels(static_cast<std::uint32_t>(4 * random.Between(1, 16)));
    packing.set_values(static_cast<v1::ValueType>(random.Between(1, 4)));
    grpc::Status status = Compress(sequence, packing);
    packed += status.ok();
    return status;
  };
  std::vector<std::thread> threads;
  threads.push_back(loop(pack));
  threads.push_back(loop(pack));
  threads.push_back(loop([&](std::uint64_t sequence, TestRandom& random) {
    return Append(sequence, length(sequence), static_cast<int>(random.Between(1, 70)),
                  Row(kHeadDim));
  }));
  threads.push_back(loop([&](std::uint64_t sequence, TestRandom& random) {
    v1::TruncateRequest request;
    *request.mutable_session() = worker_.key();
    request.set_sequence_id(sequence);
    request.set_tokens(random.Between(1, 150));
    v1::TruncateResponse response;
    return worker_.Truncate(request, &response);
  }));
  threads.push_back(loop([&](std::uint64_t sequence, TestRandom& random) {
    v1::ForkRequest fork;
    fork.set_parent_id(sequence);
    v1::ForkResponse forked;
    const grpc::Status status = other.Fork(fork, &forked);
    if (!status.ok()) return status;
    if (random.OneIn(2)) (void)pack(forked.sequence_id(), random);
    v1::FreeRequest free;
    free.add_sequence_ids(forked.sequence_id());
    v1::FreeResponse freed;
    return other.Free(free, &freed);
  }));
  threads.push_back(loop([&](std::uint64_t sequence, TestRandom& random) {
    v1::AttendRequest attend;
    v1::AttendItem& item = *attend.add_items();
    item.set_sequence_id(sequence);
    *item.mutable_query() = Query(Row(kHeadDim, 1), static_cast<int>(random.Between(1, 9)));
    if (random.OneIn(2)) item.mutable_selection()->set_rate(0.3);
    v1::AttendResponse response;
    return worker_.Attend(attend, &response);
  }));
  for (int i = 0; i < 400; ++i) {
    v1::HandoverRequest request;
    request.set_sequence_id(random_.Pick(sequences));
    RawWorker& from = random_.OneIn(2) ? worker_ : other;
    *request.mutable_session() = from.key();
    request.set_to_session_id((&from == &other ? worker_ : other).key().session_id());
    v1::HandoverResponse response;
    const grpc::Status status = from.Handover(request, &response);
    EXPECT_TRUE(expected(status)) << status.error_code() << ": " << status.error_message();
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(packed, 0);
  v1::FreeRequest free;
  for (const std::uint64_t sequence : sequences) free.add_sequence_ids(sequence);
  v1::FreeResponse freed;
  ASSERT_TRUE(worker_.Free(free, &freed).ok());
  EXPECT_EQ(freed.freed(), 3u);
  // Retired memory is freed with its last reader, possibly a moment later.
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (UsedBytes() != by_sessions && std::chrono::steady_clock::now() < deadline) {
  }
  EXPECT_EQ(UsedBytes(), by_sessions);
}

}  // namespace
}  // namespace tessera
