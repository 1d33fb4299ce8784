// Bad input gets an error that names the value and the limit, and changes nothing. One table of all
// invalid requests that a worker can send by RPC, against a real daemon.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/format/element.h"
#include "proto/shm/layout.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::RawWorker;
using fakes::SmallModel;
using fakes::SmallRows;
using grpc::StatusCode;
using testing::HasSubstr;

constexpr char kConfig[] = R"({"tenants": [{"name": "default"},
                                           {"name": "other", "token": "sesame"}]})";

// A daemon, a worker with a sequence of five tokens, and a worker of another tenant.
struct World {
  std::unique_ptr<DaemonProcess> daemon =
      DaemonProcess::Start({.flags = {"--max-message-bytes=1MiB"}, .config_json = kConfig});
  std::unique_ptr<RawWorker> worker;
  std::unique_ptr<RawWorker> stranger;
  std::uint64_t model = 0;
  std::uint64_t sequence = 0;
  std::uint64_t foreign_sequence = 0;

  bool Ready() {
    if (daemon == nullptr) return false;
    worker = std::make_unique<RawWorker>(daemon->Connect());
    stranger = std::make_unique<RawWorker>(daemon->Connect());
    v1::Hello hello = RawWorker::GoodHello();
    if (!worker->Attach(hello).ok() || !worker->OpenDescriptors().ok()) return false;
    if (!worker->Fetch(shm::DescriptorKind::kStaging, 0).ok()) return false;
    hello.set_tenant_token("sesame");
    if (!stranger->Attach(hello).ok()) return false;
    model = Register(*worker);
    sequence = Create(*worker, model);
    foreign_sequence = Create(*stranger, Register(*stranger));
    v1::AppendResponse appended;
    return worker->Append(GoodAppend(0, 5), &appended).ok();
  }

  static std::uint64_t Register(RawWorker& worker) {
    v1::RegisterModelRequest request;
    *request.mutable_model() = SmallModel();
    v1::RegisterModelResponse response;
    return worker.RegisterModel(request, &response).ok() ? response.model_id() : 0;
  }
  static std::uint64_t Create(RawWorker& worker, std::uint64_t model) {
    v1::CreateSequenceRequest request;
    request.set_model_id(model);
    v1::CreateSequenceResponse response;
    return worker.CreateSequence(request, &response).ok() ? response.sequence_id() : 0;
  }
  v1::AppendRequest GoodAppend(std::uint64_t first_token, int tokens) const {
    v1::AppendRequest request;
    request.set_sequence_id(sequence);
    request.set_first_token(first_token);
    *request.mutable_key() = SmallRows(2, tokens, 1);
    *request.mutable_value() = SmallRows(2, tokens, 2);
    return request;
  }
  v1::AttendRequest GoodAttend() const {
    v1::AttendRequest request;
    v1::AttendItem& item = *request.add_items();
    item.set_sequence_id(sequence);
    v1::Tensor& query = *item.mutable_query();
    query.set_dtype(v1::DTYPE_BF16);
    for (int dimension : {1, 4, 64}) query.add_shape(dimension);
    query.set_inline_(std::string(4 * 64 * 2, '\0'));
    return request;
  }
  v1::DescribeResponse Describe(std::uint64_t id) {
    v1::DescribeRequest request;
    request.set_sequence_id(id);
    request.set_lanes(true);
    v1::DescribeResponse response;
    EXPECT_TRUE(worker->Describe(request, &response).ok());
    return response;
  }
};

// An invalid request and its expected answer.
struct Mistake {
  std::string name;
  std::function<grpc::Status(World&)> make;
  StatusCode code;
  std::vector<std::string> message;  // must name the value and the limit
};

Mistake BadAppend(std::string name, std::function<void(v1::AppendRequest&, World&)> spoil,
                  StatusCode code, std::vector<std::string> message) {
  return {std::move(name),
          [spoil](World& world) {
            v1::AppendRequest request = world.GoodAppend(5, 3);
            spoil(request, world);
            v1::AppendResponse response;
            return world.worker->Append(request, &response);
          },
          code, std::move(message)};
}

