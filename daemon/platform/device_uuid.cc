#include "daemon/platform/device_uuid.h"

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera {

namespace {

constexpr std::string_view kPrefixes[] = {"GPU-", "MIG-", "CPU-"};  // by Kind
constexpr std::size_t kPrefixLength = 4;

// Whether a dash precedes byte `i` of the UUID.
bool DashBefore(std::size_t i) { return i == 4 || i == 6 || i == 8 || i == 10; }

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// Parses exactly kDeviceUuidLength characters.
std::optional<DeviceUuid> Parse(std::string_view text) {
  if (text.size() != kDeviceUuidLength || !HasDeviceUuidPrefix(text)) return std::nullopt;
  DeviceUuid uuid;
  while (!text.starts_with(kPrefixes[static_cast<std::size_t>(uuid.kind)])) {
    uuid.kind = static_cast<DeviceUuid::Kind>(static_cast<int>(uuid.kind) + 1);
  }
  std::size_t at = kPrefixLength;
  for (std::size_t i = 0; i < uuid.bytes.size(); ++i) {
    if (DashBefore(i) && text[at++] != '-') return std::nullopt;
    const int high = HexDigit(text[at]);
    const int low = HexDigit(text[at + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    uuid.bytes[i] = static_cast<std::byte>(high << 4 | low);
    at += 2;
  }
  return uuid;
}

}  // namespace

std::string DeviceUuid::ToString() const {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text(kPrefixes[static_cast<std::size_t>(kind)]);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (DashBefore(i)) text += '-';
    text += kDigits[std::to_integer<unsigned>(bytes[i]) >> 4];
    text += kDigits[std::to_integer<unsigned>(bytes[i]) & 15];
  }
  return text;
}

bool HasDeviceUuidPrefix(std::string_view text) {
  for (const std::string_view prefix : kPrefixes) {
    if (text.starts_with(prefix)) return true;
  }
  return false;
}

absl::StatusOr<DeviceUuid> ParseDeviceUuid(std::string_view text) {
  if (const std::optional<DeviceUuid> uuid = Parse(text)) return *uuid;
  if (text.starts_with("MIG-GPU-")) {
    return absl::InvalidArgumentError(
        Concat("\"", text, "\" is a MIG name of drivers older than 470; nvidia-smi -L of a newer ",
               "driver prints MIG-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx"));
  }
  return absl::InvalidArgumentError(
      Concat("\"", text, "\" is not a device UUID: write GPU-, MIG- or CPU- and ",
             "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx with hexadecimal digits"));
}

std::optional<DeviceUuid> FindDeviceUuid(std::string_view text) {
  for (std::size_t at = 0; at + kDeviceUuidLength <= text.size(); ++at) {
    if (auto uuid = Parse(text.substr(at, kDeviceUuidLength))) return uuid;
  }
  return std::nullopt;
}

}  // namespace tessera
