#include "daemon/serving/attach/tenant_registrar.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/base/strings.h"
#include "daemon/serving/call/caller.h"
#include "tessera/v1/tessera.pb.h"

namespace tessera::serving {

namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

constexpr std::uint32_t TagOf(int field) {
  return WireFormatLite::MakeTag(field, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
}

CodedInputStream InputOf(std::string_view bytes) {
  return CodedInputStream(reinterpret_cast<const std::uint8_t*>(bytes.data()),
                          static_cast<int>(bytes.size()));
}

// The bytes of field 1, as far as they are there. Encoders write it first.
std::optional<std::string_view> FirstField(std::string_view message) {
  CodedInputStream input = InputOf(message);
  std::uint32_t length = 0;
  if (input.ReadTag() != TagOf(1) || !input.ReadVarint32(&length)) return std::nullopt;
  return message.substr(static_cast<std::size_t>(input.CurrentPosition())).substr(0, length);
}

// The token of a Hello that may be cut off: "" if no token comes before the cut.
std::string TokenOf(std::string_view hello) {
  CodedInputStream input = InputOf(hello);
  constexpr int kMostBytes = 1024;
  std::string token;
  while (const std::uint32_t tag = input.ReadTag()) {
    std::uint32_t length = 0;
    if (tag != TagOf(v1::Hello::kTenantTokenFieldNumber)) {
      if (!WireFormatLite::SkipField(&input, tag)) break;
    } else if (!input.ReadVarint32(&length) || length > kMostBytes ||
               !input.ReadString(&token, static_cast<int>(length))) {
      break;
    }
  }
  return token;
}

}  // namespace

// As for calls: once half of the connections are open, no tenant gets more than its part.
absl::Status TenantRegistrar::Joined(TenantId tenant) {
  const auto tenants = static_cast<std::uint32_t>(node_.tenants().size());
  MutexLock lock(mutex_);
  std::uint32_t& own = connections_[tenant];
  const std::uint32_t part = std::max(kPerSession, most_ / std::max(1u, tenants));
  if (own >= part && all_ >= most_ / 2) {
    return absl::ResourceExhaustedError(Concat("the tenant has ", own,
                                               " connections; the limit is ", part, " while ",
                                               most_ / 2, " or more of all tenants are open"));
  }
  ++own;
  ++all_;
  return absl::OkStatus();
}

void TenantRegistrar::Left(TenantId tenant) {
  MutexLock lock(mutex_);
  --connections_[tenant];
  --all_;
}

TenantId TenantRegistrar::Recognise(std::string_view begin) {
  static_assert(v1::AttachRequest::kHelloFieldNumber == 1);
  const std::optional<std::string_view> first = FirstField(begin);
  if (!first.has_value()) return {};
  v1::SessionKey key;
  if (key.ParseFromArray(first->data(), static_cast<int>(first->size())) && key.session_id() != 0) {
    const absl::StatusOr<Caller> caller = FindCaller(node_, key);
    if (caller.ok()) return caller->tenant->options().id;
  }
  constexpr char kVersionTag = v1::Hello::kProtocolVersionFieldNumber << 3;
  if (!first->starts_with(kVersionTag)) return {};
  const absl::StatusOr<cache::Tenant*> tenant = node_.TenantByToken(TokenOf(*first));
  return tenant.ok() ? (*tenant)->options().id : TenantId();
}

}  // namespace tessera::serving
