#include "daemon/http/request.h"

#include <algorithm>
#include <optional>

#include "daemon/base/strings.h"

namespace tessera::http {

namespace {

using State = ParsedRequest::State;

ParsedRequest Refuse(int status, std::string_view why) {
  return {.state = State::kRefused, .request = {}, .refusal = status, .why = why};
}

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// The characters of methods and header names.
bool IsTokenCharacter(char c) {
  const bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  return letter || IsDigit(c) ||
         std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos;
}

bool IsToken(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, IsTokenCharacter);
}

char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; }

bool EqualIgnoringCase(std::string_view a, std::string_view b) {
  return std::ranges::equal(a, b, {}, Lower, Lower);
}

// Takes the next line off `text`, without its end, which is LF or CRLF; nullopt if it has no end.
std::optional<std::string_view> TakeLine(std::string_view& text) {
  const std::size_t end = text.find('\n');
  if (end == std::string_view::npos) return std::nullopt;
  std::string_view line = text.substr(0, end);
  if (line.ends_with('\r')) line.remove_suffix(1);
  text.remove_prefix(end + 1);
  return line;
}

// "/path" of "/path?query" and of "http://host/path"; nullopt for other forms.
std::optional<std::string_view> PathOf(std::string_view target) {
  constexpr std::string_view kScheme = "http://";
  if (EqualIgnoringCase(target.substr(0, kScheme.size()), kScheme)) {
    const std::size_t slash = target.find('/', kScheme.size());
    target = slash == std::string_view::npos ? "/" : target.substr(slash);
  }
  if (!target.starts_with('/')) return std::nullopt;
  const auto is_visible = [](char c) { return c > ' ' && c <= '~'; };
  if (!std::ranges::all_of(target, is_visible)) return std::nullopt;
  return target.substr(0, target.find_first_of("?#"));
}

// Reads "METHOD TARGET HTTP/1.x" into `out`. Returns the minor version, or nullopt after setting
// a refusal.
std::optional<int> ParseRequestLine(std::string_view line, ParsedRequest& out) {
  const std::size_t first = line.find(' ');
  const std::size_t last = line.rfind(' ');
  if (first == std::string_view::npos || first == last) {
    out = Refuse(400, "the request line is not \"METHOD PATH HTTP/1.1\"");
    return std::nullopt;
  }
  const std::string_view method = line.substr(0, first);
  const std::string_view target = line.substr(first + 1, last - first - 1);
  const std::string_view version = line.substr(last + 1);
  if (!version.starts_with("HTTP/") || version.size() != 8 || !IsDigit(version[5]) ||
      version[6] != '.' || !IsDigit(version[7])) {
    out = Refuse(400, "the request line does not end with \"HTTP/1.1\"");
    return std::nullopt;
  }
  if (version[5] != '1') {
    out = Refuse(505, "only HTTP/1.0 and HTTP/1.1 are spoken here");
    return std::nullopt;
  }
  if (!IsToken(method)) {
    out = Refuse(400, "the method has characters that a method cannot have");
    return std::nullopt;
  }
  const std::optional<std::string_view> path = PathOf(target);
  if (!path.has_value()) {
    out = Refuse(400, "the target is not a path of visible ASCII characters");
    return std::nullopt;
  }
  out.request.method = method == "GET"    ? Method::kGet
                       : method == "HEAD" ? Method::kHead
                                          : Method::kOther;
  out.request.path = std::string(*path);
  return version[7] - '0';
}

// Whether a list like "gzip;q=0.5, br" names gzip (or "*") with a weight above 0.
bool AcceptsGzip(std::string_view list) {
  while (!list.empty()) {
    const std::size_t comma = std::min(list.find(','), list.size());
    const std::string_view entry = list.substr(0, comma);
    list.remove_prefix(std::min(comma + 1, list.size()));
    const std::size_t semicolon = std::min(entry.find(';'), entry.size());
    const std::string_view coding = Trim(entry.substr(0, semicolon));
    if (!EqualIgnoringCase(coding, "gzip") && coding != "*") continue;
    const std::string_view weight = entry.substr(semicolon);
    const std::size_t equals = weight.find('=');
    if (equals == std::string_view::npos) return true;
    return Trim(weight.substr(equals + 1)).find_first_of("123456789") != std::string_view::npos;
  }
  return false;
}

// Reads one header line into `out`; false after setting a refusal.
bool ParseHeader(std::string_view line, ParsedRequest& out, int& hosts) {
  const std::size_t colon = line.find(':');
  if (colon == std::string_view::npos || !IsToken(line.substr(0, colon))) {
    out = Refuse(400, "a header is not \"NAME: VALUE\"");
    return false;
  }
  const std::string_view name = line.substr(0, colon);
  const std::string_view value = Trim(line.substr(colon + 1));
  const auto is_control = [](char c) {
    return (static_cast<unsigned char>(c) < ' ' && c != '\t') || c == '\x7f';
  };
  if (std::ranges::any_of(value, is_control)) {
    out = Refuse(400, "a header has control characters");
    return false;
  }
  if (EqualIgnoringCase(name, "host")) ++hosts;
  if (EqualIgnoringCase(name, "accept-encoding") && AcceptsGzip(value)) {
    out.request.accepts_gzip = true;
  }
  return true;
}

// What more bytes can no longer complete.
ParsedRequest Incomplete(std::string_view received, bool has_request_line) {
  if (received.size() < kMaxRequestBytes) return {};
  return has_request_line ? Refuse(431, "the headers are longer than 4096 bytes")
                          : Refuse(414, "the request line is longer than 4096 bytes");
}

}  // namespace

ParsedRequest ParseRequest(std::string_view received) {
  std::string_view rest = received.substr(0, kMaxRequestBytes);
  // Some clients end a request with an empty line too many.
  rest.remove_prefix(std::min(rest.find_first_not_of("\r\n"), rest.size()));
  const std::optional<std::string_view> line = TakeLine(rest);
  if (!line.has_value()) return Incomplete(received, false);
  ParsedRequest parsed;
  const std::optional<int> minor_version = ParseRequestLine(*line, parsed);
  if (!minor_version.has_value()) return parsed;
  int hosts = 0;
  for (;;) {
    const std::optional<std::string_view> header = TakeLine(rest);
    if (!header.has_value()) return Incomplete(received, true);
    if (header->empty()) break;
    if (!ParseHeader(*header, parsed, hosts)) return parsed;
  }
  // Required by the standard: a request with two hosts means different things to different parsers.
  if (hosts > 1 || (hosts == 0 && *minor_version > 0)) {
    return Refuse(400, "HTTP/1.1 needs exactly one Host header");
  }
  parsed.state = State::kComplete;
  return parsed;
}

}  // namespace tessera::http
