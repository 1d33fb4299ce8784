// `PrefixIndex` holds the token ids of published prefixes in a trie over blocks of 32 ids. A hash
// finds a node and a comparison of ids confirms it. Blocks that prefixes share are stored once.
//
//   start of a chain ── 32 ids ── 32 ids ── 32 ids     (a prefix of 96 tokens ends here)
//     (a text)             │         `───── 7 ids      (one of 71 ends here)
//                          `─ 32 ids                   (one of 64)
//
// Invariants:
// - A node holds the ids of one block. Only a leaf in which a prefix ends may have fewer than 32.
// - A node exists only while a prefix ends in it or below it, so every node can name one.
// - A node is found by its chain hash, and only if its parent and its ids match. Two blocks with
//   equal hashes are two nodes.
//
// Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "daemon/base/ids.h"
#include "daemon/cache/model/prefix_hash.h"
#include "daemon/cache/prefix/block_events.h"
#include "daemon/pool/account.h"

namespace tessera::cache {

// Identifies whose tokens are stored, and where a match may end.
struct PrefixChain {
  std::string start;            // everything that must be equal besides the ids
  bool every_boundary = false;  // a prefix also matches at each multiple of 32 tokens
  // Who finds it, for BlockEventSink; empty model: nobody is told.
  std::string model;
  std::uint32_t rank = 0;
  std::uint32_t group_size = 1;
};

class PrefixIndex {
 public:
  using Ids = std::span<const std::uint32_t>;

  struct Options {
    PrefixHash hash;
    pool::Account* account;  // charged for the nodes
  };
  explicit PrefixIndex(Options options) : options_(std::move(options)) {}
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // `ids` must not be empty, and no prefix may have exactly these ids yet (FindEnd).
  // RESOURCE_EXHAUSTED changes nothing. Appends the whole blocks that are new to `events`, if
  // given.
  absl::Status Insert(const PrefixChain& chain, Ids ids, PrefixId prefix,
                      std::vector<BlockEvent>* events = nullptr);
  // Appends the whole blocks that are gone to `events`, if given.
  void Erase(PrefixId prefix, std::vector<BlockEvent>* events = nullptr);
  // The whole blocks of each chain with a model, parents first.
  void VisitBlocks(const std::function<void(const PrefixChain& chain,
                                            const std::vector<BlockEvent>& events)>& visit) const;

  // The prefix that ends with exactly these ids; invalid if there is none.
  PrefixId FindEnd(const PrefixChain& chain, Ids ids) const;

  // The longest match: how many leading tokens of `ids`, at most `limit`, a prefix has, and one
  // such prefix.
  struct Match {
    std::uint64_t tokens = 0;
    PrefixId prefix;  // invalid: no match
  };
  Match Longest(const PrefixChain& chain, Ids ids, std::uint64_t limit) const;

  std::size_t nodes() const { return nodes_.size(); }
  std::size_t chains() const { return starts_.size(); }
  static std::uint64_t NodeBytes();
  // Of a chain, beside its first node.
  static std::uint64_t ChainBytes(const PrefixChain& chain);

  // Checks every invariant; aborts on a violation. Takes time linear in the number of nodes.
  void Validate() const;

 private:
  struct Node {
    Node* parent = nullptr;
    Hash128 hash;
    std::array<std::uint32_t, kPrefixBlock> ids{};
    std::uint32_t count = 0;  // number of ids; 0 in a start node
    PrefixId end;             // the prefix that ends here
    PrefixId below;           // some prefix that ends here or below
    Node* first_child = nullptr;
    Node* next = nullptr;  // sibling
    Node* previous = nullptr;
    // Number of children by id count, for those with fewer than 32 ids; null: there are none.
    std::unique_ptr<std::array<std::uint32_t, kPrefixBlock>> parts;
    pool::Charge parts_charge;
    pool::Charge charge;
  };
  struct LowWord {
    std::size_t operator()(const Hash128& hash) const { return hash.low; }
  };
  using Nodes = std::unordered_multimap<Hash128, Node, LowWord>;
  struct Start {
    PrefixChain chain;
    Node node;
  };
  using Starts = std::unordered_map<std::string, Start>;

  const Node* FindStart(const PrefixChain& chain) const;
  Nodes::iterator FindNode(const Node* node);
  Hash128 HashOf(const Node& parent, Ids block) const;
  const Node* Child(const Node& parent, Ids block) const;
  Node* Child(Node& parent, Ids block) {
    return const_cast<Node*>(std::as_const(*this).Child(parent, block));
  }
  absl::StatusOr<Node*> AddChild(Node& parent, Ids block);
  absl::StatusOr<Node*> TakeStart(const PrefixChain& chain);
  static BlockEvent Stored(const Node& node);
  // The longest child with fewer than 32 ids whose ids begin `rest`; null if there is none.
  const Node* Part(const Node& parent, Ids rest) const;
  // Walks from `node` to the root: removes nodes that no prefix needs and updates `below` of the
  // others.
  void Tidy(Node* node, PrefixId gone, std::vector<BlockEvent>* events = nullptr);
  void Remove(Node* node);

  const Options options_;
  Starts starts_;
  Nodes nodes_;
  absl::flat_hash_map<PrefixId, Node*> ends_;
};

}  // namespace tessera::cache
