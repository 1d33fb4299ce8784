// Parses the head of an HTTP/1.x request. Only what the daemon's pages need: method, path, and
// whether the answer may be compressed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::http {

// The longest request that is read, in bytes: request line and headers.
inline constexpr std::size_t kMaxRequestBytes = 4096;

enum class Method : std::uint8_t { kGet, kHead, kOther };

struct Request {
  Method method = Method::kOther;
  std::string path;  // as sent, without query; not decoded, since no page needs it
  bool accepts_gzip = false;

  friend bool operator==(const Request&, const Request&) = default;
};

struct ParsedRequest {
  enum class State : std::uint8_t {
    kIncomplete,  // more bytes are needed
    kComplete,    // `request` is set
    kRefused,     // `refusal` is set
  };
  State state = State::kIncomplete;
  Request request;
  int refusal = 0;       // a status code from 400 to 599
  std::string_view why;  // of a refusal, for people

  friend bool operator==(const ParsedRequest&, const ParsedRequest&) = default;
};

// Parses everything that was received so far. What follows the head is ignored: the daemon answers
// one request per connection. Never kIncomplete for kMaxRequestBytes or more.
ParsedRequest ParseRequest(std::string_view received);

}  // namespace tessera::http
