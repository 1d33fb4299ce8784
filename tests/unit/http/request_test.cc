#include "daemon/http/request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "daemon/base/strings.h"

namespace tessera::http {
namespace {

using State = ParsedRequest::State;

const std::string kHead = "Host: x\r\n\r\n";

ParsedRequest OfLine(const std::string& line) { return ParseRequest(Concat(line, "\r\n", kHead)); }

bool AcceptsGzip(const std::string& value) {
  const ParsedRequest parsed =
      ParseRequest(Concat("GET / HTTP/1.1\r\nAccept-Encoding: ", value, "\r\n", kHead));
  EXPECT_EQ(parsed.state, State::kComplete) << parsed.why;
  return parsed.request.accepts_gzip;
}

TEST(ParseRequest, MethodAndPath) {
  const ParsedRequest get = OfLine("GET /metrics HTTP/1.1");
  EXPECT_EQ(get.state, State::kComplete);
  EXPECT_EQ(get.request, (Request{.method = Method::kGet, .path = "/metrics"}));
  EXPECT_EQ(OfLine("HEAD / HTTP/1.0").request.method, Method::kHead);
  EXPECT_EQ(OfLine("DELETE / HTTP/1.1").request.method, Method::kOther);
  EXPECT_EQ(OfLine("get / HTTP/1.1").request.method, Method::kOther);
}

TEST(ParseRequest, ThePathEndsAtTheQuery) {
  EXPECT_EQ(OfLine("GET /metrics?a=/b HTTP/1.1").request.path, "/metrics");
  EXPECT_EQ(OfLine("GET /metrics# HTTP/1.1").request.path, "/metrics");
  EXPECT_EQ(OfLine("GET /%6detrics HTTP/1.1").request.path, "/%6detrics");
  EXPECT_EQ(OfLine("GET http://host:1/readyz?x HTTP/1.1").request.path, "/readyz");
  EXPECT_EQ(OfLine("GET HTTP://host HTTP/1.1").request.path, "/");
}

TEST(ParseRequest, EveryPrefixIsIncomplete) {
  const std::string whole =
      "\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n";
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_EQ(ParseRequest(whole.substr(0, size)).state, State::kIncomplete) << size;
  }
  EXPECT_EQ(ParseRequest(whole).state, State::kComplete);
  EXPECT_EQ(ParseRequest(whole), ParseRequest(whole + "GET / HTTP/1.1\r\n"));
}

TEST(ParseRequest, LinesMayEndWithLfOnly) {
  EXPECT_EQ(ParseRequest("GET / HTTP/1.1\nHost: x\n\n").state, State::kComplete);
}

TEST(ParseRequest, TheHostIsRequiredOnce) {
  EXPECT_EQ(ParseRequest("GET / HTTP/1.0\r\n\r\n").state, State::kComplete);
  EXPECT_EQ(ParseRequest("GET / HTTP/1.1\r\n\r\n").refusal, 400);
  EXPECT_EQ(ParseRequest("GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n").refusal, 400);
}

TEST(ParseRequest, WhatIsNotHttpIsRefused) {
  for (const char* line :
       {"GET", "GET /", "GET  HTTP/1.1", " GET / HTTP/1.1", "GET / HTTP/1.1 ", "GET / HTTP/1",
        "GET / HTTP/1.10", "GET / http/1.1", "G@T / HTTP/1.1", "GET metrics HTTP/1.1",
        "GET * HTTP/1.1", "GET /a b HTTP/1.1", "GET /\x80 HTTP/1.1", "GET /\x01 HTTP/1.1"}) {
    const ParsedRequest parsed = OfLine(line);
    EXPECT_EQ(parsed.state, State::kRefused) << line;
    EXPECT_EQ(parsed.refusal, 400) << line;
    EXPECT_FALSE(parsed.why.empty()) << line;
  }
  EXPECT_EQ(OfLine("PRI * HTTP/2.0").refusal, 505);
}

TEST(ParseRequest, WrongHeadersAreRefused) {
  for (const char* header :
       {"no colon", ": x", "a b: x", "name : x", " folded: x", "a: \x01", "a: b\rc", "a: \x7f"}) {
    EXPECT_EQ(ParseRequest(Concat("GET / HTTP/1.1\r\n", header, "\r\n", kHead)).refusal, 400)
        << header;
  }
  EXPECT_EQ(ParseRequest(Concat("GET / HTTP/1.1\r\na:\tb\xc3\xa4 \r\nc:\r\n", kHead)).state,
            State::kComplete);
}

TEST(ParseRequest, TooLongIsRefusedAtOnce) {
  const std::string endless(kMaxRequestBytes, 'G');
  EXPECT_EQ(ParseRequest(endless.substr(1)).state, State::kIncomplete);
  EXPECT_EQ(ParseRequest(endless).refusal, 414);
  const std::string headers = "GET / HTTP/1.1\r\na: " + endless;
  EXPECT_EQ(ParseRequest(headers.substr(0, kMaxRequestBytes - 1)).state, State::kIncomplete);
  EXPECT_EQ(ParseRequest(headers).refusal, 431);
  EXPECT_EQ(ParseRequest(headers + "\r\n" + kHead).refusal, 431);
  EXPECT_EQ(ParseRequest(std::string(kMaxRequestBytes, '\n')).refusal, 414);
}

TEST(ParseRequest, WhetherGzipIsAccepted) {
  EXPECT_TRUE(AcceptsGzip("gzip"));
  EXPECT_TRUE(AcceptsGzip("deflate, GZIP;q=0.5"));
  EXPECT_TRUE(AcceptsGzip("br, *"));
  EXPECT_FALSE(AcceptsGzip(""));
  EXPECT_FALSE(AcceptsGzip("identity"));
  EXPECT_FALSE(AcceptsGzip("gzip;q=0"));
  EXPECT_FALSE(AcceptsGzip("gzip; q=0.000, br"));
  EXPECT_FALSE(AcceptsGzip("x-gzip2"));
}

}  // namespace
}  // namespace tessera::http
