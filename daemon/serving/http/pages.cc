#include "daemon/serving/http/pages.h"

#include <google/protobuf/stubs/common.h>
#include <grpcpp/grpcpp.h>
#include <openssl/crypto.h>

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/base/version.h"
#include "daemon/metrics/exposition.h"
#include "daemon/serving/call/readiness.h"
#include "kernels/format/tile_shape.h"
#include "proto/shm/layout.h"

namespace tessera::serving {

namespace {

using http::Response;
using http::TextResponse;

Response Metrics(const Services& services) {
  return {.body = metrics::ExpositionText(*services.metrics),
          .content_type = "text/plain; version=0.0.4; charset=utf-8"};
}

Response Health(const Services& services) {
  const std::optional<std::string> hung = services.heartbeats->Hung(services.clock->Now());
  return hung.has_value() ? TextResponse(503, *hung) : TextResponse(200, "ok");
}

Response Ready(const Services& services) {
  const absl::Status ready = Readiness(services);
  return ready.ok() ? TextResponse(200, "ready") : TextResponse(503, AsStringView(ready.message()));
}

// A JSON object of texts, which need no escapes here, and of values that are JSON already.
class Object {
 public:
  Object& Text(std::string_view name, std::string_view value) {
    return Value(name, Concat("\"", value, "\""));
  }
  Object& Value(std::string_view name, std::string_view json) {
    Append(body_, body_.empty() ? "" : ",", "\"", name, "\":", json);
    return *this;
  }
  std::string Json() const { return Concat("{", body_, "}"); }

 private:
  std::string body_;
};

std::string VersionJson() {
  Object libraries;
  libraries.Text("grpc", grpc::Version())
      .Text("protobuf", google::protobuf::internal::VersionString(GOOGLE_PROTOBUF_VERSION))
      .Text("openssl", OpenSSL_version(OPENSSL_VERSION));
  Object protocols;
  protocols.Text("rpc", "tessera.v1")
      .Value("mapped", Concat(shm::kProtocolVersion))
      .Value("tile_format", Concat(kernels::kTileFormatVersion));
  Object version;
  version.Text("name", "tesserad").Text("version", Version());
  if (!Commit().empty()) version.Text("commit", Commit());
  return version.Value("libraries", libraries.Json()).Value("protocols", protocols.Json()).Json();
}

Response Index() {
  return {.body = Concat("<!DOCTYPE html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\">"
                         "<title>tesserad</title></head>\n<body>\n<h1>tesserad ",
                         Version(),
                         "</h1>\n<ul>\n"
                         "<li><a href=\"/metrics\">/metrics</a>: metrics for Prometheus</li>\n"
                         "<li><a href=\"/healthz\">/healthz</a>: whether the threads run</li>\n"
                         "<li><a href=\"/readyz\">/readyz</a>: whether workers can attach</li>\n"
                         "<li><a href=\"/version\">/version</a>: versions as JSON</li>\n"
                         "</ul>\n</body>\n</html>\n"),
          .content_type = "text/html; charset=utf-8"};
}

}  // namespace

std::vector<http::Page> StatusPages(const Services& services) {
  return {
      {"/", Index},
      {"/metrics", [&services] { return Metrics(services); }},
      {"/healthz", [&services] { return Health(services); }},
      {"/readyz", [&services] { return Ready(services); }},
      {"/version",
       [] { return Response{.body = VersionJson() + "\n", .content_type = "application/json"}; }},
  };
}

}  // namespace tessera::serving
