// TLS credentials for TCP: the daemon's certificate, and optionally required client certificates.
#pragma once

#include <grpcpp/security/server_credentials.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace tessera::serving {

// Paths of PEM files.
struct TlsFiles {
  std::string certificate;  // the daemon's certificate and its issuers; empty: no TLS
  std::string key;          // its private key, without a passphrase
  std::string client_ca;    // issuers of client certificates; empty: clients need none
};

// INVALID_ARGUMENT names a file that cannot be read, has the wrong content, or does not match the
// other one. OK without a certificate.
absl::Status CheckTls(const TlsFiles& files);

// Returns the credentials for TCP addresses, without TLS if there is no certificate. New
// connections use replaced files within seconds. Errors are those of CheckTls.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> TcpCredentials(const TlsFiles& files);

// The end of validity of the first certificate in a PEM file, in seconds since 1970. It is the file
// as it is now, which new connections use. INVALID_ARGUMENT if it has no readable certificate.
absl::StatusOr<std::int64_t> CertificateExpiry(const std::string& file);

}  // namespace tessera::serving
