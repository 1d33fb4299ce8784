// What proves the daemon to whoever comes over TCP, and them to the daemon.
#pragma once

#include <grpcpp/security/server_credentials.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace tessera::serving {

// PEM files.
struct TlsFiles {
  std::string certificate;  // the daemon's, and what it was issued by; empty: no TLS
  std::string key;          // its private key, without a passphrase
  std::string client_ca;    // who may issue certificates to callers; empty: callers need none
};

// Credentials for TCP doors: plain where there is no certificate. Files that are replaced later are
// taken up within seconds, by new connections. INVALID_ARGUMENT names a file that cannot be read,
// is not what it should be, or does not go with the other one.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> TcpCredentials(const TlsFiles& files);

}  // namespace tessera::serving
