#include "daemon/config/flags.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"

namespace tessera::config {
namespace {

using tessera::v1::DaemonConfig;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::StatusOr<Flags> Parse(std::initializer_list<std::string_view> args) {
  return ParseFlags(std::vector<std::string_view>(args));
}

std::string ErrorOf(std::initializer_list<std::string_view> args) {
  const auto flags = Parse(args);
  if (flags.ok()) return "(no error)";
  EXPECT_EQ(flags.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(flags.status().message());
}

TEST(Flags, TakeBothForms) {
  const auto flags = Parse({"--device=cpu", "--pool-bytes", "512MiB", "--config", "a.json"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_EQ(flags->overrides.device(), "cpu");
  EXPECT_EQ(flags->overrides.pool_bytes(), 512 * kMiB);
  EXPECT_EQ(Parse({"--drain-limit-ms=1.5s"})->overrides.drain_limit_ms(), 1500u);
  EXPECT_EQ(flags->config_file, "a.json");
  EXPECT_EQ(flags->action, Flags::Action::kRun);
}

TEST(Flags, WhatIsNotGivenStaysAbsent) {
  const auto flags = Parse({"--metrics="});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_TRUE(flags->overrides.has_metrics_address());
  EXPECT_FALSE(flags->overrides.has_pool_bytes());
  EXPECT_FALSE(flags->config_file.has_value());
}

TEST(Flags, ListenRepeatsAndSplits) {
  const auto flags = Parse({"--listen=unix:/a, unix:/b", "--listen", "localhost:1"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_THAT(flags->overrides.listen(), ElementsAre("unix:/a", "unix:/b", "localhost:1"));
}

TEST(Flags, TheLastOfAScalarWins) {
  EXPECT_EQ(Parse({"--log-level=debug", "--log-level=error"})->overrides.log_level(), "error");
}

TEST(Flags, Actions) {
  EXPECT_EQ(Parse({"--help"})->action, Flags::Action::kHelp);
  EXPECT_EQ(Parse({"-h"})->action, Flags::Action::kHelp);
  EXPECT_EQ(Parse({"--version"})->action, Flags::Action::kVersion);
  EXPECT_EQ(Parse({"--print-config", "--device=cpu"})->action, Flags::Action::kPrintConfig);
  EXPECT_EQ(Parse({"--check-config", "--device=cpu"})->action, Flags::Action::kCheckConfig);
  EXPECT_EQ(Parse({"--print-policies", "--nonsense"})->action, Flags::Action::kPrintPolicies);
  EXPECT_EQ(Parse({"--help", "--nonsense"})->action, Flags::Action::kHelp);
}

TEST(Flags, PrepareDirectory) {
  const auto flags = Parse({"--prepare-directory=/run/x", "--owner=65532:27", "--mode", "2770"});
  ASSERT_TRUE(flags.ok()) << flags.status();
  EXPECT_EQ(flags->action, Flags::Action::kPrepareDirectory);
  EXPECT_EQ(flags->directory,
            (DirectoryRequest{.path = "/run/x", .uid = 65532, .gid = 27, .mode = 02770}));
  EXPECT_EQ(Parse({"--prepare-directory=/run/x", "--owner=1:2"})->directory.mode, 0750u);
  EXPECT_THAT(ErrorOf({"--prepare-directory=/run/x"}), HasSubstr("needs --owner=UID:GID"));
  EXPECT_THAT(ErrorOf({"--owner=1:2"}), HasSubstr("--owner is for --prepare-directory only"));
  EXPECT_THAT(ErrorOf({"--mode=0700"}), HasSubstr("--mode is for --prepare-directory only"));
  for (const char* owner :
       {"tessera", "1", "1:", ":1", "1:2:3", "-1:2", "4294967295:1", "root:0"}) {
    EXPECT_THAT(ErrorOf({"--prepare-directory=/x", "--owner", owner}),
                HasSubstr("is not UID:GID with two numbers"))
        << owner;
  }
  for (const char* mode : {"0050", "0600", "4750", "rwx", "0888"}) {
    EXPECT_THAT(ErrorOf({"--prepare-directory=/x", "--owner=1:2", "--mode", mode}),
                HasSubstr("--mode: "))
        << mode;
  }
  for (const char* other : {"--device=cpu", "--config=x", "--check-config"}) {
    EXPECT_THAT(ErrorOf({"--prepare-directory=/x", "--owner=1:2", other}),
                HasSubstr("takes only --owner and --mode"))
        << other;
  }
}

TEST(Flags, ErrorsNameTheArgument) {
  EXPECT_THAT(ErrorOf({"--pool-byte=1"}), AllOf(HasSubstr("--pool-byte is not a flag"),
                                                HasSubstr("did you mean \"pool-bytes\"?")));
  EXPECT_THAT(ErrorOf({"serve"}), HasSubstr("\"serve\" is not a flag"));
  EXPECT_THAT(ErrorOf({"--"}), HasSubstr("\"--\" is not a flag"));
  EXPECT_THAT(ErrorOf({"--device"}), HasSubstr("--device needs a value"));
  EXPECT_THAT(ErrorOf({"--help=yes"}), HasSubstr("--help takes no value"));
  EXPECT_THAT(ErrorOf({"--config=a", "--config=b"}), HasSubstr("\"a\" and \"b\""));
  EXPECT_THAT(ErrorOf({"--pool-bytes=many"}), HasSubstr("--pool-bytes: \"many\""));
  EXPECT_THAT(ErrorOf({"--max-sessions=4294967296"}), HasSubstr("4294967295"));
  EXPECT_THAT(ErrorOf({"--max-sessions="}), HasSubstr("--max-sessions: \"\""));
  EXPECT_THAT(ErrorOf({"--max-sessions=-1"}), HasSubstr("\"-1\""));
  EXPECT_THAT(ErrorOf({"--allow-core-dumps=1"}), HasSubstr("\"1\" is not true or false"));
}

// The JSON of --print-config cannot hold other bytes, so it would be another configuration.
TEST(Flags, ValuesAreUtf8) {
  EXPECT_THAT(ErrorOf({"--listen=unix:/run/\x93.sock"}), HasSubstr("--listen is"));
  EXPECT_THAT(ErrorOf({"--tls-key-file", "\xff"}), HasSubstr("not UTF-8"));
  EXPECT_EQ(Parse({"--tls-key-file=/\xc3\xa9"})->overrides.tls_key_file(), "/\xc3\xa9");
}

TEST(Flags, MergeReplacesListsAndKeepsWhatIsNotOverridden) {
  DaemonConfig file;
  file.add_listen("unix:/file");
  file.set_device("cpu");
  file.set_max_sessions(3);
  file.add_tenants()->set_name("a");
  MergeFlags(Parse({"--listen=unix:/flag", "--max-sessions=0"})->overrides, file);
  EXPECT_THAT(file.listen(), ElementsAre("unix:/flag"));
  EXPECT_EQ(file.device(), "cpu");
  EXPECT_EQ(file.max_sessions(), 0u);
  EXPECT_EQ(file.tenants_size(), 1);

  MergeFlags(DaemonConfig(), file);
  EXPECT_THAT(file.listen(), ElementsAre("unix:/flag"));

  file.add_books("/file");
  MergeFlags(Parse({"--book=/a", "--book=/b,/c"})->overrides, file);
  EXPECT_THAT(file.books(), ElementsAre("/a", "/b", "/c"));
}

// A field added to the message must also get a flag, which --help shows with its default.
TEST(Flags, EveryFieldButTenantsHasAFlagWithHelp) {
  const std::string help = HelpText();
  const auto* descriptor = DaemonConfig::descriptor();
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const auto* field = descriptor->field(i);
    if (field->name() == "tenants") continue;
    std::string flag = field->name() == "metrics_address" ? "metrics"
                       : field->name() == "books"         ? "book"
                                                          : field->name();
    std::replace(flag.begin(), flag.end(), '_', '-');
    const std::size_t at = help.find(Concat("  --", flag, "="));
    ASSERT_NE(at, std::string::npos) << flag << " is not in --help";
    EXPECT_THAT(
        help.substr(at, help.find('\n', at) - at),
        AllOf(HasSubstr("[default: "), HasSubstr(Concat("; in the file: ", field->name(), "]"))));

    const std::string value =
        field->cpp_type() == google::protobuf::FieldDescriptor::CPPTYPE_BOOL ? "true" : "7";
    const auto flags = Parse({Concat("--", flag, "=", value)});
    ASSERT_TRUE(flags.ok()) << flags.status();
    const auto* reflection = flags->overrides.GetReflection();
    EXPECT_TRUE(field->is_repeated() ? reflection->FieldSize(flags->overrides, field) == 1
                                     : reflection->HasField(flags->overrides, field))
        << flag << " sets another field";
  }
  for (const char* flag :
       {"--config", "--print-config", "--print-policies", "--version", "--help"}) {
    EXPECT_THAT(help, HasSubstr(flag));
  }
}

}  // namespace
}  // namespace tessera::config
