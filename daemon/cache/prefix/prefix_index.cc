#include "daemon/cache/prefix/prefix_index.h"

#include <algorithm>
#include <utility>

#include "daemon/base/check.h"

namespace tessera::cache {

std::uint64_t PrefixIndex::NodeBytes() {
  // The map's overhead per node: link, hash, allocator header and a share of the buckets.
  constexpr std::uint64_t kOfTheMap = 48;
  return sizeof(Node) + kOfTheMap;
}

std::uint64_t PrefixIndex::ChainBytes(const PrefixChain& chain) {
  return sizeof(PrefixChain) + 3 * chain.start.size() + chain.model.size();
}

Hash128 PrefixIndex::HashOf(const Node& parent, Ids block) const {
  return options_.hash(parent.hash, block.data(), block.size_bytes());
}

const PrefixIndex::Node* PrefixIndex::FindStart(const PrefixChain& chain) const {
  const auto it = starts_.find(chain.start);
  return it == starts_.end() ? nullptr : &it->second.node;
}

const PrefixIndex::Node* PrefixIndex::Child(const Node& parent, Ids block) const {
  const auto [first, last] = nodes_.equal_range(HashOf(parent, block));
  for (auto it = first; it != last; ++it) {
    const Node& node = it->second;
    if (node.parent == &parent && node.count == block.size() &&
        std::equal(block.begin(), block.end(), node.ids.begin())) {
      return &node;
    }
  }
  return nullptr;
}

const PrefixIndex::Node* PrefixIndex::Part(const Node& parent, Ids rest) const {
  if (parent.parts == nullptr) return nullptr;
  for (std::size_t count = std::min(rest.size(), kPrefixBlock - 1); count > 0; --count) {
    if ((*parent.parts)[count] == 0) continue;
    if (const Node* node = Child(parent, rest.first(count))) return node;
  }
  return nullptr;
}

PrefixIndex::Match PrefixIndex::Longest(const PrefixChain& chain, Ids ids,
                                        std::uint64_t limit) const {
  Match match;
  const Node* node = FindStart(chain);
  Ids rest = ids.first(std::min<std::uint64_t>(limit, ids.size()));
  std::uint64_t tokens = 0;
  while (node != nullptr) {
    if (const Node* part = Part(*node, rest)) match = {tokens + part->count, part->end};
    if (rest.size() < kPrefixBlock) break;
    node = Child(*node, rest.first(kPrefixBlock));
    if (node == nullptr) break;
    rest = rest.subspan(kPrefixBlock);
    tokens += kPrefixBlock;
    if (node->end.valid()) {
      match = {tokens, node->end};
    } else if (chain.every_boundary) {
      match = {tokens, node->below};
    }
  }
  return match;
}

PrefixId PrefixIndex::FindEnd(const PrefixChain& chain, Ids ids) const {
  const Node* node = FindStart(chain);
  while (node != nullptr && !ids.empty()) {
    const Ids block = ids.first(std::min(ids.size(), kPrefixBlock));
    node = Child(*node, block);
    ids = ids.subspan(block.size());
  }
  return node == nullptr ? PrefixId() : node->end;
}

absl::StatusOr<PrefixIndex::Node*> PrefixIndex::TakeStart(const PrefixChain& chain) {
  const std::string& start = chain.start;
  if (const auto it = starts_.find(start); it != starts_.end()) return &it->second.node;
  absl::StatusOr<pool::Charge> charge =
      options_.account->Reserve(pool::MemoryTag::kPrefixIndex, NodeBytes() + ChainBytes(chain));
  if (!charge.ok()) return charge.status();
  Start& made = starts_[start];
  made.chain = chain;
  Node& node = made.node;
  node.hash = options_.hash(Hash128(), start.data(), start.size());
  node.charge = *std::move(charge);
  return &node;
}

absl::StatusOr<PrefixIndex::Node*> PrefixIndex::AddChild(Node& parent, Ids block) {
  const bool part = block.size() < kPrefixBlock;
  if (part && parent.parts == nullptr) {
    absl::StatusOr<pool::Charge> charge =
        options_.account->Reserve(pool::MemoryTag::kPrefixIndex, sizeof(*parent.parts));
    if (!charge.ok()) return charge.status();
    parent.parts_charge = *std::move(charge);
    parent.parts = std::make_unique<std::array<std::uint32_t, kPrefixBlock>>();
  }
  absl::StatusOr<pool::Charge> charge =
      options_.account->Reserve(pool::MemoryTag::kPrefixIndex, NodeBytes());
  if (!charge.ok()) return charge.status();
  const Hash128 hash = HashOf(parent, block);
  Node& node = nodes_.emplace(hash, Node())->second;
  node.parent = &parent;
  node.hash = hash;
  std::copy(block.begin(), block.end(), node.ids.begin());
  node.count = static_cast<std::uint32_t>(block.size());
  node.next = parent.first_child;
  if (node.next != nullptr) node.next->previous = &node;
  parent.first_child = &node;
  node.charge = *std::move(charge);
  if (part) ++(*parent.parts)[block.size()];
  return &node;
}

BlockEvent PrefixIndex::Stored(const Node& node) {
  BlockEvent event = {.stored = true, .hash = node.hash.low, .parent = {}, .ids = node.ids};
  if (node.parent->count > 0) event.parent = node.parent->hash.low;
  return event;
}

absl::Status PrefixIndex::Insert(const PrefixChain& chain, Ids ids, PrefixId prefix,
                                 std::vector<BlockEvent>* events) {
  TESSERA_CHECK(!ids.empty() && prefix.valid(), "a prefix has tokens and an id");
  absl::StatusOr<Node*> start = TakeStart(chain);
  if (!start.ok()) return start.status();
  Node* node = *start;
  const std::size_t told = events == nullptr ? 0 : events->size();
  while (!ids.empty()) {
    const Ids block = ids.first(std::min(ids.size(), kPrefixBlock));
    Node* child = Child(*node, block);
    if (child == nullptr) {
      absl::StatusOr<Node*> added = AddChild(*node, block);
      if (!added.ok()) {
        Tidy(node, prefix);
        if (events != nullptr) events->resize(told);
        return added.status();
      }
      child = *added;
      if (events != nullptr && child->count == kPrefixBlock) events->push_back(Stored(*child));
    }
    node = child;
    ids = ids.subspan(block.size());
  }
  TESSERA_CHECK(!node->end.valid(), "no prefix with exactly these ids is published yet");
  node->end = prefix;
  ends_[prefix] = node;
  for (; node != nullptr && !node->below.valid(); node = node->parent) node->below = prefix;
  return absl::OkStatus();
}

void PrefixIndex::Erase(PrefixId prefix, std::vector<BlockEvent>* events) {
  const auto it = ends_.find(prefix);
  TESSERA_CHECK(it != ends_.end(), "only a published prefix can be erased");
  Node* const node = it->second;
  ends_.erase(it);
  node->end = PrefixId();
  Tidy(node, prefix, events);
}

void PrefixIndex::VisitBlocks(
    const std::function<void(const PrefixChain& chain, const std::vector<BlockEvent>& events)>&
        visit) const {
  for (const auto& [text, start] : starts_) {
    if (start.chain.model.empty()) continue;
    std::vector<BlockEvent> events;
    std::vector<const Node*> open = {&start.node};
    while (!open.empty()) {
      const Node* const node = open.back();
      open.pop_back();
      if (node->count == kPrefixBlock) events.push_back(Stored(*node));
      for (const Node* child = node->first_child; child != nullptr; child = child->next) {
        open.push_back(child);
      }
    }
    if (!events.empty()) visit(start.chain, events);
  }
}

void PrefixIndex::Tidy(Node* node, PrefixId gone, std::vector<BlockEvent>* events) {
  while (node != nullptr) {
    Node* const parent = node->parent;
    if (!node->end.valid() && node->first_child == nullptr) {
      if (events != nullptr && node->count == kPrefixBlock) {
        events->push_back({.stored = false, .hash = node->hash.low, .parent = {}, .ids = {}});
      }
      Remove(node);
    } else if (!node->below.valid() || node->below == gone) {
      // Children on the path already name another prefix; the other children never named this one.
      node->below = node->end.valid() ? node->end : node->first_child->below;
    } else {
      return;  // the nodes above did not name it either
    }
    node = parent;
  }
}

PrefixIndex::Nodes::iterator PrefixIndex::FindNode(const Node* node) {
  auto [it, last] = nodes_.equal_range(node->hash);
  while (it != last && &it->second != node) ++it;
  TESSERA_CHECK(it != last, "a node is stored under its hash");
  return it;
}

void PrefixIndex::Remove(Node* node) {
  Node* const parent = node->parent;
  if (parent == nullptr) {
    const auto it = std::find_if(starts_.begin(), starts_.end(),
                                 [node](const auto& entry) { return &entry.second.node == node; });
    starts_.erase(it);
    return;
  }
  if (node->previous != nullptr) node->previous->next = node->next;
  if (node->next != nullptr) node->next->previous = node->previous;
  if (parent->first_child == node) parent->first_child = node->next;
  if (node->count < kPrefixBlock) --(*parent->parts)[node->count];
  nodes_.erase(FindNode(node));
}

void PrefixIndex::Validate() const {
  std::size_t ends = 0;
  const auto check = [&](const Node& node) {
    ends += node.end.valid();
    std::array<std::uint32_t, kPrefixBlock> parts{};
    bool names_one_there = node.end.valid() && node.below == node.end;
    for (const Node* child = node.first_child; child != nullptr; child = child->next) {
      TESSERA_CHECK(child->parent == &node, "a child points to its parent");
      TESSERA_CHECK(child->next == nullptr || child->next->previous == child,
                    "sibling links agree in both directions");
      if (child->count < kPrefixBlock) ++parts[child->count];
      names_one_there = names_one_there || node.below == child->below;
    }
    TESSERA_CHECK(names_one_there, "a node names a prefix at or below it");
    const auto end = ends_.find(node.below);
    TESSERA_CHECK(end != ends_.end(), "a named prefix is published");
    for (const Node* at = end->second; at != &node; at = at->parent) {
      TESSERA_CHECK(at != nullptr, "a named prefix ends at the node or below it");
    }
    if (node.parts != nullptr) TESSERA_CHECK(*node.parts == parts, "partial blocks are counted");
    if (node.count == 0 || node.count == kPrefixBlock) return;
    TESSERA_CHECK(node.first_child == nullptr && node.end.valid(),
                  "a partial block is a leaf in which a prefix ends");
  };
  for (const auto& [text, start] : starts_) check(start.node);
  for (const auto& [hash, node] : nodes_) {
    TESSERA_CHECK(hash == node.hash && node.count > 0 && node.parent != nullptr,
                  "a node is one block of ids below a parent");
    check(node);
  }
  TESSERA_CHECK(ends == ends_.size(), "every end is listed");
}

}  // namespace tessera::cache
