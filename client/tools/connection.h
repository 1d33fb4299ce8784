// The connection flags of a subcommand: address and TLS.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "client/tools/flags.h"
#include "tessera/options.h"

namespace tessera::cli {

struct Door {
  std::string address;
  std::optional<client::TlsOptions> tls;
};

// Appends the connection flags to `others`.
std::vector<Flags::Spec> WithConnection(std::vector<Flags::Spec> others);
// The same for a command that starts its own daemon if no address is given.
std::vector<Flags::Spec> WithConnectionOrLocalDaemon(std::vector<Flags::Spec> others);
// Reads the connection flags.
Door ConnectionOf(const Flags& flags);

}  // namespace tessera::cli
