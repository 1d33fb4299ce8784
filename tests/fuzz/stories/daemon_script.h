// What workers and operators may do to a daemon, as bytes: one operation after another, each a kind
// and a chunk. Messages travel as they do on the wire; small numbers in the place of ids stand for
// what came about so far, and a tensor of up to 8 bytes for one that its shape asks for, so that
// short inputs reach far.
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
      X(Restore) X(Describe) X(Stats)
// SetPolicy and the rest; their requests are named where they differ from the method.
#define TESSERA_FUZZ_ADMIN_RPCS(X) \
  X(ListSessions)                  \
  X(ListSequences)                 \
  X(ListPrefixes)                  \
  X(Evict) X(ListPolicies) X(Describe) X(Compress) X(Offload) X(Restore) X(SetPolicy) X(Drain)

enum class Op : std::uint8_t {
  kAttach,  // AttachRequest, on a new stream
  kStream,  // byte: which stream; AttachRequest
  kHangUp,  // byte
  kJobs,    // byte: how many
  kPass,    // two bytes: milliseconds
  kWrite,   // byte: whose memory; byte: which; four bytes: where; the rest: what
  kCommit,  // byte: which tail; four bytes: tokens; byte: the generation's error; byte: flags
  kWake,    // byte: which session
  kMatch,
#define TESSERA_FUZZ_OP(Method) k##Method,
  TESSERA_FUZZ_WORKER_RPCS(TESSERA_FUZZ_OP)
#undef TESSERA_FUZZ_OP
#define TESSERA_FUZZ_OP(Method) kAdmin##Method,
      TESSERA_FUZZ_ADMIN_RPCS(TESSERA_FUZZ_OP)
#undef TESSERA_FUZZ_OP
          kCount
};

// Where ids are small numbers: the other tenant's.
inline constexpr std::uint64_t kForeignPlace = 31;

class DaemonScript {
 public:
  explicit DaemonScript(DaemonCore& core) : core_(core) {}

  void Run(Input input);

 private:
  struct Attached {
    std::unique_ptr<FakeStream> stream;
    v1::SessionKey key;                           // of id 0 until Welcome
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
  // What stands for something becomes it.
  void Fix(google::protobuf::Message& message, bool admin);
  void FixIds(google::protobuf::Message& message, const google::protobuf::FieldDescriptor& field,
              bool admin);
  std::uint64_t IdOf(const std::string& field, std::uint64_t value, bool admin) const;
  // Ids that an answer brings; no row of the other tenant.
  void Judge(const grpc::Status& status, const google::protobuf::Message& response);
  void Harvest(const google::protobuf::Message& response);

  DaemonCore& core_;
  bool given_foreign_ = false;  // the input holds the other tenant's bytes by itself
  std::vector<Attached> attached_;
  std::vector<Tail> tails_;
  std::vector<std::uint64_t> things_;  // sequences, prefixes and computations
  std::vector<std::uint64_t> models_;
  std::vector<std::unique_ptr<FakeMatch>> matches_;
};

// The other way, for seeds.
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
