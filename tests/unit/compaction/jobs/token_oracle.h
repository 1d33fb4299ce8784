// The expected entries of lanes under a token policy: the oracle of tokens_property_test.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "daemon/compaction/jobs/managed_sequence.h"
#include "daemon/compaction/lanes/element.h"
#include "daemon/compaction/lanes/rope_shift.h"
#include "tests/fakes/gpu/host_key_scorer.h"
#include "tests/unit/compaction/compaction_fixture.h"
#include "tests/unit/compaction/jobs/oracle_lanes.h"

namespace tessera::compaction {

class TokenOracle {
 public:
  using Entry = OracleEntry;
  using Lane = OracleLane;
  using Layer = OracleLayer;
  // The possible outcomes per layer.
  using Outcomes = std::vector<std::vector<Layer>>;

  explicit TokenOracle(const cache::Model& model) : model_(&model) {
    for (std::uint32_t layer = 0; layer < model.layers(); ++layer) {
      layers_.emplace_back(model.layout().kv_heads(layer));
    }
  }

  // Tokens that every layer holds in segments.
  std::uint64_t tokens() const {
    std::uint64_t tokens = layers_.front().front().tail_start;
    for (const Layer& layer : layers_) {
      for (const Lane& lane : layer) tokens = std::min(tokens, lane.tail_start);
    }
    return tokens;
  }

  // Adds tokens that have been moved into segments.
  void Sync(const Track& track) {
    for (const cache::Sequence::LaneDescription& shown : track.sequence->Describe(true).lanes) {
      Lane& lane = layers_[shown.layer][shown.kv_head];
      while (lane.tail_start < shown.tokens) {
        Entry entry = {.position = lane.tail_start};
        entry.key = Row(track, lane.tail_start, {shown.layer, shown.kv_head, cache::RowKind::kKey});
        entry.value =
            Row(track, lane.tail_start, {shown.layer, shown.kv_head, cache::RowKind::kValue});
        lane.entries.push_back(std::move(entry));
        ++lane.tail_start;
      }
    }
  }

  void Cut(std::uint64_t tokens) {
    for (Layer& layer : layers_) {
      for (Lane& lane : layer) {
        while (!lane.entries.empty() && lane.entries.back().position >= tokens) {
          lane.entries.pop_back();
        }
        lane.tail_start = std::min(lane.tail_start, tokens);
      }
    }
  }

  // The outcomes of one job, whichever layers it covers.
  Outcomes Expected(const Track& track, const policies::Policy& policy) {
    Outcomes outcomes(layers_.size());
    waits_from_.assign(layers_.size(), {});
    had_packed_.assign(layers_.size(), false);
    const cache::Sequence::Description shown = track.sequence->Describe(/*lanes=*/true);
    for (std::uint32_t layer = 0; layer < layers_.size(); ++layer) {
      had_packed_[layer] = HasPacked(shown, layer);
      for (std::uint32_t head = 0; head < layers_[layer].size(); ++head) {
        waits_from_[layer].push_back(FirstOf(track, policy, layer, head));
      }
    }
    const std::shared_ptr<ManagedSequence> managed = ManagedSequence::Of(*track.sequence);
    for (std::uint32_t layer = 0; layer < layers_.size(); ++layer) {
      const std::uint32_t decides = policies::DecidesFor(policy, layer);
      // A job triggered by decoded tokens leaves an incomplete prompt alone.
      for (const bool leaves_open : {false, true}) {
        if (HasStops(policy)) {
          AddStops(track, policy, *managed, layer, leaves_open, outcomes[layer]);
          continue;
        }
        const auto decided = Decided(track, policy, *managed, decides, leaves_open);
        if (!decided.has_value()) continue;
        outcomes[layer].push_back(After(track, policy, layer, decided->first, decided->second));
      }
      if (decides == layer) continue;
      outcomes[layer].push_back(TakenOver(*managed, layer, decides));
    }
    return outcomes;
  }

