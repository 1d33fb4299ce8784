// Looks at a message in its wire form, before anything is allocated for it.
#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/zero_copy_stream.h>
#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <optional>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "tessera/v1/common.pb.h"

namespace tessera::serving {

// The session key of a worker's request: its field 1, which encoders write first. nullopt if it is
// not among the first fields.
std::optional<v1::SessionKey> PeekSessionKey(const grpc::ByteBuffer& message);

// An upper bound of the memory that a message of this type has once it is parsed. The wire form of
// an empty element has two bytes, and its object has a hundred. INVALID_ARGUMENT if the bytes are
// no such message, or if the bound exceeds `limit`: the walk then stops.
absl::StatusOr<std::uint64_t> ParsedBytes(google::protobuf::io::ZeroCopyInputStream& input,
                                          const google::protobuf::Descriptor& type,
                                          std::uint64_t limit);

// Overwrites all bytes fields of a message, at any depth: rows that a worker has sent.
void ClearBytes(google::protobuf::Message& message);
// Overwrites a message in its wire form. Only its receiver may.
void ClearBytes(grpc::ByteBuffer& message);

// Parses `from` into `message`, unless it is malformed, or larger than `limit` bytes in memory, or
// `admit` refuses its bound.
absl::Status ParseBounded(const grpc::ByteBuffer& from, std::uint64_t limit,
                          absl::FunctionRef<absl::Status(std::uint64_t bound)> admit,
                          google::protobuf::Message& message);

}  // namespace tessera::serving
