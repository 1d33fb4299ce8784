#include "daemon/compaction/jobs/policy_fits.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/base/strings.h"
#include "daemon/cache/segment/book_library.h"
#include "daemon/compaction/jobs/compactor_jobs.h"
#include "daemon/compaction/lanes/rope_shift.h"
#include "daemon/compaction/lanes/token_selector.h"
#include "daemon/policies/grammar/validate.h"
#include "daemon/policies/plan.h"
#include "daemon/policies/token_policy.h"

namespace tessera::compaction {

using LaneDescription = cache::Sequence::LaneDescription;

namespace {

absl::Status CheckNothingPacked(const cache::Sequence& sequence, const LaneDescription& lane,
                                std::string_view what_it_does) {
  for (const cache::SegmentRun& run : lane.runs) {
    if (!run.shape.packed()) continue;
    return absl::FailedPreconditionError(Concat(sequence.id().ToString(), " holds ", run.entries,
                                                " packed entries in layer ", lane.layer,
                                                ", kv head ", lane.kv_head, "; set a policy that ",
                                                what_it_does, " before entries are packed"));
  }
  return absl::OkStatus();
}

// Keys are rotated by how far their entry moves in the lane, so each entry's rotary position must
// be its index.
absl::Status CheckPositionsCanMove(const cache::Sequence& sequence) {
  if (absl::Status fits = RopeShift::WhyNot(sequence.model().spec()); !fits.ok()) return fits;
  for (const LaneDescription& lane : sequence.Describe(/*lanes=*/true).lanes) {
    if (absl::Status fits = CheckNothingPacked(sequence, lane, "moves positions"); !fits.ok()) {
      return fits;
    }
    if (lane.entries + lane.position_shift == lane.tokens) continue;
    return absl::FailedPreconditionError(
        Concat(sequence.id().ToString(), " has dropped entries: it holds ", lane.entries, " of ",
               lane.tokens,
               " tokens, at their original positions; set a policy that moves "
               "positions before any entry is dropped"));
  }
  return absl::OkStatus();
}

// The rotation of a key is undone from its token's position, so entries may not have moved.
absl::Status CheckKeysCanBeUnrotated(const cache::Sequence& sequence) {
  if (absl::Status fits = RopeShift::WhyNot(sequence.model().spec()); !fits.ok()) return fits;
  return sequence.HasMoved() ? internal::MovedPositions(sequence) : absl::OkStatus();
}

std::string Where(const cache::Sequence& sequence, const LaneDescription& lane) {
  return Concat(sequence.id().ToString(), ", layer ", lane.layer, ", kv head ", lane.kv_head);
}

absl::Status CheckLanesEqual(policies::LaneEquality alike, const cache::Sequence& sequence,
                             const LaneDescription& first, const LaneDescription& lane) {
  if (first.entries != lane.entries) {
    return absl::FailedPreconditionError(
        Concat(Where(sequence, lane), " holds ", lane.entries, " entries, but kv head ",
               first.kv_head, " holds ", first.entries,
               "; a policy that makes one decision for all lanes of a layer needs equal counts"));
  }
  if (alike == policies::LaneEquality::kLength || first.positions == lane.positions) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      Concat(Where(sequence, lane), " holds entries of other tokens than kv head ", first.kv_head,
             "; a policy that makes one decision for all lanes of a layer needs the same tokens"));
}

// Lists positions only if some token was dropped.
cache::Sequence::Description Describe(policies::LaneEquality alike,
                                      const cache::Sequence& sequence) {
  cache::Sequence::Description shown = sequence.Describe(cache::Sequence::Detail::kLanes);
  const bool all = std::ranges::all_of(
      shown.lanes, [](const LaneDescription& lane) { return lane.entries == lane.tokens; });
  if (all || alike != policies::LaneEquality::kTokens) return shown;
  return sequence.Describe(cache::Sequence::Detail::kEntries);
}

// For policies that decide about whole lanes, not only about entries that wait for a strategy.
absl::Status CheckWholeLanes(const policies::Policy& policy, const cache::Sequence& sequence) {
  const policies::LaneEquality alike = policies::NeededLaneEquality(policy);
  if (!policies::Merges(policy) && alike == policies::LaneEquality::kNothing)
    return absl::OkStatus();
  const cache::Sequence::Description shown = Describe(alike, sequence);
  for (const LaneDescription& lane : shown.lanes) {
    if (policies::Merges(policy)) {
      absl::Status fits = CheckNothingPacked(sequence, lane, "merges all of a lane");
      if (!fits.ok()) return fits;
    }
    if (alike == policies::LaneEquality::kNothing) continue;
    const auto first = std::ranges::find(shown.lanes, lane.layer, &LaneDescription::layer);
    if (absl::Status fits = CheckLanesEqual(alike, sequence, *first, lane); !fits.ok()) return fits;
  }
  return absl::OkStatus();
}

// TokenSelector::Align equalizes waiting entries for other policies, but not for those that drop
// key channels.
absl::Status CheckKeysCanBeCut(const policies::Policy& policy, const cache::Sequence& sequence) {
  if (policies::NeededLaneEquality(policy) == policies::LaneEquality::kNothing)
    return absl::OkStatus();
  const shm::LaneLayout& layout = sequence.model().layout();
  for (std::uint32_t layer = 0; layer < layout.layers(); ++layer) {
    // One snapshot of all lanes, since rows arrive meanwhile. It fails for a sequence that is
    // offloaded, which receives no rows.
    const absl::StatusOr<std::vector<cache::OpenRun>> runs =
        sequence.LookAt(layer, /*whole=*/false);
    const auto waiting = [&](std::uint32_t head) {
      if (!runs.ok()) return sequence.OpenEntries(layout.lane(layer, head));
      return (*runs)[head].provisional_entries() + (*runs)[head].plain_entries();
    };
    const std::uint64_t waits = waiting(0);
    for (std::uint32_t head = 1; head < layout.kv_heads(layer); ++head) {
      const std::uint64_t here = waiting(head);
      if (here == waits) continue;
      return absl::FailedPreconditionError(Concat(
          "in layer ", layer, " of ", sequence.id().ToString(), ", ", waits,
          " entries of kv head 0 wait for a strategy, but ", here, " of kv head ", head,
          "; a policy that makes one decision for all lanes and drops key channels needs equal "
          "counts"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckFitsModel(const policies::Policy& policy, const cache::Model& model) {
  for (std::uint32_t layer = 0; layer < model.layers(); ++layer) {
    const absl::Status fits = policies::CheckFor(policy, model.geometry(layer));
    if (!fits.ok()) {
      return absl::Status(fits.code(), Concat("layer ", layer, ": ", fits.message()));
    }
    const std::uint32_t decides = policies::DecidesFor(policy, layer);
    const std::uint32_t heads = model.layout().kv_heads(layer);
    const std::uint32_t others = model.layout().kv_heads(decides);
    if (heads == others) continue;
    return absl::InvalidArgumentError(Concat("layer ", layer, " has ", heads,
                                             " kv heads, so it cannot share the decision of layer ",
                                             decides, ", which has ", others));
  }
  const cache::ModelSpec& spec = model.spec();
  return policies::CheckForModel(
      policy, {.layers = model.layers(), .delimiters = !spec.delimiter_token_ids.empty()});
}

absl::Status CheckFitsRows(const policies::Policy& policy, const cache::Sequence& sequence) {
  if (policy.signs && policy.selection->rule.each_query &&
      !sequence.memory().device->description().reads_host_memory) {
    return absl::UnimplementedError(
        "signs: on a GPU the queries of a call share a choice; say signs:choice=call");
  }
  if (policy.planes.has_value() && policy.planes->has_book_of_file()) {
    const cache::BookLibrary none;
    const cache::BookLibrary* const loaded = sequence.memory().loaded_books;
    const cache::BookLibrary& books = loaded == nullptr ? none : *loaded;
    absl::Status fits = books.Check(policy.planes->book, sequence.model());
    if (!fits.ok()) return fits;
  }
  if (policies::MovesPositions(policy)) {
    if (absl::Status fits = CheckPositionsCanMove(sequence); !fits.ok()) return fits;
  }
  if (policies::UsesUnrotatedKeys(policy)) {
    if (absl::Status fits = CheckKeysCanBeUnrotated(sequence); !fits.ok()) return fits;
  }
  if (ChoosesFromAll(policy)) return CheckWholeLanes(policy, sequence);
  return policy.key_channels.has_value() ? CheckKeysCanBeCut(policy, sequence) : absl::OkStatus();
}

}  // namespace tessera::compaction
