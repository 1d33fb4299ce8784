// A layer of a sequence with its entries and queries, and a worker that provides the observations
// that token policies ask for. Attention can also be computed in double, for tests to compare with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "daemon/policies/token_policy.h"
#include "kernels/format/operations.h"
#include "tests/fakes/gpu/host_key_scorer.h"
#include "tests/fakes/seed.h"

namespace tessera::policies {

struct ObservedLayerOptions {
  std::uint32_t query_heads = 4;
  std::uint32_t kv_heads = 2;
  std::uint32_t head_dim = 64;
  kernels::ElementType type = kernels::ElementType::kFp32;
  std::uint32_t layer = 0;
  std::uint32_t layers = 4;
  std::uint32_t sliding_window = 0;
  float logit_softcap = 0;
  std::uint32_t observations_per_call = 1;
};

class ObservedLayer {
 public:
  using Row = std::vector<float>;
  struct Entry {
    Row key;
    std::uint64_t position;
    float weight;
  };

  ObservedLayer(const ObservedLayerOptions& options, const kernels::Operations& operations,
                TestRandom& random)
      : options_(options), operations_(operations), normal_(0, 1), engine_(random.Bits()) {
    lanes_.resize(options.kv_heads);
    grown_keys_.resize(options.kv_heads);
    queries_.resize(options.query_heads);
  }

  Row RandomRow() {
    Row row(options_.head_dim);
    for (float& number : row) number = Stored(normal_(engine_));
    return row;
  }
  // Adds `count` tokens, each with a key in every lane and a query of every head.
  void Grow(std::uint64_t count) {
    for (std::uint64_t i = 0; i < count; ++i, ++tokens_) {
      for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
        lanes_[lane].push_back({RandomRow(), tokens_, 1});
        grown_keys_[lane].push_back(lanes_[lane].back().key);
      }
      for (auto& head : queries_) head.push_back(RandomRow());
    }
  }

  // Drops the newest tokens and keeps `tokens`.
  void CutTo(std::uint64_t tokens) {
    tokens_ = std::min(tokens_, tokens);
    for (auto& lane : lanes_) {
      while (!lane.empty() && lane.back().position >= tokens_) lane.pop_back();
    }
    for (auto* rows : {&grown_keys_, &queries_}) {
      for (auto& of_one : *rows) of_one.resize(tokens_);
    }
  }

  // Gives entries random weights, as if each stood for several tokens.
  void Weigh(TestRandom& random) {
    for (auto& lane : lanes_) {
      for (Entry& entry : lane) entry.weight = static_cast<float>(random.Between(1, 40));
    }
  }

  std::uint64_t tokens() const { return tokens_; }
  std::vector<std::vector<Entry>>& lanes() { return lanes_; }
  std::vector<std::vector<Row>>& queries() { return queries_; }  // by head and position
  std::vector<TextMark>& text() { return text_; }
  const ObservedLayerOptions& options() const { return options_; }
  std::uint32_t group() const { return options_.query_heads / options_.kv_heads; }

  kernels::LayerGeometry geometry() const {
    return {.query_heads = options_.query_heads,
            .kv_heads = options_.kv_heads,
            .head_dim = options_.head_dim,
            .type = options_.type,
            .scale = static_cast<float>(1 / std::sqrt(double{1} * options_.head_dim)),
            .sliding_window = options_.sliding_window,
            .logit_softcap = options_.logit_softcap};
  }

  // The product q . k of a head's query and an entry of its lane.
  double Product(std::uint32_t head, std::uint64_t query, std::uint64_t entry) const {
    return Dot(queries_[head][query], lanes_[head / group()][entry].key);
  }
  // The attention shares of a query among these entries; invisible entries get 0. An entry counts
  // as often as its weight.
  std::vector<double> Shares(std::uint32_t head, std::uint64_t query,
                             const std::vector<std::uint32_t>& among, bool causal = true) const {
    std::vector<Seen> seen;
    for (const std::uint32_t i : among) {
      const Entry& entry = lanes_[head / group()][i];
      seen.push_back({&entry.key, entry.position, entry.weight});
    }
    return SharesAmong(queries_[head][query], query, seen, causal);
  }
  // The same for tokens by position, with their original keys, even if their entries are evicted.
  std::vector<double> SharesOfOriginalKeys(std::uint32_t head, std::uint64_t query,
                                           const std::vector<std::uint64_t>& positions) const {
    std::vector<Seen> seen;
    for (const std::uint64_t position : positions) {
      seen.push_back({&grown_keys_[head / group()][position], position, 1});
    }
    return SharesAmong(queries_[head][query], query, seen, /*causal=*/true);
  }
  std::vector<std::uint32_t> AllOf(std::size_t lane) const {
    std::vector<std::uint32_t> all(lanes_[lane].size());
    for (std::uint32_t i = 0; i < all.size(); ++i) all[i] = i;
    return all;
  }
  // The attention that queries from `first` on pay to each entry, averaged over the query heads of
  // the group.
  std::vector<float> Sums(std::size_t lane, std::uint64_t first) const {
    std::vector<double> sums(lanes_[lane].size());
    for (std::uint32_t i = 0; i < group(); ++i) {
      for (std::uint64_t query = first; query < tokens_; ++query) {
        const std::vector<double> shares =
            Shares(static_cast<std::uint32_t>(lane) * group() + i, query, AllOf(lane));
        for (std::size_t e = 0; e < sums.size(); ++e) sums[e] += shares[e] / group();
      }
    }
    return {sums.begin(), sums.end()};
  }

