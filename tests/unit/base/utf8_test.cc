#include "daemon/base/utf8.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace tessera {
namespace {

std::string Encode(std::uint32_t rune) {
  std::string out;
  const auto continuation = [&](int shift) {
    out += static_cast<char>(0x80 | (rune >> shift & 0x3f));
  };
  if (rune < 0x80) {
    out += static_cast<char>(rune);
  } else if (rune < 0x800) {
    out += static_cast<char>(0xc0 | rune >> 6);
    continuation(0);
  } else if (rune < 0x10000) {
    out += static_cast<char>(0xe0 | rune >> 12);
    continuation(6);
    continuation(0);
  } else {
    out += static_cast<char>(0xf0 | rune >> 18);
    continuation(12);
    continuation(6);
    continuation(0);
  }
  return out;
}

TEST(Utf8, EveryRuneAndNoSurrogate) {
  for (std::uint32_t rune = 0; rune < 0x120000; ++rune) {
    const std::string text = Encode(rune);
    const bool valid = rune < 0x110000 && (rune < 0xd800 || rune > 0xdfff);
    ASSERT_EQ(Utf8SequenceLength(text), valid ? text.size() : 0) << std::hex << rune;
    // A truncated sequence is invalid.
    if (text.size() > 1) {
      ASSERT_EQ(Utf8SequenceLength(text.substr(0, text.size() - 1)), 0u);
    }
  }
}

TEST(Utf8, OverlongFormsAndStrayBytesAreNone) {
  for (const char* text :
       {"\x80", "\xbf", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xf0\x8f\xbf\xbf",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xc3(", "\xe2\x82("}) {
    EXPECT_EQ(Utf8SequenceLength(text), 0u) << testing::PrintToString(text);
  }
}

TEST(Utf8, TextIsNothingButSequences) {
  for (const char* text : {"", "/run/x.sock", "\xc3\xa9", "a\xf0\x9f\x98\x80z"}) {
    EXPECT_TRUE(IsUtf8(text)) << testing::PrintToString(text);
  }
  for (const char* text : {"\x93", "/run/\x93\x04", "a\xc3", "\xc3\xa9\xff"}) {
    EXPECT_FALSE(IsUtf8(text)) << testing::PrintToString(text);
  }
}

}  // namespace
}  // namespace tessera
