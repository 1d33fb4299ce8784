// The comments of config.proto state the same defaults and limits as the code.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <regex>
#include <string>

#include "daemon/base/strings.h"
#include "daemon/config/convert.h"
#include "daemon/config/limits.h"
#include "daemon/config/reload.h"

namespace tessera::config {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

// The comment block above each field of DaemonConfig, with its lines joined.
std::map<std::string, std::string> FieldComments() {
  std::ifstream file(TESSERA_CONFIG_PROTO);
  EXPECT_TRUE(file) << TESSERA_CONFIG_PROTO;
  const std::regex field(R"(^  (?:optional|repeated) \w+ (\w+) = \d+;$)");
  std::map<std::string, std::string> comments;
  std::string comment;
  for (std::string line; std::getline(file, line) && line != "}";) {
    std::smatch match;
    if (std::regex_match(line, match, field)) {
      comments[match[1]] = comment;
      comment.clear();
    } else if (const std::string_view text = Trim(line); text.starts_with("//")) {
      Append(comment, " ", Trim(text.substr(2)));
    } else {
      comment.clear();
    }
  }
  return comments;
}

// The default of each field as JSON on one line, with 64-bit numbers unquoted.
std::string DefaultOf(const google::protobuf::FieldDescriptor* field) {
  const auto message = ToMessage(Config{});
  const auto* reflection = message.GetReflection();
  using google::protobuf::FieldDescriptor;
  if (field->is_repeated()) {
    if (reflection->FieldSize(message, field) == 0) return "[]";
    return Concat("[\"", reflection->GetRepeatedString(message, field, 0), "\"]");
  }
  if (!reflection->HasField(message, field)) return "null";
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection->GetBool(message, field) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_UINT32:
      return Concat(reflection->GetUInt32(message, field));
    case FieldDescriptor::CPPTYPE_UINT64:
      return Concat(reflection->GetUInt64(message, field));
    default:
      return Concat("\"", reflection->GetString(message, field), "\"");
  }
}

TEST(Documentation, EveryCommentNamesTheDefault) {
  const auto comments = FieldComments();
  const auto* descriptor = tessera::v1::DaemonConfig::descriptor();
  ASSERT_EQ(comments.size(), static_cast<std::size_t>(descriptor->field_count()));
  for (int i = 0; i < descriptor->field_count(); ++i) {
    const auto* field = descriptor->field(i);
    if (field->name() == "tenants") continue;
    EXPECT_THAT(comments.at(field->name()), EndsWith(Concat("Default: ", DefaultOf(field))))
        << field->name();
  }
}

TEST(Documentation, CommentsNameTheLimits) {
  const auto comments = FieldComments();
  const std::map<std::string, Range> plain = {
      {"tail_ring_tiles", kTailRingTiles},
      {"max_sessions", kMaxSessions},
      {"max_sequences_per_tenant", kMaxSequencesPerTenant},
      {"max_models_per_tenant", kMaxModelsPerTenant},
      {"max_prefixes_per_tenant", kMaxPrefixesPerTenant},
      {"max_message_bytes", kMaxMessageBytes},
      {"compactor_threads", kCompactorThreads},
      {"compactor_cpus", kCompactorCpus},
      {"raw_copy_bytes", kRawCopyBytes},
      {"host_tier_bytes", kHostTierBytes},
      {"offload_idle_ms", kOffloadIdleMs},
      {"pressure_high_percent", kPressurePercent},
      {"pressure_low_percent", kPressurePercent},
      {"compactor_linger_ms", kCompactorLingerMs},
      {"pin_limit_ms", kPinLimitMs},
      {"drain_limit_ms", kDrainLimitMs},
      {"slow_call_ms", kSlowCallMs},
      {"tcp_peer_limit_ms", kTcpPeerLimitMs},
  };
  for (const auto& [field, range] : plain) {
    EXPECT_THAT(comments.at(field), HasSubstr(Concat("from ", range.min, " to ", range.max, ".")))
        << field;
  }
  const auto whole = [](std::uint64_t bytes) {  // prints "64.0 MiB" as "64 MiB"
    return std::regex_replace(FormatBytes(bytes), std::regex("\\.0 "), " ");
  };
  const std::map<std::string, Range> extents = {
      {"pool_extent_bytes", kPoolExtentBytes},
      {"staging_bytes", kStagingBytes},
      {"tail_extent_bytes", kTailExtentBytes},
      {"directory_extent_bytes", kDirectoryExtentBytes},
  };
  for (const auto& [field, range] : extents) {
    EXPECT_THAT(comments.at(field),
                HasSubstr(Concat("a multiple of ", whole(kExtentUnit), ", from ", whole(range.min),
                                 " to ", whole(range.max), ".")))
        << field;
  }
}

TEST(Documentation, CommentsSayWhatAReloadApplies) {
  for (const auto& [field, comment] : FieldComments()) {
    const bool says_so = comment.find("A reload applies it.") != std::string::npos;
    EXPECT_EQ(says_so, IsReloadable(field)) << field;
  }
}

}  // namespace
}  // namespace tessera::config
