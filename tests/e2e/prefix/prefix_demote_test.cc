// A pool too small for its published prefixes: those that nobody uses move to the host tier, are
// matched there, and come back bit for bit.

#include <gmock/gmock.h>

#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "client/tools/admin.h"
#include "tests/e2e/prefix/prefix_lanes.h"

namespace tessera {
namespace {

constexpr std::uint32_t kPrefixes = 24;
constexpr std::uint64_t kTokens = 2048;  // of each, 8 MiB
constexpr std::uint32_t kLayers = 4;
constexpr std::uint32_t kHeads = 4;
constexpr std::size_t kRow = 64;  // bf16 elements

class Demotion : public Prefixes {
 protected:
  explicit Demotion(const std::string& tier = "512MiB")
      : Prefixes(
            DaemonProcess::Start({.flags = {"--pool-extent-bytes=8MiB", "--host-tier-bytes=" + tier,
                                            "--offload-idle-ms=0"},
                                  .pool_bytes = "64MiB"})) {}

  void SetUp() override {
    Tokens::SetUp();
    Shape({.layers = kLayers, .query_heads = kHeads, .kv_heads = kHeads, .head_dim = 64});
    seed_ = random_.Bits();
  }
  // K or V of all layers, the same at every call.
  std::vector<std::uint16_t> RowsOf(std::uint32_t prefix, bool value) const {
    std::mt19937_64 random(seed_ + 2 * prefix + value);
    std::vector<std::uint16_t> rows(kLayers * kTokens * kHeads * kRow);
    for (std::size_t i = 0; i < rows.size(); i += 4) {
      const std::uint64_t bits = random() & 0xbfffbfffbfffbfff;  // below 2, all of them finite
      std::memcpy(&rows[i], &bits, sizeof bits);
    }
    return rows;
  }
  static Ids IdsOf(std::uint32_t prefix) { return Ids(kTokens, 100 + prefix); }
  client::Sequence Prompt(std::uint32_t prefix) {
    client::Sequence sequence = NewSequence("dense");
    const auto key = RowsOf(prefix, false);
    const auto value = RowsOf(prefix, true);
    const auto held =
        sequence.Append({.key = BytesOf(key), .value = BytesOf(value), .tokens = kTokens});
    EXPECT_TRUE(held.ok()) << held.status();
    return sequence;
  }
  void ExpectRows(client::Sequence& sequence, std::uint32_t prefix) {
    const auto key = RowsOf(prefix, false);
    const auto value = RowsOf(prefix, true);
    for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
      const auto rows = sequence.Read({.layer = layer});
      ASSERT_TRUE(rows.ok()) << rows.status();
      for (const client::LaneRows& lane : rows->lanes) {
        ASSERT_EQ(lane.positions.size(), kTokens);
        for (std::uint64_t token = 0; token < kTokens; ++token) {
          const std::size_t at = ((layer * kTokens + token) * kHeads + lane.kv_head) * kRow;
          const std::size_t bytes = kRow * sizeof key[0];
          ASSERT_EQ(std::memcmp(&key[at], lane.key.data() + token * bytes, bytes), 0) << token;
          ASSERT_EQ(std::memcmp(&value[at], lane.value.data() + token * bytes, bytes), 0) << token;
        }
      }
    }
  }
  void PublishAll(std::uint32_t count) {
    for (std::uint32_t i = 0; i < count; ++i) {
      client::Sequence sequence = Prompt(i);
      EXPECT_EQ(Publish(sequence, IdsOf(i)).tokens, kTokens);
    }
  }
  std::uint32_t CountFound(std::uint32_t count) {
    std::uint32_t found = 0;
    for (std::uint32_t i = 0; i < count; ++i) {
      const PrefixMatch match = Match(*mapped_, IdsOf(i));
      if (!match.found()) continue;
      EXPECT_EQ(match.tokens, kTokens);
      client::Sequence fork = Fork(*mapped_, match);
      EXPECT_EQ(fork.tokens(), kTokens);
      ExpectRows(fork, i);
      ++found;
    }
    return found;
  }
  std::vector<v1::PrefixInfo> List() {
    auto admin = cli::Admin::At({.address = daemon_->address(), .tls = std::nullopt});
    EXPECT_TRUE(admin.ok()) << admin.status();
    const auto list = admin->Prefixes(1000);
    EXPECT_TRUE(list.ok()) << list.status();
    return {list->prefixes().begin(), list->prefixes().end()};
  }
  v1::TenantStats Stats() { return client::StatsMessage(*mapped_)->tenants(0); }

