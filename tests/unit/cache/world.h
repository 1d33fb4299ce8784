// A small node with tenants whose state tests can inspect completely, and its two kinds of users: a
// worker that writes tails and commits, and a reader that resolves lanes by the mapped protocol.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "daemon/cache/sequence/sequence.h"
#include "daemon/cache/tenant/session_state.h"
#include "daemon/cache/tenant/tenant.h"
#include "daemon/device/cpu_device.h"
#include "daemon/device/host_memory.h"
#include "gtest/gtest.h"
#include "kernels/dispatch/implementation.h"
#include "proto/shm/pin.h"
#include "proto/shm/resolve.h"
#include "tests/fakes/fake_clock.h"
#include "tests/unit/cache/rows.h"

namespace tessera::cache {

inline constexpr std::uint64_t kTestPoolExtent = 1024 * 1024;
inline constexpr std::uint64_t kTestDirectoryExtent = 512 * 1024;
inline constexpr std::uint64_t kTestTailExtent = 64 * 1024;
inline constexpr std::uint64_t kTestStaging = 64 * 1024;
inline constexpr Clock::Duration kTestPinLimit = std::chrono::seconds(5);

inline ModelSpec SmallModel(const std::string& name, std::uint32_t layers, std::uint32_t kv_heads,
                            kernels::ElementType type = kernels::ElementType::kBf16) {
  ModelSpec spec = {.name = name, .type = type};
  spec.layers.assign(layers, {.query_heads = 2 * kv_heads, .kv_heads = kv_heads, .head_dim = 64});
  return spec;
}

// Layers that differ in every respect.
inline ModelSpec MixedModel(const std::string& name, kernels::ElementType type) {
  ModelSpec spec = {.name = name, .type = type};
  spec.layers = {{.query_heads = 2, .kv_heads = 2, .head_dim = 64},
                 {.query_heads = 4, .kv_heads = 1, .head_dim = 128},
                 {.query_heads = 3, .kv_heads = 3, .head_dim = 64}};
  return spec;
}

class World {
 public:
  struct Options {
    std::uint64_t node_limit = 0;
    std::uint64_t tenant_limit = 0;
    std::uint32_t ring_tiles = 2;
    std::uint32_t tenants = 1;
    std::uint32_t max_models = 8;
    std::uint32_t max_sequences = 100000;
    std::uint32_t max_prefixes = 1000;
    device::Device* device = nullptr;  // null: the CPU
    std::uint64_t pool_extent_bytes = kTestPoolExtent;
    std::uint64_t raw_copy_bytes = 0;                        // of the node; 0: unlimited
    std::uint64_t host_tier_bytes = std::uint64_t{1} << 30;  // of the node; 0: none
    BlockEventSink* blocks = nullptr;
  };
  explicit World(const Options& options)
      : pool_extent_bytes_(options.pool_extent_bytes),
        node_("node", options.node_limit),
        raw_copies_("raw copies", options.raw_copy_bytes),
        host_tier_(options.host_tier_bytes) {
    for (std::uint32_t i = 0; i < options.tenants; ++i) {
      absl::StatusOr<std::unique_ptr<Tenant>> tenant =
          Tenant::Create({.id = TenantId(i + 1),
                          .name = "tenant-" + std::to_string(i + 1),
                          .hard_limit_bytes = options.tenant_limit,
                          .pool_extent_bytes = pool_extent_bytes_,
                          .pool_limit_bytes = 256 * pool_extent_bytes_,
                          .directory_extent_bytes = kTestDirectoryExtent,
                          .instance = 42,
                          .ring_tiles = options.ring_tiles,
                          .staging_bytes = kTestStaging,
                          .tail_extent_bytes = kTestTailExtent,
                          .max_models = options.max_models,
                          .max_sequences = options.max_sequences,
                          .max_prefixes = options.max_prefixes,
                          .pin_limit = kTestPinLimit,
                          .node = &node_,
                          .host_rows = &raw_copies_,
                          .host_tier = &host_tier_,
                          .device = options.device == nullptr ? &cpu_ : options.device,
                          .directory_memory = &directories_,
                          .clock = &clock_,
                          .on_attention = [this] { attention_.fetch_add(1); },
                          .blocks = options.blocks});
      EXPECT_TRUE(tenant.ok()) << tenant.status();
      tenants_.push_back(*std::move(tenant));
    }
  }
  World() : World(Options{}) {}

