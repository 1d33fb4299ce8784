#include "daemon/cluster/events/event_encoder.h"

#include <algorithm>
#include <msgpack.hpp>
#include <optional>
#include <span>

namespace tessera::cluster {
namespace {

using cache::BlockEvent;
using config::EventEncoding;
using Packer = msgpack::packer<msgpack::sbuffer>;

// The events from the first on that one event of the wire says.
std::span<const BlockEvent> Together(std::span<const BlockEvent> events) {
  std::size_t count = 1;
  while (count < events.size() && events[count].stored == events[0].stored &&
         (!events[0].stored || events[count].parent == events[count - 1].hash)) {
    ++count;
  }
  return events.first(count);
}

class Encoder {
 public:
  Encoder(Packer& packer, EventEncoding encoding, std::string_view medium)
      : packer_(packer), encoding_(encoding), medium_(medium) {}

  void Cleared() { Begin("AllBlocksCleared", 0); }

  void Stored(std::span<const BlockEvent> blocks) {
    Begin("BlockStored", 7);
    Hashes(blocks);
    Name("parent_block_hash");
    if (blocks[0].parent.has_value()) {
      packer_.pack(*blocks[0].parent);
    } else {
      packer_.pack_nil();
    }
    Name("token_ids");
    packer_.pack_array(static_cast<std::uint32_t>(blocks.size() * cache::kPrefixBlock));
    for (const BlockEvent& block : blocks) {
      for (const std::uint32_t id : block.ids) packer_.pack(id);
    }
    Name("block_size");
    packer_.pack(static_cast<std::uint32_t>(cache::kPrefixBlock));
    Name("lora_id");
    packer_.pack_nil();
    Medium();
    Name("lora_name");
    packer_.pack_nil();
  }

  void Removed(std::span<const BlockEvent> blocks) {
    Begin("BlockRemoved", 2);
    Hashes(blocks);
    Medium();
  }

 private:
  void Begin(std::string_view type, std::uint32_t fields) {
    if (encoding_ == EventEncoding::kMap) {
      packer_.pack_map(fields + 1);
    } else {
      packer_.pack_array(fields + 1);
    }
    Name("type");
    Text(type);
  }
  // Fields of an array have no names.
  void Name(std::string_view name) {
    if (encoding_ == EventEncoding::kMap) Text(name);
  }
  void Text(std::string_view text) {
    packer_.pack_str(static_cast<std::uint32_t>(text.size()));
    packer_.pack_str_body(text.data(), static_cast<std::uint32_t>(text.size()));
  }
  void Hashes(std::span<const BlockEvent> blocks) {
    Name("block_hashes");
    packer_.pack_array(static_cast<std::uint32_t>(blocks.size()));
    for (const BlockEvent& block : blocks) packer_.pack(block.hash);
  }
  void Medium() {
    Name("medium");
    Text(medium_);
  }

  Packer& packer_;
  const EventEncoding encoding_;
  const std::string_view medium_;
};

}  // namespace

std::string Encode(const EventBatch& batch, EventEncoding encoding, std::string_view medium) {
  std::vector<std::span<const BlockEvent>> events;
  for (std::span<const BlockEvent> rest = batch.events; !rest.empty();) {
    events.push_back(Together(rest));
    rest = rest.subspan(events.back().size());
  }
  msgpack::sbuffer bytes;
  Packer packer(bytes);
  Encoder encoder(packer, encoding, medium);
  packer.pack_array(3);
  packer.pack(batch.time);
  packer.pack_array(static_cast<std::uint32_t>(events.size() + (batch.cleared ? 1 : 0)));
  if (batch.cleared) encoder.Cleared();
  for (const std::span<const BlockEvent> blocks : events) {
    if (blocks[0].stored) {
      encoder.Stored(blocks);
    } else {
      encoder.Removed(blocks);
    }
  }
  packer.pack(0);
  return std::string(bytes.data(), bytes.size());
}

}  // namespace tessera::cluster
