// Workers that wait for each other's prefixes, and ranks that get them together or not at all.

#include <unistd.h>

#include <fstream>
#include <future>
#include <memory>
#include <vector>

#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"
#include "tests/e2e/prefix/prefix_lanes.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using std::chrono::seconds;

// ---- Waiting

TEST_F(Prefixes, AWorkerWaitsForWhatAnotherComputes) {
  const Ids ids = Count(256);
  const auto mine = mapped_->Match(model_, {.tokens = ids, .will_compute = true});
  ASSERT_TRUE(mine.ok()) << mine.status();
  EXPECT_TRUE(mine->computation.valid());
  EXPECT_EQ(Match(*remote_, ids).computing, 256u);
  auto waits = std::async(std::launch::async, [&] {
    return remote_->Match(model_, {.tokens = ids, .wait = seconds(60), .will_compute = true});
  });
  ASSERT_TRUE(Becomes([&] { return TenantStats().prefix_waits() == 1; }));
  client::Sequence sequence = NewSequence("");
  SyntheticSequence truth(shape_, 5);
  Append(sequence, truth, 256);
  Publish(sequence, ids);
  const auto found = waits.get();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->tokens, 256u);
  EXPECT_FALSE(found->computation.valid());
  client::Sequence fork = Fork(*remote_, *found);
  for (std::uint32_t layer = 0; layer < shape_.layers; ++layer) {
    EXPECT_LT(truth.Error(layer, 255, AttendByRpc(*remote_, fork, truth, layer)), 0.02);
  }
  // The wait times out by the daemon's clock while nothing else happens.
  const Ids others = Count(64, 9000);
  ASSERT_TRUE(mapped_->Match(model_, {.tokens = others, .will_compute = true}).ok());
  const auto late = remote_->Match(
      model_, {.tokens = others, .wait = std::chrono::milliseconds(50), .will_compute = true});
  ASSERT_TRUE(late.ok()) << late.status();
  EXPECT_FALSE(late->found());
  EXPECT_EQ(late->computing, 64u);
  // A worker that gives up its computation leaves it to the other one.
  EXPECT_EQ(Match(*mapped_, others).computing, 64u);
  ASSERT_TRUE(remote_->Withdraw(late->computation).ok());
  EXPECT_EQ(Match(*mapped_, others).computing, 0u);
}

TEST_F(Prefixes, WhenTheComputingWorkerDiesOneThatWaitsTakesItsPlace) {
  const Ids ids = Count(128);
  fakes::RawWorker victim(daemon_->Connect());
  ASSERT_TRUE(victim.Attach().ok());
  ASSERT_TRUE(victim.OpenDescriptors().ok());
  v1::MatchRequest request;
  *request.mutable_session() = victim.key();
  request.set_model_id(model_.id().value());
  request.mutable_token_ids()->Add(ids.begin(), ids.end());
  request.set_will_compute(true);
  grpc::ClientContext context;
  v1::MatchResponse response;
  ASSERT_TRUE(victim.stub().Match(&context, request, &response).ok());
  EXPECT_NE(response.computation_id(), 0u);
  const auto wait = [&](client::Worker* worker) {
    return worker->Match(model_, {.tokens = ids, .wait = seconds(60), .will_compute = true});
  };
  auto one = std::async(std::launch::async, wait, mapped_.get());
  auto two = std::async(std::launch::async, wait, remote_.get());
  ASSERT_TRUE(Becomes([&] { return TenantStats().prefix_waits() == 2; }));
  victim.descriptor_socket().Close();  // as the kernel does for a killed process
  ASSERT_TRUE(Becomes([&] { return TenantStats().prefix_waits() == 1; }));
  // Either of them may be first.
  const bool first = one.wait_for(seconds(0)) == std::future_status::ready ||
                     one.wait_for(std::chrono::milliseconds(500)) == std::future_status::ready;
  const auto taken = first ? one.get() : two.get();
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_FALSE(taken->found());
  EXPECT_TRUE(taken->computation.valid());
  client::Worker& computes = first ? *mapped_ : *remote_;
  auto sequence = computes.CreateSequence(model_);
  ASSERT_TRUE(sequence.ok());
  SyntheticSequence truth(shape_, 5);
  Append(*sequence, truth, 128);
  Publish(*sequence, ids);
  const auto other = first ? two.get() : one.get();
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(other->tokens, 128u);
}

