// The bytes of KV events, as vLLM's engines publish them and routers (llm-d, Dynamo) read them:
// MessagePack.
//
//   batch:  [time, [event, ...], 0]                      time: seconds since 1970
//   event:  {"type": "BlockStored", "block_hashes": [n, ...], "parent_block_hash": n or nil,
//            "token_ids": [n, ...], "block_size": 32, "lora_id": nil, "medium": "CPU" or "GPU",
//            "lora_name": nil}
//           {"type": "BlockRemoved", "block_hashes": [n, ...], "medium": "CPU" or "GPU"}
//           {"type": "AllBlocksCleared"}
//   event, in the older encoding: ["BlockStored", hashes, parent, ids, 32, nil, medium, nil] and so
//   on
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/cache/prefix/block_events.h"
#include "daemon/config/values/kv_events.h"

namespace tessera::cluster {

struct EventBatch {
  double time = 0;
  bool cleared = false;  // before the events
  std::vector<cache::BlockEvent> events;
};

// Stored blocks of which each is the parent of the next are one event, and so are removed ones in
// a row.
std::string Encode(const EventBatch& batch, config::EventEncoding encoding,
                   std::string_view medium);

}  // namespace tessera::cluster
