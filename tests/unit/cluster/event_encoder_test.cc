#include "daemon/cluster/events/event_encoder.h"

#include <gmock/gmock.h>

#include <msgpack.hpp>
#include <sstream>
#include <string>

#include "tests/unit/cluster/blocks.h"

namespace tessera::cluster {
namespace {

using config::EventEncoding;
using ::testing::HasSubstr;

std::string Decoded(const std::string& bytes) {
  const msgpack::object_handle handle = msgpack::unpack(bytes.data(), bytes.size());
  std::ostringstream text;
  text << handle.get();
  return text.str();
}

std::string IdsOf(std::initializer_list<std::uint64_t> hashes) {
  std::string text;
  for (const std::uint64_t hash : hashes) {
    for (std::uint64_t i = 0; i < 32; ++i) {
      text += (text.empty() ? "" : ",") + std::to_string(1000 * hash + i);
    }
  }
  return "[" + text + "]";
}

TEST(EventEncoder, MapsNameTheirFields) {
  const EventBatch batch = {
      .time = 1.5, .cleared = true, .events = {Stored(7), Stored(8, 7), Removed(3), Removed(4)}};
  EXPECT_EQ(Decoded(Encode(batch, EventEncoding::kMap, "CPU")),
            "[1.5,[{\"type\":\"AllBlocksCleared\"},"
            "{\"type\":\"BlockStored\",\"block_hashes\":[7,8],\"parent_block_hash\":null,"
            "\"token_ids\":" +
                IdsOf({7, 8}) +
                ",\"block_size\":32,\"lora_id\":null,\"medium\":\"CPU\",\"lora_name\":null},"
                "{\"type\":\"BlockRemoved\",\"block_hashes\":[3,4],\"medium\":\"CPU\"}],0]");
}

TEST(EventEncoder, ArraysHaveThemInOrder) {
  const EventBatch batch = {.time = 2, .cleared = true, .events = {Stored(9, 2), Removed(1)}};
  EXPECT_EQ(Decoded(Encode(batch, EventEncoding::kArray, "GPU")),
            "[2,[[\"AllBlocksCleared\"],[\"BlockStored\",[9],2," + IdsOf({9}) +
                ",32,null,\"GPU\",null],[\"BlockRemoved\",[1],\"GPU\"]],0]");
}

// Bytes by hand, from the specification of MessagePack.
TEST(EventEncoder, WritesTheBytesOfTheSpecification) {
  const EventBatch batch = {.time = 0.5, .cleared = false, .events = {Removed(0x1122334455667788)}};
  std::string expected = "\x93\xcb\x3f\xe0";
  expected += std::string(6, '\0') + "\x91\x93\xac" + "BlockRemoved" +
              "\x91\xcf\x11\x22\x33\x44\x55\x66\x77\x88" + "\xa3" + "CPU";
  expected += '\0';
  EXPECT_EQ(Encode(batch, EventEncoding::kArray, "CPU"), expected);
}

TEST(EventEncoder, BlocksOfDifferentParentsAreEventsOfTheirOwn) {
  const EventBatch batch = {
      .time = 0, .cleared = false, .events = {Stored(5), Stored(6, 5), Stored(7, 5), Stored(8)}};
  const std::string text = Decoded(Encode(batch, EventEncoding::kArray, "CPU"));
  EXPECT_THAT(text, HasSubstr("[5,6],null"));
  EXPECT_THAT(text, HasSubstr("[7],5"));
  EXPECT_THAT(text, HasSubstr("[8],null"));
}

TEST(EventEncoder, ABatchMayBeEmpty) {
  EXPECT_EQ(
      Decoded(Encode({.time = 0, .cleared = false, .events = {}}, EventEncoding::kMap, "CPU")),
      "[0,[],0]");
}

}  // namespace
}  // namespace tessera::cluster
