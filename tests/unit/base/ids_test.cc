#include "daemon/base/ids.h"

#include <gtest/gtest.h>

#include <sstream>
#include <type_traits>
#include <unordered_set>

#include "absl/hash/hash.h"

namespace tessera {
namespace {

static_assert(!std::is_convertible_v<SessionId, SequenceId>);
static_assert(!std::is_constructible_v<SessionId, SequenceId>);
static_assert(!std::is_convertible_v<std::uint64_t, SessionId>);
static_assert(!std::is_convertible_v<SessionId, std::uint64_t>);
static_assert(sizeof(SegmentId) == sizeof(std::uint64_t));

TEST(StrongId, DefaultIsInvalid) {
  EXPECT_FALSE(SessionId().valid());
  EXPECT_TRUE(SessionId(1).valid());
}

TEST(StrongId, ComparesByValue) {
  EXPECT_EQ(TenantId(3), TenantId(3));
  EXPECT_NE(TenantId(3), TenantId(4));
  EXPECT_LT(TenantId(3), TenantId(4));
}

TEST(StrongId, PrintsItsKind) {
  std::ostringstream out;
  out << SequenceId(42) << ", " << ModelId();
  EXPECT_EQ(out.str(), "sequence 42, model 0 (invalid)");
}

TEST(StrongId, Hashes) {
  std::unordered_set<SegmentId> ids;
  std::unordered_set<SegmentId, absl::Hash<SegmentId>> absl_ids;
  for (std::uint64_t i = 0; i < 100; ++i) {
    ids.insert(SegmentId(i % 50));
    absl_ids.insert(SegmentId(i % 50));
  }
  EXPECT_EQ(ids.size(), 50u);
  EXPECT_EQ(absl_ids.size(), 50u);
}

}  // namespace
}  // namespace tessera
