// The token ids of published prefixes: a trie over blocks of 32 ids, found by hash, believed by
// comparison. Ids of a block that prefixes share are kept once.
//
//   start of a chain ── 32 ids ── 32 ids ── 32 ids     (a prefix of 96 tokens ends here)
//     (a text)             |         `───── 7 ids      (one of 71 ends here)
//                          `─ 32 ids                   (one of 64)
//
// Invariants:
//   a node has the ids of one block; only a leaf, in which a prefix ends, has fewer than 32
//   a node is there while a prefix ends in it or below it: no others, so that every node can name
//   one a node is found by its chain hash, and only where its parent and its ids are the ones asked
//   for: two blocks of one hash are two nodes
//
// Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "daemon/base/ids.h"
#include "daemon/cache/model/prefix_hash.h"
#include "daemon/pool/account.h"

namespace tessera::cache {

// Whose tokens they are, and where a head of them may end.
struct PrefixChain {
  std::string start;            // all that must be equal, beside the ids
  bool every_boundary = false;  // a prefix matches at each multiple of 32 tokens, too
};

class PrefixIndex {
 public:
  using Ids = std::span<const std::uint32_t>;

  struct Options {
    PrefixHash hash;
    pool::Account* account;  // is charged for the nodes
  };
  explicit PrefixIndex(Options options) : options_(std::move(options)) {}
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // There are ids, and no prefix that has exactly these (FindEnd). RESOURCE_EXHAUSTED changes
  // nothing.
  absl::Status Insert(const PrefixChain& chain, Ids ids, PrefixId prefix);
  void Erase(PrefixId prefix);

  // The prefix that ends with exactly these ids; invalid where there is none.
  PrefixId FindEnd(const PrefixChain& chain, Ids ids) const;

  // The longest head of `ids` that matches, of at most `limit` tokens, and a prefix that has it.
  struct Match {
    std::uint64_t tokens = 0;
    PrefixId prefix;  // invalid: nothing
  };
  Match Longest(const PrefixChain& chain, Ids ids, std::uint64_t limit) const;

  std::size_t nodes() const { return nodes_.size(); }
  std::size_t chains() const { return starts_.size(); }
  static std::uint64_t NodeBytes();

  // Checks every invariant, in time for all nodes.
  void Validate() const;

 private:
  struct Node {
    Node* parent = nullptr;
    Hash128 hash;
    std::array<std::uint32_t, kPrefixBlock> ids{};
    std::uint32_t count = 0;  // of the ids; 0 in a start
    PrefixId end;             // ends here
    PrefixId below;           // ends here or below
    Node* first_child = nullptr;
    Node* next = nullptr;  // of the same parent
    Node* previous = nullptr;
    // How many children have so few ids; null: all have 32.
    std::unique_ptr<std::array<std::uint32_t, kPrefixBlock>> parts;
    pool::Charge parts_charge;
    pool::Charge charge;
  };
  struct LowWord {
    std::size_t operator()(const Hash128& hash) const { return hash.low; }
  };
  using Nodes = std::unordered_multimap<Hash128, Node, LowWord>;
  using Starts = std::unordered_map<std::string, Node>;

  const Node* FindStart(const PrefixChain& chain) const;
  Nodes::iterator FindNode(const Node* node);
  Hash128 HashOf(const Node& parent, Ids block) const;
  const Node* Child(const Node& parent, Ids block) const;
  Node* Child(Node& parent, Ids block) {
    return const_cast<Node*>(std::as_const(*this).Child(parent, block));
  }
  absl::StatusOr<Node*> AddChild(Node& parent, Ids block);
  absl::StatusOr<Node*> TakeStart(const std::string& start);
  // The longest part of `rest` that a child has, where a prefix ends.
  const Node* Part(const Node& parent, Ids rest) const;
  // From here upward: what no prefix needs goes, and the others name one that is there.
  void Tidy(Node* node, PrefixId gone);
  void Remove(Node* node);

  const Options options_;
  Starts starts_;
  Nodes nodes_;
  absl::flat_hash_map<PrefixId, Node*> ends_;
};

}  // namespace tessera::cache
