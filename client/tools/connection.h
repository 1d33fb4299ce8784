// The connection flags of a subcommand: address, TLS and token.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/tools/flags.h"
#include "tessera/options.h"

namespace tessera::cli {

// Which daemon a subcommand talks to.
enum class Connects : std::uint8_t {
  kNowhere,
  kToDaemon,       // the one at --address, or at the default address
  kToOwnOrDaemon,  // the one at --address, or a temporary one that it starts
};

struct Door {
  std::string address;
  std::optional<client::TlsOptions> tls;
  std::string token;  // of the tenant; empty without --token
};

// `attaches`: with --token.
std::vector<Flags::Spec> ConnectionFlags(Connects connects, bool attaches);
// Reads the connection flags.
Door ConnectionOf(const Flags& flags);

}  // namespace tessera::cli
