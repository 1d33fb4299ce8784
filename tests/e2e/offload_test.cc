// A pool too small for its workers' sequences: idle ones are offloaded to host memory and restored,
// without any change in what workers read.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <regex>
#include <string>
#include <utility>
#include <vector>

#include "client/api/worker_access.h"
#include "client/bench/workload/synthetic.h"
#include "tessera/v1/admin.grpc.pb.h"
#include "tessera/worker.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/daemon/http_get.h"
#include "tests/fakes/seed.h"

namespace tessera {
namespace {

using cli::BytesOf;
using cli::SyntheticSequence;
using cli::SyntheticShape;
using cli::WritableBytesOf;
using fakes::DaemonProcess;
using testing::AllOf;
using testing::HasSubstr;

// 2 KiB per token.
constexpr SyntheticShape kShape = {.layers = 4, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
constexpr std::uint64_t kTokens = 700;

struct Track {
  client::Worker* worker;
  client::Sequence sequence;
  SyntheticSequence truth;
  std::vector<std::vector<float>> answers;  // by layer, for a fixed query
  // Its tail splits the sums differently: compared with the truth instead of bit by bit.
  bool decoded = false;
};

class Offload : public testing::Test {
 protected:
  void Start(const std::vector<std::string>& flags) {
    std::vector<std::string> all = {"--pool-extent-bytes=2MiB", "--staging-bytes=2MiB",
                                    "--tail-extent-bytes=2MiB", "--metrics=127.0.0.1:0"};
    all.insert(all.end(), flags.begin(), flags.end());
    daemon_ = DaemonProcess::Start({.flags = all, .pool_bytes = "40MiB"});
    ASSERT_NE(daemon_, nullptr);
    admin_ = v1::TesseraAdmin::NewStub(daemon_->ConnectAdmin());
  }
  std::unique_ptr<client::Worker> Attach(bool mapped = true) {
    auto worker = client::Worker::Attach(
        {.address = daemon_->address(), .worker_name = "test", .map_memory = mapped});
    EXPECT_TRUE(worker.ok()) << worker.status();
    return *std::move(worker);
  }
  absl::StatusOr<std::unique_ptr<Track>> NewTrack(client::Worker& worker,
                                                  const std::string& policy = "",
                                                  std::uint64_t tokens = kTokens) {
    absl::StatusOr<client::Model> model = worker.RegisterModel(kShape.Geometry());
    if (!model.ok()) return model.status();
    absl::StatusOr<client::Sequence> sequence = worker.CreateSequence(*model, policy);
    if (!sequence.ok()) return sequence.status();
    auto track = std::make_unique<Track>(
        Track{&worker, *std::move(sequence), SyntheticSequence(kShape, ++seed_), {}, false});
    const absl::Status status = Append(*track, tokens);
    if (!status.ok()) return status;
    return track;
  }
  static absl::Status Append(Track& track, std::uint64_t tokens) {
    const std::uint64_t first = track.truth.tokens();
    track.truth.Grow(tokens);
    const std::vector<std::uint16_t> key = track.truth.KeysOfAllLayers(first, tokens);
    const std::vector<std::uint16_t> value = track.truth.ValuesOfAllLayers(first, tokens);
    absl::StatusOr<std::uint64_t> held =
        track.sequence.Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = tokens});
    if (!held.ok()) track.truth.Truncate(first);
    return held.status();
  }
  // The attention in every layer, through the mapping if there is one, else by RPC.
  static absl::StatusOr<std::vector<std::vector<float>>> Ask(Track& track, bool by_rpc) {
    std::vector<std::vector<float>> answers;
    absl::StatusOr<client::Step> step = absl::UnknownError("none");
    client::Sequence* batch[] = {&track.sequence};
    if (!by_rpc) {
      step = track.worker->BeginStep(batch);
      if (!step.ok()) return step.status();
    }
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      std::vector<float>& output = answers.emplace_back(kShape.query_row());
      const std::vector<std::uint16_t> query = track.truth.Query(layer, 17);
      absl::Status status;
      if (by_rpc) {
        const client::AttendQuery asked = {.sequence = &track.sequence,
                                           .query = BytesOf(query),
                                           .output = WritableBytesOf(output)};
        status = track.worker->AttendRpc(layer, {&asked, 1});
      } else {
        status = step->Attend(layer, {.query = BytesOf(query), .output = WritableBytesOf(output)});
      }
      if (!status.ok()) return status;
    }
    return answers;
  }
  // Decodes one token through the tail and compares it with the truth.
  static absl::Status Decode(Track& track) {
    track.truth.Grow(1);
    const std::uint64_t token = track.truth.tokens() - 1;
    client::Sequence* batch[] = {&track.sequence};
    absl::StatusOr<client::Step> step = track.worker->BeginStep(batch);
    if (!step.ok()) return step.status();
    std::vector<float> output(kShape.query_row());
    for (std::uint32_t layer = 0; layer < kShape.layers; ++layer) {
      const std::vector<std::uint16_t> query = track.truth.Query(layer, token);
      absl::Status status =
          step->AppendAndAttend(layer, {.key = BytesOf(track.truth.Key(layer, token, 1)),
                                        .value = BytesOf(track.truth.Value(layer, token, 1)),
                                        .query = BytesOf(query),
                                        .output = WritableBytesOf(output)});
      if (!status.ok()) return status;
    }
    EXPECT_LT(track.truth.Error(kShape.layers - 1, token, output), 0.02);
    return step->End();
  }
  v1::StatsResponse Stats() {
    grpc::ClientContext context;
    v1::StatsResponse stats;
    EXPECT_TRUE(admin_->NodeStats(&context, {}, &stats).ok());
    return stats;
  }
  double Metric(const std::string& name, const std::string& labels) {
    std::smatch match;
    const std::string log = daemon_->Log();
    EXPECT_TRUE(std::regex_search(log, match, std::regex("metrics port=([0-9]+)")));
    const std::string text =
        fakes::HttpGet(static_cast<std::uint16_t>(std::stoi(match[1])), "/metrics");
    const std::regex line("(^|\n)" + name + "\\{([^}]*)\\} ([-+0-9.eE]+)");
    double sum = 0;
    for (std::sregex_iterator it(text.begin(), text.end(), line), end; it != end; ++it) {
      if ((*it)[2].str().find(labels) != std::string::npos) sum += std::stod((*it)[3]);
    }
    return sum;
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<v1::TesseraAdmin::Stub> admin_;
  std::uint64_t seed_ = 100;
};

// Holds twice the pool's size with two workers, one of which maps it. All operations work as if it
// fitted.
TEST_F(Offload, ASmallPoolHoldsMoreThanItsSize) {
  ASSERT_NO_FATAL_FAILURE(Start({"--offload-idle-ms=0", "--host-tier-bytes=512MiB"}));
  const std::unique_ptr<client::Worker> workers[] = {Attach(), Attach(/*mapped=*/false)};
  std::vector<std::unique_ptr<Track>> tracks;
  TestRandom random;
  for (int i = 0; i < 56; ++i) {
    auto track = NewTrack(*workers[i % 2]);
    ASSERT_TRUE(track.ok()) << i << ": " << track.status();
    auto answers = Ask(**track, /*by_rpc=*/random.OneIn(2) || i % 2 == 1);
    ASSERT_TRUE(answers.ok()) << i << ": " << answers.status();
    (*track)->answers = *std::move(answers);
    tracks.push_back(*std::move(track));
  }
  EXPECT_GT(Stats().tenants(0).offloaded_sequences(), 15u);
  for (int i = 0; i < 300; ++i) {
    Track& track = *random.Pick(tracks);
    const bool mapped = track.worker->mapped();
    switch (random.Below(4)) {
      case 0:
        ASSERT_TRUE(Decode(track).ok()) << i;
        track.decoded = true;
        break;
      case 1: {
        auto child = track.sequence.Fork();
        ASSERT_TRUE(child.ok()) << i << ": " << child.status();
        break;
      }
      default: {
        const auto answers = Ask(track, !mapped || random.OneIn(2));
        ASSERT_TRUE(answers.ok()) << i << ": " << answers.status();
        ASSERT_TRUE(track.decoded || *answers == track.answers) << i;
      }
    }
  }
  const v1::StatsResponse stats = Stats();
  EXPECT_GT(stats.tenants(0).offloads(), 50u);
  EXPECT_GT(stats.tenants(0).restores(), 20u);
  EXPECT_EQ(stats.pressure_calls_refused(), 0u);
  EXPECT_GT(Metric("tessera_pressure_climbs_total", "outcome=\"enough\""), 0);
  EXPECT_THAT(daemon_->Log(), AllOf(HasSubstr("memory pressure"), HasSubstr("rung=offload")));
  std::printf("%llu times out, %llu back, %llu calls that waited\n",
              static_cast<unsigned long long>(stats.tenants(0).offloads()),
              static_cast<unsigned long long>(stats.tenants(0).restores()),
              static_cast<unsigned long long>(stats.pressure_calls_served()));
}

// Publishes twice the pool's size in prefixes that no worker uses.
TEST_F(Offload, UnusedPrefixesGoFirst) {
  ASSERT_NO_FATAL_FAILURE(Start({"--offload-idle-ms=0", "--host-tier-bytes=0"}));
  const std::unique_ptr<client::Worker> worker = Attach();
  const auto resting = NewTrack(*worker);
  ASSERT_TRUE(resting.ok()) << resting.status();
  for (std::uint32_t i = 0; i < 56; ++i) {
    const auto track = NewTrack(*worker);
    ASSERT_TRUE(track.ok()) << i << ": " << track.status();
    const std::vector<std::uint32_t> ids(kTokens, i);
    const auto published = (*track)->sequence.Publish(ids);
    ASSERT_TRUE(published.ok()) << i << ": " << published.status();
    EXPECT_FALSE(published->deduplicated);
  }
  const v1::TenantStats tenant = Stats().tenants(0);
  EXPECT_GT(tenant.prefixes(), 10u);
  EXPECT_LT(tenant.prefixes(), 30u);
  EXPECT_EQ(tenant.offloads(), 0u);
  EXPECT_GT(Metric("tessera_pressure_climbs_total", "rung=\"drop_prefixes\",outcome=\"enough\""),
            0);
  ASSERT_TRUE(Decode(**resting).ok());
}

// Without a host tier, rows are re-encoded with fewer channels where their policy allows it, and
// more sequences fit.
TEST_F(Offload, PoliciesMayLetRowsKeepLess) {
  std::size_t held[2] = {};
  for (const bool pressed : {false, true}) {
    // A pool of twenty extents, each for tiles of one size: new sizes need some free ones.
    ASSERT_NO_FATAL_FAILURE(Start({"--offload-idle-ms=0", "--host-tier-bytes=0",
                                   "--pressure-high-percent=60", "--pressure-low-percent=50"}));
    const std::unique_ptr<client::Worker> worker = Attach();
    const std::string policy =
        std::string("bf16+mosaickv:sinks=0,recent=0,keep=0.5,group=1,loss_k=1,loss_v=1,select=0") +
        (pressed ? ",pressed=0.125" : "");
    std::vector<std::unique_ptr<Track>> tracks;
    absl::Status refused;
    while (refused.ok() && tracks.size() < 200) {
      auto track = NewTrack(*worker, policy);
      refused = track.status();
      if (!refused.ok()) break;
      refused = (*track)->sequence.Compress().status();
      tracks.push_back(*std::move(track));
    }
    held[pressed] = tracks.size();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
    const std::string why = pressed
                                ? "(packed rows cannot|packed rows already have as few channels)"
                                : "no policy allows re-encoding with fewer channels";
    EXPECT_TRUE(std::regex_search(refused.ToString(), std::regex(why))) << refused;
    // The first one has been reduced the most. It still answers, but is no longer a prefix.
    Track& first = *tracks.front();
    tracks.pop_back();
    tracks.pop_back();
    const auto answers = Ask(first, /*by_rpc=*/true);
    ASSERT_TRUE(answers.ok()) << answers.status();
    const auto described = client::DescribeMessage(first.sequence, client::Detail::kEntries);
    ASSERT_TRUE(described.ok());
    EXPECT_EQ(described->tokens(), kTokens);
    const auto published = first.sequence.Publish(std::vector<std::uint32_t>(kTokens, 1));
    EXPECT_EQ(published.ok(), !pressed) << published.status();
    const char* const thinned = "rung=\"thin\",outcome=\"enough\"";
    if (pressed) {
      EXPECT_THAT(published.status().ToString(), HasSubstr("further to save memory"));
      EXPECT_GT(Metric("tessera_pressure_climbs_total", thinned), 0);
    } else {
      EXPECT_EQ(Metric("tessera_pressure_climbs_total", thinned), 0);
    }
  }
  std::printf("sequences held: %zu, and %zu that may keep less\n", held[0], held[1]);
  EXPECT_GT(2 * held[1], 3 * held[0]);
}

// Demotes unused prefixes, then offloads idle sequences, then reduces rows whose policy allows it.
// Each stage starts only when the previous one cannot free more.
TEST_F(Offload, TheRungsAreClimbedInTheirOrder) {
  constexpr std::uint64_t kTier = 6 << 20;
  ASSERT_NO_FATAL_FAILURE(Start({"--offload-idle-ms=0", "--host-tier-bytes=6MiB",
                                 "--pressure-high-percent=60", "--pressure-low-percent=50"}));
  const std::unique_ptr<client::Worker> worker = Attach();
  for (std::uint32_t i = 0; i < 4; ++i) {
    const auto track = NewTrack(*worker);
    ASSERT_TRUE(track.ok()) << track.status();
    ASSERT_TRUE((*track)->sequence.Publish(std::vector<std::uint32_t>(kTokens, i)).ok());
  }
  std::vector<std::unique_ptr<Track>> tracks;
  std::vector<std::string> order;
  while (order.size() < 3 && tracks.size() < 300) {
    auto track = NewTrack(
        *worker,
        "bf16+mosaickv:sinks=0,recent=0,keep=0.5,group=1,loss_k=1,loss_v=1,select=0,pressed=0.125");
    ASSERT_TRUE(track.ok()) << "behind " << order.size() << " rungs: " << track.status();
    (void)(*track)->sequence.Compress();
    tracks.push_back(*std::move(track));
    for (const std::string rung : {"demote_prefixes", "offload", "thin"}) {
      const bool known = std::ranges::find(order, rung) != order.end();
      if (known || Metric("tessera_pressure_steps_total", "rung=\"" + rung + "\"") == 0) continue;
      order.push_back(rung);
      const v1::TenantStats tenant = Stats().tenants(0);
      if (rung == "demote_prefixes") {
        EXPECT_EQ(tenant.prefixes(), 4u);
      }
      if (rung == "thin") {
        EXPECT_EQ(tenant.prefixes(), 0u) << "sequences need their room in the tier";
        EXPECT_GT(tenant.offloaded_bytes(), kTier * 2 / 3);
      }
    }
  }
  EXPECT_THAT(order, testing::ElementsAre("demote_prefixes", "offload", "thin"));
}

TEST_F(Offload, OnlyAFullTierIsRefused) {
  ASSERT_NO_FATAL_FAILURE(Start({"--offload-idle-ms=0", "--host-tier-bytes=16MiB"}));
  const std::unique_ptr<client::Worker> worker = Attach(/*mapped=*/false);
  std::vector<std::unique_ptr<Track>> tracks;
  absl::Status refused;
  while (refused.ok() && tracks.size() < 100) {
    auto track = NewTrack(*worker);
    refused = track.status();
    if (track.ok()) tracks.push_back(*std::move(track));
  }
  // 40 MiB and 16 MiB, at 1.4 MiB each.
  EXPECT_GT(tracks.size(), 30u);
  EXPECT_LT(tracks.size(), 42u);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(
      refused.ToString(),
      AllOf(HasSubstr("requested for"), HasSubstr("used of a limit of 40.0 MiB"),
            HasSubstr("the host tier is full"), HasSubstr("of 16.0 MiB"), HasSubstr("Retry in ")));
  EXPECT_GT(Stats().pressure_calls_refused(), 0u);
  EXPECT_GT(Metric("tessera_memory_refusals_total", "cause=\"node\"") +
                Metric("tessera_memory_refusals_total", "cause=\"quota\""),
            0);
  EXPECT_GT(Metric("tessera_pressure_climbs_total", "outcome=\"nothing\""), 0);
  // With free memory again, all remaining sequences answer as before.
  for (std::size_t i = 0; i < tracks.size(); i += 3) tracks[i] = nullptr;
  for (const auto& track : tracks) {
    if (track == nullptr) continue;
    ASSERT_TRUE(Decode(*track).ok());
  }
  EXPECT_GT(static_cast<double>(Stats().pressure_calls_served()) +
                Metric("tessera_moves_total", "direction=\"restore\""),
            0);
}

// A sequence compressed by any policy is restored bit by bit.
TEST_F(Offload, CompressedSequencesComeBackBitForBit) {
  ASSERT_NO_FATAL_FAILURE(Start({}));
  for (const bool mapped : {true, false}) {
    const std::unique_ptr<client::Worker> worker = Attach(mapped);
    for (const char* policy :
         {"dense", "mosaickv:keep=0.25",
          "mosaickv:keep=0.25,loss_k=1,loss_v=1,min_segment=32,floor=32", "quest",
          "streaming:sink=4,recent=60", "semanticache+mosaickv+int8", "lacache:span=2"}) {
      SCOPED_TRACE(policy);
      auto made = NewTrack(*worker, policy);
      ASSERT_TRUE(made.ok()) << made.status();
      Track& track = **made;
      std::vector<std::uint32_t> ids(kTokens);
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::uint32_t>(i % 7);
      ASSERT_TRUE(track.sequence.ObserveTokens(0, ids).ok());
      const auto compressed = track.sequence.Compress();
      ASSERT_TRUE(compressed.ok()) << compressed.status();
      const auto before = Ask(track, /*by_rpc=*/!mapped);
      ASSERT_TRUE(before.ok()) << before.status();
      const auto entries = client::DescribeMessage(track.sequence, client::Detail::kEntries);
      ASSERT_TRUE(entries.ok()) << entries.status();

      const auto moved = track.sequence.Offload();
      ASSERT_TRUE(moved.ok()) << moved.status();
      EXPECT_GT(*moved, 0u);
      const auto away = client::DescribeMessage(track.sequence, client::Detail::kEntries);
      ASSERT_TRUE(away.ok());
      EXPECT_EQ(away->state(), v1::SEQUENCE_STATE_OFFLOADED);
      EXPECT_EQ(away->tile_bytes(), 0u);
      EXPECT_GT(away->offloaded_bytes(), 0u);
      EXPECT_EQ(away->tokens(), kTokens);

      const auto after = Ask(track, /*by_rpc=*/!mapped);
      ASSERT_TRUE(after.ok()) << after.status();
      EXPECT_EQ(*after, *before);
      const auto back = client::DescribeMessage(track.sequence, client::Detail::kEntries);
      ASSERT_TRUE(back.ok());
      EXPECT_EQ(back->tile_bytes(), entries->tile_bytes());
      EXPECT_EQ(back->rotation_bytes(), entries->rotation_bytes());
      EXPECT_EQ(back->offloaded_bytes(), 0u);
      ASSERT_EQ(back->lane_size(), entries->lane_size());
      for (int i = 0; i < back->lane_size(); ++i) {
        EXPECT_EQ(back->lane(i).SerializeAsString(), entries->lane(i).SerializeAsString());
      }
      // It can continue.
      if (std::string(policy) == "dense") {
        ASSERT_TRUE(Decode(track).ok());
      }
      ASSERT_TRUE(track.sequence.Offload().ok());
      ASSERT_TRUE(track.sequence.Restore().ok());
      EXPECT_EQ(client::DescribeMessage(track.sequence, client::Detail::kEntries)->state(),
                v1::SEQUENCE_STATE_LIVE);
    }
  }
}

TEST_F(Offload, AnOperatorMovesSequencesToo) {
  ASSERT_NO_FATAL_FAILURE(Start({}));
  const std::unique_ptr<client::Worker> worker = Attach();
  auto track = NewTrack(*worker);
  ASSERT_TRUE(track.ok());
  ASSERT_TRUE(Decode(**track).ok());
  const std::uint64_t id = (*track)->sequence.id().value();
  {
    grpc::ClientContext context;
    v1::OffloadRequest request;
    request.set_sequence_id(id);
    v1::OffloadResponse response;
    const grpc::Status status = admin_->Offload(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_GT(response.moved_bytes(), 0u);
  }
  {
    grpc::ClientContext context;
    v1::ListSequencesResponse sequences;
    ASSERT_TRUE(admin_->ListSequences(&context, {}, &sequences).ok());
    ASSERT_EQ(sequences.sequences_size(), 1);
    EXPECT_EQ(sequences.sequences(0).state(), v1::SEQUENCE_STATE_OFFLOADED);
    EXPECT_GT(sequences.sequences(0).offloaded_bytes(), 0u);
    EXPECT_EQ(sequences.sequences(0).tokens(), kTokens + 1);
  }
  const v1::StatsResponse stats = Stats();
  EXPECT_EQ(stats.tenants(0).offloaded_sequences(), 1u);
  EXPECT_EQ(stats.tenants(0).offloaded_bytes(), stats.host_tier_bytes());
  EXPECT_GT(stats.host_tier_bytes(), kTokens * 2048);
  EXPECT_GT(stats.host_tier_limit_bytes(), stats.host_tier_bytes());
  {
    grpc::ClientContext context;
    v1::RestoreRequest request;
    request.set_sequence_id(id);
    v1::RestoreResponse response;
    ASSERT_TRUE(admin_->Restore(&context, request, &response).ok());
    EXPECT_EQ(response.tokens(), kTokens + 1);
  }
  ASSERT_TRUE(Decode(**track).ok());
  {
    grpc::ClientContext context;
    v1::OffloadRequest request;
    request.set_sequence_id(id + 1);
    v1::OffloadResponse response;
    EXPECT_EQ(admin_->Offload(&context, request, &response).error_code(),
              grpc::StatusCode::NOT_FOUND);
  }
}

}  // namespace
}  // namespace tessera
