#include "daemon/lifecycle/reloader.h"

#include <string>
#include <string_view>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/config/reload.h"
#include "daemon/metrics/names.h"
#include "daemon/platform/read_file.h"
#include "daemon/serving/tls.h"

namespace tessera::lifecycle {

namespace {

double SecondsSince1970() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

constexpr std::size_t kMaxTlsFile = 1 << 20;
// A signal that stops the daemon waits for a reload.
constexpr std::chrono::seconds kReadLimit{5};

std::size_t HashOf(const serving::TlsFiles& files) {
  std::string text;
  for (const std::string& path : {files.certificate, files.key, files.client_ca}) {
    // CheckTls reports what cannot be read.
    text += ReadFile(path, kMaxTlsFile).value_or("");
    text += '\0';
  }
  return std::hash<std::string>()(text);
}

std::string Joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) Append(text, text.empty() ? "" : ",", name);
  return text.empty() ? "none" : text;
}

}  // namespace

std::vector<cache::Node::TenantOptions> TenantsOf(const config::Config& config) {
  std::vector<cache::Node::TenantOptions> tenants;
  for (const config::Tenant& tenant : config.tenants) {
    tenants.push_back({.name = tenant.name,
                       .token = tenant.token,
                       .hard_limit_bytes = tenant.hard_limit_bytes,
                       .soft_limit_bytes = tenant.soft_limit_bytes,
                       .reserved_bytes = tenant.reserved_bytes,
                       .max_sessions = tenant.max_sessions});
  }
  return tenants;
}

serving::TlsFiles TlsFilesOf(const config::Config& config) {
  return {.certificate = config.tls_certificate_file,
          .key = config.tls_key_file,
          .client_ca = config.tls_client_ca_file};
}

// The TLS files are those of the start: a reload replaces their content, not their names.
Reloader::Reloader(const Options& options)
    : options_(options),
      files_(
          [load = options.load, tls = TlsFilesOf(*options.running->Get())] {
            return Files{.config = load(), .tls = serving::CheckTls(tls), .tls_hash = HashOf(tls)};
          },
          kReadLimit),
      tls_hash_(HashOf(TlsFilesOf(*options.running->Get()))),
      success_time_(SecondsSince1970()) {}

absl::StatusOr<Reloader::Reloaded> Reloader::Reload() {
  MutexLock lock(mutex_);
  const std::atomic<bool>& draining = options_.services->draining;
  if (draining.load()) {
    return absl::FailedPreconditionError("the daemon is draining and reloads nothing");
  }
  options_.manager->Reloading();
  absl::StatusOr<Reloaded> reloaded = Apply();
  successful_.store(reloaded.ok());
  if (reloaded.ok()) success_time_.store(SecondsSince1970());
  Report(reloaded);
  // Also after a failure: the daemon serves as before.
  if (!draining.load()) options_.manager->Ready();
  return reloaded;
}

absl::StatusOr<Reloader::Reloaded> Reloader::Apply() {
  const absl::StatusOr<Files> files = files_.Read();
  if (!files.ok()) return files.status();
  if (!files->config.ok()) return files->config.status();
  absl::StatusOr<config::ReloadPlan> plan =
      config::PlanReload(*options_.running->Get(), *files->config, options_.memory);
  if (!plan.ok()) return plan.status();
  if (!files->tls.ok()) return files->tls;
  // The only step that can fail. If it does, it has changed nothing.
  serving::Services& services = *options_.services;
  if (absl::Status status = services.node->SetTenants(TenantsOf(plan->config)); !status.ok()) {
    return status;
  }
  services.pressure->WatchTenants();
  options_.server->TenantsChanged();
  options_.server->SetUnixPeers(plan->config.unix_peers);
  services.call_log->SetSlow(plan->config.slow_call);
  services.logger->set_level(plan->config.log_level);
  // gRPC looks at the files by itself, every few seconds.
  if (files->tls_hash != tls_hash_) plan->applied.emplace_back("tls_certificate_file");
  tls_hash_ = files->tls_hash;
  options_.running->Set(std::move(plan->config));
  return Reloaded{.applied = std::move(plan->applied),
                  .needs_restart = std::move(plan->needs_restart)};
}

void Reloader::Report(const absl::StatusOr<Reloaded>& reloaded) {
  Logger& logger = *options_.services->logger;
  if (!reloaded.ok()) {
    logger.Log(LogLevel::kError, "reload failed: the daemon keeps its configuration",
               {{"error", AsStringView(reloaded.status().message())}});
    return;
  }
  for (const std::string& warning : config::Warnings(*options_.running->Get())) {
    logger.Log(LogLevel::kWarning, warning);
  }
  const std::string applied = Joined(reloaded->applied);
  const std::string needs_restart = Joined(reloaded->needs_restart);
  const LogLevel level = reloaded->needs_restart.empty() ? LogLevel::kInfo : LogLevel::kWarning;
  logger.Log(level, "reloaded", {{"applied", applied}, {"needs_restart", needs_restart}});
}

void Reloader::Collect(metrics::Visitor& visitor) const {
  visitor.Add(metrics::kConfigLastReloadSuccessful, successful_.load() ? 1 : 0);
  visitor.Add(metrics::kConfigLastReloadSuccessTimestampSeconds, success_time_.load());
}

}  // namespace tessera::lifecycle