  std::uint64_t seed_ = 0;
};

TEST_F(Demotion, EveryPrefixIsFoundTwiceAndBitForBit) {
  PublishAll(kPrefixes);
  for (int round = 0; round < 2; ++round) {
    EXPECT_EQ(CountFound(kPrefixes), kPrefixes) << "in round " << round;
  }
  EXPECT_EQ(Stats().prefixes(), kPrefixes);
  std::uint64_t in_pool = 0;
  std::uint64_t in_tier = 0;
  for (const v1::PrefixInfo& prefix : List()) {
    EXPECT_EQ(prefix.tile_bytes() == 0, prefix.offloaded_bytes() != 0);
    in_pool += prefix.tile_bytes();
    in_tier += prefix.offloaded_bytes();
  }
  EXPECT_GT(in_pool, 0u);
  EXPECT_EQ(in_pool + in_tier, kPrefixes * std::uint64_t{8} << 20);
  EXPECT_EQ(Stats().offloaded_bytes(), in_tier);
}

// The tier has room for six of them: the least recently used ones are dropped.
class SmallTier : public Demotion {
 protected:
  SmallTier() : Demotion("50MiB") {}
};

TEST_F(SmallTier, KeepsTheNewestAndMakesRoomForSequences) {
  PublishAll(kPrefixes);
  const std::uint32_t kept = static_cast<std::uint32_t>(Stats().prefixes());
  EXPECT_GE(kept, 6u);
  EXPECT_LT(kept, kPrefixes);
  {
    // What a session has found is kept for it, so another one asks.
    const auto other = client::Worker::Attach({.address = daemon_->address()});
    ASSERT_TRUE(other.ok()) << other.status();
    const auto model = (*other)->RegisterModel(shape_.Geometry());
    std::uint32_t found = 0;
    for (std::uint32_t i = 0; i < kPrefixes; ++i) {
      const Ids ids = IdsOf(i);
      const auto match = (*other)->Match(*model, {.tokens = ids});
      EXPECT_TRUE(match->found() || found == 0) << "older ones than " << i << " are kept";
      found += match->found();
    }
    EXPECT_GE(found, 6u);
  }
  // Nothing is lost of sequences that no worker uses for a while: prefixes give way.
  std::vector<client::Sequence> sequences;
  for (std::uint32_t i = 0; i < 10; ++i) sequences.push_back(Prompt(100 + i));
  for (std::uint32_t i = 0; i < 10; ++i) ExpectRows(sequences[i], 100 + i);
  EXPECT_LT(Stats().prefixes(), kept);
}

// A prefix whose publisher still holds it stays in the pool, and stays published.
TEST_F(Demotion, WhatASequenceSharesStays) {
  std::vector<client::Sequence> publishers;
  for (std::uint32_t i = 0; i < 3; ++i) {
    publishers.push_back(Prompt(i));
    EXPECT_EQ(Publish(publishers.back(), IdsOf(i)).tokens, kTokens);
  }
  for (std::uint32_t i = 3; i < 12; ++i) {
    client::Sequence sequence = Prompt(i);
    Publish(sequence, IdsOf(i));
  }
  EXPECT_EQ(Stats().prefixes(), 12u);
  EXPECT_EQ(CountFound(12), 12u);
  for (std::uint32_t i = 0; i < 3; ++i) ExpectRows(publishers[i], i);
}

// Segments that idle sequences share with their own prefixes can leave the pool only once those are
// dropped.
TEST_F(Demotion, PrefixesGiveWayToTheSequencesThatShareThem) {
  constexpr std::uint32_t kPublishers = 12;
  std::vector<client::Sequence> publishers;
  for (std::uint32_t i = 0; i < kPublishers; ++i) {
    publishers.push_back(Prompt(i));
    Publish(publishers.back(), IdsOf(i));
  }
  EXPECT_LT(Stats().prefixes(), kPublishers);
  EXPECT_GT(Stats().offloaded_sequences(), 0u);
  for (std::uint32_t i = 0; i < kPublishers; ++i) ExpectRows(publishers[i], i);
}

// A prompt that is computed again, and a part of one. Whether the sequence shares the copy that
// comes back depends on the room in the pool.
TEST_F(Demotion, PublishingAgainFindsWhatIsInTheTier) {
  PublishAll(16);
  std::optional<std::uint64_t> demoted;
  for (const v1::PrefixInfo& prefix : List()) {
    if (prefix.tile_bytes() == 0) demoted = prefix.prefix_id();
  }
  ASSERT_TRUE(demoted.has_value());
  std::uint32_t which = 0;
  while (which < 16 && Match(*remote_, IdsOf(which)).prefix.value() != *demoted) ++which;
  ASSERT_LT(which, 16u);
  client::Sequence again = Prompt(which);
  const PublishedPrefix published = Publish(again, IdsOf(which));
  EXPECT_EQ(published.prefix.value(), *demoted);
  EXPECT_TRUE(published.deduplicated);
  ExpectRows(again, which);
  // Another one, whose first half is published now.
  const std::uint32_t other = which == 0 ? 1 : 0;
  client::Sequence longer = Prompt(other);
  Ids half = IdsOf(other);
  half.resize(kTokens / 2);
  const PublishedPrefix part = Publish(longer, half);
  EXPECT_TRUE(part.deduplicated);
  EXPECT_EQ(Match(*remote_, half).tokens, kTokens / 2);
  ExpectRows(longer, other);
}

}  // namespace
}  // namespace tessera