Mistake BadAttend(std::string name, std::function<void(v1::AttendRequest&, World&)> spoil,
                  StatusCode code, std::vector<std::string> message) {
  return {std::move(name),
          [spoil](World& world) {
            v1::AttendRequest request = world.GoodAttend();
            spoil(request, world);
            v1::AttendResponse response;
            return world.worker->Attend(request, &response);
          },
          code, std::move(message)};
}

Mistake BadModel(std::string name, std::function<void(v1::ModelGeometry&)> spoil, StatusCode code,
                 std::vector<std::string> message) {
  return {std::move(name),
          [spoil](World& world) {
            v1::RegisterModelRequest request;
            *request.mutable_model() = SmallModel();
            request.mutable_model()->set_name("spoilt");
            spoil(*request.mutable_model());
            v1::RegisterModelResponse response;
            return world.worker->RegisterModel(request, &response);
          },
          code, std::move(message)};
}

Mistake BadHello(std::string name, std::function<void(v1::Hello&)> spoil, StatusCode code,
                 std::vector<std::string> message) {
  return {std::move(name),
          [spoil](World& world) {
            RawWorker worker(world.daemon->Connect());
            v1::Hello hello = RawWorker::GoodHello();
            spoil(hello);
            return worker.Attach(hello);
          },
          code, std::move(message)};
}

