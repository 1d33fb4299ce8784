#include "client/observe/observer.h"

#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <utility>

#include "daemon/base/expected_tokens.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/implementation.h"
#include "kernels/format/element.h"
#include "kernels/tokens/counts.h"

namespace tessera::client {

namespace {

double SquaredNorm(const std::byte* row, std::uint32_t size, kernels::ElementType type) {
  double sum = 0;
  for (std::uint32_t i = 0; i < size; ++i) {
    float value;
    if (type == kernels::ElementType::kFp32) {
      std::memcpy(&value, row + i * sizeof value, sizeof value);
    } else {
      std::uint16_t bits;
      std::memcpy(&bits, row + i * sizeof bits, sizeof bits);
      value = type == kernels::ElementType::kBf16 ? kernels::Bf16ToFloat(bits)
                                                  : kernels::Fp16ToFloat(bits);
    }
    sum += static_cast<double>(value) * value;
  }
  // Infinity keeps the row, so that the daemon refuses it and names it.
  return std::isnan(sum) ? std::numeric_limits<double>::infinity() : sum;
}

// At most this many more of the newest queries are kept than needed, in addition to drafts.
constexpr std::uint64_t kMaxDrafts = 64;

}  // namespace

std::uint64_t Observer::NormsOf(std::uint64_t tokens) const {
  return kernels::CountUp(needs_.norm_share() * static_cast<double>(tokens));
}

Observer::Observer(v1::PolicyNeeds needs, std::shared_ptr<const BoundModel> model)
    : needs_(std::move(needs)), model_(std::move(model)) {}

bool Observer::CollectsSame(const v1::PolicyNeeds& needs) const {
  return google::protobuf::util::MessageDifferencer::Equals(needs, needs_);
}

absl::Status Observer::See(const ObservedRows& rows, const kernels::Operations& operations) {
  if (rows.layer >= model_->layers()) {
    return absl::InvalidArgumentError(
        Concat("layer is ", rows.layer, "; the model has ", model_->layers(), " layers"));
  }
  const kernels::LayerGeometry& geometry = model_->geometry(rows.layer);
  const std::uint64_t token_bytes = geometry.query_heads * RowBytes(geometry);
  const std::uint64_t tokens = rows.query.size() / token_bytes;
  if (tokens == 0 || rows.query.size() % token_bytes != 0) {
    return absl::InvalidArgumentError(Concat("query has ", rows.query.size(), " bytes; a token of ",
                                             geometry.query_heads, " heads has ", token_bytes));
  }
  const std::uint64_t key_bytes = tokens * geometry.kv_heads * RowBytes(geometry);
  if (needs_.attention_sums() && rows.key.size() != key_bytes) {
    return absl::InvalidArgumentError(Concat("key has ", rows.key.size(), " bytes; ", tokens,
                                             " tokens of ", geometry.kv_heads, " kv heads have ",
                                             key_bytes, ", and the policy needs attention sums"));
  }
  if (!Decides(rows.layer)) return absl::OkStatus();
  Layer& layer = LayerOf(rows.layer);
  layer.wants_all = layer.wants_all || (needs_.decode_queries() && decided_.contains(rows.layer));
  const bool gap = rows.first_token > layer.next && !layer.empty() && !layer.rests;
  // The policy needs only the newest queries, and those before the gap are not among them.
  if (gap && needs_.norm_share() == 0 && !needs_.decode_queries()) {
    layer.last.clear();
  } else if (gap) {
    return absl::OutOfRangeError(Concat("first_token is ", rows.first_token, "; layer ", rows.layer,
                                        " was observed up to token ", layer.next));
  }
  if (rows.first_token < layer.next) ForgetFrom(rows.first_token, rows.layer);
  ObserveLast(rows, tokens, /*drafts=*/0, layer);
  // If another worker has observed an earlier prompt, the share refers to both.
  const std::uint64_t end = rows.first_token + std::max(rows.prompt_tokens, tokens);
  ObserveNorms(rows, tokens,
               rows.prompt_tokens == 0 ? ~std::uint64_t{0} : NormsOf(ExpectedTokens(end)),
               /*prompt=*/true, layer);
  // The daemon computes the sums of keys before this observer from all queries.
  const bool from_first = !decided_.contains(rows.layer);
  if (needs_.attention_sums() && from_first) ObserveSums(rows, tokens, operations, layer);
  layer.next = rows.first_token + tokens;
  layer.rests = false;
  return absl::OkStatus();
}

Observer::Layer& Observer::LayerOf(std::uint32_t index) {
  const auto [at, fresh] = layers_.try_emplace(index);
  if (fresh) at->second.wants_all = needs_.decode_queries() && decided_.contains(index);
  return at->second;
}

// Sums cannot be reduced by what later queries added, so they start again.
void Observer::ForgetFrom(std::uint64_t token, std::uint32_t index) {
  const kernels::LayerGeometry& geometry = model_->geometry(index);
  Layer& layer = layers_[index];
  const std::uint64_t token_bytes = geometry.query_heads * RowBytes(geometry);
  const std::uint64_t left = token > layer.last_first ? token - layer.last_first : 0;
  layer.last.resize(std::min<std::uint64_t>(layer.last.size(), left * token_bytes));
  layer.ForgetNormsFrom(token);
  const std::uint64_t keys = layer.sums.empty() ? 0 : layer.sums.front().size();
  if (token >= layer.sums_first + keys) return;
  layer.keys.clear();
  layer.sums.clear();
}

void Observer::TruncateTo(std::uint64_t tokens) {
  const std::uint64_t ids = tokens - std::min(tokens, first_id_);
  if (ids_.size() > ids) ids_.resize(ids);
  TruncateRows(tokens);
}

void Observer::TruncateRows(std::uint64_t tokens) {
  if (tokens == 0) {
    decided_.clear();
    layers_.clear();
  }
  for (const auto& [index, layer] : layers_) TruncateLayer(tokens, index);
}

void Observer::TruncateLayer(std::uint64_t tokens, std::uint32_t index) {
  const auto layer = layers_.find(index);
  if (layer == layers_.end() || layer->second.next <= tokens) return;
  ForgetFrom(tokens, index);
  layer->second.next = tokens;
  layer->second.from = std::min(layer->second.from, tokens);
}

std::uint64_t Observer::MostLast(const Layer& layer, std::uint64_t tokens) const {
  if (layer.wants_all) return tokens;
  return std::max(std::uint64_t{needs_.last_queries()},
                  kernels::CountUp(needs_.last_share() * static_cast<double>(tokens)));
}

void Observer::ObserveLast(const ObservedRows& rows, std::uint64_t tokens, std::uint64_t drafts,
                           Layer& layer) {
  const kernels::LayerGeometry& geometry = model_->geometry(rows.layer);
  const std::uint64_t token_bytes = geometry.query_heads * RowBytes(geometry);
  const std::uint64_t most = MostLast(layer, rows.first_token + tokens);
  if (most == 0) return;
  if (layer.last.empty()) layer.last_first = rows.first_token;
  layer.last.insert(layer.last.end(), rows.query.begin(), rows.query.end());
  const std::uint64_t spare = drafts + std::min(most, kMaxDrafts);
  if (layer.last.size() > (2 * most + spare) * token_bytes) {
    KeepLast(most + spare, token_bytes, layer);
  }
}

void Observer::KeepLast(std::uint64_t count, std::uint64_t token_bytes, Layer& layer) {
  const std::uint64_t rows = layer.last.size() / token_bytes;
  if (rows <= count) return;
  layer.last.erase(layer.last.begin(),
                   layer.last.begin() + static_cast<std::ptrdiff_t>((rows - count) * token_bytes));
  layer.last_first += rows - count;
}

void Observer::ObserveNorms(const ObservedRows& rows, std::uint64_t tokens, std::uint64_t most,
                            bool prompt, Layer& layer) {
  // Earlier tokens are observed again but already decided.
  const std::uint64_t begin = std::max(rows.first_token, layer.from);
  const std::uint64_t end = rows.first_token + tokens;
  if (needs_.norm_share() == 0 || begin >= end) return;
  const kernels::LayerGeometry& geometry = model_->geometry(rows.layer);
  const std::uint64_t row_bytes = RowBytes(geometry);
  Strongest& norms = layer.NormsOf(begin, end, prompt, most);
  norms.heads.resize(geometry.query_heads);
  for (std::uint64_t position = begin; position < end; ++position) {
    for (std::uint32_t head = 0; head < geometry.query_heads; ++head) {
      const std::uint64_t row = (position - rows.first_token) * geometry.query_heads + head;
      const std::span<const std::byte> bytes = rows.query.subspan(row * row_bytes, row_bytes);
      const double norm = SquaredNorm(bytes.data(), geometry.head_dim, geometry.type);
      norms.heads[head].Add(position, norm, bytes, most);
    }
  }
}

void Observer::HeadRows::Add(std::uint64_t position, double norm, std::span<const std::byte> row,
                             std::uint64_t most) {
  const Strength strength(norm, ~position);
  if (rows.size() >= most) {
    const Strength weakest = order.empty() ? strength : *order.begin();
    if (strength <= weakest) {
      let_go.Add(position, norm);
      return;
    }
    let_go.Add(~weakest.second, weakest.first);
    Erase(rows.find(~weakest.second));
  }
  rows[position] = {norm, std::vector<std::byte>(row.begin(), row.end())};
  order.insert(strength);
}

void Observer::HeadRows::Erase(std::map<std::uint64_t, ByNorm>::iterator row) {
  order.erase({row->second.norm, ~row->first});
  rows.erase(row);
}

void Observer::DroppedNorms::Add(std::uint64_t position, double norm) {
  newest_.emplace(position, norm);
  if (newest_.size() <= kMaxNewest) return;
  for (std::size_t i = 0; i < kMaxNewest / 2; ++i) {
    const auto [at, of_it] = *newest_.begin();
    AddToBlock(at / kBlock, {of_it, ~at});
    newest_.erase(newest_.begin());
  }
}

void Observer::DroppedNorms::AddAll(const DroppedNorms& other) {
  for (const auto& [block, strength] : other.blocks_) AddToBlock(block, strength);
  for (const auto& [at, norm] : other.newest_) Add(at, norm);
}

void Observer::DroppedNorms::AddToBlock(std::uint64_t block, const Strength& strength) {
  Strength& strongest = blocks_.try_emplace(block, strength).first->second;
  strongest = std::max(strongest, strength);
}

Observer::Strength Observer::DroppedNorms::Strongest() const {
  Strength strongest = {0, 0};
  for (const auto& [at, norm] : newest_) strongest = std::max(strongest, Strength(norm, ~at));
  for (const auto& [block, of_it] : blocks_) strongest = std::max(strongest, of_it);
  return strongest;
}

// The second strongest row of a block is unknown. If a block loses its strongest row, the next one
// is assumed to be as strong and to be the first remaining one.
void Observer::DroppedNorms::ForgetFrom(std::uint64_t position) {
  newest_.erase(newest_.lower_bound(position), newest_.end());
  blocks_.erase(blocks_.lower_bound((position + kBlock - 1) / kBlock), blocks_.end());
  const auto cut = blocks_.find(position / kBlock);
  if (cut == blocks_.end() || ~cut->second.second < position) return;
  cut->second.second = ~(cut->first * kBlock);
}

void Observer::DroppedNorms::ForgetBefore(std::uint64_t position) {
  newest_.erase(newest_.begin(), newest_.lower_bound(position));
  blocks_.erase(blocks_.begin(), blocks_.lower_bound(position / kBlock));
  const auto cut = blocks_.find(position / kBlock);
  if (cut != blocks_.end() && ~cut->second.second < position) cut->second.second = ~position;
}

void Observer::HeadRows::ForgetBefore(std::uint64_t position) {
  while (!rows.empty() && rows.begin()->first < position) Erase(rows.begin());
  let_go.ForgetBefore(position);
}

void Observer::HeadRows::ForgetFrom(std::uint64_t position) {
  while (!rows.empty() && rows.rbegin()->first >= position) Erase(std::prev(rows.end()));
  let_go.ForgetFrom(position);
}

void Observer::Strongest::ForgetFrom(std::uint64_t token) {
  end = std::min(end, token);
  prompt_end = std::min(prompt_end, token);
  for (HeadRows& head : heads) head.ForgetFrom(token);
}

void Observer::Strongest::ForgetBefore(std::uint64_t token) {
  first = std::max(first, token);
  prompt_end = std::max(prompt_end, first);
  for (HeadRows& head : heads) head.ForgetBefore(token);
}

void Observer::Strongest::Append(const Strongest& next, std::uint64_t most) {
  for (std::size_t head = 0; head < heads.size(); ++head) {
    for (const auto& [position, by_norm] : next.heads[head].rows) {
      heads[head].Add(position, by_norm.norm, by_norm.row, most);
    }
    heads[head].let_go.AddAll(next.heads[head].let_go);
  }
  prompt_end = next.prompt_end;
  end = next.end;
}

Observer::Strongest& Observer::Layer::NormsOf(std::uint64_t begin, std::uint64_t end, bool prompt,
                                              std::uint64_t most) {
  // Each prompt has its own range, because any of them may be the first undecided one later.
  const bool follows = !norms.empty() && norms.back().end == begin;
  const bool behind_decoded = follows && norms.back().prompt_end < norms.back().end;
  if (!follows || (prompt && behind_decoded)) {
    if (norms.size() == kMaxRanges) JoinNorms(most);
    norms.push_back({.first = begin, .prompt_end = begin, .end = begin});
  }
  Strongest& to = norms.back();
  to.end = end;
  if (prompt) to.prompt_end = end;
  return to;
}

// Range 1 is likely the first that counts. Range 0, decoded before it, rarely counts, so it is
// dropped if the others cannot be joined because tokens between them were not observed.
void Observer::Layer::JoinNorms(std::uint64_t most) {
  if (norms[1].end == norms[2].first) {
    norms[1].Append(norms[2], most);
    norms.erase(norms.begin() + 2);
  } else {
    norms.erase(norms.begin());
  }
}

void Observer::Layer::ForgetNormsFrom(std::uint64_t token) {
  while (!norms.empty() && norms.back().first >= token) norms.pop_back();
  if (!norms.empty()) norms.back().ForgetFrom(token);
}

void Observer::Layer::ForgetNormsBefore(std::uint64_t token) {
  from = std::max(from, token);
  std::erase_if(norms, [token](const Strongest& each) { return each.end <= token; });
  if (!norms.empty()) norms.front().ForgetBefore(token);
}

void Observer::ObserveSums(const ObservedRows& rows, std::uint64_t tokens,
                           const kernels::Operations& operations, Layer& layer) {
  const kernels::LayerGeometry& geometry = model_->geometry(rows.layer);
  const std::uint64_t row_bytes = RowBytes(geometry);
  // Tokens decoded in between have no keys here, so the sums start again after them.
  if (!layer.keys.empty() &&
      layer.sums_first + layer.keys.front().size() / row_bytes != rows.first_token) {
    layer.keys.clear();
    layer.sums.clear();
  }
  if (layer.keys.empty()) {
    layer.sums_first = rows.first_token;
    layer.keys.resize(geometry.kv_heads);
    layer.sums.resize(geometry.kv_heads);
  }
  const std::uint64_t before = rows.first_token - layer.sums_first;
  std::vector<std::uint64_t> visible_end;
  for (std::uint64_t token = 0; token < tokens; ++token) visible_end.push_back(before + token + 1);
  std::vector<std::uint64_t> visible_begin;
  for (const std::uint64_t end : visible_end) {
    const std::uint64_t window = geometry.sliding_window;
    visible_begin.push_back(window != 0 && end > window ? end - window : 0);
  }
  std::vector<float> scratch(kernels::kObserveRows * (before + tokens));
  for (std::uint32_t kv_head = 0; kv_head < geometry.kv_heads; ++kv_head) {
    std::vector<std::byte>& keys = layer.keys[kv_head];
    for (std::uint64_t token = 0; token < tokens; ++token) {
      const std::byte* const row =
          rows.key.data() + (token * geometry.kv_heads + kv_head) * row_bytes;
      keys.insert(keys.end(), row, row + row_bytes);
    }
    layer.sums[kv_head].resize(before + tokens, 0.0);
    std::vector<double> paid(before + tokens, 0.0);
    for (std::uint32_t i = 0; i < geometry.group(); ++i) {
      const std::uint32_t head = kv_head * geometry.group() + i;
      operations.observe({.keys = keys.data(),
                          .key_stride = row_bytes,
                          .key_count = before + tokens,
                          .queries = rows.query.data() + head * row_bytes,
                          .query_stride = geometry.query_heads * row_bytes,
                          .query_count = static_cast<std::uint32_t>(tokens),
                          .visible_begin = visible_begin.data(),
                          .visible_end = visible_end.data(),
                          .head_dim = geometry.head_dim,
                          .type = geometry.type,
                          .scale = geometry.scale,
                          .logit_softcap = geometry.logit_softcap,
                          .logits = false,
                          .scratch = scratch.data(),
                          .sums = paid.data()});
    }
    for (std::uint64_t token = 0; token < paid.size(); ++token) {
      layer.sums[kv_head][token] += paid[token] / geometry.group();
    }
  }
}

absl::Status Observer::CheckDecoded(std::uint32_t index, std::uint64_t first_token,
                                    std::span<const std::byte> query) const {
  if (!needs_.decode_queries() || !Decides(index)) return absl::OkStatus();
  const kernels::LayerGeometry& geometry = model_->geometry(index);
  const std::size_t elements = query.size() / kernels::ElementBytes(geometry.type);
  const std::int64_t bad =
      kernels::FirstUnusable(kernels::BestImplementation(), query.data(), elements, geometry.type);
  if (bad < 0) return absl::OkStatus();
  const std::uint64_t row = static_cast<std::uint64_t>(bad) / geometry.head_dim;
  return absl::InvalidArgumentError(
      Concat("layer ", index, ": the query of head ", row % geometry.query_heads, " of token ",
             first_token + row / geometry.query_heads,
             " is not finite, or its magnitude is 2^63 or more, and the policy learns from every "
             "query; nothing was observed: repeat the call with a valid query"));
}

void Observer::ObserveDecoded(std::uint32_t index, std::uint64_t first_token,
                              std::span<const std::byte> query) {
  if (!Decides(index)) return;
  const kernels::LayerGeometry& geometry = model_->geometry(index);
  const std::uint64_t token_bytes = geometry.query_heads * RowBytes(geometry);
  Layer& layer = LayerOf(index);
  layer.wants_all = needs_.decode_queries();
  // After a gap the newest queries say nothing about the tokens before it.
  if (first_token < layer.next) ForgetFrom(first_token, index);
  if (first_token > layer.next) layer.last.clear();
  const std::uint64_t tokens = query.size() / token_bytes, end = first_token + tokens;
  const ObservedRows rows = {.layer = index, .first_token = first_token, .query = query};
  ObserveLast(rows, tokens, /*drafts=*/tokens, layer);
  ObserveNorms(rows, tokens, NormsOf(ExpectedTokens(end)), /*prompt=*/false, layer);
  layer.next = end;
  layer.rests = false;
}

absl::Status Observer::ObserveTokenIds(std::uint64_t first_token,
                                       std::span<const std::uint32_t> ids) {
  if (!needs_.token_ids()) return absl::OkStatus();
  if (!ids_.empty() && first_token > first_id_ + ids_.size()) {
    return absl::OutOfRangeError(Concat("first_token is ", first_token,
                                        "; ids were observed up to token ",
                                        first_id_ + ids_.size()));
  }
  if (ids_.empty() || first_token < first_id_) {
    first_id_ = first_token;
    ids_.clear();
  }
  ids_.resize(first_token - first_id_);
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  return absl::OkStatus();
}

void Observer::Decided(std::uint32_t index, std::uint64_t until) {
  decided_.insert(index);
  const auto known = layers_.find(index);
  if (known == layers_.end()) return;
  Layer& layer = known->second;
  if (layer.norms.empty() || until >= layer.next) {
    layers_.erase(known);
    return;
  }
  // A longer sequence needs more of them. The daemon has the rest.
  Layer left = {
      .next = layer.next, .from = layer.from, .rests = true, .norms = std::move(layer.norms)};
  left.ForgetNormsBefore(until);
  layer = std::move(left);
}

void Observer::MarkPrefixDecided() {
  for (std::uint32_t layer = 0; layer < model_->layers(); ++layer) decided_.insert(layer);
}

}  // namespace tessera::client
