// The configured limits of a daemon: a worker exceeds each one and checks the error.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tessera/v1/error.pb.h"
#include "tests/fakes/daemon/daemon_process.h"
#include "tests/fakes/raw_worker.h"

namespace tessera {
namespace {

using fakes::DaemonProcess;
using fakes::RawWorker;
using grpc::StatusCode;
using testing::HasSubstr;

// Creates the allowed number of each, and one more.
TEST(Limits, EachNamesTheValueAndTheLimit) {
  const auto daemon = DaemonProcess::Start(
      {.flags = {"--max-sessions=1", "--max-models-per-tenant=1", "--max-sequences-per-tenant=2",
                 "--max-message-bytes=64KiB"}});
  ASSERT_NE(daemon, nullptr);
  RawWorker worker(daemon->Connect());
  ASSERT_TRUE(worker.Attach().ok());
  int with_cause = 0;
  const auto refuses = [&with_cause](const grpc::Status& status, const char* a, const char* b) {
    EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
    EXPECT_THAT(status.error_message(), testing::AllOf(HasSubstr(a), HasSubstr(b)));
    v1::StatusDetails details;  // empty if gRPC itself refuses
    ASSERT_TRUE(details.ParseFromString(status.error_details()));
    for (const auto& any : details.details()) {
      v1::ErrorInfo info;
      ASSERT_TRUE(any.UnpackTo(&info));
      EXPECT_EQ(info.cause(), "quota");
      ++with_cause;
    }
  };
  RawWorker another(daemon->Connect());
  refuses(another.Attach(), "1 sessions", "limit is 1");

  v1::RegisterModelRequest model;
  *model.mutable_model() = fakes::SmallModel();
  v1::RegisterModelResponse registered;
  ASSERT_TRUE(worker.RegisterModel(model, &registered).ok());
  model.mutable_model()->set_name("another");
  v1::RegisterModelResponse refused;
  refuses(worker.RegisterModel(model, &refused), "1 models", "limit is 1");

  v1::CreateSequenceRequest create;
  create.set_model_id(registered.model_id());
  v1::CreateSequenceResponse created;
  ASSERT_TRUE(worker.CreateSequence(create, &created).ok());
  ASSERT_TRUE(worker.CreateSequence(create, &created).ok());
  v1::CreateSequenceResponse third;
  refuses(worker.CreateSequence(create, &third), "2 sequences", "limit is 2");

  v1::AppendRequest append;
  append.set_sequence_id(created.sequence_id());
  *append.mutable_key() = fakes::SmallRows(2, 100, 1);
  *append.mutable_value() = fakes::SmallRows(2, 100, 2);
  v1::AppendResponse appended;
  *append.mutable_session() = worker.key();
  const std::string bytes = std::to_string(append.ByteSizeLong());
  refuses(worker.Append(append, &appended), bytes.c_str(), "65536");
  *append.mutable_key() = fakes::SmallRows(2, 10, 1);
  *append.mutable_value() = fakes::SmallRows(2, 10, 2);
  EXPECT_TRUE(worker.Append(append, &appended).ok());
  EXPECT_EQ(with_cause, 3) << "sessions, models, sequences";
}

}  // namespace
}  // namespace tessera
