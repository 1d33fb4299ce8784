#include "daemon/serving/call/peer.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera::serving {
namespace {

constexpr char kTrace[] = "4bf92f3577b34da6a3ce929d0e0e4736";

std::string Parent(const std::string& version, const std::string& trace,
                   const std::string& parent = "00f067aa0ba902b7",
                   const std::string& flags = "01") {
  return version + "-" + trace + "-" + parent + "-" + flags;
}

TEST(TraceContext, TheTraceIdIsFound) {
  EXPECT_EQ(TraceIdIn(Parent("00", kTrace)), kTrace);
  EXPECT_EQ(TraceIdIn(Parent("00", kTrace, "00f067aa0ba902b7", "00")), kTrace);
  // Later versions may have more fields.
  EXPECT_EQ(TraceIdIn(Parent("01", kTrace) + "-more"), kTrace);
}

TEST(TraceContext, MalformedContextHasNone) {
  const std::string zeros(32, '0');
  std::string upper = kTrace;
  upper[1] = 'B';
  for (const std::string& text :
       {std::string(), std::string("00"), std::string(kTrace), Parent("ff", kTrace),
        Parent("0x", kTrace), Parent("00", zeros), Parent("00", upper),
        Parent("00", kTrace, std::string(16, '0')), Parent("00", kTrace, "00f067aa0ba902bg"),
        Parent("00", kTrace, "00f067aa0ba902b7", "0g"), Parent("00", kTrace) + "-more",
        Parent("01", kTrace) + "more", "00 " + Parent("00", kTrace).substr(3),
        Parent("00", kTrace).substr(0, 54)}) {
    EXPECT_EQ(TraceIdIn(text), "") << text;
  }
}

}  // namespace
}  // namespace tessera::serving
