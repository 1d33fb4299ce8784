// Operator commands: `tessera` against a daemon whose worker holds compressed sequences. A
// command's output must match the RPC's answer, and an error must say what to do instead.

#include <gmock/gmock.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <string>

#include "client/api/worker_access.h"
#include "client/cli/policies/policy_estimate.h"
#include "client/json/message_json.h"
#include "client/tools/short_id.h"
#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"
#include "tessera/tessera.h"
#include "tests/e2e/prefix/prefix_lanes.h"

namespace tessera {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::Not;

struct Outcome {
  std::string text;  // stdout and stderr
  int code = -1;
};

class Commands : public Prefixes {
 protected:
  Outcome Run(const std::string& arguments) {
    Outcome outcome;
    const std::string line =
        Concat(TESSERA_BINARY " ", arguments, " --address=", daemon_->address(), " 2>&1");
    FILE* const pipe = ::popen(line.c_str(), "r");
    EXPECT_NE(pipe, nullptr);
    if (pipe == nullptr) return outcome;
    std::array<char, 4096> piece{};
    for (std::size_t got; (got = ::fread(piece.data(), 1, piece.size(), pipe)) > 0;) {
      outcome.text.append(piece.data(), got);
    }
    const int status = ::pclose(pipe);
    outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    return outcome;
  }
  std::string Good(const std::string& arguments) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.code, 0) << arguments << "\n" << outcome.text;
    return outcome.text;
  }
  void Bad(const std::string& arguments, int code, const std::string& why) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.code, code) << arguments << "\n" << outcome.text;
    EXPECT_THAT(outcome.text, HasSubstr(why)) << arguments;
  }
  static std::string IdOf(const client::Sequence& sequence) {
    return cli::ShortId(cli::kSequenceLetter, sequence.id().value());
  }
  v1::DescribeResponse Described(const client::Sequence& sequence) {
    const auto described = client::DescribeMessage(sequence, client::Detail::kLanes);
    EXPECT_TRUE(described.ok()) << described.status();
    return described.value_or(v1::DescribeResponse());
  }
};

TEST_F(Commands, ALaneIsDescribedStrategyByStrategy) {
  client::Sequence sequence = NewSequence(
      "mosaickv:keep=0.25,group=1,segment=128,min_segment=32,sinks=0,recent=0,loss_k=1,loss_v=1");
  SyntheticSequence truth(shape_, 3);
  Append(sequence, truth, 256);
  Compress(sequence);
  Append(sequence, truth, 5);
  const v1::DescribeResponse held = Described(sequence);
  // Two segments with a strategy each, and five rows that still wait for one.
  for (const v1::LaneDescription& lane : held.lane()) {
    ASSERT_EQ(lane.segment_run_size(), 3);
    for (int i = 0; i < 2; ++i) {
      const v1::SegmentRun& run = lane.segment_run(i);
      EXPECT_EQ(run.first_position(), 128u * i);
      EXPECT_EQ(run.entries(), 128u);
      EXPECT_EQ(run.segments(), 1u);
      EXPECT_EQ(run.kept_channels(), 16u);
      EXPECT_GT(run.key_loss(), 0);
      EXPECT_GT(run.value_loss(), 0);
      EXPECT_GT(run.rotation_bytes(), 0u);
    }
    EXPECT_EQ(lane.segment_run(2).first_position(), 256u);
    EXPECT_EQ(lane.segment_run(2).format(), "dense bf16");
  }
  const v1::SegmentRun& first = held.lane(0).segment_run(0);
  const std::string text = Good("describe " + IdOf(sequence));
  EXPECT_THAT(text, AllOf(HasSubstr("policy mosaickv:"), HasSubstr("tokens 261"),
                          HasSubstr("packed int8 16 of 64"), HasSubstr("dense bf16"),
                          HasSubstr("loss K"), HasSubstr("bytes"), ContainsRegex("kept: tokens"),
                          ContainsRegex("lanes: 5 of 261 entries left dense: waiting")));
  char loss[16];
  std::snprintf(loss, sizeof loss, "%.3f", first.key_loss());
  EXPECT_THAT(text, HasSubstr(loss));
  EXPECT_EQ(Good("describe --json " + IdOf(sequence)), client::JsonOf(held) + "\n");
}

// Rows without their own strategy report their loss under the previous segment's strategy.
TEST_F(Commands, RowsThatWaitSayWhatTheyLose) {
  client::Sequence sequence = NewSequence(
      "mosaickv:keep=0.25,group=1,segment=4096,min_segment=2048,sinks=0,recent=0,loss_k=1,"
      "loss_v=1");
  SyntheticSequence truth(shape_, 4);
  Append(sequence, truth, 128);
  Compress(sequence);
  for (int i = 0; i < 80; ++i) Decode(sequence, truth);
  ASSERT_TRUE(Becomes([&] {
    const v1::DescribeResponse held = Described(sequence);
    const auto provisional = [](const v1::LaneDescription& lane) {
      return lane.segment_run_size() > 1 && lane.segment_run(1).provisional();
    };
    return std::ranges::all_of(held.lane(), provisional);
  }));
  const v1::DescribeResponse held = Described(sequence);
  EXPECT_GT(held.lane(0).segment_run(1).key_loss(), 0);
  EXPECT_LT(held.lane(0).segment_run(1).key_loss(), 1);
  EXPECT_EQ(held.lane(0).segment_run(1).first_position(), 128u);
  EXPECT_THAT(Good("describe " + IdOf(sequence)), HasSubstr("provisional"));
}