  Tenant& tenant(std::size_t i = 0) { return *tenants_[i]; }
  FakeClock& clock() { return clock_; }
  const pool::Account& node() const { return node_; }
  pool::Account& raw_copies() { return raw_copies_; }
  const tiers::HostTier& host_tier() const { return host_tier_; }
  int attention() const { return attention_.load(); }

  std::shared_ptr<SessionState> OpenSession(std::size_t i = 0) {
    absl::StatusOr<std::shared_ptr<SessionState>> session =
        tenant(i).OpenSession({.worker_name = "test"});
    EXPECT_TRUE(session.ok()) << session.status();
    return *session;
  }
  std::shared_ptr<const Model> Register(ModelSpec spec, std::size_t i = 0) {
    absl::StatusOr<std::shared_ptr<const Model>> model =
        tenant(i).RegisterModel(std::move(spec), SessionId());
    EXPECT_TRUE(model.ok()) << model.status();
    return *model;
  }
  std::shared_ptr<Sequence> NewSequence(SessionState& session, const Model& model,
                                        std::size_t i = 0) {
    absl::StatusOr<std::shared_ptr<Sequence>> sequence =
        tenant(i).CreateSequence(session, model.id());
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return *sequence;
  }

  // Checks that all accounts agree.
  void Validate() {
    std::uint64_t expected_node = 0;
    std::uint64_t offloaded = 0;
    for (const std::unique_ptr<Tenant>& tenant : tenants_) {
      offloaded += tenant->offloaded().used_bytes();
    }
    ASSERT_EQ(host_tier_.used_bytes(), offloaded);
    for (const std::unique_ptr<Tenant>& tenant : tenants_) {
      tenant->pool().Validate();
      tenant->directory().pool().Validate();
      const pool::Account& account = tenant->account();
      const auto used = [&](pool::MemoryTag tag) { return account.used_bytes(tag); };
      ASSERT_EQ(used(pool::MemoryTag::kTiles) + used(pool::MemoryTag::kTables) +
                    used(pool::MemoryTag::kRotations),
                tenant->pool().used_bytes());
      ASSERT_EQ(used(pool::MemoryTag::kSnapshots) + used(pool::MemoryTag::kSequences),
                tenant->directory().pool().used_bytes());
      std::uint64_t sum = 0;
      for (std::size_t tag = 0; tag < pool::kMemoryTags; ++tag) {
        sum += used(static_cast<pool::MemoryTag>(tag));
      }
      ASSERT_EQ(sum, account.used_bytes());
      expected_node += tenant->pool().extents() * pool_extent_bytes_ +
                       // The first extent is charged before the first session allocates it.
                       std::max(tenant->directory().pool().extents(), 1u) * kTestDirectoryExtent +
                       used(pool::MemoryTag::kTails) + used(pool::MemoryTag::kStaging) +
                       used(pool::MemoryTag::kState) + used(pool::MemoryTag::kModels) +
                       used(pool::MemoryTag::kPrefixIndex);
    }
    ASSERT_EQ(node_.used_bytes(), expected_node);
  }

  // Checks that nothing is left once every session and sequence is gone.
  void ExpectBaseline() {
    for (const std::unique_ptr<Tenant>& tenant : tenants_) {
      EXPECT_EQ(tenant->epochs().Collect(), std::nullopt);
      EXPECT_EQ(tenant->epochs().waiting_bytes(), 0u);
      EXPECT_EQ(tenant->sequence_count(), 0u);
      for (std::size_t tag = 0; tag < pool::kMemoryTags; ++tag) {
        const auto memory_tag = static_cast<pool::MemoryTag>(tag);
        if (memory_tag == pool::MemoryTag::kModels) continue;  // Register needs no session
        EXPECT_EQ(tenant->account().used_bytes(memory_tag), 0u) << pool::TagName(memory_tag);
      }
      EXPECT_EQ(tenant->pool().used_bytes(), 0u);
      EXPECT_EQ(tenant->directory().pool().used_bytes(), 0u);
      EXPECT_LE(tenant->pool().extents(), 1u);
      EXPECT_EQ(tenant->host_rows().used_bytes(), 0u);
      EXPECT_EQ(tenant->offloaded().used_bytes(), 0u);
    }
    EXPECT_EQ(host_tier_.used_bytes(), 0u);
    Validate();
  }

