#include "daemon/serving/call/wire.h"

#include <gmock/gmock.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {
namespace {

using testing::HasSubstr;

absl::StatusOr<std::uint64_t> BoundOf(const std::string& bytes,
                                      const google::protobuf::Descriptor& type,
                                      std::uint64_t limit = 64 << 20) {
  // In pieces, as gRPC has it.
  google::protobuf::io::ArrayInputStream input(bytes.data(), static_cast<int>(bytes.size()), 7);
  return ParsedBytes(input, type, limit);
}

grpc::ByteBuffer Buffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

TEST(Wire, TheBoundCoversTheParsedMessage) {
  v1::AttendRequest request;
  request.mutable_session()->set_session_id(7);
  for (int i = 0; i < 300; ++i) {
    v1::AttendItem& item = *request.add_items();
    item.set_sequence_id(i);
    for (int k = 0; k < i % 5; ++k) item.mutable_query()->add_shape(1u << (7 * k));
    item.mutable_query()->set_inline_(std::string(i, 'q'));
  }
  v1::MatchRequest match;
  for (int i = 0; i < 10000; ++i) match.add_token_ids(i);
  v1::FreeRequest free;
  for (int i = 0; i < 10000; ++i) free.add_sequence_ids(i);
  v1::RegisterModelRequest model;
  model.mutable_model()->set_name(std::string(1000, 'n'));
  for (int i = 0; i < 100; ++i) model.mutable_model()->add_layers()->set_head_dim(64);
  for (const google::protobuf::Message* message :
       std::initializer_list<const google::protobuf::Message*>{&request, &match, &free, &model}) {
    const std::string bytes = message->SerializeAsString();
    const auto bound = BoundOf(bytes, *message->GetDescriptor());
    ASSERT_TRUE(bound.ok()) << bound.status();
    std::unique_ptr<google::protobuf::Message> parsed(message->New());
    ASSERT_TRUE(parsed->ParseFromString(bytes));
    EXPECT_GE(*bound, parsed->SpaceUsedLong()) << message->GetDescriptor()->name();
    EXPECT_LE(*bound, 8 * parsed->SpaceUsedLong()) << message->GetDescriptor()->name();
  }
}

TEST(Wire, EmptyElementsAreCountedAsObjects) {
  std::string bomb;
  for (int i = 0; i < 1 << 20; ++i) bomb += "\x1a";
  for (std::size_t i = 1; i < bomb.size(); i += 2) bomb[i] = '\0';
  const auto bound = BoundOf(bomb, *v1::AttendRequest::descriptor(), 16 << 20);
  EXPECT_TRUE(absl::IsInvalidArgument(bound.status())) << bound.status();
  EXPECT_THAT(std::string(bound.status().message()),
              HasSubstr("AttendRequest would use more than 16777216 bytes"));
}

TEST(Wire, AKnownFieldOfAnotherWireTypeIsCountedAsUnknown) {
  std::string bytes;
  for (int i = 0; i < 10000; ++i) bytes += std::string("\x08\0", 2);  // field 1 is a message
  v1::StatsRequest parsed;
  ASSERT_TRUE(parsed.ParseFromString(bytes));
  const auto bound = BoundOf(bytes, *v1::StatsRequest::descriptor());
  ASSERT_TRUE(bound.ok()) << bound.status();
  EXPECT_GE(*bound, parsed.SpaceUsedLong());
}

TEST(Wire, MessagesWithinMessagesHaveALimit) {
  // Unknown to the type, so they are no messages: kept as bytes.
  std::string nested;
  for (int i = 0; i < 1000; ++i) {
    nested = std::string("\x3a") + static_cast<char>(std::min<std::size_t>(nested.size(), 127)) +
             nested.substr(0, 127);
  }
  EXPECT_TRUE(BoundOf(nested, *v1::StatsRequest::descriptor()).ok());
}

TEST(Wire, MalformedBytesAreRefused) {
  for (const std::string& bytes : {std::string("\x07"), std::string("\x0a\xff"),
                                   std::string("\x0b"), std::string("\x0a\x05\x09")}) {
    v1::AttendRequest request;
    EXPECT_FALSE(request.ParseFromString(bytes));
    EXPECT_FALSE(
        ParseBounded(
            Buffer(bytes), 1 << 20, [](std::uint64_t) { return absl::OkStatus(); }, request)
            .ok());
  }
}

TEST(Wire, AMessageThatIsNotAdmittedIsNotParsed) {
  v1::FreeRequest request;
  request.add_sequence_ids(1);
  const grpc::ByteBuffer buffer = Buffer(request.SerializeAsString());
  request.Clear();
  EXPECT_EQ(ParseBounded(
                buffer, 1 << 20, [](std::uint64_t) { return absl::ResourceExhaustedError("no"); },
                request),
            absl::ResourceExhaustedError("no"));
  EXPECT_EQ(request.sequence_ids_size(), 0);
}

TEST(Wire, RowsAreClearedInAMessageAndInItsWireForm) {
  v1::AttendRequest request;
  for (int i = 0; i < 3; ++i) {
    request.add_items()->mutable_query()->set_inline_(std::string(1000, 'q'));
  }
  grpc::ByteBuffer buffer = Buffer(request.SerializeAsString());
  grpc::ByteBuffer kept = buffer;  // shares the bytes
  ClearBytes(request);
  for (const v1::AttendItem& item : request.items()) {
    EXPECT_EQ(item.query().inline_(), std::string(1000, '\0'));
  }
  ClearBytes(buffer);
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(kept.Dump(&slices).ok());
  for (const grpc::Slice& slice : slices) {
    EXPECT_EQ(std::string(slice.begin(), slice.end()), std::string(slice.size(), '\0'));
  }
}

TEST(Wire, TheSessionKeyIsFoundWithoutParsing) {
  v1::AppendRequest request;
  request.mutable_session()->set_session_id(3);
  request.mutable_session()->set_secret(4);
  request.mutable_key()->set_inline_(std::string(100, 'k'));
  const auto key = PeekSessionKey(Buffer(request.SerializeAsString()));
  ASSERT_TRUE(key.has_value());
  EXPECT_EQ(key->session_id(), 3u);
  EXPECT_EQ(key->secret(), 4u);
  EXPECT_FALSE(PeekSessionKey(Buffer("")).has_value());
  EXPECT_FALSE(PeekSessionKey(Buffer(std::string(100, '\x08') + "\x0a")).has_value());
  EXPECT_FALSE(PeekSessionKey(Buffer("\x0a\x7f" + std::string(127, 'x'))).has_value());
}

}  // namespace
}  // namespace tessera::serving
