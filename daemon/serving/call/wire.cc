#include "daemon/serving/call/wire.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <string.h>

#include <algorithm>
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

#include "daemon/base/strings.h"

namespace tessera::serving {

namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

constexpr int kFirstFields = 8;         // among which the session key is looked for
constexpr int kMostNested = 32;         // messages within messages; ours have four
constexpr std::uint64_t kString = 48;   // of a string's object and of the pointer to it
constexpr std::uint64_t kPointer = 16;  // in a repeated field, which grows by doubling

// Sizes of empty objects, which protobuf looks up under a lock.
class ObjectSizes {
 public:
  std::uint64_t Of(const Descriptor& type) {
    std::uint64_t& size = sizes_[&type];
    if (size == 0) {
      size = google::protobuf::MessageFactory::generated_factory()
                 ->GetPrototype(&type)
                 ->SpaceUsedLong();
    }
    return size;
  }

 private:
  std::unordered_map<const Descriptor*, std::uint64_t> sizes_;
};

class Walk {
 public:
  Walk(CodedInputStream& input, std::uint64_t limit) : input_(input), limit_(limit) {}

  std::uint64_t bytes() const { return bytes_; }
  bool too_large() const { return bytes_ > limit_; }

  // False: the bytes are malformed, or the limit is exceeded.
  bool Message(const Descriptor& type, int depth) {
    if (depth > kMostNested || !Add(sizes_.Of(type) + kPointer)) return false;
    for (;;) {
      const std::uint32_t tag = input_.ReadTag();
      if (tag == 0) return input_.ConsumedEntireMessage();
      if (!Field(type, tag, depth)) return false;
    }
  }

 private:
  bool Add(std::uint64_t bytes) {
    bytes_ += bytes;
    return bytes_ <= limit_;
  }

  static bool HasWireType(const FieldDescriptor& field, WireFormatLite::WireType wire) {
    const bool packed = wire == WireFormatLite::WIRETYPE_LENGTH_DELIMITED && field.is_packable();
    return packed || WireFormatLite::WireTypeForFieldType(
                         static_cast<WireFormatLite::FieldType>(field.type())) == wire;
  }

  bool Field(const Descriptor& type, std::uint32_t tag, int depth) {
    const WireFormatLite::WireType wire = WireFormatLite::GetTagWireType(tag);
    const FieldDescriptor* field = type.FindFieldByNumber(WireFormatLite::GetTagFieldNumber(tag));
    // The parser keeps a known field of another wire type as an unknown one.
    if (field != nullptr && !HasWireType(*field, wire)) field = nullptr;
    switch (wire) {
      case WireFormatLite::WIRETYPE_VARINT: {
        std::uint64_t value = 0;
        return input_.ReadVarint64(&value) && Number(field, tag);
      }
      case WireFormatLite::WIRETYPE_FIXED32:
        return input_.Skip(4) && Number(field, tag);
      case WireFormatLite::WIRETYPE_FIXED64:
        return input_.Skip(8) && Number(field, tag);
      case WireFormatLite::WIRETYPE_LENGTH_DELIMITED:
        return Delimited(field, depth);
      default:
        return false;  // groups: proto3 has none
    }
  }

  // Unknown fields are kept as objects of their own.
  bool Number(const FieldDescriptor* field, std::uint32_t tag) {
    return Add(field == nullptr       ? kString + (tag > 0 ? 8 : 0)
               : field->is_repeated() ? 16  // a vector of 8 bytes that grows by doubling
                                      : 0);
  }

  bool Delimited(const FieldDescriptor* field, int depth) {
    std::uint32_t length = 0;
    if (!input_.ReadVarint32(&length) || length > std::uint32_t(std::numeric_limits<int>::max()))
      return false;
    const int size = static_cast<int>(length);
    if (field != nullptr && field->type() == FieldDescriptor::TYPE_MESSAGE) {
      const CodedInputStream::Limit outer = input_.PushLimit(size);
      // A length beyond the outer message ends early, and the end is not where it should be.
      const bool fits = input_.BytesUntilLimit() == size;
      const bool good = fits && Message(*field->message_type(), depth + 1);
      input_.PopLimit(outer);
      return good;
    }
    const bool packed = field != nullptr && field->is_packable();
    if (!packed) return Add(kString + kPointer + length) && input_.Skip(size);
    const int wire =
        WireFormatLite::WireTypeForFieldType(static_cast<WireFormatLite::FieldType>(field->type()));
    if (wire != WireFormatLite::WIRETYPE_VARINT)
      return Add(2 * std::uint64_t{length}) && input_.Skip(size);
    // Each number has at least a byte there and 4 or 8 here; repeated fields grow by doubling.
    const bool wide = field->cpp_type() == FieldDescriptor::CPPTYPE_UINT64 ||
                      field->cpp_type() == FieldDescriptor::CPPTYPE_INT64;
    return Numbers(size, wide ? 16 : 8);
  }

