#include "client/tools/connection.h"

#include <utility>

namespace tessera::cli {

namespace {

std::vector<Flags::Spec> With(std::vector<Flags::Spec> door, std::vector<Flags::Spec> others) {
  door.insert(
      door.end(),
      {{"tls", "", "Use TLS. The other --tls flags imply it.", ""},
       {"tls-ca", "FILE", "CA certificates to trust. Unset: the system's.", ""},
       {"tls-certificate", "FILE", "Client certificate, if the daemon asks for one.", ""},
       {"tls-key", "FILE", "Private key of the client certificate.", ""},
       {"tls-name", "NAME", "Name to expect in the daemon's certificate. Unset: the host.", ""}});
  // A command's own flags come first in --help.
  others.insert(others.end(), std::make_move_iterator(door.begin()),
                std::make_move_iterator(door.end()));
  return others;
}

}  // namespace

std::vector<Flags::Spec> WithConnection(std::vector<Flags::Spec> others) {
  return With({{"address", "ADDRESS", "Address of the daemon: unix:PATH or HOST:PORT.",
                client::kDefaultAddress}},
              std::move(others));
}

std::vector<Flags::Spec> WithConnectionOrLocalDaemon(std::vector<Flags::Spec> others) {
  return With(
      {{"address", "ADDRESS",
        "Address of the daemon: unix:PATH or HOST:PORT. Unset: start a temporary one.", ""}},
      std::move(others));
}

Door ConnectionOf(const Flags& flags) {
  Door door = {.address = flags.Get("address"), .tls = std::nullopt};
  const client::TlsOptions tls = {.ca_file = flags.Get("tls-ca"),
                                  .certificate_file = flags.Get("tls-certificate"),
                                  .key_file = flags.Get("tls-key"),
                                  .server_name = flags.Get("tls-name")};
  for (const char* name : {"tls", "tls-ca", "tls-certificate", "tls-key", "tls-name"}) {
    if (flags.Has(name)) door.tls = tls;
  }
  return door;
}

}  // namespace tessera::cli