 private:
  const std::uint64_t pool_extent_bytes_;
  FakeClock clock_;
  std::atomic<int> attention_{0};
  pool::Account node_;
  pool::Account raw_copies_;
  tiers::HostTier host_tier_;
  device::CpuDevice cpu_{kernels::BestImplementation()};
  device::HostMemorySource directories_{"test-directory"};
  std::vector<std::unique_ptr<Tenant>> tenants_;
};

// ---- Readers

struct SequenceView {
  std::shared_ptr<const TailHandle> tail;
  std::uint64_t committed = 0;  // 0 without a committed tail
  std::vector<kernels::SegmentView> segments;
  struct LaneOf {
    std::uint32_t layer;
    std::uint32_t kv_head;
    std::size_t first_segment;
    shm::ResolvedLane resolved;
  };
  std::vector<LaneOf> lanes;
};

// Resolves like a pinned reader: tail, committed count, then lane words. If other threads change
// the sequence, the caller compares the block's version before and after.
inline absl::StatusOr<SequenceView> ReadSequence(
    Tenant& tenant, const Sequence& sequence, const std::function<void()>& in_between = nullptr) {
  SequenceView view;
  view.tail = sequence.tail();
  if (view.tail != nullptr) view.committed = view.tail->CommittedTokens().value_or(0);
  if (in_between) in_between();
  const shm::MappedArena directory = tenant.directory().mapped();
  const shm::MappedArena pool = {tenant.pool().base(), tenant.pool().limit_bytes()};
  const shm::SequenceBlock* block = nullptr;
  const shm::Word* words = shm::LaneWords(directory, sequence.directory_offset(), &block);
  if (words == nullptr || block->sequence_id.load() != sequence.id().value()) {
    return absl::NotFoundError("the sequence is gone");
  }
  const shm::LaneLayout& layout = sequence.model().layout();
  for (std::uint32_t layer = 0; layer < layout.layers(); ++layer) {
    for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
      SequenceView::LaneOf lane = {layer, head, view.segments.size(), {}};
      if (shm::ResolveLane(words[layout.lane(layer, head)].load(), directory, pool, view.segments,
                           lane.resolved) == shm::ResolveStatus::kOutOfBounds) {
        return absl::InternalError("a snapshot is out of bounds");
      }
      view.lanes.push_back(lane);
    }
  }
  return view;
}

// Returns an empty string if the view shows exactly `stamps[layer]` in every lane, else the first
// difference.
inline std::string Differs(const SequenceView& view, const Model& model,
                           const std::vector<std::vector<std::uint64_t>>& stamps) {
  for (const SequenceView::LaneOf& lane : view.lanes) {
    const kernels::DenseTile tile = model.layout().tile(lane.layer);
    const std::vector<std::uint64_t>& expected = stamps[lane.layer];
    const std::string where =
        "layer " + std::to_string(lane.layer) + " head " + std::to_string(lane.kv_head) + ": ";
    std::uint64_t token = 0;
    const auto check = [&](const std::byte* key, const std::byte* value) {
      if (token >= expected.size()) return false;
      const std::uint64_t stamp = expected[token++];
      return IsRow(key, stamp, {lane.layer, lane.kv_head, RowKind::kKey}, tile) &&
             IsRow(value, stamp, {lane.layer, lane.kv_head, RowKind::kValue}, tile);
    };
    for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
      const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
      if (segment.first_position != token) return where + "a segment starts elsewhere";
      if (segment.entries == 0) return where + "an empty segment";
      for (std::uint32_t e = 0; e < segment.entries; ++e) {
        const std::uint64_t offset = segment.tile_offsets[e / kernels::kTileEntries];
        if (offset % 64 != 0 || offset > segment.arena_bytes - tile.bytes()) {
          return where + "a tile out of bounds";
        }
        const std::byte* at = segment.arena + offset;
        const std::uint32_t row = e % kernels::kTileEntries;
        if (!check(at + tile.key_offset(row), at + tile.value_offset(row))) {
          return where + "token " + std::to_string(token - 1) + " of segment " + std::to_string(s) +
                 " is another's";
        }
      }
    }
    if (lane.resolved.entries != token || lane.resolved.tail_start != token) {
      return where + "entries or tail_start disagree with the segments";
    }
    if (view.tail != nullptr && view.committed > token) {
      const shm::TailRing ring =
          model.layout().ring(view.tail->region().data(), lane.layer, lane.kv_head);
      if (view.committed - token > ring.capacity()) return where + "more tail than the ring holds";
      while (token < view.committed) {
        if (!check(ring.Key(token), ring.Value(token))) {
          return where + "token " + std::to_string(token - 1) + " of the tail is another's";
        }
      }
    }
    if (token != expected.size()) {
      return where + "shows " + std::to_string(token) + " tokens, not " +
             std::to_string(expected.size());
    }
  }
  return "";
}

