// A worker's request in its wire form. The bound of its parsed size must cover what the parser
// makes of it, and what the parser takes must be bounded.
#include "daemon/serving/call/wire.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>

#include <cstdint>
#include <memory>
#include <string>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "tessera/v1/tessera.pb.h"
#include "tests/fuzz/fuzz_target.h"

namespace tessera::fuzz {
namespace {

constexpr std::uint64_t kLimit = 1 << 20;

const google::protobuf::Message* const kTypes[] = {
    &v1::AttendRequest::default_instance(),         &v1::RegisterModelRequest::default_instance(),
    &v1::CreateSequenceRequest::default_instance(), &v1::MatchRequest::default_instance(),
    &v1::ObserveRequest::default_instance(),        &v1::CompressRequest::default_instance(),
    &v1::FreeRequest::default_instance(),           &v1::AttachRequest::default_instance()};

// The first byte chooses the type.
void Run(const std::string& input) {
  if (input.empty()) return;
  const auto& type = *kTypes[static_cast<std::uint8_t>(input[0]) % std::size(kTypes)];
  const std::string bytes = input.substr(1);
  google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()), 5);
  const absl::StatusOr<std::uint64_t> bound =
      serving::ParsedBytes(stream, *type.GetDescriptor(), kLimit);
  const std::unique_ptr<google::protobuf::Message> parsed(type.New());
  if (!parsed->ParseFromString(bytes)) return;
  if (!bound.ok()) {
    TESSERA_CHECK(bound.status().message().find("bytes in memory") != std::string::npos,
                  "what the parser takes is refused for its size only");
    return;
  }
  TESSERA_CHECK(*bound >= parsed->SpaceUsedLong(),
                Concat(*bound, " bytes are no bound of ", parsed->SpaceUsedLong()));
}

}  // namespace

std::vector<Seed> Seeds() {
  v1::AttendRequest attend;
  attend.mutable_session()->set_session_id(7);
  for (int i = 0; i < 3; ++i) {
    v1::AttendItem& item = *attend.add_items();
    item.set_sequence_id(i);
    for (const std::uint64_t extent : {1, 300, 70000}) item.mutable_query()->add_shape(extent);
    item.mutable_query()->set_inline_("query");
  }
  v1::RegisterModelRequest model;
  model.mutable_model()->set_name("model");
  for (int i = 0; i < 3; ++i) model.mutable_model()->add_layers()->set_head_dim(64);
  v1::MatchRequest match;
  for (const std::uint32_t id : {1u, 300u, 70000u, ~0u}) match.add_token_ids(id);
  v1::FreeRequest free;
  for (std::uint64_t id = 0; id < 5; ++id) free.add_sequence_ids(id);
  std::string bomb(1, '\0');
  for (int i = 0; i < 30000; ++i) bomb += std::string("\x1a\0", 2);
  return {{"attend", '\0' + attend.SerializeAsString()},
          {"model", '\1' + model.SerializeAsString()},
          {"match", '\3' + match.SerializeAsString()},
          {"free", '\6' + free.SerializeAsString()},
          {"bomb", bomb}};
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tessera::fuzz::Run({reinterpret_cast<const char*>(data), size});
  return 0;
}
