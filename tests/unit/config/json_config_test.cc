#include "daemon/config/json_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"

namespace tessera::config {
namespace {

using tessera::v1::DaemonConfig;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

DaemonConfig Read(std::string_view json) {
  DaemonConfig message;
  const absl::Status status = FromJson(json, &message);
  EXPECT_TRUE(status.ok()) << status << "\n" << json;
  return message;
}

std::string JsonErrorOf(std::string_view json) {
  DaemonConfig message;
  const absl::Status status = FromJson(json, &message);
  if (status.ok()) return "(no error)";
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(JsonConfig, EveryKindOfField) {
  const DaemonConfig message = Read(R"({
    "listen": ["unix:/a", "localhost:1"], "allow_core_dumps": true, "device": "cpu",
    "pool_bytes": 8589934592, "max_sessions": 7, "prefix_hash_seed": 18446744073709551615,
    "tenants": [{"name": "a", "hard_limit_bytes": 1}, {"name": "b"}]})");
  EXPECT_THAT(message.listen(), ElementsAre("unix:/a", "localhost:1"));
  EXPECT_TRUE(message.allow_core_dumps());
  EXPECT_EQ(message.device(), "cpu");
  EXPECT_EQ(message.pool_bytes(), 8 * kGiB);
  EXPECT_EQ(message.max_sessions(), 7u);
  EXPECT_EQ(message.prefix_hash_seed(), ~std::uint64_t{0});
  ASSERT_EQ(message.tenants_size(), 2);
  EXPECT_EQ(message.tenants(0).hard_limit_bytes(), 1u);
  EXPECT_EQ(message.tenants(1).name(), "b");
  EXPECT_EQ(Read("{}").ByteSizeLong(), 0u);
  EXPECT_EQ(Read("\xef\xbb\xbf{\"listen\":[]}\n").ByteSizeLong(), 0u);
}

TEST(JsonConfig, SizesTimesAndQuotedNumbers) {
  EXPECT_EQ(Read(R"({"pool_bytes": "8GiB"})").pool_bytes(), 8 * kGiB);
  EXPECT_EQ(Read(R"({"pool_bytes": "1.5 G"})").pool_bytes(), 3 * kGiB / 2);
  EXPECT_EQ(Read(R"({"pool_bytes": "8589934592"})").pool_bytes(), 8 * kGiB);
  EXPECT_EQ(Read(R"({"drain_limit_ms": "10s"})").drain_limit_ms(), 10'000u);
  EXPECT_EQ(Read(R"({"drain_limit_ms": "2m"})").drain_limit_ms(), 120'000u);
  EXPECT_EQ(Read(R"({"drain_limit_ms": 250})").drain_limit_ms(), 250u);
  EXPECT_EQ(Read(R"({"max_sessions": "7"})").max_sessions(), 7u);
  EXPECT_EQ(Read(R"({"tenants": [{"soft_limit_bytes": "2MiB"}]})").tenants(0).soft_limit_bytes(),
            2 * kMiB);
}

TEST(JsonConfig, Comments) {
  const DaemonConfig message = Read(
      "// first\n{ # second\n  /* a block\n * of // lines */ \"device\": /**/ \"cpu\" // "
      "last\n}\n#");
  EXPECT_EQ(message.device(), "cpu");
  EXPECT_EQ(Read(R"({"tls_key_file": "//a#b/*c*/"})").tls_key_file(), "//a#b/*c*/");
  EXPECT_EQ(JsonErrorOf("{\n  /* no end"), "2:3: this comment has no end");
  EXPECT_THAT(JsonErrorOf("{} / "), StartsWith("1:4: "));
}

TEST(JsonConfig, EscapesAndUnicode) {
  EXPECT_EQ(Read(R"({"device": "\"\\\/\b\f\n\r\t"})").device(), "\"\\/\b\f\n\r\t");
  EXPECT_EQ(Read(R"({"device": "\u0041\u00e4\u20AC\uD83D\uDE00"})").device(), "Aä€😀");
  EXPECT_EQ(Read("{\"device\": \"ä€😀\"}").device(), "ä€😀");
  EXPECT_EQ(Read(R"({"\u0064evice": "cpu"})").device(), "cpu");
  for (const char* text : {R"(\x)", R"(\u12)", R"(\u12g4)", R"(\ud800)", R"(\ud800\u0041)",
                           R"(\udc00)", R"(\u0000)", "\x01", "\n", "\xff", "\xc3", R"(\)"}) {
    EXPECT_THAT(JsonErrorOf(Concat("{\"device\": \"", text, "\"}")), StartsWith("1:")) << text;
  }
}

TEST(JsonConfig, NullLeavesAFieldOut) {
  const DaemonConfig message =
      Read(R"({"device": null, "listen": null, "tenants": [{"token": null}]})");
  EXPECT_FALSE(message.has_device());
  EXPECT_FALSE(message.tenants(0).has_token());
}

TEST(JsonConfig, NamesInBothSpellings) {
  EXPECT_EQ(Read(R"({"poolBytes": 4096})").pool_bytes(), 4096u);
  EXPECT_EQ(JsonErrorOf("{\"pool_bytes\": 1,\n \"poolBytes\": 2}"),
            "2:2: pool_bytes: is given twice; the first is at 1:16");
}

TEST(JsonConfig, UnknownFieldsAreNamedWithAGuess) {
  EXPECT_EQ(JsonErrorOf("{\n  \"pool_byte\": 1\n}"),
            "2:3: \"pool_byte\" is not a field; did you mean \"pool_bytes\"?");
  EXPECT_EQ(JsonErrorOf(R"({"tenants": [{"name": "a"}, {"nam": "b"}]})"),
            "1:30: tenants[1].\"nam\" is not a field; did you mean \"name\"?");
  EXPECT_THAT(JsonErrorOf(R"({"tenants": [{"quota": 1}]})"),
              HasSubstr("the fields are name, token, token_file, soft_limit_bytes"));
}

TEST(JsonConfig, ValuesOfTheWrongTypeAreNamed) {
  EXPECT_EQ(JsonErrorOf(R"({"device": 3})"),
            "1:12: device: expected text in quotes, found a number");
  EXPECT_EQ(JsonErrorOf(R"({"allow_core_dumps": "true"})"),
            "1:22: allow_core_dumps: expected true or false, found text in quotes");
  EXPECT_EQ(JsonErrorOf(R"({"max_sessions": true})"),
            "1:18: max_sessions: expected a number, found true");
  EXPECT_EQ(JsonErrorOf(R"({"listen": "unix:/a"})"),
            "1:12: listen: expected '[', found text in quotes");
  EXPECT_EQ(JsonErrorOf(R"({"listen": ["a", {}]})"),
            "1:18: listen[1]: expected text in quotes, found '{'");
  EXPECT_EQ(JsonErrorOf(R"({"tenants": {}})"), "1:13: tenants: expected '[', found '{'");
  EXPECT_EQ(JsonErrorOf(R"({"tenants": [1]})"), "1:14: tenants[0]: expected '{', found a number");
  EXPECT_THAT(JsonErrorOf(R"({"pool_bytes": "8GB"})"),
              HasSubstr("pool_bytes: \"8GB\" is not a byte"));
  EXPECT_THAT(JsonErrorOf(R"({"drain_limit_ms": "10x"})"),
              HasSubstr("drain_limit_ms: \"10x\" is not"));
  EXPECT_THAT(JsonErrorOf(R"({"max_sessions": 4294967296})"), HasSubstr("limit of 4294967295"));
  EXPECT_THAT(JsonErrorOf(R"({"prefix_hash_seed": 18446744073709551616})"),
              HasSubstr("the limit of"));
  for (const char* number : {"-1", "1.0", "8.589934592e+09", "1e3"}) {
    EXPECT_THAT(JsonErrorOf(Concat("{\"pool_bytes\": ", number, "}")),
                HasSubstr(Concat("pool_bytes: \"", number, "\" is not a whole number")));
  }
}

TEST(JsonConfig, WhatIsNotJsonIsRefusedWithItsPlace) {
  EXPECT_EQ(JsonErrorOf(""), "1:1: expected '{', found the end of the file");
  EXPECT_EQ(JsonErrorOf("[]"), "1:1: expected '{', found '['");
  EXPECT_EQ(JsonErrorOf("null"), "1:1: expected '{', found null");
  EXPECT_EQ(JsonErrorOf("{"), "1:2: expected the name of a field, found the end of the file");
  EXPECT_EQ(JsonErrorOf("{} {}"), "1:4: expected the end of the file, found '{'");
  EXPECT_EQ(JsonErrorOf("{\"device\": \"cpu\",\n}"), "2:1: a comma before the end; remove it");
  EXPECT_EQ(JsonErrorOf("{\"listen\": [\"a\",]}"),
            "1:17: listen: a comma before the end; remove it");
  EXPECT_EQ(JsonErrorOf("{\"device\" \"cpu\"}"),
            "1:11: device: expected ':', found text in quotes");
  EXPECT_EQ(JsonErrorOf("{\"device\": \"cpu\" \"listen\": []}"),
            "1:18: expected ',' or '}', found text in quotes");
  EXPECT_EQ(JsonErrorOf("{device: \"cpu\"}"),
            "1:2: this is not true, false, null or a number; text needs quotes");
  EXPECT_EQ(JsonErrorOf("{\"pool_bytes\": 8GiB}"),
            "1:16: this is no number; sizes, times and file modes need quotes");
  EXPECT_EQ(JsonErrorOf("{\"unix_socket_mode\": 0660}"),
            "1:22: this is no number; sizes, times and file modes need quotes");
  EXPECT_EQ(JsonErrorOf("{'device': 'cpu'}"), "1:2: text needs double quotes");
  EXPECT_EQ(JsonErrorOf("{\"device\": \"cpu\n\"}"),
            "1:12: this text has no closing quote in its line");
  EXPECT_EQ(JsonErrorOf("{\"device\": \"cpu"), "1:12: this text has no closing quote");
  for (const char* number : {"01", "1.", ".5", "1e", "--1", "+1", "1_000", "0x10"}) {
    EXPECT_THAT(JsonErrorOf(Concat("{\"pool_bytes\": ", number, "}")), StartsWith("1:16: "))
        << number;
  }
}

TEST(JsonConfig, ColumnsCountCharacters) {
  EXPECT_THAT(JsonErrorOf("{\"device\": \"ä€😀\", x}"), StartsWith("1:19: "));
}

TEST(JsonConfig, ErrorsDoNotContainTokens) {
  for (const char* value : {"12345678", "s3cret", "\"s3cret", "\"s3cret\\x\"", "\"s3cret\" 1",
                            "[\"s3cret\"]", "\"s3cret\", \"token\": \"s3cret\""}) {
    const std::string error = JsonErrorOf(Concat("{\"tenants\": [{\"token\": ", value, "}]}"));
    EXPECT_THAT(error, StartsWith("1:")) << value;
    EXPECT_THAT(error, Not(HasSubstr("s3cret"))) << value;
    EXPECT_THAT(error, Not(HasSubstr("12345678"))) << value;
  }
}

TEST(FieldPlaces, LocatesErrorsThatNameAField) {
  DaemonConfig message;
  FieldPlaces places;
  ASSERT_TRUE(FromJson("{\n \"device\": \"cpu\",\n \"tenants\": [{\"name\": \"a\"},\n"
                       "   {\"name\": \"b\"}]}",
                       &message, &places)
                  .ok());
  const auto located = [&places](std::string_view text) {
    return std::string(places.Locate(absl::FailedPreconditionError(Concat(text))).message());
  };
  EXPECT_EQ(located("device: is bad"), "2:12: device: is bad");
  EXPECT_EQ(located("tenants[1].name: is bad"), "4:13: tenants[1].name: is bad");
  EXPECT_EQ(located("tenants[1].name of x: is bad"), "4:13: tenants[1].name of x: is bad");
  EXPECT_EQ(located("listen: is bad"), "listen: is bad");
  EXPECT_TRUE(places.Locate(absl::OkStatus()).ok());
  places.Remove("device");
  EXPECT_EQ(located("device: is bad"), "device: is bad");
}

}  // namespace
}  // namespace tessera::config