// ---- Workers

class TestWorker {
 public:
  TestWorker(Tenant& tenant, std::shared_ptr<SessionState> session)
      : tenant_(tenant), session_(std::move(session)) {}

  SessionState& session() const { return *session_; }
  const std::shared_ptr<SessionState>& shared_session() const { return session_; }

  struct OpenTail {
    Tenant::TailPlace place;
    std::byte* region;
  };

  absl::StatusOr<OpenTail> Open(const Sequence& sequence) {
    absl::StatusOr<std::vector<Tenant::TailPlace>> places =
        tenant_.OpenTails(*session_, {sequence.id()});
    if (!places.ok()) return places.status();
    const Tenant::TailPlace& place = places->front();
    return OpenTail{place, Map(place.tail.extent) + place.tail.offset};
  }

  // Whether the protocol allows writing this token: only into free ring space.
  bool HasRoom(const Sequence& sequence, std::uint64_t token) const {
    return token < Block(sequence).ring_start.load() + sequence.model().layout().ring_capacity();
  }
  void Write(const Sequence& sequence, const OpenTail& tail, std::uint64_t token,
             std::uint64_t stamp) {
    const shm::LaneLayout& layout = sequence.model().layout();
    std::byte key[256 * 4], value[256 * 4];
    for (std::uint32_t layer = 0; layer < layout.layers(); ++layer) {
      for (std::uint32_t head = 0; head < layout.kv_heads(layer); ++head) {
        MakeRow(stamp, {layer, head, RowKind::kKey}, layout.tile(layer), key);
        MakeRow(stamp, {layer, head, RowKind::kValue}, layout.tile(layer), value);
        shm::StoreRow(layout.ring(tail.region, layer, head), token, key, value);
      }
    }
  }
  void Commit(const OpenTail& tail, std::uint64_t tokens) {
    Commit(tail, tail.place.tail.generation, tokens);
  }
  void Commit(const OpenTail& tail, std::uint32_t generation, std::uint64_t tokens) {
    session_->control()->page().commits[tail.place.tail.commit_slot].store(
        shm::CommitWord::Pack(generation, tokens), std::memory_order_release);
  }
  const shm::SequenceBlock& Block(const Sequence& sequence) const {
    return *reinterpret_cast<const shm::SequenceBlock*>(tenant_.directory().mapped().base +
                                                        sequence.directory_offset());
  }

  // Drops the mappings of extents that the daemon has released.
  void Unmap(const std::vector<std::uint32_t>& extents) {
    for (std::uint32_t extent : extents) mappings_.erase(extent);
  }

 private:
  std::byte* Map(std::uint32_t extent) {
    AddressRange& range = mappings_[extent];
    if (!range.valid()) {
      const absl::StatusOr<device::Export> share = session_->tails().Share(extent);
      EXPECT_TRUE(share.ok()) << share.status();
      absl::StatusOr<AddressRange> mapped =
          AddressRange::Map(share->fd.get(), share->bytes, Access::kReadWrite);
      EXPECT_TRUE(mapped.ok()) << mapped.status();
      range = *std::move(mapped);
    }
    return range.data();
  }

  Tenant& tenant_;
  std::shared_ptr<SessionState> session_;
  std::unordered_map<std::uint32_t, AddressRange> mappings_;
};

// Stamps that no other token has.
inline std::vector<std::uint64_t> NewStamps(std::uint64_t count) {
  static std::atomic<std::uint64_t> next{1};
  std::vector<std::uint64_t> stamps(count);
  for (std::uint64_t& stamp : stamps) stamp = next.fetch_add(1);
  return stamps;
}

// Appends to all layers of a sequence with `held` tokens.
inline absl::StatusOr<std::uint64_t> AppendAll(Sequence& sequence, std::uint64_t held,
                                               const std::vector<std::uint64_t>& stamps) {
  return sequence.Append({.first_layer = 0,
                          .layers = sequence.model().layers(),
                          .first_token = held,
                          .tokens = stamps.size()},
                         StampedRows(sequence.model().layout(), stamps));
}

}  // namespace tessera::cache
