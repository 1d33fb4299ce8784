#include "daemon/config/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <charconv>

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera::config {
namespace {

absl::Status BadAddress(std::string_view text, std::string_view why) {
  return absl::InvalidArgumentError(Concat("\"", text, "\" is not an address: ", why));
}

bool IsIpv6(const std::string& host) {
  in6_addr address;
  return inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

// Letters, digits, '-', '.' and '_': host names and IPv4 addresses.
bool IsHostName(std::string_view host) {
  for (const char c : host) {
    const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    const bool digit = c >= '0' && c <= '9';
    if (!letter && !digit && c != '-' && c != '.' && c != '_') return false;
  }
  return !host.empty() && host.size() <= 253;
}

void ReplaceAll(std::string& text, std::string_view from, std::string_view to) {
  for (std::size_t at = text.find(from); at != std::string::npos;
       at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

}  // namespace

std::string HostPort::ToString() const {
  const bool brackets = host.find(':') != std::string::npos;
  return Concat(brackets ? "[" : "", host, brackets ? "]" : "", ":", port);
}

bool HostPort::IsLoopback() const {
  if (host == "localhost") return true;
  in6_addr six;
  if (inet_pton(AF_INET6, host.c_str(), &six) == 1) return IN6_IS_ADDR_LOOPBACK(&six) != 0;
  in_addr four;
  return inet_pton(AF_INET, host.c_str(), &four) == 1 && ntohl(four.s_addr) >> 24 == 127;
}

std::string ListenAddress::ToString() const {
  return is_unix() ? Concat("unix:", unix_path) : tcp.ToString();
}

bool ListenAddress::needs_uuid() const {
  return unix_path.find(kUuidPlaceholder) != std::string::npos;
}

void ListenAddress::SetUuid(const DeviceUuid& uuid) {
  ReplaceAll(unix_path, kUuidPlaceholder, uuid.ToString());
}

absl::StatusOr<HostPort> ParseHostPort(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return BadAddress(text, "expected host:port");
  std::string_view host = text.substr(0, colon);
  const std::string_view port_text = text.substr(colon + 1);

  HostPort address;
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    address.host = std::string(host.substr(1, host.size() - 2));
    if (!IsIpv6(address.host)) return BadAddress(text, "the brackets must hold an IPv6 address");
  } else {
    address.host = std::string(host);
    if (host.empty()) return BadAddress(text, "the host is missing (0.0.0.0: every interface)");
    if (host.find(':') != std::string_view::npos) {
      return BadAddress(text, "write IPv6 addresses in brackets, as in [::1]:9000");
    }
    if (!IsHostName(host)) return BadAddress(text, "the host is not a valid host name");
  }
  const char* const end = port_text.data() + port_text.size();
  const auto parsed = std::from_chars(port_text.data(), end, address.port);
  if (port_text.empty() || parsed.ec != std::errc() || parsed.ptr != end) {
    return BadAddress(text, Concat("the port \"", port_text, "\" is not a number from 0 to 65535"));
  }
  return address;
}

absl::StatusOr<ListenAddress> ParseListenAddress(std::string_view text) {
  constexpr std::string_view kScheme = "unix:";
  if (!text.starts_with(kScheme)) {
    if (text.starts_with("unix-abstract:") || text.starts_with("/")) {
      return BadAddress(text, "write a Unix socket as unix:PATH");
    }
    const absl::StatusOr<HostPort> tcp = ParseHostPort(text);
    if (!tcp.ok()) return tcp.status();
    return ListenAddress{.unix_path = "", .tcp = *tcp};
  }
  std::string_view path = text.substr(kScheme.size());
  if (path.starts_with("//")) path.remove_prefix(2);  // unix:///run/x is unix:/run/x
  // "//run/x" means "/run/x", but "unix://run/x" would be read as "run/x".
  while (path.starts_with("//")) path.remove_prefix(1);
  if (path.empty()) return BadAddress(text, "the path is missing");
  std::string longest(path);
  ReplaceAll(longest, kUuidPlaceholder, std::string(kDeviceUuidLength, 'x'));
  if (longest.find_first_of("{}") != std::string::npos) {
    return BadAddress(text, "the only placeholder is {uuid}, the UUID of the daemon's device");
  }
  if (longest.size() > kMaxUnixPath) {
    return BadAddress(text, Concat("the path has ", longest.size(), " bytes; the limit is ",
                                   kMaxUnixPath, ", which leaves room for the \"", kAdminSuffix,
                                   "\" of the operator's socket"));
  }
  // A socket must not have the path of a file next to another socket.
  for (const std::string_view suffix : {kDescriptorSuffix, kLockSuffix, kAdminSuffix}) {
    if (path.ends_with(suffix)) {
      return BadAddress(text, Concat("a path that ends in ", suffix,
                                     " is reserved for the file next to another socket"));
    }
  }
  if (path.find('%') != std::string_view::npos) {
    return BadAddress(text, "the path contains a %, which gRPC would decode");
  }
  if (path.find('\0') != std::string_view::npos) {
    return BadAddress(text, "the path contains a zero byte");
  }
  return ListenAddress{.unix_path = std::string(path), .tcp = {}};
}

absl::StatusOr<ListenAddress> ParseAdminAddress(std::string_view text) {
  if (!text.starts_with("unix:")) {
    return BadAddress(text, "operators' calls are served on a Unix socket only, unix:PATH");
  }
  const bool suffixed = text.ends_with(kAdminSuffix);
  if (suffixed) text.remove_suffix(kAdminSuffix.size());
  absl::StatusOr<ListenAddress> address = ParseListenAddress(text);
  if (address.ok() && suffixed) address->unix_path += kAdminSuffix;
  return address;
}

}  // namespace tessera::config