  // The observations of a worker at the end of a prompt, or of the tokens decoded from
  // `first_decoded` on.
  LayerView Show(const Needs& needs, std::uint64_t first_decoded) {
    const bool decoding = first_decoded != tokens_;
    prompts_.clear();
    if (first_decoded > 0) prompts_.push_back({.begin = 0, .end = first_decoded});
    const auto up = [](double number) { return static_cast<std::uint64_t>(std::ceil(number)); };
    const double all = static_cast<double>(tokens_);
    const std::uint64_t last =
        std::min(tokens_, std::max<std::uint64_t>(needs.last_queries, up(needs.last_share * all)));
    const std::uint64_t first =
        decoding ? (needs.decode_queries ? first_decoded : tokens_) : tokens_ - last;
    shown_.assign(options_.query_heads, {});
    for (std::uint32_t head = 0; head < options_.query_heads; ++head) {
      std::vector<std::uint64_t> positions = LongestQueries(head, up(needs.norm_share * all));
      for (std::uint64_t position = first; position < tokens_; ++position) {
        positions.push_back(position);
      }
      std::ranges::sort(positions);
      positions.erase(std::ranges::unique(positions).begin(), positions.end());
      for (const std::uint64_t position : positions) {
        Append(queries_[head][position], shown_[head].rows);
      }
      shown_[head].positions = std::move(positions);
    }
    sums_.clear();
    if (needs.attention_sums && !decoding) {
      for (std::size_t lane = 0; lane < lanes_.size(); ++lane) sums_.push_back(Sums(lane, 0));
    }
    shows_text_ = needs.token_ids;
    return View();
  }

