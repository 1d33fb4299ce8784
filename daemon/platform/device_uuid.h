// DeviceUuid: the identity of a device. It is the same in every process and container of a node,
// unlike a CUDA ordinal, which depends on what a process may see.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tessera {

struct DeviceUuid {
  enum class Kind : std::uint8_t {
    kGpu,
    kMig,  // an instance of a GPU in MIG mode
    kCpu,  // given by the operator to a daemon that keeps KV in host memory
  };
  Kind kind = Kind::kGpu;
  std::array<std::byte, 16> bytes = {};

  // "GPU-", "MIG-" or "CPU-" and 8-4-4-4-12 lower-case hexadecimal digits, as nvidia-smi -L prints.
  std::string ToString() const;
  friend bool operator==(const DeviceUuid&, const DeviceUuid&) = default;
};

// Length of every DeviceUuid::ToString().
inline constexpr std::size_t kDeviceUuidLength = 40;

// Whether the text starts with "GPU-", "MIG-" or "CPU-".
bool HasDeviceUuidPrefix(std::string_view text);

// Parses ToString()'s text; digits may be upper-case. INVALID_ARGUMENT names the text and the form.
absl::StatusOr<DeviceUuid> ParseDeviceUuid(std::string_view text);

// The first device UUID that `text` contains, for example in a file name.
std::optional<DeviceUuid> FindDeviceUuid(std::string_view text);

}  // namespace tessera
