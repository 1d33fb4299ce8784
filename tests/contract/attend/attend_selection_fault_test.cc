// Selections over lanes whose tables point summaries outside the arena.
#include <cstdint>
#include <limits>
#include <vector>

#include "tests/contract/attend/attend_conformance.h"
#include "tests/contract/attend/attend_packed_cases.h"

namespace tessera::kernels {
namespace {

TEST_P(AttendSelection, RefusesSummariesOutsideTheArena) {
  const std::uint64_t max = std::numeric_limits<std::uint64_t>::max();
  int refused = 0;
  for (int round = 0; round < 60 && refused < 12; ++round) {
    BatchShape shape = AnyBatch(random_);
    shape.geometry.sliding_window = 0;  // what no query sees is not looked up
    Mixture mixture(shape, {.cut = true, .dense = true}, {70, 130}, 3, random_);
    const std::size_t s = random_.Below(2);
    std::vector<std::uint64_t>& offsets = mixture.lane->summary_offsets(s);
    if (offsets.empty()) continue;
    const SelectionRule rule = {.rate = 0.25};
    TestBatch batch(shape, random_);
    AddNewest(batch, *mixture.lane, 2);
    std::uint64_t& offset = offsets[random_.Below(offsets.size())];
    const std::uint64_t good = offset;
    const std::uint64_t arena = mixture.lane->arena_bytes();
    for (const std::uint64_t bad : {arena, arena / 4 * 4 - 4, max, max - 3, std::uint64_t{2}}) {
      const std::uint64_t bytes = LayoutOf(mixture.lane->segment(s).shape).summary_bytes;
      if (bad == arena / 4 * 4 - 4 && bytes <= 4) continue;
      offset = bad;
      batch.items()[0].selection = &rule;
      EXPECT_EQ(batch.Run(subject()).status, AttendStatus::kBadTile) << bad << mixture.Describe();
      batch.items()[0].selection = nullptr;
      EXPECT_EQ(batch.Run(subject()).status, AttendStatus::kOk) << "nobody looks there";
    }
    offset = good;
    batch.items()[0].selection = &rule;
    ASSERT_EQ(batch.Run(subject()).status, AttendStatus::kOk);
    if (HasFailure()) return;
    ++refused;
  }
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace tessera::kernels
