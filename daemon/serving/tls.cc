#include "daemon/serving/tls.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <ctime>
#include <string_view>

#include "daemon/base/strings.h"
#include "daemon/platform/read_file.h"

namespace tessera::serving {

namespace {

constexpr unsigned kLookAgainSeconds = 5;

// Builds the error, with OpenSSL's reason for the last failure.
absl::Status Refuse(std::string_view field, const std::string& file, std::string_view what) {
  const char* const reason = ERR_reason_error_string(ERR_peek_last_error());
  ERR_clear_error();
  return absl::InvalidArgumentError(
      Concat(field, ": \"", file, "\" ", what, reason == nullptr ? "" : " (",
             reason == nullptr ? "" : reason, reason == nullptr ? "" : ")"));
}

}  // namespace

// gRPC would only fail at the first handshake.
absl::Status CheckTls(const TlsFiles& files) {
  if (files.certificate.empty()) return absl::OkStatus();
  if (absl::Status status = CheckSecret(files.key); !status.ok()) {
    return absl::Status(status.code(), Concat("tls_key_file: ", AsStringView(status.message())));
  }
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_server_method()),
                                                                  &SSL_CTX_free);
  if (context == nullptr) return absl::InternalError("OpenSSL cannot create a context");
  // Without this, OpenSSL would ask for a passphrase on the terminal.
  SSL_CTX_set_default_passwd_cb(context.get(), [](char*, int, int, void*) { return 0; });
  if (SSL_CTX_use_certificate_chain_file(context.get(), files.certificate.c_str()) != 1) {
    return Refuse("tls_certificate_file", files.certificate, "has no PEM certificate");
  }
  if (SSL_CTX_use_PrivateKey_file(context.get(), files.key.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_check_private_key(context.get()) != 1) {
    return Refuse("tls_key_file", files.key,
                  Concat("has no PEM private key, without a passphrase, that matches \"",
                         files.certificate, "\""));
  }
  if (!files.client_ca.empty() &&
      SSL_CTX_load_verify_locations(context.get(), files.client_ca.c_str(), nullptr) != 1) {
    return Refuse("tls_client_ca_file", files.client_ca, "has no PEM certificate");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> TcpCredentials(const TlsFiles& files) {
  if (files.certificate.empty()) return grpc::InsecureServerCredentials();
  if (absl::Status status = CheckTls(files); !status.ok()) return status;
  using Watcher = grpc::experimental::FileWatcherCertificateProvider;
  const auto provider =
      files.client_ca.empty()
          ? std::make_shared<Watcher>(files.key, files.certificate, kLookAgainSeconds)
          : std::make_shared<Watcher>(files.key, files.certificate, files.client_ca,
                                      kLookAgainSeconds);
  grpc::experimental::TlsServerCredentialsOptions options(provider);
  options.watch_identity_key_cert_pairs();
  if (!files.client_ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

absl::StatusOr<std::int64_t> CertificateExpiry(const std::string& file) {
  const std::unique_ptr<BIO, decltype(&BIO_free)> input(BIO_new_file(file.c_str(), "r"), &BIO_free);
  const std::unique_ptr<X509, decltype(&X509_free)> certificate(
      input == nullptr ? nullptr : PEM_read_bio_X509(input.get(), nullptr, nullptr, nullptr),
      &X509_free);
  std::tm time{};
  if (certificate == nullptr ||
      ASN1_TIME_to_tm(X509_get0_notAfter(certificate.get()), &time) != 1) {
    return Refuse("tls_certificate_file", file, "has no PEM certificate");
  }
  return static_cast<std::int64_t>(::timegm(&time));
}

}  // namespace tessera::serving
