// Writes to memory that a worker shares with the daemon while the daemon reads it: committed
// counts, wake words, reader slots, tail rows, the staging arena. Inputs are scripts that start
// with a worker with two decoding sequences. A lie may fail only that worker's own sequences or
// calls. An honest worker of the tenant and the other tenant must see no effect.
#include "proto/shm/layout.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/stories/daemon_script.h"
#include "tests/fuzz/stories/script_seeds.h"

namespace tessera::fuzz {
namespace {

std::string Tails(bool open, std::initializer_list<std::uint64_t> sequences) {
  v1::AttachRequest request;
  for (const std::uint64_t sequence : sequences) {
    open ? request.mutable_open_tails()->add_sequence_ids(sequence)
         : request.mutable_close_tails()->add_sequence_ids(sequence);
  }
  return Output().Byte(0).Bytes(request.SerializeAsString()).bytes();
}

std::string Prelude() {
  ScriptWriter script = Begun("");
  script.Add(Op::kCreateSequence, SeedSequence("mosaickv:segment=64,min_segment=64"));
  script.Add(Op::kAppend, SeedAppend(0, 40));
  script.Add(Op::kStream, Tails(true, {0, 1}));
  return script.bytes();
}

std::string Commit(std::uint8_t tail, std::uint32_t tokens, std::uint8_t error,
                   std::uint8_t flags) {
  return Output().Byte(tail).Add(tokens).Byte(error).Byte(flags).bytes();
}

std::string Written(std::uint8_t area, std::uint32_t at, std::string_view bytes) {
  return Output().Byte(0).Byte(area).Add(at).Bytes(bytes).bytes();
}

const std::string kAll(1, '\x20');
const std::string kFirst(1, '\0');

// Decodes tokens in both sequences, which are absorbed, read and closed.
std::string Decode(std::uint32_t tokens) {
  ScriptWriter script;
  script.Add(Op::kCommit, Commit(0, tokens, 0, 2)).Add(Op::kCommit, Commit(1, tokens, 0, 2));
  script.Add(Op::kWake, kFirst).Add(Op::kJobs, kAll);
  script.Add(Op::kAttend, SeedAttend());
  v1::ForkRequest fork;
  script.Add(Op::kFork, fork);
  script.Add(Op::kStream, Tails(false, {0, 1}));
  script.Add(Op::kStream, Tails(true, {1, 0}));
  script.Add(Op::kCommit, Commit(3, 2, 0, 1));
  script.Add(Op::kOffload, v1::OffloadRequest()).Add(Op::kHangUp, kFirst);
  return script.bytes();
}

std::string Lies() {
  ScriptWriter script;
  script.Add(Op::kCommit, Commit(0, 1000000, 0, 2)).Add(Op::kWake, kFirst).Add(Op::kJobs, kAll);
  script.Add(Op::kCommit, Commit(1, 40, 1, 2)).Add(Op::kWake, kFirst).Add(Op::kJobs, kAll);
  script.Add(Op::kWrite, Written(1, 0, std::string(64, '\xff')));
  script.Add(Op::kCommit, Commit(1, 33, 0, 0)).Add(Op::kWake, kFirst).Add(Op::kJobs, kAll);
  script.Add(Op::kDescribe, v1::DescribeRequest());
  return script.bytes();
}

// A reader that never unpins, and memory that waits for it.
std::string Pins() {
  const std::uint32_t slot = offsetof(shm::ControlPage, readers);
  ScriptWriter script;
  script.Add(Op::kWrite, Written(0, slot, Output().Add<std::uint64_t>(2).bytes()));
  v1::TruncateRequest truncate;
  truncate.set_tokens(8);
  script.Add(Op::kTruncate, truncate);
  script.Add(Op::kPass, Output().Add<std::uint16_t>(6000).bytes());
  script.Add(Op::kStats, v1::StatsRequest());
  return script.bytes();
}

std::string Staged() {
  ScriptWriter script;
  script.Add(Op::kWrite, Written(2, 0, std::string(512, '\x3e')));
  v1::AppendRequest append;
  append.set_first_token(40);
  for (v1::Tensor* tensor : {append.mutable_key(), append.mutable_value()}) {
    tensor->set_dtype(v1::DTYPE_BF16);
    for (const std::uint64_t extent : {2, 1, 1, 64}) tensor->add_shape(extent);
    tensor->mutable_staging()->set_bytes(256);
  }
  append.mutable_value()->mutable_staging()->set_offset(256);
  script.Add(Op::kStream, Tails(false, {0}));
  script.Add(Op::kAppend, append);
  append.mutable_value()->mutable_staging()->set_offset(65535);
  script.Add(Op::kAppend, append);
  script.Add(Op::kAttend, SeedAttend());
  return script.bytes();
}

}  // namespace

std::vector<Seed> Seeds() {
  return {{"decode", Decode(3)},
          {"full-tile", Decode(33)},
          {"lies", Lies()},
          {"pins", Pins()},
          {"staged", Staged()}};
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera::fuzz;
  static const std::string prelude = Prelude();
  DaemonCore core(/*crowded=*/true);
  DaemonScript script(core);
  const std::string whole = prelude + std::string(reinterpret_cast<const char*>(data), size);
  script.Run(Input(whole));
  return 0;
}
