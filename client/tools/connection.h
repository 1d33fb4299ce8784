// The connection flags of a subcommand: address, device, TLS and token.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
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
  std::string device;  // as AttachOptions::device
  std::optional<client::TlsOptions> tls;
  std::string token;  // of the tenant; empty without --token
};

// `attaches`: with --token.
std::vector<Flags::Spec> ConnectionFlags(Connects connects, bool attaches);
// Reads the connection flags.
Door ConnectionOf(const Flags& flags);
// INVALID_ARGUMENT if a device is given without an address, for a command that then starts a
// daemon.
absl::Status CheckNoDevice(const Door& door);
// The address of the one daemon that an operator means, never of a directory. If there are several,
// the error lists them.
absl::StatusOr<std::string> AddressOf(const Door& door);

}  // namespace tessera::cli
