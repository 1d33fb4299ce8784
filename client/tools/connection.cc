#include "client/tools/connection.h"

#include <utility>

namespace tessera::cli {

namespace {

std::vector<Flags::Spec> With(std::vector<Flags::Spec> door, std::vector<Flags::Spec> others) {
  door.insert(door.end(),
              {{"tls", "", "over TLS; the other --tls flags imply it", ""},
               {"tls-ca", "FILE", "who issued the daemon's certificate; none: the system's", ""},
               {"tls-certificate", "FILE", "one's own, where the daemon asks for it", ""},
               {"tls-key", "FILE", "the private key of that", ""},
               {"tls-name", "NAME", "in the daemon's certificate; none: that of the address", ""}});
  // What a command is about comes first.
  others.insert(others.end(), std::make_move_iterator(door.begin()),
                std::make_move_iterator(door.end()));
  return others;
}

}  // namespace

std::vector<Flags::Spec> WithDoor(std::vector<Flags::Spec> others) {
  return With(
      {{"address", "ADDRESS", "the daemon: unix:PATH or HOST:PORT", client::kDefaultAddress}},
      std::move(others));
}

std::vector<Flags::Spec> WithDoorOrOwn(std::vector<Flags::Spec> others) {
  return With({{"address", "ADDRESS", "the daemon; none: one of its own", ""}}, std::move(others));
}

Door DoorOf(const Flags& flags) {
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
