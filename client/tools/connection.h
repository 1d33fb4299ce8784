// By which address a subcommand reaches a daemon, and how that is made safe.
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

// The flags that say so, and behind them `others`.
std::vector<Flags::Spec> WithDoor(std::vector<Flags::Spec> others);
// The same for a command that starts a daemon of its own where no address is given.
std::vector<Flags::Spec> WithDoorOrOwn(std::vector<Flags::Spec> others);
Door DoorOf(const Flags& flags);

}  // namespace tessera::cli