TEST_F(Commands, PoliciesAreSetAndCarriedOut) {
  client::Sequence sequence = NewSequence("");
  SyntheticSequence truth(shape_, 5);
  Append(sequence, truth, 128);
  const std::uint64_t dense = Described(sequence).tile_bytes();
  EXPECT_EQ(
      Good("policy " + IdOf(sequence) + " mosaickv:keep=0.25,min_segment=32,sinks=0,recent=0"),
      "policy is now mosaickv:keep=0.25,min_segment=32,sinks=0,recent=0\n");
  EXPECT_THAT(Described(sequence).policy(), HasSubstr("mosaickv"));
  EXPECT_EQ(Described(sequence).tile_bytes(), dense) << "what is there stays as it is";
  EXPECT_THAT(Good("compress " + IdOf(sequence)),
              AllOf(HasSubstr("tiles "), HasSubstr(" -> "), HasSubstr("entries dropped 0"),
                    HasSubstr("compressed: 128 tokens")));
  EXPECT_THAT(Good("compress " + IdOf(sequence)),
              HasSubstr("nothing new since the last compression"));
  EXPECT_LT(Described(sequence).tile_bytes(), dense / 2);
  Bad("policy " + IdOf(sequence) + " mosaikkv", 2, "mosaikkv");
  Bad("policy " + IdOf(sequence), 2, "tessera policy: missing POLICY; 'tessera policies' lists");
  Bad("policy " + IdOf(sequence) + " mosaickv:keep=2", 2, "keep");
  Bad("compress 12345", 1, "no sequence s12345; it may have been freed or evicted");
  Bad("describe nonsense", 2, "'tessera status' lists them");
}

TEST_F(Commands, StatusAndTopShowWhatIsDone) {
  client::Sequence sequence = NewSequence("mosaickv:keep=0.25,min_segment=32,sinks=0,recent=0");
  SyntheticSequence truth(shape_, 6);
  Append(sequence, truth, 128);
  Compress(sequence);
  for (const std::string command : {"status", "top --rounds=1 --interval-ms=100"}) {
    EXPECT_THAT(Good(command),
                AllOf(ContainsRegex("jobs running.queued: tails [0-9]+.0, seals [0-9]+.0"),
                      HasSubstr("sealed 4"), HasSubstr("raw copies "),
                      HasSubstr("\n" + IdOf(sequence) + " "), HasSubstr("packed")))
        << command;
  }
}

// What `explain` computes from options and geometry contains what the daemon makes of real rows.
TEST_F(Commands, AnExplanationHoldsForTheDaemon) {
  const cli::ModelShape model = {.layers = shape_.layers,
                                 .geometry = {.query_heads = shape_.query_heads,
                                              .kv_heads = shape_.kv_heads,
                                              .head_dim = shape_.head_dim}};
  for (const char* text :
       {"dense", "quest", "mosaickv:keep=0.25,group=1,loss_k=1,loss_v=1",
        "mosaickv:keep=0.125|0.5,min_segment=64,segment=128,sinks=0,recent=0",
        "mosaickv:keep=0.25,min_segment=64,segment=256,sinks=8,recent=40+fp8",
        "mosaickv:keep=0.25,sinks=0,recent=0,loss_k=0,loss_v=0", "streaming:sink=4,recent=100",
        "streaming:sink=4,recent=100+mosaickv:keep=0.25,min_segment=32,loss_k=1,loss_v=1"}) {
    for (const std::uint64_t tokens : {32u, 300u, 384u}) {
      SCOPED_TRACE(Concat(text, " of ", tokens, " tokens"));
      const auto policy = policies::ParsePolicy(text);
      ASSERT_TRUE(policy.ok()) << policy.status();
      const auto estimate = cli::EstimatePolicy(*policy, model, tokens);
      ASSERT_TRUE(estimate.ok()) << estimate.status();
      client::Sequence sequence = NewSequence(text);
      SyntheticSequence truth(shape_, tokens);
      Append(sequence, truth, tokens);
      Compress(sequence);
      const v1::DescribeResponse held = Described(sequence);
      const std::uint64_t bytes = held.tile_bytes() + held.rotation_bytes();
      EXPECT_GE(bytes, estimate->bytes.least);
      EXPECT_LE(bytes, estimate->bytes.most);
      std::uint64_t entries = 0;
      for (const v1::LaneDescription& lane : held.lane()) entries += lane.entries();
      EXPECT_GE(entries, estimate->kept.least * model.lanes());
      EXPECT_LE(entries, estimate->kept.most * model.lanes());
    }
  }
}

TEST_F(Commands, SequencesAndPrefixesComeAndGo) {
  client::Sequence sequence = NewSequence("");
  SyntheticSequence truth(shape_, 7);
  Append(sequence, truth, 64);
  EXPECT_THAT(Good("offload " + IdOf(sequence)), HasSubstr("moved out of the pool"));
  EXPECT_THAT(Good("describe " + IdOf(sequence)), HasSubstr("offloaded"));
  EXPECT_THAT(Good("restore " + IdOf(sequence)), HasSubstr("64 tokens in the pool"));
  EXPECT_THAT(Good("prefixes"), HasSubstr("no prefixes"));
  const PublishedPrefix prefix = Publish(sequence, Count(64));
  const std::string id = cli::ShortId(cli::kPrefixLetter, prefix.prefix.value());
  EXPECT_THAT(Good("prefixes"), testing::AllOf(HasSubstr(id), HasSubstr("pool")));
  Good("evict " + id);
  EXPECT_THAT(Good("prefixes"), Not(HasSubstr(id)));
  Bad("evict " + id, 1, id);
  Good("evict " + IdOf(sequence));
  Bad("describe " + IdOf(sequence), 1, IdOf(sequence));
  EXPECT_THAT(Good("drain --limit-ms=100"), HasSubstr("draining; 2 sessions"));
  EXPECT_EQ(daemon_->WaitForExit(20), 0);
  Bad("status", 1, daemon_->address());
}

}  // namespace
}  // namespace tessera
