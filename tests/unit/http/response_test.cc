#include "daemon/http/response.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <string>

#include "absl/time/clock.h"
#include "daemon/base/strings.h"

namespace tessera::http {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

const Request kGetRequest = {.method = Method::kGet, .path = "/"};
const Request kHeadRequest = {.method = Method::kHead, .path = "/"};
const Request kGzipGet = {.method = Method::kGet, .path = "/", .accepts_gzip = true};

std::string Unzip(std::string_view bytes, std::size_t size) {
  std::string out(size, '\0');
  z_stream stream{};
  EXPECT_EQ(inflateInit2(&stream, 15 + 16), Z_OK);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(inflate(&stream, Z_FINISH), Z_STREAM_END);
  EXPECT_EQ(stream.total_out, size);
  EXPECT_EQ(stream.avail_in, 0u);
  inflateEnd(&stream);
  return out;
}

TEST(Serialize, StatusHeadersAndBody) {
  EXPECT_THAT(
      Serialize(TextResponse(503, "draining"), kGetRequest, absl::FromUnixSeconds(784111777)),
      AllOf(StartsWith("HTTP/1.1 503 Service Unavailable\r\n"),
            HasSubstr("\r\nDate: Sun, 06 Nov 1994 08:49:37 GMT\r\n"),
            HasSubstr("\r\nConnection: close\r\n"),
            HasSubstr("\r\nContent-Type: text/plain; charset=utf-8\r\n"),
            HasSubstr("\r\nContent-Length: 9\r\n"), EndsWith("\r\n\r\ndraining\n")));
}

TEST(Serialize, HeadHasTheLengthWithoutTheBody) {
  EXPECT_THAT(Serialize(TextResponse(200, "ok"), kHeadRequest, absl::Now()),
              AllOf(HasSubstr("\r\nContent-Length: 3\r\n"), EndsWith("\r\n\r\n")));
}

TEST(Serialize, OnlyAWrongMethodNamesTheRightOnes) {
  EXPECT_THAT(Serialize(TextResponse(405, "x"), kGetRequest, absl::Now()),
              HasSubstr("\r\nAllow: GET, HEAD\r\n"));
  EXPECT_THAT(Serialize(TextResponse(404, "x"), kGetRequest, absl::Now()), Not(HasSubstr("Allow")));
}

TEST(Serialize, CompressesLongAnswersIfAccepted) {
  std::string body;
  for (int i = 0; i < 3000; ++i) Append(body, "tessera_metric_", i, " 1\n");
  const Response page = {.body = body};
  EXPECT_THAT(Serialize(page, kGetRequest, absl::Now()),
              AllOf(EndsWith(body), Not(HasSubstr("Content-Encoding"))));
  const std::string answer = Serialize(page, kGzipGet, absl::Now());
  EXPECT_THAT(answer, HasSubstr("\r\nContent-Encoding: gzip\r\n"));
  EXPECT_LT(answer.size(), body.size() / 2);
  const std::string sent = answer.substr(answer.find("\r\n\r\n") + 4);
  EXPECT_THAT(answer, HasSubstr(Concat("\r\nContent-Length: ", sent.size(), "\r\n")));
  EXPECT_EQ(Unzip(sent, body.size()), body);
  EXPECT_THAT(Serialize(TextResponse(200, "short"), kGzipGet, absl::Now()),
              Not(HasSubstr("Content-Encoding")));
}

TEST(Gzip, NothingAndWhatDoesNotShrink) {
  EXPECT_EQ(Unzip(Gzip(""), 0), "");
  std::string noise;
  for (std::uint32_t x = 1, i = 0; i < 100'000; ++i) {
    x = x * 1664525 + 1013904223;
    noise += static_cast<char>(x >> 24);
  }
  EXPECT_EQ(Unzip(Gzip(noise), noise.size()), noise);
}

}  // namespace
}  // namespace tessera::http
