// What each token policy promises under given options; checked by policy_contract_test.cc.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::policies {

// The promise of a registry row under these options, for 100 or more tokens.
struct Promise {
  std::string_view row;
  std::string_view as;  // name of the test instance
  std::string text;
  std::uint64_t entries;  // kept of 100 tokens; if `at_most`, an upper bound
  // For relative budgets: entries kept of `tokens`, a multiple of 100.
  std::uint64_t (*entries_of)(std::uint64_t tokens) = nullptr;
  std::uint64_t sink = 0;    // first entries that are always kept
  std::uint64_t recent = 0;  // newest entries that are always kept
  bool at_most = false;
  bool one_for_all = false;     // all lanes of a layer keep the same tokens
  bool same_again = true;       // a second decision without new tokens drops nothing
  bool wants_likeness = false;  // refuses if too few keys are similar
};

inline const std::vector<Promise>& Promises() {
  static const std::vector<Promise> kPromises = {
      {.row = "chunkkv",
       .as = "paper",
       .text = "chunkkv:tokens=30,window=7",
       .entries = 30,
       .recent = 7,
       .one_for_all = true},
      {.row = "chunkkv",
       .as = "heads",
       .text = "chunkkv:tokens=30,window=7,scope=head",
       .entries = 30,
       .recent = 7},
      {.row = "chunkkv",
       .as = "logits",
       .text = "chunkkv:tokens=30,window=7,chunk=3,score=logit,agg=mean",
       .entries = 30,
       .recent = 7,
       .one_for_all = true},
      // 6 of 20 chunks. Of the window, those chunks that lie entirely in it.
      {.row = "chunkkv",
       .as = "kvpress",
       .text = "chunkkv:mode=kvpress,chunk=5,window=10,budget=0.3",
       .entries = 30,
       .entries_of = [](std::uint64_t tokens) { return tokens * 3 / 10; },
       .recent = 6,
       .one_for_all = true,
       .same_again = false},
      {.row = "chunkkv",
       .as = "beside_planes",
       .text = "chunkkv:tokens=30,window=7+planes+signs",
       .entries = 30,
       .recent = 7,
       .one_for_all = true},
      {.row = "semantickv",
       .as = "total",
       .text = "semantickv:sink=6,recent_ratio=0.05,keep_total=0.3,lambda=0.1",
       .entries = 30,
       .entries_of = [](std::uint64_t tokens) { return tokens * 3 / 10; },
       .sink = 6,
       .recent = 5},
      // 17.8 of the 89 in between.
      {.row = "semantickv",
       .as = "middle",
       .text = "semantickv:sink=6,recent_ratio=0.05,keep_middle=0.2,lambda=0.1,mask=none,agg=max",
       .entries = 28,
       .entries_of =
           [](std::uint64_t tokens) { return 6 + tokens / 20 + (tokens - 6 - tokens / 20) / 5; },
       .sink = 6,
       .recent = 5},
      {.row = "semanticache",
       .as = "tau",
       .text = "semanticache:tau=0.05,sink=3,recent=5",
       .entries = 99,
       .entries_of = [](std::uint64_t tokens) { return tokens - 1; },
       .sink = 3,
       .recent = 5,
       .at_most = true,
       .same_again = false},
      {.row = "semanticache",
       .as = "layer",
       .text = "semanticache:tau=0.05,sink=3,recent=5,scope=layer",
       .entries = 99,
       .entries_of = [](std::uint64_t tokens) { return tokens - 1; },
       .sink = 3,
       .recent = 5,
       .at_most = true,
       .one_for_all = true,
       .same_again = false},
      {.row = "semanticache",
       .as = "budget",
       .text = "semanticache:budget=0.8,sink=3,recent=5",
       .entries = 80,
       .entries_of = [](std::uint64_t tokens) { return tokens * 8 / 10; },
       .sink = 3,
       .recent = 5,
       .at_most = true,
       .same_again = false,
       .wants_likeness = true},
      {.row = "semanticache",
       .as = "behind_snapkv",
       .text = "snapkv:tokens=60,window=7+semanticache:tau=0.05,sink=3,recent=5",
       .entries = 60,
       .recent = 5,
       .at_most = true,
       .same_again = false},
      // 4 layers, span 2: one of each two ladder positions is dropped.
      {.row = "lacache",
       .as = "mod",
       .text = "lacache:budget=30,span=2,sink=3",
       .entries = 30,
       .sink = 3,
       .recent = 4,
       .one_for_all = true},
      {.row = "lacache",
       .as = "band",
       .text = "lacache:budget=30,span=2,sink=3,map=band",
       .entries = 30,
       .sink = 3,
       .recent = 4,
       .one_for_all = true},
      {.row = "lacache",
       .as = "slot",
       .text = "lacache:budget=30,span=2,sink=3,pos=slot",
       .entries = 30,
       .sink = 3,
       .recent = 4,
       .one_for_all = true},
      {.row = "streaming",
       .as = "both",
       .text = "streaming:sink=3,recent=27",
       .entries = 30,
       .sink = 3,
       .recent = 27},
      {.row = "streaming",
       .as = "together",
       .text = "streaming:sink=3,budget=30,pos=slot",
       .entries = 30,
       .sink = 3,
       .recent = 27},
      {.row = "h2o", .as = "both", .text = "h2o:heavy=20,recent=10", .entries = 30, .recent = 10},
      {.row = "snapkv",
       .as = "mean",
       .text = "snapkv:tokens=30,window=7",
       .entries = 30,
       .recent = 7},
      {.row = "snapkv",
       .as = "max",
       .text = "snapkv:tokens=30,window=7,pool=max,kernel=7",
       .entries = 30,
       .recent = 7},
      // The layers have 45, 35, 25 and 15; this is the second.
      {.row = "pyramidkv",
       .as = "second",
       .text = "pyramidkv:tokens=30,window=7,beta=2",
       .entries = 35,
       .recent = 7},
      {.row = "tova",
       .as = "beside_planes",
       .text = "tova:budget=30+planes",
       .entries = 30,
       .one_for_all = true},
      {.row = "tova", .as = "all", .text = "tova:budget=30", .entries = 30, .one_for_all = true},
  };
  return kPromises;
}

}  // namespace tessera::policies
