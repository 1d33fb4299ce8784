// The answer to a request, and its bytes on the wire.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "daemon/http/request.h"

namespace tessera::http {

struct Response {
  int status = 200;
  std::string body;
  std::string content_type = "text/plain; charset=utf-8";
};

// A line of text as the body of an answer.
Response TextResponse(int status, std::string_view line);

// The bytes to send. `request` decides whether the body is sent (not for HEAD) and compressed.
// Every answer closes the connection.
std::string Serialize(const Response& response, const Request& request, absl::Time now);

// `text` in gzip's format.
std::string Gzip(std::string_view text);

}  // namespace tessera::http
