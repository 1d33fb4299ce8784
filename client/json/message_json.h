// JSON of protobuf messages for scripts. deploy/docs/json.md describes the shapes.
//
// Unlike protobuf's own JSON: 64-bit integers are numbers, values of an enumeration are lower-case
// words without the enumeration's name ("live"), every field is present, and names are those of
// the .proto files.
#pragma once

#include <google/protobuf/message.h>

#include <string>

namespace tessera::client {

// An object without a line break.
std::string JsonOf(const google::protobuf::Message& message);

}  // namespace tessera::client
