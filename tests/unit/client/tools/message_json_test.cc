#include "client/json/message_json.h"

#include <gtest/gtest.h>

#include <limits>

#include "tessera/v1/admin.pb.h"

namespace tessera::cli {
namespace {

TEST(MessageJsonTest, NumbersAreNumbersAndWordsAreShort) {
  v1::SequenceInfo sequence;
  sequence.set_sequence_id((std::uint64_t{1} << 48) + 51);
  sequence.set_tenant("a\"b\n");
  sequence.set_state(v1::SEQUENCE_STATE_OFFLOADED);
  sequence.set_tile_bytes(std::numeric_limits<std::uint64_t>::max());
  v1::SegmentRun& run = *sequence.add_form();
  run.set_summary(v1::BLOCK_SUMMARY_MIN_MAX);
  run.set_key_loss(0.25);
  EXPECT_EQ(client::JsonOf(sequence),
            "{\"id\":\"s51\",\"sequence_id\":281474976710707,\"tenant\":\"a\\\"b\\u000a\","
            "\"owner_session_id\":0,\"model\":\"\",\"policy\":\"\",\"state\":\"offloaded\","
            "\"tokens\":0,\"decoding\":false,\"tile_bytes\":18446744073709551615,"
            "\"form\":[{\"segments\":0,\"entries\":0,\"format\":\"\",\"channels\":0,"
            "\"kept_channels\":0,\"group\":0,\"summary\":\"min_max\",\"block\":0,\"tile_bytes\":0,"
            "\"rotation_bytes\":0,\"provisional\":false,\"key_loss\":0.25,\"value_loss\":0,"
            "\"value_channels\":0,\"value_kept_channels\":0,\"first_position\":0,"
            "\"table_bytes\":0,\"summary_bytes\":0}],\"offloaded_bytes\":0}");
}

TEST(MessageJsonTest, MapsAreObjectsAndAbsentMessagesAreNull) {
  v1::TenantStats tenant;
  (*tenant.mutable_used_bytes_by_tag())["tiles"] = 5;
  (*tenant.mutable_used_bytes_by_tag())["tails"] = 6;
  EXPECT_NE(client::JsonOf(tenant).find("\"used_bytes_by_tag\":{\"tails\":6,\"tiles\":5}"),
            std::string::npos);
  EXPECT_NE(client::JsonOf(v1::DescribeResponse()).find("\"selection\":null"), std::string::npos);
  EXPECT_NE(client::JsonOf(v1::StatsResponse()).find("\"tenants\":[]"), std::string::npos);
}

TEST(MessageJsonTest, NumbersThatJsonLacksAreNull) {
  v1::StatsResponse stats;
  stats.set_uptime_seconds(std::numeric_limits<double>::infinity());
  EXPECT_NE(client::JsonOf(stats).find("\"uptime_seconds\":null"), std::string::npos);
}

}  // namespace
}  // namespace tessera::cli