  // Takes over each layer's outcome if it is one of the expected ones. For packed rows, whose keys
  // have changed, accepts any subset.
  void Adopt(const Track& track, const policies::Policy& policy, Outcomes outcomes) {
    const cache::Sequence::Description shown =
        track.sequence->Describe(cache::Sequence::Detail::kEntries);
    for (std::uint32_t layer = 0; layer < layers_.size(); ++layer) {
      if (Matches(shown, layer, layers_[layer])) continue;
      // The other layer's entries after the same job.
      const std::uint32_t decides = policies::DecidesFor(policy, layer);
      if (decides != layer) {
        outcomes[layer].push_back(TakenOver(*ManagedSequence::Of(*track.sequence), layer, decides));
      }
      const auto it = std::ranges::find_if(
          outcomes[layer], [&](const Layer& outcome) { return Matches(shown, layer, outcome); });
      if (it != outcomes[layer].end()) {
        layers_[layer] = *it;
      } else if ((!had_packed_.empty() && had_packed_[layer]) || HasPacked(shown, layer)) {
        KeepShown(shown, layer);
      }
    }
    had_packed_.clear();
  }

  // For a sequence with re-rotated keys: later policies use the current keys.
  void TakeKeys(const cache::SequenceView& view) {
    for (const cache::SequenceView::LaneOf& lane : view.lanes) {
      std::vector<Entry>& entries = layers_[lane.layer][lane.kv_head].entries;
      const std::size_t row_bytes = model_->layout().tile(lane.layer).row_bytes();
      std::size_t next = 0;
      for (std::uint32_t s = 0; s < lane.resolved.segments; ++s) {
        const kernels::SegmentView& segment = view.segments[lane.first_segment + s];
        const std::uint32_t keys = kernels::LayoutOf(segment.shape).key_data;
        for (std::uint32_t e = 0; e < segment.entries; ++e, ++next) {
          if (segment.shape.packed()) continue;
          const std::byte* const key = segment.arena +
                                       segment.tile_offsets[e / kernels::kTileEntries] + keys +
                                       e % kernels::kTileEntries * row_bytes;
          entries[next].key.assign(key, key + row_bytes);
        }
      }
    }
  }

  // Returns an empty string if every lane shows these entries and then the tail. `turned`: keys
  // differ from the appended ones.
  std::string Differs(const cache::SequenceView& view, const Track& track, bool turned) const {
    const cache::Sequence::Description shown =
        track.sequence->Describe(cache::Sequence::Detail::kEntries);
    for (const cache::SequenceView::LaneOf& lane : view.lanes) {
      const std::string where =
          "layer " + std::to_string(lane.layer) + " head " + std::to_string(lane.kv_head) + ": ";
      const Lane& expected = layers_[lane.layer][lane.kv_head];
      std::string wrong =
          LaneShows(view, lane, expected, turned, model_->layout().tile(lane.layer).row_bytes());
      if (wrong.empty()) wrong = TailShows(view, lane, expected, track);
      if (!wrong.empty()) return where + wrong;
    }
    for (std::uint32_t layer = 0; layer < layers_.size(); ++layer) {
      if (!Matches(shown, layer, layers_[layer])) return "is described as something else";
    }
    return "";
  }

 private:
  std::vector<std::byte> Row(const Track& track, std::uint64_t token,
                             const cache::RowPlace& place) const {
    const kernels::DenseTile tile = model_->layout().tile(place.layer);
    std::vector<std::byte> row(tile.row_bytes());
    DrawRow(track.stamps[token], place, tile, row.data());
    return row;
  }

  // ---- A policy's decision about a layer, and the number of entries that it covers per lane
  std::uint64_t FirstOf(const Track& track, const policies::Policy& policy, std::uint32_t layer,
                        std::uint32_t head) const {
    if (ChoosesFromAll(policy)) return 0;
    return layers_[layer][head].entries.size() -
           track.sequence->OpenEntries(model_->layout().lane(layer, head));
  }

