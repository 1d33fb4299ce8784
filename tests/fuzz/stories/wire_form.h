// Messages in the form in which gRPC passes them to raw methods.
#pragma once

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/byte_buffer.h>

#include "daemon/base/check.h"

namespace tessera::fuzz {

template <typename Message>
grpc::ByteBuffer ToWire(const Message& message) {
  grpc::ByteBuffer bytes;
  bool own = false;
  TESSERA_CHECK((grpc::SerializationTraits<Message>::Serialize(message, &bytes, &own).ok()),
                "serialised");
  return bytes;
}

template <typename Message>
Message FromWire(grpc::ByteBuffer bytes) {
  Message message;
  TESSERA_CHECK(grpc::SerializationTraits<Message>::Deserialize(&bytes, &message).ok(), "parsed");
  return message;
}

}  // namespace tessera::fuzz