// The daemon drops a waiting call whose caller has gone.
TEST_F(Prefixes, ACallThatIsCancelledWaitsNoLonger) {
  const Ids ids = Count(128);
  ASSERT_TRUE(mapped_->Match(model_, {.tokens = ids, .will_compute = true}).ok());
  fakes::RawWorker raw(daemon_->Connect());
  ASSERT_TRUE(raw.Attach().ok());
  v1::MatchRequest request;
  *request.mutable_session() = raw.key();
  request.set_model_id(model_.id().value());
  request.mutable_token_ids()->Add(ids.begin(), ids.end());
  request.set_wait_ms(3600000);
  grpc::ClientContext context;
  auto waits = std::async(std::launch::async, [&] {
    v1::MatchResponse response;
    return raw.stub().Match(&context, request, &response);
  });
  ASSERT_TRUE(Becomes([&] { return TenantStats().prefix_waits() == 1; }));
  context.TryCancel();
  EXPECT_EQ(waits.get().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Becomes([&] { return TenantStats().prefix_waits() == 0; }));
  // A daemon that stops does not wait for such a call.
  grpc::ClientContext another;
  auto stopped = std::async(std::launch::async, [&] {
    v1::MatchResponse response;
    return raw.stub().Match(&another, request, &response);
  });
  ASSERT_TRUE(Becomes([&] { return TenantStats().prefix_waits() == 1; }));
  daemon_->Kill(SIGTERM);
  daemon_->Kill(SIGTERM);
  EXPECT_EQ(daemon_->WaitForExit(20), 0);
  EXPECT_FALSE(stopped.get().ok());
}

// A waiting call keeps one copy of its ids, which is charged.
TEST_F(Prefixes, CallsThatWaitKeepOnlyWhatIsCharged) {
  constexpr int kCalls = 12;
  const Ids ids = Count(2'000'000);
  const auto resident = [&] {
    std::ifstream file(Concat("/proc/", daemon_->pid(), "/statm"));
    std::uint64_t size = 0;
    std::uint64_t pages = 0;
    EXPECT_TRUE(file >> size >> pages);
    return pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  };
  const auto charged = [&] { return TenantStats().used_bytes_by_tag().at("prefix_index"); };
  ASSERT_TRUE(mapped_->Match(model_, {.tokens = ids, .will_compute = true}).ok());
  fakes::RawWorker raw(daemon_->Connect());
  ASSERT_TRUE(raw.Attach().ok());
  v1::MatchRequest request;
  *request.mutable_session() = raw.key();
  request.set_model_id(model_.id().value());
  request.mutable_token_ids()->Add(ids.begin(), ids.end());
  request.set_wait_ms(3600000);
  const std::uint64_t charged_before = charged();
  const std::uint64_t resident_before = resident();
  struct Call {
    grpc::ClientContext context;
    v1::MatchResponse response;
    std::promise<void> done;
  };
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < kCalls; ++i) {
    Call& call = *calls.emplace_back(std::make_unique<Call>());
    raw.stub().async()->Match(&call.context, &request, &call.response,
                              [&call](const grpc::Status&) { call.done.set_value(); });
    ASSERT_TRUE(Becomes([&] { return TenantStats().prefix_waits() == calls.size(); }));
  }
  const std::uint64_t paid = charged() - charged_before;
  const std::uint64_t grown = resident() - resident_before;
  EXPECT_GE(paid, kCalls * ids.size() * sizeof(std::uint32_t));
  EXPECT_LE(grown, paid + paid / 5 + 32 * kMiB);
  for (const std::unique_ptr<Call>& call : calls) call->context.TryCancel();
  for (const std::unique_ptr<Call>& call : calls) call->done.get_future().wait();
}

TEST_F(Prefixes, RanksOfAGroupHitTogetherOrNotAtAll) {
  std::vector<std::unique_ptr<client::Worker>> ranks;
  std::vector<client::Model> models;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    auto worker = client::Worker::Attach(
        {.address = daemon_->address(), .group = "tp", .rank = rank, .group_size = 2});
    ASSERT_TRUE(worker.ok()) << worker.status();
    models.push_back(*(*worker)->RegisterModel(shape_.Geometry()));
    ranks.push_back(*std::move(worker));
  }
  std::vector<client::Sequence> sequences;
  const auto publish = [&](std::uint32_t rank, std::uint64_t tokens) {
    auto sequence = ranks[rank]->CreateSequence(models[rank]);
    ASSERT_TRUE(sequence.ok());
    SyntheticSequence truth(shape_, 50 + rank);
    Append(*sequence, truth, tokens);
    Publish(*sequence, Count(tokens));
  };
  const auto match = [&](std::uint32_t rank) {
    const Ids list = Count(500);
    const auto found = ranks[rank]->Match(models[rank], {.tokens = list});
    EXPECT_TRUE(found.ok()) << found.status();
    return found.value_or(PrefixMatch());
  };
  publish(0, 256);
  EXPECT_EQ(match(0).tokens, 0u);
  publish(1, 128);
  EXPECT_EQ(match(1).tokens, 0u) << "as rank 0 was told";
  const PrefixMatch one = match(1);
  publish(1, 256);
  const PrefixMatch zero = match(0);
  EXPECT_EQ(one.tokens, 128u);
  EXPECT_EQ(zero.tokens, 128u);
  EXPECT_NE(one.prefix, zero.prefix);
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    client::Sequence fork = Fork(*ranks[rank], rank == 0 ? zero : one);
    SyntheticSequence truth(shape_, 50 + rank);
    truth.Grow(128);
    EXPECT_LT(truth.Error(0, 127, AttendByRpc(*ranks[rank], fork, truth, 0)), 0.02);
  }
  EXPECT_FALSE(Match(*mapped_, Count(500)).found()) << "no worker without a group";
}

}  // namespace
}  // namespace tessera
