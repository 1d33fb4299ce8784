#include "daemon/compaction/observation/observation.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "daemon/base/expected_tokens.h"
#include "daemon/base/strings.h"
#include "kernels/tokens/counts.h"

namespace tessera::compaction {

namespace {

absl::Status Refuse(std::uint32_t layer, const auto&... why) {
  return absl::InvalidArgumentError(Concat("observation of layer ", layer, ": ", why...));
}

// The number of these ascending positions that are smaller than `position`.
std::size_t CountBefore(const std::vector<std::uint64_t>& positions, std::uint64_t position) {
  return static_cast<std::size_t>(std::ranges::lower_bound(positions, position) -
                                  positions.begin());
}

constexpr std::uint64_t kAll = ~std::uint64_t{0};

std::uint64_t NormRangeEnd(const ObservedLayer& shown) {
  return std::min(shown.norm.end, shown.tokens);
}

absl::Status CheckCounts(const ObservedLayer& shown, const policies::Needs& needs,
                         std::uint64_t most_last) {
  const std::uint32_t decides = shown.layer - shown.layer % needs.layers_alike;
  if (decides != shown.layer) {
    return Refuse(shown.layer, "the layer shares the decision of layer ", decides,
                  "; send observations of that layer only");
  }
  if (shown.last.count > 0 && most_last == 0) {
    return Refuse(shown.layer, "it has last queries; the policy asks for none");
  }
  if (shown.last.count > most_last) {
    return Refuse(shown.layer, shown.last.count, " last queries; the policy asks for ", most_last);
  }
  if (shown.last.first_position + shown.last.count > shown.tokens) {
    return Refuse(shown.layer, "last queries up to position ",
                  shown.last.first_position + shown.last.count, "; the sequence holds ",
                  shown.tokens, " tokens");
  }
  // A worker may send more than the policy needs now: a worker that continues the sequence does
  // not have these queries when it needs more of them.
  const std::uint64_t most = std::min(
      shown.tokens,
      kernels::CountUp(needs.norm_share * static_cast<double>(ExpectedTokens(shown.tokens))));
  if (shown.norm.count > most) {
    return Refuse(shown.layer, shown.norm.count, " queries by norm; of ", shown.tokens,
                  " tokens the policy asks for ", most, " at most");
  }
  if (shown.norm.first_token > NormRangeEnd(shown)) {
    return Refuse(shown.layer, "the token range of the queries by norm is reversed: it is from ",
                  shown.norm.first_token, " to before ", NormRangeEnd(shown));
  }
  if (shown.norm.none && needs.norm_share == 0) {
    return Refuse(shown.layer, "it has queries by norm from token ", shown.norm.first_token,
                  " on; the policy asks for none");
  }
  if (shown.sums.count > 0 && !needs.attention_sums) {
    return Refuse(shown.layer, "it has sums of attention; the policy asks for none");
  }
  if (shown.sums.first_position + shown.sums.count > shown.tokens) {
    return Refuse(shown.layer, "sums of attention up to position ",
                  shown.sums.first_position + shown.sums.count, "; the sequence holds ",
                  shown.tokens, " tokens");
  }
  return absl::OkStatus();
}

absl::Status CheckValues(const ObservedLayer& shown, const kernels::LayerGeometry& geometry,
                         const kernels::Operations& operations) {
  const std::uint64_t row = std::uint64_t{geometry.query_heads} * geometry.head_dim;
  for (const auto& [rows, count, what] :
       {std::tuple(shown.last.rows, shown.last.count, "last queries"),
        std::tuple(shown.norm.rows, shown.norm.count, "queries by norm")}) {
    if (count == 0) continue;
    const std::int64_t bad = operations.first_unusable(rows, count * row, geometry.type);
    if (bad >= 0) {
      return Refuse(shown.layer, "element ", bad, " of the ", what,
                    " is not finite, or its magnitude is 2^63 or more");
    }
  }
  for (std::uint64_t i = 0; i < shown.sums.count * geometry.kv_heads; ++i) {
    const float sum = shown.sums.values[i];
    if (std::isfinite(sum) && sum >= 0) continue;
    return Refuse(shown.layer, "sums must be finite and at least 0, but element ", i,
                  " of the sums of attention is ", sum);
  }
  for (std::uint64_t i = 0; i < shown.norm.positions.size(); ++i) {
    const std::uint64_t position = shown.norm.positions[i];
    const bool rises = i % shown.norm.count == 0 || position > shown.norm.positions[i - 1];
    if (position < shown.tokens && rises) continue;
    return Refuse(shown.layer, "position ", i, " of the queries by norm is ", position,
                  "; the positions of a head are ascending and below ", shown.tokens);
  }
  for (const std::uint64_t position : shown.norm.positions) {
    if (shown.norm.first_token <= position && position < NormRangeEnd(shown)) continue;
    return Refuse(shown.layer, "a query by norm has position ", position,
                  ", which is not among the reported tokens from ", shown.norm.first_token,
                  " to before ", NormRangeEnd(shown));
  }
  return absl::OkStatus();
}

}  // namespace

std::uint64_t BytesOf(const ObservedLayer& shown, const kernels::LayerGeometry& geometry) {
  const std::uint64_t rows = (shown.last.count + shown.norm.count) * geometry.query_heads;
  return rows * geometry.head_dim * kernels::ElementBytes(geometry.type) +
         shown.sums.count * geometry.kv_heads * sizeof(float);
}

absl::Status Observation::Take(const ObservedLayer& shown, const policies::Needs& needs,
                               const cache::Model& model, const kernels::Operations& operations,
                               pool::Account& budget) {
  const kernels::LayerGeometry geometry = model.geometry(shown.layer);
  // A policy that needs every query also needs all queries of later prompts, sent together.
  const std::uint64_t most_last =
      std::max({std::uint64_t{needs.last_queries},
                kernels::CountUp(needs.last_share * static_cast<double>(shown.tokens)),
                needs.decode_queries ? shown.tokens : 0});
  absl::Status status = CheckCounts(shown, needs, most_last);
  if (status.ok()) status = CheckValues(shown, geometry, operations);
  if (!status.ok()) return status;

  const std::uint64_t row_bytes = geometry.head_dim * kernels::ElementBytes(geometry.type);
  // Unshared memory grows in place, and only by rows at new positions.
  const bool alone = Alone();
  const std::uint64_t more = AddedBytes(shown, geometry);
  absl::StatusOr<pool::Charge> charge =
      budget.Reserve(pool::MemoryTag::kObservations, alone ? more : bytes() + more);
  if (!charge.ok()) return charge.status();
  if (!alone) shown_ = shown_ == nullptr ? std::make_shared<Shown>() : shown_->Copy();

  if (shown.norm.count > 0 || shown.norm.none) {
    TrimNormReports(0, shown.norm.first_token);
    norm_reports_.push_back({.begin = shown.norm.first_token,
                             .end = NormRangeEnd(shown),
                             .known = shown.norm.all ? kAll : shown.norm.count});
  }
  Shown& now = *shown_;
  if (shown.last.count + shown.norm.count > 0) now.heads.resize(geometry.query_heads);
  for (std::uint32_t head = 0; head < now.heads.size(); ++head) {
    HeadRows norm;
    const std::uint64_t first = head * shown.norm.count;
    for (std::uint64_t i = 0; i < shown.norm.count; ++i) {
      norm.positions.push_back(shown.norm.positions[first + i]);
    }
    if (shown.norm.count > 0) {
      const std::byte* const rows = shown.norm.rows + first * row_bytes;
      norm.rows.assign(rows, rows + shown.norm.count * row_bytes);
      std::vector<std::uint64_t>& strongest = now.heads[head].strongest;
      strongest.resize(CountBefore(strongest, shown.norm.first_token));
      strongest.insert(strongest.end(), norm.positions.begin(), norm.positions.end());
    }
    Merge(std::move(norm), row_bytes, now.heads[head]);
    HeadRows last;
    for (std::uint64_t i = 0; i < shown.last.count; ++i) {
      last.positions.push_back(shown.last.first_position + i);
      const std::byte* const row = shown.last.rows + (i * geometry.query_heads + head) * row_bytes;
      last.rows.insert(last.rows.end(), row, row + row_bytes);
    }
    Merge(std::move(last), row_bytes, now.heads[head]);
  }
  if (shown.sums.count > 0) {
    now.sums_first = shown.sums.first_position;
    now.sums.clear();
    for (std::uint32_t head = 0; head < geometry.kv_heads; ++head) {
      const float* const values = shown.sums.values + head * shown.sums.count;
      now.sums.emplace_back(values, values + shown.sums.count);
    }
  }
  now.budget = &budget;
  now.charge.Add(*std::move(charge));
  now.charge.ShrinkTo(now.bytes());  // the reservation was an upper bound
  return absl::OkStatus();
}

// Upper bound of the bytes that Take adds.
std::uint64_t Observation::AddedBytes(const ObservedLayer& shown,
                                      const kernels::LayerGeometry& geometry) const {
  const std::uint64_t row_bytes = geometry.head_dim * kernels::ElementBytes(geometry.type);
  std::uint64_t rows = (shown.last.count + shown.norm.count) * geometry.query_heads;
  std::uint64_t sums = shown.sums.count * geometry.kv_heads;
  if (shown_ != nullptr) {
    for (std::uint32_t head = 0; head < shown_->heads.size(); ++head) {
      const std::vector<std::uint64_t>& known = shown_->heads[head].positions;
      const auto is_known = [&](std::uint64_t position) {
        return std::ranges::binary_search(known, position);
      };
      for (std::uint64_t i = 0; i < shown.norm.count; ++i) {
        rows -= is_known(shown.norm.positions[head * shown.norm.count + i]) ? 1 : 0;
      }
      for (std::uint64_t i = 0; i < shown.last.count; ++i) {
        rows -= is_known(shown.last.first_position + i) ? 1 : 0;
      }
    }
    std::uint64_t held = 0;
    for (const std::vector<float>& of_head : shown_->sums) held += of_head.size();
    sums -= std::min(sums, held);
  }
  return rows * (row_bytes + sizeof(std::uint64_t)) + sums * sizeof(float) +
         shown.norm.positions.size() * sizeof(std::uint64_t);
}

// Whether no fork shares the memory any more.
bool Observation::Alone() const {
  if (shown_ == nullptr || shown_.use_count() != 1) return false;
  // use_count() is no synchronization: releasing a copy orders us after the previous holders.
  std::shared_ptr<Shown>(shown_).reset();
  return true;
}

void Observation::ForgetBefore(std::uint64_t position) {
  TrimNormReports(position, kAll);
  KeepOnly(position, kAll, /*keeps_sums=*/false);
}

void Observation::KeepNewest(std::uint64_t count) {
  if (shown_ == nullptr || !Alone()) return;
  std::uint64_t from = 0;
  for (const HeadRows& head : shown_->heads) {
    const std::size_t rows = head.positions.size();
    if (rows > count) from = std::max(from, head.positions[rows - count]);
  }
  if (from > 0) KeepOnly(from, kAll, /*keeps_sums=*/true);
}

void Observation::ForgetFrom(std::uint64_t position) {
  TrimNormReports(0, position);
  if (shown_ != nullptr) KeepOnly(0, position, /*keeps_sums=*/shown_->SumsEnd() <= position);
}

void Observation::ForgetRows() {
  for (Showing& showing : norm_reports_) showing.known = 0;
  shown_ = nullptr;
}

// The strongest queries of a range that lie in a sub-range are the strongest of the sub-range.
Observation::Showing Observation::Part(const Showing& showing, std::uint64_t begin,
                                       std::uint64_t end) const {
  Showing part = {.begin = std::max(begin, showing.begin),
                  .end = std::min(end, showing.end),
                  .known = showing.known};
  const bool whole = part.begin == showing.begin && part.end == showing.end;
  if (whole || part.known == kAll || part.begin >= part.end) return part;
  if (shown_ == nullptr) part.known = 0;
  for (std::size_t head = 0; shown_ != nullptr && head < shown_->heads.size(); ++head) {
    const std::vector<std::uint64_t>& strongest = shown_->heads[head].strongest;
    part.known = std::min<std::uint64_t>(
        part.known, CountBefore(strongest, part.end) - CountBefore(strongest, part.begin));
  }
  return part;
}

void Observation::TrimNormReports(std::uint64_t begin, std::uint64_t end) {
  for (Showing& showing : norm_reports_) showing = Part(showing, begin, end);
  std::erase_if(norm_reports_, [](const Showing& showing) { return showing.begin >= showing.end; });
}

std::uint64_t Observation::FirstTokenWithoutNorms(std::uint64_t begin, std::uint64_t end) const {
  for (const Showing& showing : norm_reports_) {
    if (showing.begin <= begin) begin = std::max(begin, showing.end);
  }
  return std::min(begin, end);
}

std::uint64_t Observation::KnownNormQueries(std::uint64_t begin, std::uint64_t end) const {
  std::uint64_t known = kAll;
  for (const Showing& showing : norm_reports_) {
    const Showing part = Part(showing, begin, end);
    if (part.begin < part.end) known = std::min(known, part.known);
  }
  return known;
}

void Observation::KeepOnly(std::uint64_t begin, std::uint64_t end, bool keeps_sums) {
  if (shown_ == nullptr) return;
  bool all = keeps_sums || shown_->sums.empty();
  auto rest = std::make_shared<Shown>();
  if (keeps_sums) {
    rest->sums_first = shown_->sums_first;
    rest->sums = shown_->sums;
  }
  bool empty = rest->sums.empty();
  for (const HeadRows& head : shown_->heads) {
    const auto at = [&](std::uint64_t position) {
      return std::lower_bound(head.positions.begin(), head.positions.end(), position);
    };
    const auto first = at(begin);
    const auto last = at(end);
    all = all && first == head.positions.begin() && last == head.positions.end();
    HeadRows& kept = rest->heads.emplace_back();
    if (first == last) continue;
    empty = false;
    const std::size_t row_bytes = head.rows.size() / head.positions.size();
    const auto row = [&](auto position) {
      return head.rows.begin() +
             static_cast<std::ptrdiff_t>(row_bytes) * (position - head.positions.begin());
    };
    kept.positions.assign(first, last);
    kept.rows.assign(row(first), row(last));
    const auto strong = [&](std::uint64_t position) {
      return std::ranges::lower_bound(head.strongest, position);
    };
    kept.strongest.assign(strong(begin), strong(end));
  }
  if (all) return;
  const std::shared_ptr<Shown> before = std::exchange(shown_, nullptr);
  if (empty) return;
  rest->budget = before->budget;
  if (before.use_count() == 1) {
    rest->charge = std::move(before->charge);
    rest->charge.ShrinkTo(rest->bytes());
  } else {
    absl::StatusOr<pool::Charge> charge =
        before->budget->Reserve(pool::MemoryTag::kObservations, rest->bytes());
    if (!charge.ok()) {
      for (Showing& showing : norm_reports_) showing.known = 0;
      return;
    }
    rest->charge = *std::move(charge);
  }
  shown_ = std::move(rest);
}

// Merges by position; `added` replaces rows at equal positions.
void Observation::Merge(HeadRows added, std::uint64_t row_bytes, HeadRows& rows) {
  if (added.positions.empty()) return;
  if (rows.positions.empty()) {
    rows.positions = std::move(added.positions);
    rows.rows = std::move(added.rows);
    return;
  }
  if (added.positions.front() > rows.positions.back()) {
    rows.positions.insert(rows.positions.end(), added.positions.begin(), added.positions.end());
    rows.rows.insert(rows.rows.end(), added.rows.begin(), added.rows.end());
    return;
  }
  HeadRows merged;
  std::size_t a = 0;
  std::size_t b = 0;
  const auto take = [&](const HeadRows& from, std::size_t index) {
    merged.positions.push_back(from.positions[index]);
    const std::byte* const row = from.rows.data() + index * row_bytes;
    merged.rows.insert(merged.rows.end(), row, row + row_bytes);
  };
  while (a < rows.positions.size() || b < added.positions.size()) {
    const bool from_added = a == rows.positions.size() ||
                            (b < added.positions.size() && added.positions[b] <= rows.positions[a]);
    if (!from_added) {
      take(rows, a++);
      continue;
    }
    if (a < rows.positions.size() && rows.positions[a] == added.positions[b]) ++a;
    take(added, b++);
  }
  rows.positions = std::move(merged.positions);
  rows.rows = std::move(merged.rows);
}

std::shared_ptr<Observation::Shown> Observation::Shown::Copy() const {
  auto copy = std::make_shared<Shown>();
  copy->heads = heads;
  copy->sums_first = sums_first;
  copy->sums = sums;
  return copy;
}

std::uint64_t Observation::Shown::bytes() const {
  std::uint64_t sum = 0;
  for (const HeadRows& head : heads) {
    sum +=
        head.rows.size() + (head.positions.size() + head.strongest.size()) * sizeof(std::uint64_t);
  }
  for (const std::vector<float>& of_head : sums) sum += of_head.size() * sizeof(float);
  return sum;
}

std::uint64_t Observation::bytes() const { return shown_ == nullptr ? 0 : shown_->bytes(); }

std::vector<policies::HeadQueries> Observation::queries() const {
  std::vector<policies::HeadQueries> queries;
  if (shown_ == nullptr) return queries;
  for (const HeadRows& head : shown_->heads) {
    queries.push_back({.positions = head.positions, .rows = head.rows.data()});
  }
  return queries;
}

std::vector<float> Observation::SumsAt(std::uint32_t kv_head,
                                       std::span<const std::uint64_t> positions) const {
  std::vector<float> sums;
  if (shown_ == nullptr || kv_head >= shown_->sums.size()) return sums;
  const std::vector<float>& known = shown_->sums[kv_head];
  for (const std::uint64_t position : positions) {
    const std::uint64_t first = shown_->sums_first;
    if (position < first) return {};
    if (position - first >= known.size()) break;
    sums.push_back(known[position - first]);
  }
  return sums;
}

void TakeTokenIds(std::uint64_t first_token, std::span<const std::uint32_t> ids,
                  const cache::Model& model, std::vector<policies::TextMark>& text) {
  const std::vector<std::uint32_t>& known = model.spec().delimiter_token_ids;
  const absl::flat_hash_set<std::uint32_t> ends(known.begin(), known.end());
  using policies::TextMark;
  const std::uint64_t end = first_token + ids.size();
  if (text.size() < end) text.resize(end, TextMark::kNotShown);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    text[first_token + i] = ends.contains(ids[i]) ? TextMark::kDelimiter : TextMark::kInside;
  }
}

}  // namespace tessera::compaction
