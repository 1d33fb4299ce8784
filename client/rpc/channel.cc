#include "client/rpc/channel.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <cctype>
#include <string_view>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/platform/read_file.h"

namespace tessera::client {

namespace {

constexpr std::string_view kUnixScheme = "unix:";
constexpr std::size_t kMaxPemFile = 4 << 20;  // bundles of all public authorities have 0.3 MB

// A worker on TCP notices within 30 s that its daemon's host is gone.
constexpr int kPingEveryMs = 15'000;
constexpr int kPingPatienceMs = 15'000;

// Returns "" for an empty path.
absl::StatusOr<std::string> ReadPem(std::string_view what, const std::string& path) {
  if (path.empty()) return std::string();
  std::string text = ReadFile(path, kMaxPemFile).value_or("");
  if (text.find("-----BEGIN ") == std::string::npos) {
    return absl::InvalidArgumentError(
        Concat(what, ": \"", path, "\" cannot be read or is not a PEM file"));
  }
  return text;
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> Credentials(const TlsOptions& tls) {
  if (tls.certificate_file.empty() != tls.key_file.empty()) {
    return absl::InvalidArgumentError(Concat(
        "tls: only the ", tls.key_file.empty() ? "certificate" : "key", " \"", tls.certificate_file,
        tls.key_file, "\" is set; set certificate_file and key_file together"));
  }
  grpc::SslCredentialsOptions options;
  for (const auto& [what, path, place] :
       {std::tuple("tls.ca_file", &tls.ca_file, &options.pem_root_certs),
        std::tuple("tls.certificate_file", &tls.certificate_file, &options.pem_cert_chain),
        std::tuple("tls.key_file", &tls.key_file, &options.pem_private_key)}) {
    absl::StatusOr<std::string> text = ReadPem(what, *path);
    if (!text.ok()) return text.status();
    *place = *std::move(text);
  }
  return grpc::SslCredentials(options);
}

}  // namespace

std::string TlsHint(const std::string& address, bool tls, std::string_view error) {
  if (IsUnixAddress(address)) return "";
  // OpenSSL writes "wrong version number", BoringSSL WRONG_VERSION_NUMBER.
  std::string words;
  for (const char c : error) {
    words += c == '_' ? ' ' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  const auto has = [&words](std::string_view part) {
    return words.find(part) != std::string::npos;
  };
  const bool closed = has("socket closed") || has("connection reset") || has("broken pipe");
  if (!tls) {
    // A server that speaks TLS closes the connection at the first byte that is not.
    return closed ? "it may speak TLS: give --tls-ca=FILE (AttachOptions::tls)" : "";
  }
  if (has("wrong version number")) {
    return "it does not speak TLS: leave out the --tls flags (AttachOptions::tls)";
  }
  if (has("certificate verify failed")) {
    return "its certificate is expired, or not from an authority in --tls-ca "
           "(TlsOptions::ca_file)";
  }
  if (has("is not in peer certificate") || has("hostname verification")) {
    return "its certificate is for another name: give --tls-name=NAME (TlsOptions::server_name)";
  }
  if (has("certificate required") || closed) {
    return "it may ask for a client certificate: give --tls-certificate and --tls-key "
           "(TlsOptions::certificate_file, key_file)";
  }
  return "";
}

bool IsUnixAddress(const std::string& address) { return address.starts_with(kUnixScheme); }

absl::Status CheckAddress(const std::string& address) {
  const std::size_t colon = address.rfind(':');
  const bool is_unix = IsUnixAddress(address) && address.size() > kUnixScheme.size();
  const bool is_tcp = !IsUnixAddress(address) && colon != std::string::npos && colon > 0 &&
                      colon + 1 < address.size() && address.find("://") == std::string::npos;
  if (is_unix || is_tcp) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Concat("address \"", address, "\" is neither unix:PATH nor unix:DIRECTORY/ nor HOST:PORT"));
}

absl::StatusOr<std::shared_ptr<grpc::Channel>> OpenChannel(const std::string& address,
                                                           const std::optional<TlsOptions>& tls,
                                                           grpc::ChannelArguments arguments) {
  if (absl::Status status = CheckAddress(address); !status.ok()) return status;
  arguments.SetInt("grpc.enable_http_proxy", 0);
  if (!IsUnixAddress(address)) {
    // A host that vanishes closes nothing: without an answer to a ping, the connection is lost.
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kPingEveryMs);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPingPatienceMs);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  }
  if (!tls.has_value()) {
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }
  if (IsUnixAddress(address)) {
    return absl::InvalidArgumentError(
        Concat("tls: ", address, " is a Unix socket, which does not support TLS"));
  }
  const absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> credentials = Credentials(*tls);
  if (!credentials.ok()) return credentials.status();
  if (!tls->server_name.empty()) arguments.SetSslTargetNameOverride(tls->server_name);
  return grpc::CreateCustomChannel(address, *credentials, arguments);
}

}  // namespace tessera::client
