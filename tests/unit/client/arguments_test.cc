// Null, empty and moved-from arguments answer INVALID_ARGUMENT: a library must not end the process
// that it is in.

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <utility>

#include "absl/strings/cord.h"
#include "client/api/c_handles.h"
#include "client/api/worker_access.h"
#include "client/error/error_info.h"
#include "tests/unit/client/decoder.h"

namespace tessera::client {
namespace {

#define EXPECT_REFUSED(call, name)                                           \
  do {                                                                       \
    const absl::Status status = (call);                                      \
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << #call << ": " << status; \
    EXPECT_NE(status.ToString().find(name), std::string::npos) << status;    \
    EXPECT_EQ(GetErrorInfo(status).cause, ErrorCause::kArgument) << #call;   \
  } while (false)

ModelGeometry OneLayerModel() {
  ModelGeometry model;
  model.name = "tiny";
  model.layers.assign(1, {.query_heads = 2, .kv_heads = 1, .head_dim = 64});
  return model;
}

TEST(Arguments, EmptySequencesAreRefused) {
  TestRandom random;
  Decoder decoder(random, OneLayerModel());
  Sequence moved = *decoder.worker->CreateSequence(decoder.model);
  const Sequence kept = std::move(moved);
  Sequence none;
  for (Sequence* empty : {&none, &moved}) {
    EXPECT_FALSE(empty->valid());
    EXPECT_FALSE(empty->id().valid());
    EXPECT_EQ(empty->tokens(), 0u);
    EXPECT_EQ(empty->next_position(), 0u);
    EXPECT_EQ(empty->policy(), "");
    EXPECT_EQ(empty->needs(), PolicyNeeds());
    EXPECT_REFUSED(empty->Append({}).status(), "Sequence::Append: the sequence");
    EXPECT_REFUSED(empty->Observe({}), "Sequence::Observe:");
    EXPECT_REFUSED(empty->ObserveTokens(0, {}), "Sequence::ObserveTokens");
    EXPECT_REFUSED(empty->Compress().status(), "Sequence::Compress");
    EXPECT_REFUSED(empty->EndPrompt(), "Sequence::EndPrompt");
    EXPECT_REFUSED(empty->Compress(Packing()).status(), "Sequence::Compress");
    EXPECT_REFUSED(empty->Fork().status(), "Sequence::Fork");
    EXPECT_REFUSED(empty->Fork("dense").status(), "Sequence::Fork");
    EXPECT_REFUSED(empty->Publish({}).status(), "Sequence::Publish");
    EXPECT_REFUSED(empty->Truncate(0), "Sequence::Truncate");
    EXPECT_REFUSED(empty->Park(), "Sequence::Park");
    EXPECT_REFUSED(empty->Offload().status(), "Sequence::Offload");
    EXPECT_REFUSED(empty->Restore(), "Sequence::Restore");
    EXPECT_REFUSED(empty->Describe().status(), "Sequence::Describe");
    EXPECT_REFUSED(empty->DescribeEntries().status(), "Sequence::Describe");
    EXPECT_REFUSED(empty->Handover(SessionId(1)), "Sequence::Handover");
    EXPECT_REFUSED(empty->Free(), "Sequence::Free");

    Sequence* const batch[] = {empty};
    EXPECT_REFUSED(decoder.worker->BeginStep(batch).status(), "Worker::BeginStep: sequences[0]");
    const AttendQuery query = {.sequence = empty};
    EXPECT_REFUSED(decoder.worker->AttendRpc(0, {&query, 1}),
                   "Worker::AttendRpc: queries[0].sequence");
    EXPECT_REFUSED(decoder.worker->Select(0, {.sequence = empty}, {}).status(),
                   "Worker::Select: query.sequence");
  }
  Sequence* const null_batch[] = {nullptr};
  EXPECT_REFUSED(decoder.worker->BeginStep(null_batch).status(), "Worker::BeginStep");
  const AttendQuery null_query;
  EXPECT_REFUSED(decoder.worker->AttendRpc(0, {&null_query, 1}), "Worker::AttendRpc");
  EXPECT_REFUSED(decoder.worker->Select(0, {}, {}).status(), "Worker::Select");
}

TEST(Arguments, EmptyModelsStepsAndTensorsAreRefused) {
  TestRandom random;
  Decoder decoder(random, OneLayerModel());
  Worker& worker = *decoder.worker;
  const Model none;
  EXPECT_EQ(none.geometry().layers.size(), 0u);
  EXPECT_FALSE(none.id().valid());
  EXPECT_REFUSED(worker.CreateSequence(none).status(), "Worker::CreateSequence: model");
  EXPECT_REFUSED(worker.Adopt(none, SequenceId(1)).status(), "Worker::Adopt: model");
  EXPECT_REFUSED(worker.Match(none, {}).status(), "Worker::Match: model");
  EXPECT_REFUSED(worker.Fork(PrefixMatch()).status(), "Worker::Fork");
  EXPECT_REFUSED(worker.Fork({.prefix = PrefixId(1)}).status(), "Worker::Fork: match.model");

  Track track = decoder.NewTrack();
  Sequence* const batch[] = {&track.sequence};
  Step begun = *worker.BeginStep(batch);
  Step kept = std::move(begun);
  Step empty;
  for (Step* step : {&empty, &begun}) {
    EXPECT_FALSE(step->open());
    EXPECT_REFUSED(step->Append(0, {}, {}), "Step::Append:");
    EXPECT_REFUSED(step->Attend(0, {}), "Step::Attend:");
    EXPECT_REFUSED(step->AppendAndAttend(0, {}), "Step::AppendAndAttend");
    EXPECT_REFUSED(step->End(), "Step::End");
    step->Abandon();
  }
  EXPECT_TRUE(kept.open());
  kept.Abandon();
  EXPECT_TRUE(absl::IsFailedPrecondition(kept.End()));

  Tensor made = *worker.NewTensor(64);
  const Tensor taken = std::move(made);
  EXPECT_EQ(taken.size(), 64u);
  std::byte bytes[4];
  Tensor null_tensor;
  for (Tensor* tensor : {&null_tensor, &made}) {
    EXPECT_EQ(tensor->size(), 0u);
    EXPECT_REFUSED(tensor->Write(bytes), "Tensor::Write");
    EXPECT_REFUSED(tensor->Read(bytes), "Tensor::Read");
  }
}

TEST(Arguments, CausesTravelWithAStatus) {
  absl::Status status = absl::ResourceExhaustedError("full");
  EXPECT_EQ(GetErrorInfo(status).cause, ErrorCause::kUnspecified);
  for (std::uint32_t i = 1; i <= static_cast<std::uint32_t>(ErrorCause::kArgument); ++i) {
    const auto cause = static_cast<ErrorCause>(i);
    const ErrorInfo info = GetErrorInfo(WithCause(status, cause, std::chrono::milliseconds(i)));
    EXPECT_EQ(info.cause, cause);
    EXPECT_EQ(info.retry_after.count(), i);
  }
  status = WithCause(status, ErrorCause::kQuota, std::chrono::milliseconds(5));
  EXPECT_EQ(GetErrorInfo(WithCause(status, ErrorCause::kDraining)).cause, ErrorCause::kQuota);
  EXPECT_EQ(GetErrorInfo(WithMessage(status, "other")).retry_after.count(), 5);
  EXPECT_TRUE(WithCause(absl::OkStatus(), ErrorCause::kQuota).ok());
  for (const char* text : {"", "cause", "cause=", "cause=nothing retry_after_ms=x", "=", " = "}) {
    status.SetPayload("tessera.error", absl::Cord(text));
    EXPECT_EQ(GetErrorInfo(status).cause, ErrorCause::kUnspecified) << text;
    EXPECT_EQ(GetErrorInfo(status).retry_after.count(), 0) << text;
  }
  status.SetPayload("tessera.error", absl::Cord("more=1 cause=pool_full retry_after_ms=2001"));
  EXPECT_EQ(GetErrorInfo(status).cause, ErrorCause::kPoolFull);
  EXPECT_EQ(GetErrorInfo(status).retry_after.count(), 2001);
}

// ---- C

using Call = std::function<tessera_code(tessera_error*)>;

void ExpectRefused(const std::string& name, const std::string& argument, const Call& call) {
  tessera_error error = {};
  EXPECT_EQ(call(&error), TESSERA_INVALID_ARGUMENT) << name << ": " << error.message;
  EXPECT_EQ(std::string(error.message).rfind(name + ": " + argument, 0), 0u) << error.message;
  EXPECT_EQ(error.cause, TESSERA_CAUSE_ARGUMENT) << name;
  EXPECT_EQ(call(nullptr), TESSERA_INVALID_ARGUMENT);
}

// Every function of tessera.h, each with NULL for everything.
std::map<std::string, Call> NullCalls() {
  const auto plain = [](auto act) {
    return [act](tessera_error*) {
      act();
      return TESSERA_OK;
    };
  };
  return {
      {"tessera_abi_version", plain([] { EXPECT_EQ(tessera_abi_version(), 2u); })},
      {"tessera_version", plain([] { EXPECT_NE(tessera_version(), nullptr); })},
      {"tessera_detach", plain([] { tessera_detach(nullptr); })},
      {"tessera_is_mapped", plain([] { EXPECT_EQ(tessera_is_mapped(nullptr), 0); })},
      {"tessera_is_draining", plain([] { EXPECT_EQ(tessera_is_draining(nullptr), 0); })},
      {"tessera_session_id", plain([] { EXPECT_EQ(tessera_session_id(nullptr), 0u); })},
      {"tessera_delimiters", plain([] { EXPECT_EQ(tessera_delimiters(nullptr, 3, nullptr), 0u); })},
      {"tessera_model_destroy", plain([] { tessera_model_destroy(nullptr); })},
      {"tessera_sequence_destroy", plain([] { tessera_sequence_destroy(nullptr); })},
      {"tessera_sequence_id", plain([] { EXPECT_EQ(tessera_sequence_id(nullptr), 0u); })},
      {"tessera_sequence_tokens", plain([] { EXPECT_EQ(tessera_sequence_tokens(nullptr), 0u); })},
      {"tessera_sequence_next_position",
       plain([] { EXPECT_EQ(tessera_sequence_next_position(nullptr), 0u); })},
      {"tessera_sequence_policy",
       plain([] { EXPECT_STREQ(tessera_sequence_policy(nullptr), ""); })},
      {"tessera_step_destroy", plain([] { tessera_step_destroy(nullptr); })},
      {"tessera_attach", [](auto* e) { return tessera_attach(nullptr, nullptr, e); }},
      {"tessera_status", [](auto* e) { return tessera_status(nullptr, e); }},
      {"tessera_reattach", [](auto* e) { return tessera_reattach(nullptr, nullptr, e); }},
      {"tessera_register_model",
       [](auto* e) { return tessera_register_model(nullptr, nullptr, nullptr, e); }},
      {"tessera_sequence_create",
       [](auto* e) { return tessera_sequence_create(nullptr, nullptr, nullptr, nullptr, e); }},
      {"tessera_sequence_adopt",
       [](auto* e) { return tessera_sequence_adopt(nullptr, nullptr, 1, nullptr, e); }},
      {"tessera_sequence_append",
       [](auto* e) { return tessera_sequence_append(nullptr, nullptr, nullptr, e); }},
      {"tessera_sequence_fork", [](auto* e) { return tessera_sequence_fork(nullptr, nullptr, e); }},
      {"tessera_sequence_fork_as",
       [](auto* e) { return tessera_sequence_fork_as(nullptr, nullptr, nullptr, e); }},
      {"tessera_sequence_truncate",
       [](auto* e) { return tessera_sequence_truncate(nullptr, 0, e); }},
      {"tessera_sequence_park", [](auto* e) { return tessera_sequence_park(nullptr, e); }},
      {"tessera_sequence_handover",
       [](auto* e) { return tessera_sequence_handover(nullptr, 1, e); }},
      {"tessera_sequence_offload",
       [](auto* e) { return tessera_sequence_offload(nullptr, nullptr, e); }},
      {"tessera_sequence_restore", [](auto* e) { return tessera_sequence_restore(nullptr, e); }},
      {"tessera_sequence_describe",
       [](auto* e) { return tessera_sequence_describe(nullptr, nullptr, e); }},
      {"tessera_sequence_needs",
       [](auto* e) { return tessera_sequence_needs(nullptr, nullptr, e); }},
      {"tessera_sequence_observe",
       [](auto* e) { return tessera_sequence_observe(nullptr, nullptr, e); }},
      {"tessera_sequence_observe_tokens",
       [](auto* e) { return tessera_sequence_observe_tokens(nullptr, 0, nullptr, 1, e); }},
      {"tessera_sequence_compress", [](auto* e) { return tessera_sequence_compress(nullptr, e); }},
      {"tessera_sequence_end_prompt",
       [](auto* e) { return tessera_sequence_end_prompt(nullptr, e); }},
      {"tessera_sequence_publish",
       [](auto* e) {
         return tessera_sequence_publish(nullptr, nullptr, 1, nullptr, nullptr, nullptr, e);
       }},
      {"tessera_match",
       [](auto* e) { return tessera_match(nullptr, nullptr, nullptr, nullptr, e); }},
      {"tessera_fork_prefix",
       [](auto* e) { return tessera_fork_prefix(nullptr, nullptr, nullptr, 0, nullptr, e); }},
      {"tessera_free_id", [](auto* e) { return tessera_free_id(nullptr, 1, e); }},
      {"tessera_step_begin",
       [](auto* e) { return tessera_step_begin(nullptr, nullptr, 1, nullptr, nullptr, e); }},
      {"tessera_step_append", [](auto* e) { return tessera_step_append(nullptr, 0, nullptr, e); }},
      {"tessera_step_attend", [](auto* e) { return tessera_step_attend(nullptr, 0, nullptr, e); }},
      {"tessera_step_append_and_attend",
       [](auto* e) { return tessera_step_append_and_attend(nullptr, 0, nullptr, e); }},
      {"tessera_step_end", [](auto* e) { return tessera_step_end(nullptr, nullptr, 0, e); }},
      {"tessera_free_text", plain([] { tessera_free_text(nullptr); })},
      {"tessera_events_fd", plain([] { EXPECT_EQ(tessera_events_fd(nullptr), -1); })},
      {"tessera_next_event", [](auto* e) { return tessera_next_event(nullptr, nullptr, e); }},
      {"tessera_stats_json", [](auto* e) { return tessera_stats_json(nullptr, nullptr, e); }},
      {"tessera_welcome_json", [](auto* e) { return tessera_welcome_json(nullptr, nullptr, e); }},
      {"tessera_sequence_describe_json",
       [](auto* e) {
         return tessera_sequence_describe_json(nullptr, TESSERA_DETAIL_SEQUENCE, nullptr, e);
       }},
      {"tessera_executor_create", [](auto* e) { return tessera_executor_create(1, nullptr, e); }},
      {"tessera_executor_destroy", plain([] { tessera_executor_destroy(nullptr); })},
      {"tessera_executor_run", plain([] { tessera_executor_run(nullptr, 3, nullptr, nullptr); })},
      {"tessera_read_begin",
       [](auto* e) { return tessera_read_begin(nullptr, nullptr, 1, nullptr, nullptr, e); }},
      {"tessera_read_attend", [](auto* e) { return tessera_read_attend(nullptr, 0, nullptr, e); }},
      {"tessera_read_end", [](auto* e) { return tessera_read_end(nullptr, e); }},
      {"tessera_read_destroy", plain([] { tessera_read_destroy(nullptr); })},
      {"tessera_attend_rpc",
       [](auto* e) { return tessera_attend_rpc(nullptr, nullptr, 1, 0, nullptr, e); }},
      {"tessera_select_json",
       [](auto* e) { return tessera_select_json(nullptr, nullptr, 0, nullptr, nullptr, e); }},
      {"tessera_sequence_read", [](auto* e) { return tessera_sequence_read(nullptr, nullptr, e); }},
  };
}

TEST(CArguments, NullIsRefusedByEveryFunction) {
  std::stringstream header;
  for (const char* name : {"tessera.h", "tessera_decode.h"}) {
    std::ifstream file(std::string(TESSERA_CLIENT_FOLDER "/include/tessera/") + name);
    ASSERT_TRUE(file.good()) << name;
    header << file.rdbuf();
  }
  const std::string text = header.str();
  std::size_t functions = 0;
  const std::map<std::string, Call> calls = NullCalls();
  for (std::size_t at = 0; (at = text.find("\nTESSERA_API ", at)) != std::string::npos; ++at) {
    const std::size_t open = text.find('(', at);
    const std::size_t begin = text.rfind("tessera_", open);
    const std::string name = text.substr(begin, open - begin);
    EXPECT_TRUE(calls.contains(name)) << name;
    ++functions;
  }
  EXPECT_EQ(functions, calls.size());
  for (const auto& [name, call] : calls) {
    tessera_error error = {};
    if (call(&error) == TESSERA_OK) continue;
    ExpectRefused(name, "", call);
  }
}

TEST(CArguments, EveryPointerIsNamed) {
  TestRandom random;
  Decoder decoder(random, OneLayerModel());
  tessera_worker worker = {std::move(decoder.worker)};
  tessera_model model = {decoder.model};
  tessera_sequence* sequence = nullptr;
  tessera_error made = {};
  ASSERT_EQ(tessera_sequence_create(&worker, &model, nullptr, &sequence, &made), TESSERA_OK)
      << made.message;
  tessera_sequence empty;
  tessera_sequence* out = nullptr;
  tessera_step* step = nullptr;

  ExpectRefused("tessera_register_model", "options is NULL",
                [&](auto* e) { return tessera_register_model(&worker, nullptr, nullptr, e); });
  tessera_model_options options = TESSERA_MODEL_OPTIONS_INIT;
  options.layer_count = 3;
  tessera_model* registered = nullptr;
  ExpectRefused("tessera_register_model", "options->layers is NULL",
                [&](auto* e) { return tessera_register_model(&worker, &options, &registered, e); });
  ExpectRefused("tessera_sequence_create", "model is NULL", [&](auto* e) {
    return tessera_sequence_create(&worker, nullptr, nullptr, &out, e);
  });
  ExpectRefused("tessera_sequence_create", "sequence is NULL", [&](auto* e) {
    return tessera_sequence_create(&worker, &model, nullptr, nullptr, e);
  });
  tessera_layer layer = TESSERA_LAYER_INIT;
  layer.query_heads = layer.kv_heads = 1;
  layer.head_dim = 64;
  options.layers = &layer;
  options.layer_count = 1;
  options.name = "wrong";
  options.type = static_cast<tessera_type>(257);  // 1 in eight bits
  tessera_error wrong = {};
  EXPECT_EQ(tessera_register_model(&worker, &options, &registered, &wrong),
            TESSERA_INVALID_ARGUMENT);
  EXPECT_NE(std::string(wrong.message).find("type"), std::string::npos) << wrong.message;
  options.type = TESSERA_BF16;
  tessera_layer two[2] = {layer, layer};
  two[1].struct_size = 8;
  options.layers = two;
  options.layer_count = 2;
  ExpectRefused("tessera_register_model", "options->layers[1].struct_size is 8",
                [&](auto* e) { return tessera_register_model(&worker, &options, &registered, e); });
  two[0].struct_size = 0;
  ExpectRefused("tessera_register_model", "options->layers[0].struct_size is 0",
                [&](auto* e) { return tessera_register_model(&worker, &options, &registered, e); });
  tessera_executor* executor = nullptr;
  ExpectRefused("tessera_executor_create", "threads is 0",
                [&](auto* e) { return tessera_executor_create(0, &executor, e); });
  tessera_text json = nullptr;
  ExpectRefused("tessera_sequence_describe_json", "detail is 3", [&](auto* e) {
    return tessera_sequence_describe_json(sequence, static_cast<tessera_detail>(3), &json, e);
  });
  tessera_append append = TESSERA_APPEND_INIT;
  append.bytes = 128;
  append.tokens = 1;
  ExpectRefused("tessera_sequence_append", "append->key is NULL",
                [&](auto* e) { return tessera_sequence_append(sequence, &append, nullptr, e); });
  tessera_sequence* const batch[] = {nullptr};
  tessera_sequence* const empty_batch[] = {&empty};
  for (tessera_sequence* const* handles : {batch, empty_batch}) {
    tessera_error error = {};
    EXPECT_EQ(tessera_step_begin(&worker, handles, 1, nullptr, &step, &error),
              TESSERA_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error.message).find("sequences[0]"), std::string::npos) << error.message;
  }
  ExpectRefused("tessera_sequence_observe_tokens", "ids is NULL", [&](auto* e) {
    return tessera_sequence_observe_tokens(sequence, 0, nullptr, 2, e);
  });
  tessera_match_options match = TESSERA_MATCH_OPTIONS_INIT;
  match.token_count = 2;
  tessera_prefix_match found = TESSERA_PREFIX_MATCH_INIT;
  ExpectRefused("tessera_match", "options->token_ids is NULL",
                [&](auto* e) { return tessera_match(&worker, &model, &match, &found, e); });

  ASSERT_EQ(tessera_step_begin(&worker, &sequence, 1, nullptr, &step, &made), TESSERA_OK)
      << made.message;
  tessera_step_tensors tensors = TESSERA_STEP_TENSORS_INIT;
  tensors.key_bytes = 128;
  ExpectRefused("tessera_step_append", "tensors->key is NULL",
                [&](auto* e) { return tessera_step_append(step, 0, &tensors, e); });
  tensors.query_bytes = 256;
  ExpectRefused("tessera_step_attend", "tensors->query is NULL",
                [&](auto* e) { return tessera_step_attend(step, 0, &tensors, e); });
  tessera_step_destroy(step);
  tessera_sequence_destroy(sequence);
}

}  // namespace
}  // namespace tessera::client
