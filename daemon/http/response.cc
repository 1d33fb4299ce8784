#include "daemon/http/response.h"

#include <zlib.h>

#include <string_view>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"

namespace tessera::http {

namespace {

// Below this, the header of gzip and the time are worth more than the bytes.
constexpr std::size_t kMinCompressedBytes = 1024;

std::string_view ReasonOf(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 400:
      return "Bad Request";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 414:
      return "URI Too Long";
    case 431:
      return "Request Header Fields Too Large";
    case 503:
      return "Service Unavailable";
    case 505:
      return "HTTP Version Not Supported";
    default:
      return "";
  }
}

}  // namespace

Response TextResponse(int status, std::string_view line) {
  return {.status = status, .body = Concat(line, "\n")};
}

std::string Gzip(std::string_view text) {
  constexpr int kGzipWindow = 15 + 16;  // the largest window, with gzip's header
  constexpr int kMemoryLevel = 8;       // zlib's default
  z_stream stream{};
  TESSERA_CHECK(deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, kGzipWindow, kMemoryLevel,
                             Z_DEFAULT_STRATEGY) == Z_OK,
                "deflateInit2");
  std::string out(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  // One call suffices: the output has the size that zlib named.
  TESSERA_CHECK(deflate(&stream, Z_FINISH) == Z_STREAM_END, "deflate");
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

std::string Serialize(const Response& response, const Request& request, absl::Time now) {
  const bool compressed = request.accepts_gzip && response.body.size() >= kMinCompressedBytes;
  const std::string body = compressed ? Gzip(response.body) : response.body;
  const std::string date = absl::FormatTime("%a, %d %b %Y %H:%M:%S GMT", now, absl::UTCTimeZone());
  std::string out =
      Concat("HTTP/1.1 ", response.status, " ", ReasonOf(response.status), "\r\nDate: ", date,
             "\r\nConnection: close\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff",
             "\r\nVary: Accept-Encoding\r\nContent-Type: ", response.content_type,
             "\r\nContent-Length: ", body.size(), "\r\n");
  if (compressed) out += "Content-Encoding: gzip\r\n";
  if (response.status == 405) out += "Allow: GET, HEAD\r\n";
  out += "\r\n";
  if (request.method != Method::kHead) out += body;
  return out;
}

}  // namespace tessera::http