  // The waiting tokens that the other layer has decided about and kept.
  Layer TakenOver(ManagedSequence& managed, std::uint32_t layer, std::uint32_t decides) const {
    ManagedSequence::ManagedLayer& other = managed.layer(decides);
    MutexLock lock(other.mutex);
    const std::uint64_t until = other.state.decided_until;
    Layer left = layers_[layer];
    for (std::size_t head = 0; head < left.size(); ++head) {
      const std::vector<Entry>& theirs = layers_[decides][head].entries;
      std::vector<Entry>& entries = left[head].entries;
      const auto goes = [&](const Entry& entry) {
        const auto at = std::ranges::find(theirs, entry.position, &Entry::position);
        return entry.position < until && at == theirs.end();
      };
      const auto waits = entries.begin() + static_cast<std::ptrdiff_t>(waits_from_[layer][head]);
      entries.erase(std::remove_if(waits, entries.end(), goes), entries.end());
    }
    return left;
  }

  // A job makes choices that end at stops. It may find the tokens up to the next one missing.
  void AddStops(const Track& track, const policies::Policy& policy, ManagedSequence& managed,
                std::uint32_t index, bool leaves_open, std::vector<Layer>& outcomes) {
    const Layer before = layers_[index];
    std::uint64_t decided = managed.decided_until(index);
    for (bool more = true; more;) {
      const std::uint64_t stop = StopAfter(managed.prompts(), decided);
      const auto decision = Decided(track, policy, managed, index, leaves_open,
                                    Progress{.until = decided, .stop = stop});
      if (!decision.has_value()) break;
      layers_[index] = After(track, policy, index, decision->first, decision->second);
      outcomes.push_back(layers_[index]);
      more = std::ranges::any_of(before, [&](const Lane& lane) {
        return !lane.entries.empty() && lane.entries.back().position >= stop;
      });
      decided = stop;
    }
    layers_[index] = before;
  }

