// The head of an HTTP request, as any peer of the metrics port can send it. A request that arrives
// in pieces must get the same answer as in one, at the earliest byte that decides it, and the
// answer must be well-formed.
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/clock.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/http/request.h"
#include "daemon/http/response.h"
#include "tests/fuzz/fuzz_target.h"

namespace tessera::fuzz {
namespace {

using http::ParsedRequest;
using State = ParsedRequest::State;

void CheckAnswer(const ParsedRequest& parsed) {
  if (parsed.state == State::kRefused) {
    TESSERA_CHECK(parsed.refusal >= 400 && parsed.refusal < 600, "a refusal has a status");
    TESSERA_CHECK(!parsed.why.empty(), "a refusal has a reason");
  } else {
    TESSERA_CHECK(parsed.request.path.starts_with('/'), parsed.request.path);
    TESSERA_CHECK(parsed.request.path.find_first_of("\r\n ?") == std::string::npos,
                  parsed.request.path);
  }
  const std::string answer =
      http::Serialize(http::TextResponse(parsed.state == State::kRefused ? parsed.refusal : 200,
                                         parsed.state == State::kRefused ? parsed.why : "ok"),
                      parsed.request, absl::UnixEpoch());
  TESSERA_CHECK(answer.starts_with("HTTP/1.1 "), answer);
  TESSERA_CHECK(answer.find("\r\n\r\n") != std::string::npos, answer);
}

void Run(std::string_view bytes) {
  const ParsedRequest whole = http::ParseRequest(bytes);
  TESSERA_CHECK(whole.state != State::kIncomplete || bytes.size() < http::kMaxRequestBytes,
                "long input is decided");
  bool decided = false;
  for (std::size_t size = 0; size <= bytes.size() && !decided; ++size) {
    const ParsedRequest part = http::ParseRequest(bytes.substr(0, size));
    decided = part.state != State::kIncomplete;
    if (decided) TESSERA_CHECK(part == whole, Concat("the first ", size, " bytes differ"));
  }
  TESSERA_CHECK(decided == (whole.state != State::kIncomplete), "pieces are decided as the whole");
  if (decided) CheckAnswer(whole);
}

}  // namespace

std::vector<Seed> Seeds() {
  return {{"scrape",
           "GET /metrics HTTP/1.1\r\nHost: 10.0.0.1:9464\r\nUser-Agent: Prometheus/2.42.0\r\n"
           "Accept: application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5\r\n"
           "Accept-Encoding: gzip\r\nX-Prometheus-Scrape-Timeout-Seconds: 10\r\n\r\n"},
          {"probe", "GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"},
          {"old", "HEAD /healthz?verbose HTTP/1.0\r\n\r\n"},
          {"absolute", "GET http://host/version HTTP/1.1\nHost: host\n\n"},
          {"weights", "GET / HTTP/1.1\r\nHost: x\r\nAccept-Encoding: br;q=1, gzip;q=0.0\r\n\r\n"},
          {"long", "GET / HTTP/1.1\r\nx: " + std::string(http::kMaxRequestBytes, 'x')}};
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tessera::fuzz::Run({reinterpret_cast<const char*>(data), size});
  return 0;
}
