#include "daemon/serving/attach/tenant_registrar.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
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
      return "";  // cut off, or no text
    }
  }
  return token;
}

}  // namespace

absl::Status TenantRegistrar::Joined(TenantId tenant) {
  if (connections_.Adjust(tenant, 0, 1)) return absl::OkStatus();
  return absl::ResourceExhaustedError("the tenant has as many connections as it may have now");
}

bool TenantRegistrar::MustWait(TenantId tenant, const FrameGuard& asker) {
  const bool plenty = !options_.arriving->OverHalf(tenant) && !options_.requests->OverHalf(tenant);
  return !turns_.MayRead(tenant, &asker, plenty, options_.clock->Now());
}

bool TenantRegistrar::MayMiss() {
  MutexLock lock(mutex_);
  return misses_.Left(options_.clock->Now()) >= 1;
}

TenantId TenantRegistrar::Recognise(std::string_view begin) {
  static_assert(v1::AttachRequest::kHelloFieldNumber == 1);
  const std::optional<std::string_view> first = FirstField(begin);
  if (!first.has_value()) return {};
  v1::SessionKey key;
  if (key.ParseFromArray(first->data(), static_cast<int>(first->size())) && key.session_id() != 0) {
    const absl::StatusOr<Caller> caller = FindCaller(*options_.node, key);
    if (caller.ok()) return caller->tenant->options().id;
  }
  constexpr char kVersionTag = v1::Hello::kProtocolVersionFieldNumber << 3;
  if (!first->starts_with(kVersionTag)) return {};
  const std::string token = TokenOf(*first);
  // While others guess, a worker with the right token is known a little later, by its session key.
  if (!token.empty() && !MayMiss()) return {};
  const absl::StatusOr<cache::Tenant*> tenant = options_.node->TenantByToken(token);
  if (tenant.ok()) return (*tenant)->options().id;
  MutexLock lock(mutex_);
  (void)misses_.Spend(options_.clock->Now());
  return {};
}

}  // namespace tessera::serving