std::vector<Mistake> AppendMistakes() {
  return {
      BadAppend("another dtype",
                [](auto& r, World&) { r.mutable_key()->set_dtype(v1::DTYPE_FP32); },
                StatusCode::INVALID_ARGUMENT, {"key is fp32", "model is bf16"}),
      BadAppend("no dtype",
                [](auto& r, World&) { r.mutable_value()->set_dtype(v1::DTYPE_UNSPECIFIED); },
                StatusCode::INVALID_ARGUMENT, {"value", "dtype 0", "BF16"}),
      BadAppend("wrong head count", [](auto& r, World&) { r.mutable_key()->set_shape(2, 3); },
                StatusCode::INVALID_ARGUMENT, {"key has shape [2, 3, 3, 64]", "[2, any, 2, 64]"}),
      BadAppend("wrong head_dim", [](auto& r, World&) { r.mutable_key()->set_shape(3, 128); },
                StatusCode::INVALID_ARGUMENT, {"128", "[2, any, 2, 64]"}),
      BadAppend("missing dimension",
                [](auto& r, World&) { r.mutable_key()->mutable_shape()->RemoveLast(); },
                StatusCode::INVALID_ARGUMENT, {"key has shape [2, 3, 2]"}),
      BadAppend("no tokens", [](auto& r, World&) { r.mutable_key()->set_shape(1, 0); },
                StatusCode::INVALID_ARGUMENT, {"[2, 0, 2, 64]"}),
      BadAppend("K and V of different length",
                [](auto& r, World&) { *r.mutable_value() = SmallRows(2, 4, 9); },
                StatusCode::INVALID_ARGUMENT, {"value has shape [2, 4, 2, 64]", "[2, 3, 2, 64]"}),
      BadAppend("bytes cut short",
                [](auto& r, World&) { r.mutable_key()->mutable_inline_()->pop_back(); },
                StatusCode::INVALID_ARGUMENT, {"key has 1535 bytes", "needs 1536"}),
      BadAppend("decoded tokens that end a prompt",
                [](auto& r, World&) {
                  r.set_decoded(true);
                  r.set_end_of_prompt(true);
                },
                StatusCode::INVALID_ARGUMENT, {"decoded", "end_of_prompt"}),
      BadAppend("a shape whose bytes overflow",
                [](auto& r, World&) { r.mutable_key()->set_shape(1, ~std::uint64_t{0}); },
                StatusCode::INVALID_ARGUMENT, {"2^64"}),
      BadAppend("first_layer beyond the model", [](auto& r, World&) { r.set_first_layer(2); },
                StatusCode::INVALID_ARGUMENT, {"first_layer is 2", "2 layers"}),
      BadAppend("layers beyond the model", [](auto& r, World&) { r.set_layers(3); },
                StatusCode::INVALID_ARGUMENT, {"layers is 3", "2 layers"}),
      BadAppend("a gap", [](auto& r, World&) { r.set_first_token(6); }, StatusCode::OUT_OF_RANGE,
                {"first_token is 6", "holds 5"}),
      BadAppend("an overlap", [](auto& r, World&) { r.set_first_token(4); },
                StatusCode::OUT_OF_RANGE, {"first_token is 4", "holds 5"}),
      BadAppend("no such sequence", [](auto& r, World&) { r.set_sequence_id(12345); },
                StatusCode::NOT_FOUND, {"sequence 12345"}),
      BadAppend("a sequence of another tenant",
                [](auto& r, World& w) { r.set_sequence_id(w.foreign_sequence); },
                StatusCode::NOT_FOUND, {"sequence"}),
      BadAppend("staging offset beyond the arena",
                [](auto& r, World&) {
                  r.mutable_key()->mutable_staging()->set_offset(4 << 20);
                  r.mutable_key()->mutable_staging()->set_bytes(1536);
                },
                StatusCode::OUT_OF_RANGE, {"staging offset 4194304", "4194304 bytes"}),
      BadAppend("staging range across the arena's end",
                [](auto& r, World&) {
                  r.mutable_key()->mutable_staging()->set_offset((4 << 20) - 1535);
                  r.mutable_key()->mutable_staging()->set_bytes(1536);
                },
                StatusCode::OUT_OF_RANGE, {"4192769", "1536 bytes"}),
      BadAppend("staging offset that overflows",
                [](auto& r, World&) {
                  r.mutable_key()->mutable_staging()->set_offset(~std::uint64_t{0} - 100);
                  r.mutable_key()->mutable_staging()->set_bytes(1536);
                },
                StatusCode::OUT_OF_RANGE, {"18446744073709551515"}),
      BadAppend("staging of a worker without any",
                [](auto& r, World& w) {
                  // The other tenant's worker never fetched its staging arena.
                  *r.mutable_session() = w.stranger->key();
                  r.set_sequence_id(w.foreign_sequence);
                  r.set_first_token(0);
                  r.mutable_key()->mutable_staging()->set_bytes(1536);
                },
                StatusCode::FAILED_PRECONDITION, {"staging arena"}),
      BadAppend("a message beyond the limit",
                [](auto& r, World&) { r.mutable_key()->mutable_inline_()->resize(2 << 20); },
                StatusCode::RESOURCE_EXHAUSTED, {"1048576"}),
      BadAppend("an unknown session",
                [](auto& r, World&) { r.mutable_session()->set_session_id(99); },
                StatusCode::UNAUTHENTICATED, {"session 99"}),
      BadAppend("a wrong secret",
                [](auto& r, World& w) {
                  *r.mutable_session() = w.worker->key();
                  r.mutable_session()->set_secret(w.worker->key().secret() + 1);
                },
                StatusCode::UNAUTHENTICATED, {"session"}),
  };
}