  using Decision = std::pair<policies::LayerDecision, std::vector<std::uint64_t>>;
  // The tokens that were decided about before, and where the choice ends.
  struct Progress {
    std::uint64_t until;
    std::uint64_t stop;
  };
  std::optional<Decision> Decided(const Track& track, const policies::Policy& policy,
                                  ManagedSequence& managed, std::uint32_t index, bool leaves_open,
                                  std::optional<Progress> progress = std::nullopt) const {
    ManagedSequence::ManagedLayer& kept = managed.layer(index);
    MutexLock lock(kept.mutex);
    const LayerState& state = kept.state;
    const std::uint64_t decided =
        progress.has_value() ? progress->until : state.decided_until.load();
    std::uint64_t begin = ~std::uint64_t{0};
    std::uint64_t end = 0;
    for (std::uint32_t head = 0; head < layers_[index].size(); ++head) {
      const Lane& lane = layers_[index][head];
      const std::uint64_t first = FirstOf(track, policy, index, head);
      if (first == lane.entries.size()) continue;
      begin = std::min(begin, lane.entries[first].position);
      end = std::max(end, lane.entries.back().position + 1);
    }
    begin = end == 0 ? 0 : begin;
    const std::vector<policies::TokenSpan> all_prompts = managed.prompts();
    if (leaves_open && !all_prompts.empty() && all_prompts.back().end >= end) {
      end = std::min(end, std::max(all_prompts.back().begin, decided));
    }
    const std::vector<policies::HeadQueries> queries = state.observation.queries();
    const auto shown_from = [&](std::uint64_t token) {
      for (const std::uint64_t position :
           queries.empty() ? std::span<const std::uint64_t>() : queries.front().positions) {
        token += position == token;
      }
      return token;
    };
    bool advances = policies::Continues(policy) && decided > 0;
    if (policies::NeedsOf(policy).decode_queries) {
      advances |= begin == 0 && shown_from(0) >= end;
      if (advances) {
        std::uint64_t until = shown_from(decided);
        for (const policies::TokenSpan& span : all_prompts) {  // a whole prompt, or nothing
          if (span.begin < until && until < std::min(span.end, end)) {
            until = std::max(span.begin, decided);
          }
        }
        end = std::min(end, until);
      }
    }
    if (progress.has_value()) end = std::min(end, progress->stop);
    const std::uint64_t from = ChoosesFromAll(policy) ? 0 : begin;

    struct LaneData {
      std::vector<std::byte> keys;
      std::vector<std::uint64_t> positions;
      std::vector<float> weights;
      std::vector<float> sums;
    };
    std::vector<LaneData> data(layers_[index].size());
    std::vector<policies::LaneEntries> lanes;
    std::vector<kernels::RowRange> keys;
    std::vector<std::span<const float>> sums;
    std::vector<std::uint64_t> counts;
    std::vector<std::uint64_t> held;
    bool all_sums = true;
    for (std::uint32_t head = 0; head < data.size(); ++head) {
      const std::vector<Entry>& entries = layers_[index][head].entries;
      held.push_back(0);
      LaneData& lane = data[head];
      std::vector<std::uint64_t> absolute;
      for (std::size_t i = FirstOf(track, policy, index, head);
           i < entries.size() && entries[i].position < end; ++i) {
        const std::vector<std::byte> key = Looked(policy, index, entries[i]);
        lane.keys.insert(lane.keys.end(), key.begin(), key.end());
        absolute.push_back(entries[i].position);
        lane.positions.push_back(entries[i].position - from);
        lane.weights.push_back(entries[i].weight);
        held.back() += entries[i].position < decided;
      }
      lane.sums = state.observation.SumsAt(head, absolute);
      all_sums &= lane.sums.size() == absolute.size();
      sums.push_back(lane.sums);
      counts.push_back(absolute.size());
      lanes.push_back(
          {.count = absolute.size(), .positions = lane.positions, .weights = lane.weights});
      keys.push_back({.rows = lane.keys.data(), .count = absolute.size()});
    }
    std::vector<std::vector<std::uint64_t>> behind(queries.size());
    std::vector<policies::HeadQueries> shown;
    for (std::size_t i = 0; i < queries.size(); ++i) {
      std::size_t skipped = 0;
      for (const std::uint64_t position : queries[i].positions) {
        if (position < from) {
          ++skipped;
        } else {
          behind[i].push_back(position - from);
        }
      }
      shown.push_back(
          {.positions = behind[i],
           .rows = queries[i].rows + skipped * model_->layout().tile(index).row_bytes()});
    }
    const std::vector<policies::TextMark> text = managed.text();
    std::vector<policies::TokenSpan> prompts;
    for (const policies::TokenSpan& span : all_prompts) {
      if (span.end > from && span.begin < end) {
        prompts.push_back({std::max(span.begin, from) - from, std::min(span.end, end) - from});
      }
    }
    kernels::LayerGeometry looked = model_->geometry(index);
    if (policies::UsesUnrotatedKeys(policy)) looked.type = kernels::ElementType::kFp32;
    policies::HostKeyScorer scorer(*operations_, looked, std::move(keys));
    policies::LayerView view = {
        .layer = index,
        .layers = model_->layers(),
        .geometry = model_->geometry(index),
        .first = from,
        .tokens = end - std::min(end, from),
        .prompts = prompts,
        .lanes = lanes,
        .queries = shown,
        .sums = {},
        .text = std::span(text).subspan(std::min<std::size_t>(from, text.size())),
        .scorer = &scorer};
    if (all_sums) view.sums = sums;
    policies::LayerMemory memory = state.memory;
    auto decision = advances ? policies::Advance(policy, view, held, memory)
                             : policies::Decide(policy, view, memory);
    if (!decision.ok()) return std::nullopt;
    return Decision(*std::move(decision), counts);
  }

  Layer After(const Track& track, const policies::Policy& policy, std::uint32_t index,
              const policies::LayerDecision& decision,
              const std::vector<std::uint64_t>& decided) const {
    Layer after = layers_[index];
    for (std::uint32_t head = 0; head < after.size(); ++head) {
      const std::vector<Entry>& before = layers_[index][head].entries;
      const std::uint64_t first = FirstOf(track, policy, index, head);
      const policies::LaneDecision& of_lane = decision[head];
      if (first + decided[head] > before.size()) continue;  // of another length: not carried out
      std::vector<Entry> entries(before.begin(), before.begin() + static_cast<long>(first));
      for (std::size_t i = 0; i < of_lane.kept.size(); ++i) {
        entries.push_back(before[first + of_lane.kept[i]]);
        if (!of_lane.merges()) continue;
        std::vector<const Entry*> members;
        for (std::uint32_t m = of_lane.begins[i]; m < of_lane.begins[i + 1]; ++m) {
          members.push_back(&before[first + of_lane.members[m]]);
        }
        if (members.size() > 1) {
          Merge(index, members, policies::UsesUnrotatedKeys(policy), entries.back());
        }
      }
      entries.insert(entries.end(), before.begin() + static_cast<long>(first + decided[head]),
                     before.end());
      after[head].entries = std::move(entries);
    }
    return after;
  }

