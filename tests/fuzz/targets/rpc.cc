// Requests to the daemon from workers that may lie in every field (daemon_script.h). No answer may
// be an internal error or hold another tenant's rows. When the workers are gone, nothing of them
// may be left.
#include "daemon/base/strings.h"
#include "daemon/policies/registry.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/stories/daemon_script.h"
#include "tests/fuzz/stories/script_seeds.h"

namespace tessera::fuzz {
namespace {

std::string PackAndMove() {
  ScriptWriter script = Begun("");
  script.Add(Op::kAppend, SeedAppend(0, 40));
  v1::CompressRequest compress;
  compress.mutable_packing()->set_kept_channels(16);
  compress.mutable_packing()->set_values(v1::VALUE_TYPE_INT8);
  compress.mutable_packing()->set_summary(v1::BLOCK_SUMMARY_MEAN);
  *compress.mutable_rotations()->mutable_key() = ShortTensor({kSeedLayers, 1, 64, 64}, "\x40");
  *compress.mutable_rotations()->mutable_value() = ShortTensor({kSeedLayers, 1, 64, 64}, "\x40");
  script.Add(Op::kCompress, compress);
  v1::SelectRequest select;
  *select.mutable_query() = ShortTensor({1, 2, 64});
  select.mutable_selection()->set_rate(0.5);
  script.Add(Op::kSelect, select);
  v1::AttendRequest attend = SeedAttend();
  attend.mutable_items(0)->mutable_selection()->set_entries(16);
  script.Add(Op::kAttend, attend);
  script.Add(Op::kRead, v1::ReadRequest());
  script.Add(Op::kOffload, v1::OffloadRequest());
  script.Add(Op::kAttend, SeedAttend());
  script.Add(Op::kOffload, v1::OffloadRequest());
  script.Add(Op::kRestore, v1::RestoreRequest());
  v1::DescribeRequest describe;
  describe.set_lanes(true);
  describe.set_entries(true);
  script.Add(Op::kDescribe, describe);
  v1::ForkRequest fork;
  script.Add(Op::kFork, fork);
  v1::TruncateRequest truncate;
  truncate.set_tokens(20);
  script.Add(Op::kTruncate, truncate);
  script.Add(Op::kAppend, SeedAppend(20, 5));
  v1::FreeRequest free;
  free.add_sequence_ids(0);
  free.add_sequence_ids(1);
  free.add_sequence_ids(kForeignPlace);
  script.Add(Op::kFree, free);
  script.Add(Op::kStats, v1::StatsRequest());
  return script.bytes();
}

std::string Prefixes() {
  ScriptWriter script = Begun("");
  script.Add(Op::kAttach, SeedHello());
  v1::MatchRequest compute = TokenIds(v1::MatchRequest(), 64);
  compute.set_will_compute(true);
  script.Add(Op::kMatch, compute);
  v1::MatchRequest waits = TokenIds(v1::MatchRequest(), 64);
  waits.mutable_session()->set_session_id(1);
  waits.set_wait_ms(1000);
  script.Add(Op::kMatch, waits);
  script.Add(Op::kAppend, SeedAppend(0, 64));
  v1::PublishRequest publish = TokenIds(v1::PublishRequest(), 64);
  publish.set_ttl_ms(5000);
  script.Add(Op::kPublish, publish);
  script.Add(Op::kMatch, waits);
  v1::ForkRequest fork;
  fork.mutable_session()->set_session_id(1);
  fork.set_parent_id(2);
  fork.set_tokens(32);
  script.Add(Op::kFork, fork);
  script.Add(Op::kPass, Output().Add<std::uint16_t>(60000).bytes());
  script.Add(Op::kAdminListPrefixes, v1::ListPrefixesRequest());
  v1::EvictRequest evict;
  evict.set_sequence_id(2);
  script.Add(Op::kAdminEvict, evict);
  script.Add(Op::kHangUp, std::string(1, '\1'));
  return script.bytes();
}

// A prompt under a policy, compressed and read.
std::string Prompt(const std::string& policy) {
  constexpr std::uint64_t kTokens = 96;
  ScriptWriter script = Begun(policy);
  v1::AppendRequest append = SeedAppend(0, kTokens);
  script.Add(Op::kAppend, append);
  SeedObserve(kTokens, script);
  script.Add(Op::kCompress, v1::CompressRequest());
  script.Add(Op::kAttend, SeedAttend());
  append = SeedAppend(kTokens, 40);
  append.set_end_of_prompt(true);
  script.Add(Op::kAppend, append);
  script.Add(Op::kJobs, std::string(1, '\x20'));
  v1::ReadRequest read;
  read.set_dtype(v1::DTYPE_FP32);
  read.set_first_entry(10);
  read.set_entries(70);
  script.Add(Op::kRead, read);
  script.Add(Op::kOffload, v1::OffloadRequest());
  script.Add(Op::kAttend, SeedAttend());
  return script.bytes();
}

// Options that fit short prompts: most defaults are for thousands of tokens and many layers.
std::string ForShortPrompts(const policies::TermKind& kind) {
  constexpr std::pair<std::string_view, std::string_view> kOptions[] = {
      {"budget", "0.5"}, {"span", "2"}, {"segment", "64"}, {"min_segment", "64"}};
  std::string text(kind.name);
  char separator = ':';
  for (const policies::Option& option : kind.options) {
    for (const auto& [name, value] : kOptions) {
      if (option.name != name ||
          (name == "budget" && option.type != policies::OptionType::kNumber)) {
        continue;
      }
      Append(text, separator, name, "=", value);
      separator = ',';
    }
  }
  return text;
}

std::string Operator() {
  ScriptWriter script = Begun("mosaickv");
  script.Add(Op::kAppend, SeedAppend(0, 64));
  script.Add(Op::kAdminListSessions, v1::ListSessionsRequest());
  script.Add(Op::kAdminListSequences, v1::ListSequencesRequest());
  script.Add(Op::kAdminListPolicies, v1::ListPoliciesRequest());
  v1::SetPolicyRequest policy;
  policy.set_policy("quest");
  script.Add(Op::kAdminSetPolicy, policy);
  script.Add(Op::kAdminCompress, v1::CompressRequest());
  script.Add(Op::kAdminOffload, v1::OffloadRequest());
  script.Add(Op::kAdminDescribe, v1::DescribeRequest());
  script.Add(Op::kAdminRestore, v1::RestoreRequest());
  script.Add(Op::kAdminEvict, v1::EvictRequest());
  script.Add(Op::kAdminDrain, v1::DrainRequest());
  script.Add(Op::kCreateSequence, SeedSequence(""));
  return script.bytes();
}

std::string TwoWorkers() {
  ScriptWriter script = Begun("");
  script.Add(Op::kAttach, SeedHello());
  script.Add(Op::kAppend, SeedAppend(0, 33));
  v1::HandoverRequest handover;
  handover.set_to_session_id(1);
  script.Add(Op::kHandover, handover);
  script.Add(Op::kHangUp, std::string(1, '\0'));
  script.Add(Op::kJobs, std::string(1, '\x08'));
  v1::AttendRequest attend = SeedAttend();
  attend.mutable_session()->set_session_id(1);
  script.Add(Op::kAttend, attend);
  return script.bytes();
}

}  // namespace

std::vector<Seed> Seeds() {
  std::vector<Seed> seeds = {{"pack-and-move", PackAndMove()},
                             {"prefixes", Prefixes()},
                             {"operator", Operator()},
                             {"two-workers", TwoWorkers()}};
  for (const policies::TermKind* kind : policies::TermKinds()) {
    seeds.push_back({Concat("policy-", kind->name), Prompt(ForShortPrompts(*kind))});
  }
  seeds.push_back(
      {"composed", Prompt("chunkkv:budget=0.5+mosaickv:segment=64,min_segment=64+int8")});
  return seeds;
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tessera::fuzz::DaemonCore core;
  tessera::fuzz::DaemonScript script(core);
  script.Run(tessera::fuzz::Input(data, size));
  return 0;
}
