// tessera eval with a language model.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "client/tools/flags.h"

namespace tessera::cli {

// `model`: its path. `args`: those of the command, for the report.
absl::Status EvaluateTexts(const Flags& flags, std::span<const std::string_view> args,
                           const std::string& model);

}  // namespace tessera::cli
