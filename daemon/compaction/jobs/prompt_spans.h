// Records which tokens of a sequence were appended as prompts; the others were decoded. Adjacent
// prompts count as one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "daemon/policies/token_policy.h"

namespace tessera::compaction {

class PromptSpans {
 public:
  // May be called once per layer, with overlapping ranges.
  void Add(std::uint64_t begin, std::uint64_t end) {
    if (begin >= end) return;
    policies::TokenSpan added = {.begin = begin, .end = end};
    std::vector<policies::TokenSpan> spans;
    for (const policies::TokenSpan& span : spans_) {
      if (span.end < added.begin) {
        spans.push_back(span);
      } else if (span.begin <= added.end) {
        added = {.begin = std::min(added.begin, span.begin), .end = std::max(added.end, span.end)};
      }
    }
    spans.push_back(added);
    for (const policies::TokenSpan& span : spans_) {
      if (span.begin > added.end) spans.push_back(span);
    }
    spans_ = std::move(spans);
  }
  // The sequence was truncated to `tokens`.
  void CutTo(std::uint64_t tokens) {
    while (!spans_.empty() && spans_.back().begin >= tokens) spans_.pop_back();
    if (!spans_.empty()) spans_.back().end = std::min(spans_.back().end, tokens);
  }

  // Ascending and disjoint.
  const std::vector<policies::TokenSpan>& spans() const { return spans_; }

 private:
  std::vector<policies::TokenSpan> spans_;
};

}  // namespace tessera::compaction
