// Moves the metrics of a worker's calls off zero through a real daemon and reads them back over
// HTTP. A metric that nothing can move is useless.

#include <sys/socket.h>

#include <cstring>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "daemon/platform/unix_socket.h"
#include "kernels/format/element.h"
#include "proto/shm/pin.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tests/e2e/metrics/metrics_fixture.h"
#include "tests/fakes/raw_mapping.h"

namespace tessera {
namespace {

using fakes::RawMapping;
using fakes::RawWorker;

class Work : public Metrics {
 protected:
  void SetUp() override {
    ASSERT_NO_FATAL_FAILURE(Start({.flags = Flags()}));
    ASSERT_NO_FATAL_FAILURE(Attach());
  }
};

TEST_F(Work, OfTheHostTier) {
  EXPECT_EQ(Value("tessera_moves_total"), 0);
  EXPECT_GT(Value("tessera_host_tier_limit_bytes"), 0);
  const std::uint64_t sequence = NewSequence(100);
  v1::OffloadResponse offloaded;
  ASSERT_TRUE(Offload(sequence, &offloaded).ok());
  EXPECT_GT(offloaded.moved_bytes(), 0u);
  EXPECT_EQ(Value("tessera_moved_bytes_total", "direction=\"offload\""),
            static_cast<double>(offloaded.moved_bytes()));
  EXPECT_EQ(Value("tessera_moves_total", "direction=\"offload\""), 1);
  EXPECT_EQ(Value("tessera_tier_bytes", "tier=\"host\""), 4 * 4 * 8192);
  EXPECT_EQ(Value("tessera_sequences", "state=\"offloaded\""), 1);
  EXPECT_EQ(Value("tessera_sequences", "state=\"held\""), 0);
  EXPECT_EQ(Value("tessera_sequence_tokens"), 100);
  EXPECT_EQ(Value("tessera_tier_seconds_count", "tier=\"host\""), 1);
  EXPECT_EQ(Value("tessera_restore_seconds_count"), 0);
  {
    v1::RestoreRequest request;
    *request.mutable_session() = worker_->key();
    request.set_sequence_id(sequence);
    grpc::ClientContext context;
    v1::RestoreResponse response;
    ASSERT_TRUE(worker_->stub().Restore(&context, request, &response).ok());
    EXPECT_EQ(response.tokens(), 100u);
  }
  EXPECT_EQ(Value("tessera_moves_total", "direction=\"restore\""), 1);
  EXPECT_GT(Value("tessera_moved_bytes_total", "direction=\"restore\""), 0);
  EXPECT_EQ(Value("tessera_tier_bytes"), 0);
  EXPECT_EQ(Value("tessera_restore_seconds_count"), 1);
  EXPECT_GT(Value("tessera_restore_seconds_sum"), 0);
  EXPECT_EQ(Value("tessera_tier_seconds_count"), 2);
  EXPECT_EQ(Value("tessera_tier_errors_total"), 0);
}

TEST_F(Work, StateOfPoolsAndSequences) {
  EXPECT_EQ(Value("tessera_sequences"), 0);
  NewSequence(100);
  EXPECT_EQ(Value("tessera_build_info"), 1);
  EXPECT_EQ(Value("tessera_sessions"), 1);
  EXPECT_EQ(Value("tessera_sessions_total"), 1);
  EXPECT_EQ(Value("tessera_sequences", "tenant=\"default\",state=\"held\""), 1);
  EXPECT_EQ(Value("tessera_sequence_tokens", "tenant=\"default\""), 100);
  // 4 lanes of 4 tiles of 32 rows x 64 channels x 2 bytes, K and V.
  EXPECT_EQ(Value("tessera_tenant_memory_bytes", "tag=\"tiles\""), 4 * 4 * 8192);
  EXPECT_GT(Value("tessera_tenant_memory_bytes", "tag=\"snapshots\""), 0);
  EXPECT_GT(Value("tessera_tenant_memory_bytes", "tag=\"other\""), 0);
  EXPECT_EQ(Value("tessera_tenant_memory_bytes", "tag=\"staging\""), 0);
  ASSERT_TRUE(worker_->Fetch(shm::DescriptorKind::kStaging, 0).ok());
  EXPECT_EQ(Value("tessera_tenant_memory_bytes", "tag=\"staging\""),
            static_cast<double>(worker_->welcome().staging_bytes()));
  // What the quota counts, of which the tags are parts.
  EXPECT_EQ(Value("tessera_tenant_used_bytes"), Value("tessera_tenant_memory_bytes"));
  EXPECT_EQ(Value("tessera_tenant_hard_limit_bytes"), 512.0 * 1024 * 1024);  // the pool
  EXPECT_EQ(Value("tessera_pool_limit_bytes", "device=\"cpu\""), 512.0 * 1024 * 1024);
  EXPECT_GT(Value("tessera_pool_reserved_bytes", "device=\"cpu\""),
            Value("tessera_tenant_used_bytes"));
  EXPECT_EQ(Value("tessera_pool_extents", "device=\"cpu\""), 1);
}

TEST_F(Work, AppendsAttendsAndCalls) {
  const std::uint64_t sequence = NewSequence(70);
  EXPECT_EQ(Value("tessera_tokens_committed_total", "transport=\"rpc\""), 70);
  EXPECT_EQ(Value("tessera_tiles_encoded_total"), 4 * 3);
  EXPECT_EQ(Value("tessera_snapshots_published_total"), 4);
  v1::AttendRequest attend;
  attend.add_items()->set_sequence_id(sequence);
  v1::Tensor& query = *attend.mutable_items(0)->mutable_query();
  query.set_dtype(v1::DTYPE_BF16);
  for (int dimension : {1, 4, 64}) query.add_shape(dimension);
  query.set_inline_(std::string(4 * 64 * 2, '\0'));
  v1::AttendResponse response;
  ASSERT_TRUE(worker_->Attend(attend, &response).ok());
  EXPECT_EQ(Value("tessera_attend_requests_total"), 1);
  attend.set_layer(9);
  EXPECT_FALSE(worker_->Attend(attend, &response).ok());
  const std::string method = "service=\"Tessera\",method=\"Attend\"";
  EXPECT_EQ(Value("tessera_rpc_requests_total", method + ",code=\"INVALID_ARGUMENT\""), 1);
  EXPECT_EQ(Value("tessera_rpc_requests_total", method + ",code=\"OK\""), 1);
  EXPECT_GT(Value("tessera_rpc_seconds_total", method), 0);
  const std::string hot = "service=\"Tessera\",class=\"hot\"";
  EXPECT_EQ(Value("tessera_rpc_duration_seconds_count", hot), 3);  // with CreateSequence
  EXPECT_GT(Value("tessera_rpc_duration_seconds_sum", hot), 0);
}

// Both services have a method of this name.
TEST_F(Work, CallsOfTheTwoServicesAreCountedApart) {
  v1::DescribeRequest request;
  request.set_sequence_id(NewSequence(5));
  v1::DescribeResponse response;
  ASSERT_TRUE(worker_->Describe(request, &response).ok());
  const auto admin = v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin());
  for (int i = 0; i < 2; ++i) {
    grpc::ClientContext context;
    ASSERT_TRUE(admin->Describe(&context, request, &response).ok());
  }
  const std::string ok = "method=\"Describe\",code=\"OK\"";
  EXPECT_EQ(Value("tessera_rpc_requests_total", "service=\"Tessera\"," + ok), 1);
  EXPECT_EQ(Value("tessera_rpc_requests_total", "service=\"TesseraAdmin\"," + ok), 2);
  EXPECT_EQ(Value("tessera_rpc_duration_seconds_count", "class=\"admin\""), 2);
}

TEST_F(Work, AttachIsCountedByItsAnswer) {
  const std::string method = "service=\"Tessera\",method=\"Attach\"";
  EXPECT_EQ(Value("tessera_rpc_requests_total", method + ",code=\"OK\""), 1);
  RawWorker stranger(daemon_->Connect());
  v1::Hello hello = RawWorker::GoodHello();
  hello.set_tenant_token("nobody's");
  EXPECT_FALSE(stranger.Attach(hello).ok());
  EXPECT_EQ(Value("tessera_rpc_requests_total", method + ",code=\"PERMISSION_DENIED\""), 1);
  worker_->Leave();
  EXPECT_TRUE(Becomes("tessera_sessions", "", [](double v) { return v == 0; }));
  EXPECT_EQ(Value("tessera_rpc_requests_total", method), 2);
}

TEST_F(Work, PackingsAndSelections) {
  const std::uint64_t sequence = NewSequence(70);
  EXPECT_EQ(Value("tessera_entries_packed_total"), 0);
  v1::CompressRequest compress;
  *compress.mutable_session() = worker_->key();
  compress.set_sequence_id(sequence);
  compress.mutable_packing()->set_kept_channels(16);
  compress.mutable_packing()->set_summary(v1::BLOCK_SUMMARY_MEAN);
  // [2 layers][2 kv heads][64 channels][64]: the identity.
  v1::Tensor& key = *compress.mutable_rotations()->mutable_key();
  key.set_dtype(v1::DTYPE_BF16);
  for (int dimension : {2, 2, 64, 64}) key.add_shape(dimension);
  std::vector<std::uint16_t> matrices(4 * 64 * 64);
  for (int i = 0; i < 4 * 64; ++i) matrices[i * 64 + i % 64] = kernels::FloatToBf16(1.0f);
  key.set_inline_(matrices.data(), matrices.size() * sizeof(std::uint16_t));
  *compress.mutable_rotations()->mutable_value() = key;
  {
    grpc::ClientContext context;
    v1::CompressResponse response;
    const grpc::Status status = worker_->stub().Compress(&context, compress, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  EXPECT_EQ(Value("tessera_entries_packed_total"), 4 * 70);
  EXPECT_EQ(Value("tessera_packed_bytes_total", "side=\"before\""), 4 * 3 * 8192);
  // 16 channels of 2 bytes and a bitmap of 8, K and V. One mean key per 8 entries; with so few
  // tiles those of each tile are a separate object, a multiple of 64 bytes.
  const double packed = 4 * 3 * (32 * 2 * (32 + 8) + 192);
  static_assert(4 * (32 + 8) <= 192);
  EXPECT_EQ(Value("tessera_packed_bytes_total", "side=\"after\""), packed);
  EXPECT_TRUE(Becomes("tessera_tenant_memory_bytes", "tag=\"tiles\"",
                      [&](double v) { return v == packed; }));
  EXPECT_EQ(Value("tessera_policy_bytes_total"), 0);  // no policy asked for it

  v1::SelectRequest select;
  *select.mutable_session() = worker_->key();
  select.set_sequence_id(sequence);
  select.mutable_selection()->set_entries(20);
  v1::Tensor& query = *select.mutable_query();
  query.set_dtype(v1::DTYPE_BF16);
  for (int dimension : {1, 4, 64}) query.add_shape(dimension);
  query.set_inline_(std::string(4 * 64 * 2, '\0'));
  grpc::ClientContext context;
  v1::SelectResponse response;
  ASSERT_TRUE(worker_->stub().Select(&context, select, &response).ok());
  EXPECT_EQ(Value("tessera_select_requests_total"), 1);
}

// A prompt is sealed, tiles are encoded as they fill, and the budget for raw copies is used up.
TEST_F(Work, BackgroundCompaction) {
  const std::uint64_t sequence = NewSequence(
      64,
      "mosaickv:sinks=0,recent=0,keep=0.25,group=1,loss_k=1,loss_v=1,segment=64,min_segment=64");
  Compress(sequence);
  EXPECT_EQ(Value("tessera_segments_sealed_total"), 4);
  EXPECT_EQ(Value("tessera_strategies_total"), 4);
  const std::string policy = "policy=\"mosaickv\"";
  EXPECT_EQ(Value("tessera_policy_bytes_total", policy + ",side=\"before\""), 4 * 2 * 8192);
  EXPECT_GT(Value("tessera_policy_bytes_total", policy + ",side=\"after\""), 0);
  EXPECT_LT(Value("tessera_policy_bytes_total", policy + ",side=\"after\""), 4 * 8192);
  EXPECT_TRUE(Becomes("tessera_background_jobs_total", "seals", [](double v) { return v >= 4; }));
  EXPECT_EQ(Value("tessera_background_jobs", "queued"), 0);
  EXPECT_EQ(Value("tessera_segments_stored_dense_total"), 0);
  const std::unique_ptr<RawMapping> mapping = RawMapping::Map(*worker_);
  ASSERT_NE(mapping, nullptr);
  ASSERT_TRUE(mapping->OpenTail(sequence));
  mapping->Commit(96);
  worker_->SignalWake();
  EXPECT_TRUE(Becomes("tessera_provisional_tiles_total", "", [](double v) { return v == 4; }));
  EXPECT_TRUE(Becomes("tessera_raw_copy_bytes", "", Positive));
  EXPECT_EQ(Value("tessera_raw_copy_limit_bytes"), 1 << 20);
  EXPECT_EQ(Value("tessera_raw_rows_dropped_total"), 0);

  // Too short to be worth a strategy.
  Compress(NewSequence(5, "mosaickv:sinks=0,recent=0"));
  EXPECT_EQ(Value("tessera_segments_stored_dense_total"), 4);
  EXPECT_EQ(Value("tessera_segments_left_dense_total"), 4);
}

// One token policy evicts entries; another one misses observations.
TEST_F(Work, TokenPolicies) {
  Compress(NewSequence(100, "streaming:sink=4,recent=40"));
  EXPECT_EQ(Value("tessera_entries_dropped_total"), 4 * 56);
  EXPECT_EQ(Value("tessera_token_choices_total"), 2);
  EXPECT_GT(Value("tessera_token_choice_seconds_total"), 0);
  // 4 tiles a lane, of which 44 entries stay, in 2 tiles.
  const std::string policy = "policy=\"streaming\"";
  EXPECT_EQ(Value("tessera_policy_bytes_total", policy + ",side=\"before\""), 4 * 4 * 8192);
  EXPECT_GE(Value("tessera_policy_bytes_total", policy + ",side=\"after\""), 4 * 2 * 8192);
  EXPECT_LT(Value("tessera_policy_bytes_total", policy + ",side=\"after\""), 4 * 3 * 8192);
  v1::ObserveRequest observe;
  *observe.mutable_session() = worker_->key();
  const std::uint64_t sequence = NewSequence(100, "snapkv:window=8");
  observe.set_sequence_id(sequence);
  v1::Tensor& queries = *observe.mutable_last_queries();
  queries.set_dtype(v1::DTYPE_BF16);
  for (int dimension : {8, 4, 64}) queries.add_shape(dimension);
  queries.set_inline_(std::string(8 * 4 * 64 * 2, '\0'));
  observe.set_first_query_position(92);
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    observe.set_layer(layer);
    grpc::ClientContext context;
    v1::ObserveResponse response;
    const grpc::Status status = worker_->stub().Observe(&context, observe, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  EXPECT_TRUE(Becomes("tessera_observation_bytes", "", Positive));
  EXPECT_EQ(Value("tessera_observed_bytes_total"), 2 * 8 * 4 * 64 * 2);
  Compress(sequence);
  EXPECT_TRUE(Becomes("tessera_observation_bytes", "", [](double bytes) { return bytes == 0; }));
}

// More rows wait for a strategy than fit in the budget of 1 MiB.
TEST_F(Work, RawRowsThatAreNotKept) {
  const std::uint64_t sequence = NewSequence(64,
                                             "mosaickv:sinks=0,recent=0,keep=0.25,group=1,loss_k=1,"
                                             "loss_v=1,segment=4096,min_segment=4096");
  Append(sequence, 4032, 64);
  Compress(sequence);
  EXPECT_EQ(Value("tessera_segments_sealed_total"), 4);
  Append(sequence, 2048, 4096);
  const std::unique_ptr<RawMapping> mapping = RawMapping::Map(*worker_);
  ASSERT_NE(mapping, nullptr);
  ASSERT_TRUE(mapping->OpenTail(sequence));
  mapping->Commit(4096 + 2048 + 32);
  worker_->SignalWake();
  EXPECT_TRUE(Becomes("tessera_raw_rows_dropped_total", "", Positive));
}

TEST_F(Work, PrefixesAndMatches) {
  const auto publish = [&](std::uint64_t sequence, int tokens, std::uint64_t ttl_ms) {
    v1::PublishRequest request;
    *request.mutable_session() = worker_->key();
    request.set_sequence_id(sequence);
    for (int i = 0; i < tokens; ++i) request.add_token_ids(static_cast<std::uint32_t>(i));
    request.set_ttl_ms(ttl_ms);
    grpc::ClientContext context;
    v1::PublishResponse response;
    const grpc::Status status = worker_->stub().Publish(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  };
  v1::MatchRequest match;
  *match.mutable_session() = worker_->key();
  match.set_model_id(model_);
  const auto ask = [&](RawWorker& worker) {
    *match.mutable_session() = worker.key();
    grpc::ClientContext context;
    v1::MatchResponse response;
    const grpc::Status status = worker.stub().Match(&context, match, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  };
  for (std::uint32_t i = 0; i < 64; ++i) match.add_token_ids(i);
  match.set_will_compute(true);
  EXPECT_EQ(ask(*worker_).tokens(), 0u);
  EXPECT_EQ(Value("tessera_prefix_matches_total", "outcome=\"nothing\""), 1);
  RawWorker other(daemon_->Connect());
  ASSERT_TRUE(other.Attach().ok());
  match.set_will_compute(false);
  match.set_wait_ms(60000);
  auto waits = std::async(std::launch::async, [&] { return ask(other).tokens(); });
  EXPECT_TRUE(Becomes("tessera_prefix_waits", "", Positive));
  const std::uint64_t sequence = NewSequence(64);
  const std::uint64_t prefix = publish(sequence, 64, 0).prefix_id();
  EXPECT_EQ(waits.get(), 64u);
  EXPECT_EQ(Value("tessera_match_wait_seconds_count"), 1);
  EXPECT_GT(Value("tessera_match_wait_seconds_sum"), 0);
  EXPECT_EQ(Value("tessera_prefixes", "tenant=\"default\""), 1);
  EXPECT_EQ(Value("tessera_prefix_bytes", "tenant=\"default\""), 4 * 2 * 8192);
  EXPECT_EQ(Value("tessera_prefixes_published_total", "outcome=\"new\""), 1);
  EXPECT_TRUE(publish(NewSequence(64), 64, 0).deduplicated());
  EXPECT_EQ(Value("tessera_prefixes_published_total", "outcome=\"known\""), 1);
  EXPECT_EQ(Value("tessera_prefix_matches_total", "outcome=\"all\""), 1);
  match.add_token_ids(64);
  EXPECT_EQ(ask(*worker_).tokens(), 64u);
  EXPECT_EQ(Value("tessera_prefix_matches_total", "outcome=\"part\""), 1);
  EXPECT_EQ(Value("tessera_prefix_match_tokens_total", "side=\"asked\""), 64 + 64 + 65);
  EXPECT_EQ(Value("tessera_prefix_match_tokens_total", "side=\"found\""), 64 + 64);
  v1::FreeRequest free;
  free.add_sequence_ids(prefix);
  v1::FreeResponse freed;
  ASSERT_TRUE(worker_->Free(free, &freed).ok());
  EXPECT_EQ(freed.freed(), 1u);
  EXPECT_EQ(Value("tessera_prefixes_dropped_total", "reason=\"freed\""), 1);
  publish(sequence, 64, 1);
  EXPECT_TRUE(Becomes("tessera_prefixes_dropped_total", "reason=\"expired\"", Positive));
  // At most two.
  publish(sequence, 32, 0);
  publish(sequence, 33, 0);
  publish(sequence, 34, 0);
  EXPECT_EQ(Value("tessera_prefixes_dropped_total", "reason=\"least_recently_used\""), 1);
}

TEST_F(Work, TailsAndTheirAbsorption) {
  const std::uint64_t sequence = NewSequence(10);
  const std::unique_ptr<RawMapping> mapping = RawMapping::Map(*worker_);
  ASSERT_NE(mapping, nullptr);
  ASSERT_TRUE(mapping->OpenTail(sequence));
  EXPECT_EQ(Value("tessera_sequences", "state=\"decoding\""), 1);
  EXPECT_GT(Value("tessera_tenant_memory_bytes", "tag=\"tails\""), 0);
  mapping->control().ring_full_waits.fetch_add(3);
  EXPECT_EQ(Value("tessera_tail_full_waits_total"), 3);
  mapping->control().step_waits[0].fetch_add(5);
  mapping->control().step_waits[3].fetch_add(1);
  mapping->control().step_wait_nanoseconds.fetch_add(2'000'000);
  EXPECT_EQ(Value("tessera_decode_wait_seconds_count"), 6);
  EXPECT_EQ(Value("tessera_decode_wait_seconds_sum"), 0.002);
  EXPECT_EQ(Value("tessera_decode_wait_seconds_bucket", "le=\"0.001\""), 5);
  // 5 tokens are less than a tile: they are committed before the daemon absorbs them.
  mapping->Commit(15);
  EXPECT_EQ(Value("tessera_tokens_committed_total", "transport=\"mapped\""), 5);
  EXPECT_EQ(Value("tessera_sequence_tokens"), 15);
  // 40 tokens of zeros are committed; closing the tail absorbs them.
  mapping->Commit(50);
  EXPECT_EQ(worker_->CloseTails({sequence}).tokens(0), 50);
  EXPECT_EQ(Value("tessera_tokens_committed_total", "transport=\"mapped\""), 40);
  EXPECT_EQ(Value("tessera_sequences", "state=\"decoding\""), 0);
}

TEST_F(Work, FailedSequences) {
  const std::uint64_t sequence = NewSequence(10);
  const std::unique_ptr<RawMapping> mapping = RawMapping::Map(*worker_);
  ASSERT_NE(mapping, nullptr);
  ASSERT_TRUE(mapping->OpenTail(sequence));
  const std::uint16_t nan = kernels::FloatToBf16(std::numeric_limits<float>::quiet_NaN());
  shm::LaneLayout layout(kernels::ElementType::kBf16, worker_->welcome().tail_ring_tiles(),
                         {{2, 64}, {2, 64}});
  std::memcpy(layout.ring(mapping->tail_region(), 1, 0).Key(12), &nan, sizeof nan);
  mapping->Commit(15);
  const v1::TailsClosed closed = worker_->CloseTails({sequence});
  EXPECT_NE(closed.code(), 0);
  EXPECT_THAT(closed.error(), testing::HasSubstr("K of layer 1, kv head 0, token 12"));
  EXPECT_EQ(Value("tessera_sequences_failed_total", "tenant=\"default\""), 1);
}

TEST_F(Work, RetiredMemoryAndRevokedPins) {
  const std::unique_ptr<RawMapping> mapping = RawMapping::Map(*worker_);
  ASSERT_NE(mapping, nullptr);
  // A reader that never advances, pinned at the first epoch.
  mapping->control().readers[5].word.store(shm::PinWord(1));
  const std::uint64_t sequence = NewSequence(100);
  v1::FreeRequest free;
  free.add_sequence_ids(sequence);
  v1::FreeResponse freed;
  ASSERT_TRUE(worker_->Free(free, &freed).ok());
  EXPECT_GT(Value("tessera_epoch_retired_bytes"), 0);
  EXPECT_TRUE(Becomes("tessera_pins_revoked_total", "tenant=\"default\"", Positive));
  EXPECT_TRUE(Becomes("tessera_epoch_retired_bytes", "", [](double v) { return v == 0; }));
  EXPECT_EQ(mapping->control().readers[5].word.load(), shm::kPinRevoked);
}

TEST_F(Work, ConnectionsAndSessionsThatAreRefused) {
  const absl::StatusOr<Fd> socket = ConnectUnix(daemon_->socket_path());
  ASSERT_TRUE(socket.ok()) << socket.status();
  ASSERT_EQ(::send(socket->get(), "GET / HTTP/1.1", 14, MSG_NOSIGNAL), 14);
  EXPECT_TRUE(Becomes("tessera_connections_refused_total", "reason=\"protocol\"", Positive));
  v1::Hello hello = RawWorker::GoodHello();
  hello.set_tenant_token("wrong");
  EXPECT_EQ(RawWorker(daemon_->Connect()).Attach(hello).error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_EQ(Value("tessera_attach_refused_total", "reason=\"token\""), 1);
}

TEST_F(Work, EndsOfSessionsByReason) {
  worker_->Leave();
  EXPECT_TRUE(Becomes("tessera_session_ends_total", "reason=\"closed\"", Positive));
  EXPECT_TRUE(Becomes("tessera_sessions", "", [](double v) { return v == 0; }));
  // A worker whose descriptor socket closes is gone.
  ASSERT_TRUE(worker_->Attach().ok());
  ASSERT_TRUE(worker_->OpenDescriptors().ok());
  worker_->descriptor_socket().Close();
  EXPECT_TRUE(Becomes("tessera_session_ends_total", "reason=\"lost\"", Positive));
  EXPECT_EQ(worker_->Leave().error_code(), grpc::StatusCode::UNAVAILABLE);
  // A worker that breaks the protocol is refused.
  ASSERT_TRUE(worker_->Attach().ok());
  RawWorker second(daemon_->Connect());
  ASSERT_TRUE(second.Attach().ok());
  EXPECT_TRUE(Becomes("tessera_sessions", "", [](double v) { return v == 2; }));
}

}  // namespace
}  // namespace tessera
