// Operations of workers and operators as bytes: a sequence of operations, each a kind and a chunk.
// Messages have their wire format. Small numbers in place of ids stand for objects created so far,
// and a tensor of up to 8 bytes is expanded to its shape, so that short inputs reach far.
#pragma once

#include <google/protobuf/message.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/platform/memfd.h"
#include "tessera/v1/admin.pb.h"
#include "tessera/v1/tessera.pb.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/stories/daemon_core.h"

namespace tessera::fuzz {

#define TESSERA_FUZZ_WORKER_RPCS(X)                                                              \
  X(RegisterModel)                                                                               \
  X(CreateSequence)                                                                              \
  X(Fork)                                                                                        \
  X(Truncate)                                                                                    \
  X(Handover) X(Free) X(Append) X(Compress) X(Observe) X(Select) X(Attend) X(Publish) X(Offload) \
      X(Restore) X(Describe) X(Stats) X(Read)
// SetPolicy and the other admin RPCs. Requests are listed where their names differ from the
// method's.
#define TESSERA_FUZZ_ADMIN_RPCS(X) \
  X(ListSessions)                  \
  X(ListSequences)                 \
  X(ListPrefixes)                  \
  X(Evict) X(ListPolicies) X(Describe) X(Compress) X(Offload) X(Restore) X(SetPolicy) X(Drain)

enum class Op : std::uint8_t {
  kAttach,  // AttachRequest, on a new stream
  kStream,  // byte: stream; AttachRequest
  kHangUp,  // byte: stream
  kJobs,    // byte: number of jobs
  kPass,    // two bytes: milliseconds
  kWrite,   // byte: memory; byte: index; four bytes: offset; the rest: data
  kCommit,  // byte: tail; four bytes: tokens; byte: error of the generation; byte: flags
  kWake,    // byte: session
  kMatch,
#define TESSERA_FUZZ_OP(Method) k##Method,
  TESSERA_FUZZ_WORKER_RPCS(TESSERA_FUZZ_OP)
#undef TESSERA_FUZZ_OP
#define TESSERA_FUZZ_OP(Method) kAdmin##Method,
      TESSERA_FUZZ_ADMIN_RPCS(TESSERA_FUZZ_OP)
#undef TESSERA_FUZZ_OP
          kCount
};

// The placeholder of the other tenant's objects.
inline constexpr std::uint64_t kForeignPlace = 31;

class DaemonScript {
 public:
  explicit DaemonScript(DaemonCore& core) : core_(core) {}

  void Run(Input input);

 private:
  struct Attached {
    std::unique_ptr<FakeStream> stream;
    v1::SessionKey key;                           // id 0 until Welcome
    std::map<std::uint32_t, AddressRange> tails;  // by extent
    AddressRange control;
    AddressRange staging;
  };
  struct Tail {
    std::size_t session;
    v1::TailPlace place;
  };
  enum class Memory : std::uint8_t { kControl, kTail, kStaging, kCount };

  void RunOne(Op op, std::string_view chunk);
  void OpenStream(std::string_view chunk);
  void SendOnStream(Input input);
  void Hear(std::size_t session);
  void Write(Input input);
  void Commit(Input input);
  std::shared_ptr<cache::SessionState> StateOf(const Attached& attached);
  std::span<std::byte> MemoryOf(Attached& attached, Memory which);
  void MapMemory(Attached& attached, cache::SessionState& state);

  template <typename Request, typename Response, typename Service>
  void Call(Service& service,
            grpc::Status (Service::*method)(grpc::ServerContext*, const Request*, Response*),
            std::string_view chunk, bool admin);
  void CallMatch(std::string_view chunk);
  // Replaces placeholders by the objects that they stand for.
  void Fix(google::protobuf::Message& message, bool admin);
  void FixIds(google::protobuf::Message& message, const google::protobuf::FieldDescriptor& field,
              bool admin);
  std::uint64_t IdOf(const std::string& field, std::uint64_t value, bool admin) const;
  // Collects the ids of an answer, and checks that it has no row of the other tenant.
  void Judge(const grpc::Status& status, const google::protobuf::Message& response);
  void Harvest(const google::protobuf::Message& response);

  DaemonCore& core_;
  bool given_foreign_ = false;  // the input itself contains the other tenant's bytes
  std::vector<Attached> attached_;
  std::vector<Tail> tails_;
  std::vector<std::uint64_t> things_;  // sequences, prefixes and computations
  std::vector<std::uint64_t> models_;
  std::vector<std::unique_ptr<FakeMatch>> matches_;
};

// Writes seeds in the format that DaemonScript reads.
class ScriptWriter {
 public:
  ScriptWriter& Add(Op op, const google::protobuf::Message& message) {
    return Add(op, message.SerializeAsString());
  }
  ScriptWriter& Add(Op op, std::string_view chunk) {
    output_.Byte(static_cast<std::uint8_t>(op)).Chunk(chunk);
    return *this;
  }
  const std::string& bytes() const { return output_.bytes(); }

 private:
  Output output_;
};

}  // namespace tessera::fuzz
