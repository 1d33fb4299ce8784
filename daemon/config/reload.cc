#include "daemon/config/reload.h"

#include <google/protobuf/text_format.h>

#include <algorithm>
#include <array>

#include "daemon/base/strings.h"
#include "daemon/config/convert.h"

namespace tessera::config {

namespace {

using google::protobuf::FieldDescriptor;
using tessera::v1::DaemonConfig;

constexpr std::array<std::string_view, 5> kReloadable = {"drain_limit_ms", "log_level",
                                                         "slow_call_ms", "tenants", "unix_peers"};

// Tokens from files are part of the text.
std::string TextOf(const Config& config, const DaemonConfig& message,
                   const FieldDescriptor& field) {
  std::string text;
  if (field.name() == "tenants") {
    for (const Tenant& tenant : config.tenants) {
      Append(text, Quoted(tenant.name), Quoted(tenant.token), tenant.soft_limit_bytes, " ",
             tenant.hard_limit_bytes, " ", tenant.reserved_bytes, " ", tenant.max_sessions, "\n");
    }
    return text;
  }
  const int count = field.is_repeated() ? message.GetReflection()->FieldSize(message, &field) : 1;
  for (int i = 0; i < count; ++i) {
    std::string value;
    google::protobuf::TextFormat::PrintFieldValueToString(message, &field,
                                                          field.is_repeated() ? i : -1, &value);
    Append(text, value, "\n");
  }
  return text;
}

// A limit that equals pool_bytes means "the whole pool". The running pool keeps its size, so the
// limit becomes that size.
std::uint64_t LimitIn(const Config& running, const Config& fresh, std::uint64_t limit) {
  return limit == fresh.pool_bytes ? running.pool_bytes : limit;
}

// A file that has lost its tenants must not open the daemon to everybody.
absl::Status CheckStaysClosed(const Config& running, const Config& fresh) {
  const auto closed = [](const Tenant& tenant) { return !tenant.token.empty(); };
  const auto needs_token = std::ranges::find_if(running.tenants, closed);
  if (needs_token == running.tenants.end() || std::ranges::any_of(fresh.tenants, closed)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      Concat("tenants: no tenant would need a token any more, and now \"", needs_token->name,
             "\" does; restart the daemon if that is meant"));
}

}  // namespace

bool IsReloadable(std::string_view field) {
  return std::find(kReloadable.begin(), kReloadable.end(), field) != kReloadable.end();
}

absl::StatusOr<ReloadPlan> PlanReload(const Config& running, const Config& fresh,
                                      const DeviceMemory& memory) {
  if (absl::Status status = CheckStaysClosed(running, fresh); !status.ok()) return status;
  ReloadPlan plan{.config = running, .applied = {}, .needs_restart = {}};
  Config& merged = plan.config;
  merged.drain_limit = fresh.drain_limit;
  merged.log_level = fresh.log_level;
  merged.slow_call = fresh.slow_call;
  merged.unix_peers = fresh.unix_peers;
  merged.tenants = fresh.tenants;
  for (Tenant& tenant : merged.tenants) {
    const bool derived = tenant.reserved_bytes == DerivedReserve(fresh, tenant);
    tenant.soft_limit_bytes = LimitIn(running, fresh, tenant.soft_limit_bytes);
    tenant.hard_limit_bytes = LimitIn(running, fresh, tenant.hard_limit_bytes);
    if (derived) tenant.reserved_bytes = DerivedReserve(merged, tenant);
  }
  if (absl::Status status = Validate(merged, memory); !status.ok()) {
    return absl::Status(status.code(), Concat("together with the running values of the fields that "
                                              "need a restart: ",
                                              status.message()));
  }
  const DaemonConfig before = ToMessage(running);
  const DaemonConfig now = ToMessage(merged);
  const DaemonConfig wanted = ToMessage(fresh);
  const google::protobuf::Descriptor& fields = *DaemonConfig::descriptor();
  for (int i = 0; i < fields.field_count(); ++i) {
    const FieldDescriptor& field = *fields.field(i);
    const std::string running_text = TextOf(running, before, field);
    if (IsReloadable(field.name())) {
      if (TextOf(merged, now, field) != running_text) plan.applied.push_back(field.name());
    } else if (TextOf(fresh, wanted, field) != running_text) {
      plan.needs_restart.push_back(field.name());
    }
  }
  return plan;
}

}  // namespace tessera::config