std::vector<Mistake> AttendMistakes() {
  return {
      BadAttend("layer beyond the model", [](auto& r, World&) { r.set_layer(2); },
                StatusCode::INVALID_ARGUMENT, {"layer is 2", "2 layers"}),
      BadAttend("an empty batch", [](auto& r, World&) { r.clear_items(); },
                StatusCode::INVALID_ARGUMENT, {"no items"}),
      BadAttend("wrong query heads",
                [](auto& r, World&) { r.mutable_items(0)->mutable_query()->set_shape(1, 5); },
                StatusCode::INVALID_ARGUMENT, {"[1, 5, 64]", "[any, 4, 64]"}),
      BadAttend(
          "query of another dtype",
          [](auto& r, World&) { r.mutable_items(0)->mutable_query()->set_dtype(v1::DTYPE_FP16); },
          StatusCode::INVALID_ARGUMENT, {"query is fp16", "bf16"}),
      BadAttend("an output type that is not served",
                [](auto& r, World&) { r.set_output_dtype(v1::DTYPE_FP16); },
                StatusCode::INVALID_ARGUMENT, {"output_dtype is fp16", "bf16"}),
      BadAttend("a sequence of another tenant",
                [](auto& r, World& w) { r.mutable_items(0)->set_sequence_id(w.foreign_sequence); },
                StatusCode::NOT_FOUND, {"sequence"}),
      BadAttend("more queries than tokens",
                [](auto& r, World&) {
                  v1::Tensor& query = *r.mutable_items(0)->mutable_query();
                  query.set_shape(0, 6);
                  query.mutable_inline_()->resize(6 * 4 * 64 * 2);
                },
                StatusCode::INVALID_ARGUMENT, {"6 rows", "5 tokens", "first_query_position"}),
      BadAttend("an answer larger than a message",
                [](auto& r, World&) {
                  v1::Tensor& query = *r.mutable_items(0)->mutable_query();
                  query.set_shape(0, 1500);
                  query.mutable_inline_()->resize(1500 * 4 * 64 * 2);
                  r.mutable_items(0)->set_first_query_position(0);
                  r.set_output_dtype(v1::DTYPE_FP32);
                },
                StatusCode::INVALID_ARGUMENT, {"1048576 bytes"}),
  };
}

std::vector<Mistake> ModelAndSequenceMistakes() {
  return {
      BadModel("no layers", [](auto& m) { m.clear_layers(); }, StatusCode::INVALID_ARGUMENT,
               {"0 layers", "1 to 1024"}),
      BadModel("a head_dim that is not served",
               [](auto& m) { m.mutable_layers(1)->set_head_dim(96); }, StatusCode::INVALID_ARGUMENT,
               {"layer 1", "96", "64, 128 and 256"}),
      BadModel("heads that do not divide", [](auto& m) { m.mutable_layers(0)->set_query_heads(5); },
               StatusCode::INVALID_ARGUMENT, {"layer 0", "query_heads 5", "kv_heads 2"}),
      BadModel("K and V of different width",
               [](auto& m) { m.mutable_layers(0)->set_value_head_dim(128); },
               StatusCode::UNIMPLEMENTED, {"value_head_dim 128", "head_dim 64"}),
      BadModel(
          "a scale that is no number",
          [](auto& m) { m.mutable_layers(0)->set_scale(std::numeric_limits<float>::quiet_NaN()); },
          StatusCode::INVALID_ARGUMENT, {"scale is nan"}),
      BadModel("too few sinks", [](auto& m) { m.mutable_layers(0)->add_sinks(1); },
               StatusCode::INVALID_ARGUMENT, {"1 sinks", "4"}),
      BadModel("a known name with another geometry",
               [](auto& m) {
                 m.set_name("small-2");
                 m.mutable_layers(0)->set_sliding_window(7);
               },
               StatusCode::ALREADY_EXISTS, {"small-2"}),
      {"no such model",
       [](World& w) {
         v1::CreateSequenceRequest request;
         request.set_model_id(777);
         v1::CreateSequenceResponse response;
         return w.worker->CreateSequence(request, &response);
       },
       StatusCode::NOT_FOUND,
       {"model 777"}},
      {"a policy that is none",
       [](World& w) {
         v1::CreateSequenceRequest request;
         request.set_model_id(w.model);
         request.set_policy("mosaickv:keep=0.25,keeep=3");
         v1::CreateSequenceResponse response;
         return w.worker->CreateSequence(request, &response);
       },
       StatusCode::INVALID_ARGUMENT,
       {"keeep", "keep"}},
      {"a policy that the model cannot have",
       [](World& w) {
         v1::CreateSequenceRequest request;
         request.set_model_id(w.model);
         request.set_policy("mosaickv:keep=0.05");
         v1::CreateSequenceResponse response;
         return w.worker->CreateSequence(request, &response);
       },
       StatusCode::INVALID_ARGUMENT,
       {"keep", "64"}},
      {"truncating to more than there is",
       [](World& w) {
         v1::TruncateRequest request;
         request.set_sequence_id(w.sequence);
         request.set_tokens(6);
         v1::TruncateResponse response;
         return w.worker->Truncate(request, &response);
       },
       StatusCode::OUT_OF_RANGE,
       {"holds 5", "to 6"}},
      {"forking another tenant's sequence",
       [](World& w) {
         v1::ForkRequest request;
         request.set_parent_id(w.foreign_sequence);
         v1::ForkResponse response;
         return w.worker->Fork(request, &response);
       },
       StatusCode::NOT_FOUND,
       {"sequence"}},
      {"handing over to nobody",
       [](World& w) {
         v1::HandoverRequest request;
         request.set_sequence_id(w.sequence);
         request.set_to_session_id(4242);
         v1::HandoverResponse response;
         return w.worker->Handover(request, &response);
       },
       StatusCode::NOT_FOUND,
       {"session 4242"}},
  };
}