  // The same with the observations of the last Show.
  LayerView View() {
    keys_.assign(lanes_.size(), {});
    std::vector<kernels::RowRange> ranges;
    lane_views_.clear();
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      Held& held = keys_[lane];
      for (const Entry& entry : lanes_[lane]) {
        Append(entry.key, held.rows);
        held.positions.push_back(entry.position);
        held.weights.push_back(entry.weight);
      }
      lane_views_.push_back(
          {.count = held.positions.size(), .positions = held.positions, .weights = held.weights});
      ranges.push_back({.rows = held.rows.data(), .count = held.positions.size()});
    }
    scorer_ = std::make_shared<HostKeyScorer>(operations_, geometry(), std::move(ranges),
                                              options_.observations_per_call);
    query_views_.clear();
    for (const Held& head : shown_) {
      query_views_.push_back({.positions = head.positions, .rows = head.rows.data()});
    }
    sum_views_.assign(sums_.begin(), sums_.end());
    text_.resize(tokens_);
    return {.layer = options_.layer,
            .layers = options_.layers,
            .geometry = geometry(),
            .tokens = tokens_,
            .prompts = prompts_,
            .lanes = lane_views_,
            .queries = query_views_,
            .sums = sum_views_,
            .text = shows_text_ ? std::span<const TextMark>(text_) : std::span<const TextMark>(),
            .scorer = scorer_.get()};
  }

  // The scorer of the last view.
  HostKeyScorer& scorer() { return *scorer_; }

  // Applies a decision as an engine would: evicts entries, or merges them into means weighted by
  // the tokens that they stand for.
  void Apply(const LayerDecision& decision) {
    for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
      const LaneDecision& of_lane = decision[lane];
      std::vector<Entry> kept;
      for (std::size_t i = 0; i < of_lane.kept.size(); ++i) {
        Entry entry = lanes_[lane][of_lane.kept[i]];
        if (of_lane.merges()) {
          std::vector<double> sum(options_.head_dim);
          double weight = 0;
          for (std::uint32_t m = of_lane.begins[i]; m < of_lane.begins[i + 1]; ++m) {
            const Entry& member = lanes_[lane][of_lane.members[m]];
            for (std::size_t c = 0; c < sum.size(); ++c) {
              sum[c] += double{member.weight} * member.key[c];
            }
            weight += member.weight;
          }
          for (std::size_t c = 0; c < sum.size(); ++c) entry.key[c] = Stored(sum[c] / weight);
          entry.weight = static_cast<float>(weight);
        }
        kept.push_back(std::move(entry));
      }
      lanes_[lane] = std::move(kept);
    }
  }

 private:
  static double Dot(const Row& a, const Row& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += double{a[i]} * b[i];
    return sum;
  }
  struct Seen {
    const Row* key;
    std::uint64_t position;
    float weight;  // tokens that it stands for
  };
  std::vector<double> SharesAmong(const Row& row, std::uint64_t query,
                                  const std::vector<Seen>& entries, bool causal) const {
    std::vector<double> shares;
    for (const auto& [key, position, weight] : entries) {
      const std::uint32_t window = options_.sliding_window;
      const bool seen =
          !causal || (position <= query && (window == 0 || position + window > query));
      double logit = geometry().scale * Dot(row, *key);
      const double cap = options_.logit_softcap;
      if (cap != 0) logit = cap * std::tanh(logit / cap);
      logit += std::log(weight);
      shares.push_back(seen ? logit : -std::numeric_limits<double>::infinity());
    }
    const double most = shares.empty() ? 0 : std::ranges::max(shares);
    if (std::isinf(most)) return std::vector<double>(shares.size());
    double total = 0;
    for (double& share : shares) total += share = std::exp(share - most);
    for (double& share : shares) share /= total;
    return shares;
  }

  struct Held {
    std::vector<std::byte> rows;
    std::vector<std::uint64_t> positions;
    std::vector<float> weights;
  };

  // Rounds to the layer's element type.
  float Stored(double number) const {
    const auto value = static_cast<float>(number);
    if (options_.type == kernels::ElementType::kBf16) {
      return kernels::Bf16ToFloat(kernels::FloatToBf16(value));
    }
    if (options_.type == kernels::ElementType::kFp16) {
      return kernels::Fp16ToFloat(kernels::FloatToFp16(value));
    }
    return value;
  }
  void Append(const Row& row, std::vector<std::byte>& bytes) const {
    const auto append = [&bytes](const auto& element) {
      const std::size_t at = bytes.size();
      bytes.resize(at + sizeof(element));
      std::memcpy(bytes.data() + at, &element, sizeof(element));
    };
    for (const float number : row) {
      if (options_.type == kernels::ElementType::kFp32) append(number);
      if (options_.type == kernels::ElementType::kBf16) append(kernels::FloatToBf16(number));
      if (options_.type == kernels::ElementType::kFp16) append(kernels::FloatToFp16(number));
    }
  }
  std::vector<std::uint64_t> LongestQueries(std::uint32_t head, std::uint64_t count) const {
    std::vector<std::uint64_t> positions(tokens_);
    for (std::uint64_t i = 0; i < tokens_; ++i) positions[i] = i;
    const auto length = [&](std::uint64_t i) {
      double sum = 0;
      for (const float number : queries_[head][i]) sum += double{number} * number;
      return sum;
    };
    std::ranges::stable_sort(positions, std::greater<>(), length);
    positions.resize(std::min<std::size_t>(positions.size(), count));
    return positions;
  }

  ObservedLayerOptions options_;
  const kernels::Operations& operations_;
  std::normal_distribution<double> normal_;
  std::mt19937_64 engine_;
  std::uint64_t tokens_ = 0;
  std::vector<std::vector<Entry>> lanes_;
  std::vector<std::vector<Row>> grown_keys_;  // by lane and position
  std::vector<std::vector<Row>> queries_;
  std::vector<TextMark> text_;

  // Storage that views point to.
  std::vector<Held> keys_;
  std::vector<Held> shown_;
  std::vector<std::vector<float>> sums_;
  bool shows_text_ = false;
  std::vector<TokenSpan> prompts_;  // set by the last Show
  std::shared_ptr<HostKeyScorer>
      scorer_;  // of the last view; shared with copies of the layer until their next view
  std::vector<LaneEntries> lane_views_;
  std::vector<HeadQueries> query_views_;
  std::vector<std::span<const float>> sum_views_;
};

}  // namespace tessera::policies
