#include "client/tools/connection.h"

#include <string>

#include "daemon/base/strings.h"

namespace tessera::cli {

std::vector<Flags::Spec> ConnectionFlags(Connects connects, bool attaches) {
  constexpr FlagKind kKind = FlagKind::kConnection;
  if (connects == Connects::kNowhere) return {};
  std::vector<Flags::Spec> flags;
  if (connects == Connects::kToDaemon) {
    flags.push_back({"address", "ADDRESS", "Address of the daemon: unix:PATH or HOST:PORT.",
                     client::kDefaultAddress, kKind, "TESSERA_ADDRESS"});
  } else {
    // Not from the environment: load for a test must not reach a daemon unasked.
    flags.push_back(
        {"address", "ADDRESS", "Address of the daemon: unix:PATH or HOST:PORT.", "", kKind});
  }
  if (attaches) {
    flags.push_back({"token", "TOKEN",
                     "Token of the tenant, for commands that attach as a worker does. Other users "
                     "of the machine can see it among the processes: prefer the variable.",
                     "", kKind, "TESSERA_TOKEN"});
  }
  flags.push_back({"tls", "", "Use TLS. The other --tls flags imply it.", "", kKind});
  flags.push_back({"tls-ca", "FILE", "CA certificates to trust. Unset: the system's.", "", kKind});
  flags.push_back(
      {"tls-certificate", "FILE", "Client certificate, if the daemon asks for one.", "", kKind});
  flags.push_back({"tls-key", "FILE", "Private key of the client certificate.", "", kKind});
  flags.push_back({"tls-name", "NAME",
                   "Name to expect in the daemon's certificate. Unset: the host.", "", kKind});
  return flags;
}

Door ConnectionOf(const Flags& flags) {
  Door door = {.address = flags.Get("address"), .tls = std::nullopt, .token = ""};
  const client::TlsOptions tls = {.ca_file = flags.Get("tls-ca"),
                                  .certificate_file = flags.Get("tls-certificate"),
                                  .key_file = flags.Get("tls-key"),
                                  .server_name = flags.Get("tls-name")};
  for (const char* name : {"tls", "tls-ca", "tls-certificate", "tls-key", "tls-name"}) {
    if (flags.Has(name)) door.tls = tls;
  }
  // A token that comes from a file ends in a newline, and no token contains white space.
  if (flags.Declares("token")) door.token = std::string(Trim(flags.Get("token")));
  return door;
}

}  // namespace tessera::cli