std::vector<Mistake> HelloMistakes() {
  const std::string version = std::to_string(shm::kProtocolVersion);
  return {
      BadHello("another protocol version",
               [](auto& h) { h.set_protocol_version(shm::kProtocolVersion + 1); },
               StatusCode::FAILED_PRECONDITION,
               {"version " + std::to_string(shm::kProtocolVersion + 1), "version " + version}),
      BadHello("another layout", [](auto& h) { h.set_layout_fingerprint(12345); },
               StatusCode::FAILED_PRECONDITION, {"12345", std::to_string(shm::kLayoutFingerprint)}),
      BadHello("an unknown token", [](auto& h) { h.set_tenant_token("guess"); },
               StatusCode::PERMISSION_DENIED, {"token"}),
      BadHello("a long name", [](auto& h) { h.set_worker_name(std::string(129, 'x')); },
               StatusCode::INVALID_ARGUMENT, {"129", "128"}),
      BadHello("a rank outside its group",
               [](auto& h) {
                 h.set_group_size(2);
                 h.set_rank(2);
               },
               StatusCode::INVALID_ARGUMENT, {"rank is 2", "group_size, 2"}),
      BadHello("a group without a name", [](auto& h) { h.set_group_size(2); },
               StatusCode::INVALID_ARGUMENT, {"group_size is 2", "set group"}),
      BadHello("a group without end", [](auto& h) { h.set_group_size(4000000000u); },
               StatusCode::INVALID_ARGUMENT, {"4000000000", "1024"}),
      BadHello("another hash of prefixes", [](auto& h) { h.set_prefix_hash("sha256/16"); },
               StatusCode::FAILED_PRECONDITION, {"sha256/16", "xxh3-128/32"}),
      BadHello("another seed of it", [](auto& h) { h.set_prefix_hash_seed(77); },
               StatusCode::FAILED_PRECONDITION, {"seed 77", "from 0"}),
      {"something before Hello",
       [](World& w) {
         grpc::ClientContext context;
         std::unique_ptr<v1::Tessera::Stub> stub = v1::Tessera::NewStub(w.daemon->Connect());
         auto stream = stub->Attach(&context);
         v1::AttachRequest request;
         request.mutable_open_tails()->add_sequence_ids(w.sequence);
         stream->Write(request);
         return stream->Finish();
       },
       StatusCode::FAILED_PRECONDITION,
       {"Hello"}},
  };
}

class BadInput : public testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(world_.Ready()); }

  void Check(const std::vector<Mistake>& mistakes) {
    const std::string before = world_.Describe(world_.sequence).SerializeAsString();
    for (const Mistake& mistake : mistakes) {
      SCOPED_TRACE(mistake.name);
      const grpc::Status status = mistake.make(world_);
      EXPECT_EQ(status.error_code(), mistake.code) << status.error_message();
      for (const std::string& part : mistake.message) {
        EXPECT_THAT(status.error_message(), HasSubstr(part));
      }
      EXPECT_EQ(world_.Describe(world_.sequence).SerializeAsString(), before);
    }
    v1::AppendResponse appended;
    EXPECT_TRUE(world_.worker->Append(world_.GoodAppend(5, 3), &appended).ok());
    EXPECT_EQ(appended.tokens(), 8);
  }

  World world_;
};