  // The key that a policy uses.
  std::vector<std::byte> Looked(const policies::Policy& policy, std::uint32_t layer,
                                const Entry& entry) const {
    if (!policies::UsesUnrotatedKeys(policy)) return entry.key;
    const std::vector<double> row = TurnedTo(layer, entry, 0);
    const std::vector<float> narrow(row.begin(), row.end());
    const auto bytes = std::as_bytes(std::span(narrow));
    return {bytes.begin(), bytes.end()};
  }
  // The key rotated for another position.
  std::vector<double> TurnedTo(std::uint32_t layer, const Entry& entry,
                               std::uint64_t position) const {
    const kernels::DenseTile tile = model_->layout().tile(layer);
    std::vector<double> row(tile.head_dim);
    RopeShift(model_->spec().rope(), tile)
        .ShiftInto(entry.key.data(), static_cast<std::int64_t>(position - entry.position), row);
    return row;
  }

  void Merge(std::uint32_t layer, const std::vector<const Entry*>& members, bool turns,
             Entry& into) const {
    const kernels::DenseTile tile = model_->layout().tile(layer);
    double sum = 0;
    for (const Entry* member : members) sum += member->weight;
    const auto merge = [&](std::vector<std::byte> Entry::*row, bool turned) {
      std::vector<double> mean(tile.head_dim);
      for (const Entry* member : members) {
        const std::vector<double> at =
            turned ? TurnedTo(layer, *member, into.position) : std::vector<double>();
        for (std::uint32_t d = 0; d < tile.head_dim; ++d) {
          mean[d] += double{member->weight} *
                     (turned ? at[d] : ElementAt((member->*row).data(), tile.type, d));
        }
      }
      std::vector<std::byte> merged(tile.row_bytes());
      for (std::uint32_t d = 0; d < tile.head_dim; ++d) {
        SetElement(merged.data(), tile.type, d, static_cast<float>(mean[d] / sum));
      }
      into.*row = std::move(merged);
    };
    merge(&Entry::key, turns);
    merge(&Entry::value, false);
    into.weight = static_cast<float>(sum);
  }

  // ---- Entries that a description reports
  void KeepShown(const cache::Sequence::Description& shown, std::uint32_t layer) {
    for (const auto& lane : shown.lanes) {
      if (lane.layer != layer) continue;
      std::erase_if(layers_[layer][lane.kv_head].entries, [&](const Entry& entry) {
        return !std::ranges::binary_search(lane.positions, entry.position);
      });
    }
  }

  std::string TailShows(const cache::SequenceView& view, const cache::SequenceView::LaneOf& lane,
                        const Lane& expected, const Track& track) const {
    if (view.tail == nullptr) return "";
    const shm::TailRing ring =
        model_->layout().ring(view.tail->region().data(), lane.layer, lane.kv_head);
    for (std::uint64_t token = expected.tail_start; token < view.committed; ++token) {
      const auto same = [&](const std::byte* row, cache::RowKind kind) {
        const std::vector<std::byte> made = Row(track, token, {lane.layer, lane.kv_head, kind});
        return std::memcmp(row, made.data(), made.size()) == 0;
      };
      if (!same(ring.Key(token), cache::RowKind::kKey) ||
          !same(ring.Value(token), cache::RowKind::kValue)) {
        return "token " + std::to_string(token) + " of the tail is another's";
      }
    }
    return "";
  }

  const cache::Model* model_;
  // The device's operations.
  const kernels::Operations* operations_ = &kernels::OperationsOf(cache::ReferenceKernels());
  std::vector<Layer> layers_;
  // By layer and head, before the expected job: the first entry that the choice covers.
  std::vector<std::vector<std::uint64_t>> waits_from_;
  std::vector<bool> had_packed_;  // by layer; empty: nothing is expected
};

}  // namespace tessera::compaction