  // Counts packed varints: bytes without the sign bit end a number.
  bool Numbers(int size, std::uint64_t each) {
    while (size > 0) {
      const void* data = nullptr;
      int there = 0;
      if (!input_.GetDirectBufferPointer(&data, &there)) return false;
      there = std::min(there, size);
      const auto* const bytes = static_cast<const std::uint8_t*>(data);
      std::uint64_t count = 0;
      for (int i = 0; i < there; ++i) count += bytes[i] < 0x80;
      if (!Add(count * each) || !input_.Skip(there)) return false;
      size -= there;
    }
    return true;
  }

  CodedInputStream& input_;
  const std::uint64_t limit_;
  std::uint64_t bytes_ = 0;
  ObjectSizes sizes_;
};

absl::Status Malformed(const Descriptor& type) {
  return absl::InvalidArgumentError(Concat("the message is not a ", type.name()));
}

}  // namespace

std::optional<v1::SessionKey> PeekSessionKey(const grpc::ByteBuffer& message) {
  grpc::ByteBuffer copy = message;  // of references
  grpc::ProtoBufferReader reader(&copy);
  if (!reader.status().ok()) return std::nullopt;
  CodedInputStream input(&reader);
  for (int i = 0; i < kFirstFields; ++i) {
    const std::uint32_t tag = input.ReadTag();
    if (tag == 0) return std::nullopt;
    constexpr int kSessionField = 1;
    constexpr std::uint32_t kSessionTag =
        WireFormatLite::MakeTag(kSessionField, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
    if (tag != kSessionTag) {
      if (!WireFormatLite::SkipField(&input, tag)) return std::nullopt;
      continue;
    }
    constexpr std::uint32_t kMostBytes = 64;
    std::uint32_t length = 0;
    std::string bytes;
    if (!input.ReadVarint32(&length) || length > kMostBytes ||
        !input.ReadString(&bytes, static_cast<int>(length))) {
      return std::nullopt;
    }
    v1::SessionKey key;
    if (!key.ParseFromString(bytes)) return std::nullopt;
    return key;
  }
  return std::nullopt;
}

absl::StatusOr<std::uint64_t> ParsedBytes(google::protobuf::io::ZeroCopyInputStream& input,
                                          const Descriptor& type, std::uint64_t limit) {
  CodedInputStream coded(&input);
  coded.SetTotalBytesLimit(std::numeric_limits<int>::max());
  Walk walk(coded, limit);
  if (walk.Message(type, 0)) return walk.bytes();
  if (!walk.too_large()) return Malformed(type);
  return absl::InvalidArgumentError(Concat("the ", type.name(), " would use more than ", limit,
                                           " bytes in memory; send fewer elements at a time"));
}

void ClearBytes(google::protobuf::Message& message) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->type() == FieldDescriptor::TYPE_BYTES && !field->is_repeated()) {
      std::string scratch;
      const std::string& bytes = reflection.GetStringReference(message, field, &scratch);
      // The reference is to the field itself, which nobody else reads.
      ::explicit_bzero(const_cast<char*>(bytes.data()), bytes.size());
    } else if (field->type() == FieldDescriptor::TYPE_MESSAGE && field->is_repeated()) {
      for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
        ClearBytes(*reflection.MutableRepeatedMessage(&message, field, i));
      }
    } else if (field->type() == FieldDescriptor::TYPE_MESSAGE) {
      ClearBytes(*reflection.MutableMessage(&message, field));
    }
  }
}

void ClearBytes(grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  if (!message.Dump(&slices).ok()) return;
  for (const grpc::Slice& slice : slices) {
    ::explicit_bzero(const_cast<std::uint8_t*>(slice.begin()), slice.size());
  }
}

absl::Status ParseBounded(const grpc::ByteBuffer& from, std::uint64_t limit,
                          absl::FunctionRef<absl::Status(std::uint64_t bound)> admit,
                          google::protobuf::Message& message) {
  grpc::ByteBuffer copy = from;  // of references
  grpc::ProtoBufferReader first(&copy);
  if (!first.status().ok()) return absl::InternalError("the message has no bytes");
  const absl::StatusOr<std::uint64_t> bound = ParsedBytes(first, *message.GetDescriptor(), limit);
  if (!bound.ok()) return bound.status();
  if (absl::Status status = admit(*bound); !status.ok()) return status;
  grpc::ProtoBufferReader second(&copy);
  if (!message.ParseFromZeroCopyStream(&second)) return Malformed(*message.GetDescriptor());
  return absl::OkStatus();
}

}  // namespace tessera::serving