TEST_F(BadInput, Append) { Check(AppendMistakes()); }
TEST_F(BadInput, Attend) { Check(AttendMistakes()); }
TEST_F(BadInput, ModelsAndSequences) { Check(ModelAndSequenceMistakes()); }
TEST_F(BadInput, Hello) { Check(HelloMistakes()); }

// Unusable values fail their sequence, with an error that names them, and nothing else.
TEST_F(BadInput, UnusableValuesFailTheirSequenceAlone) {
  const std::string before = world_.Describe(world_.sequence).SerializeAsString();
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity(), 1e19f}) {
    SCOPED_TRACE(bad);
    const std::uint64_t victim = World::Create(*world_.worker, world_.model);
    v1::AppendRequest request = world_.GoodAppend(0, 7);
    request.set_sequence_id(victim);
    // Layer 1, token 6, kv head 1, channel 3 of V.
    const std::size_t at = ((1 * 7 + 6) * 2 + 1) * 64 + 3;
    const std::uint16_t bits = kernels::FloatToBf16(bad);
    std::memcpy(request.mutable_value()->mutable_inline_()->data() + at * 2, &bits, 2);
    v1::AppendResponse response;
    const grpc::Status status = world_.worker->Append(request, &response);
    EXPECT_EQ(status.error_code(), StatusCode::DATA_LOSS);
    EXPECT_THAT(status.error_message(), HasSubstr("V of layer 1, kv head 1, token 6, channel 3"));
    const v1::DescribeResponse described = world_.Describe(victim);
    EXPECT_EQ(described.state(), v1::SEQUENCE_STATE_FAILED);
    EXPECT_THAT(described.failure(), HasSubstr("token 6"));
    EXPECT_EQ(described.tokens(), 0);
    EXPECT_EQ(world_.worker->Append(request, &response).error_code(),
              StatusCode::FAILED_PRECONDITION);
    v1::FreeRequest free;
    free.add_sequence_ids(victim);
    v1::FreeResponse freed;
    EXPECT_TRUE(world_.worker->Free(free, &freed).ok());
    EXPECT_EQ(freed.freed(), 1);
  }
  EXPECT_EQ(world_.Describe(world_.sequence).SerializeAsString(), before);
}

TEST_F(BadInput, NobodyMovesWhatIsNotThere) {
  v1::Tessera::Stub& stub = world_.worker->stub();
  const auto call = [&](auto method, auto request, auto response) {
    *request.mutable_session() = world_.worker->key();
    for (const std::uint64_t id : {std::uint64_t{0}, ~std::uint64_t{0}}) {
      grpc::ClientContext context;
      request.set_sequence_id(id);
      EXPECT_EQ((stub.*method)(&context, request, &response).error_code(), StatusCode::NOT_FOUND);
    }
  };
  call(&v1::Tessera::Stub::Offload, v1::OffloadRequest(), v1::OffloadResponse());
  call(&v1::Tessera::Stub::Restore, v1::RestoreRequest(), v1::RestoreResponse());
}

TEST_F(BadInput, DescriptorOpeningsThatMustBeRefused) {
  RawWorker worker(world_.daemon->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  ASSERT_TRUE(worker.OpenDescriptors().ok());
  // A nonce opens only once.
  RawWorker thief(world_.daemon->Connect());
  ASSERT_TRUE(thief.Attach().ok());
  EXPECT_FALSE(worker.Fetch(shm::DescriptorKind::kPool, 9999)->fd.valid());
  EXPECT_EQ(worker.Fetch(shm::DescriptorKind::kTail, 0)->answer.code,
            shm::DescriptorCode::kNoSuchIndex);
  EXPECT_EQ(worker.Fetch(static_cast<shm::DescriptorKind>(77), 0)->answer.code,
            shm::DescriptorCode::kBadRequest);
  Fd first = std::move(worker.descriptor_socket());
  ASSERT_TRUE(worker.OpenDescriptors().ok());  // the socket works; the answer is a refusal
  EXPECT_FALSE(worker.Fetch(shm::DescriptorKind::kControl, 0).ok());
}

}  // namespace
}  // namespace tessera
