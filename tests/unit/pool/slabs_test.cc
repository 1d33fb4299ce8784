// Slabs compared with a map of live objects, over random operations that are printed as a story.

#include "daemon/pool/slabs.h"

#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <variant>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/seed.h"

namespace tessera::pool {
namespace {

constexpr std::uint64_t kSlabBytes = 4096;
constexpr std::uint32_t kSlabsPerExtent = 4;
constexpr std::uint64_t kExtentBytes = kSlabBytes * kSlabsPerExtent;

struct AddExtent {
  std::uint32_t index;
};
struct RemoveIdleExtent {};
struct Allocate {
  std::uint64_t bytes;
  Fit fit;
};
struct Free {
  std::size_t nth;  // index among the live objects, by offset
};
using Operation = std::variant<AddExtent, RemoveIdleExtent, Allocate, Free>;

std::string Print(const Operation& operation) {
  std::ostringstream out;
  std::visit(
      [&](const auto& op) {
        using Op = std::decay_t<decltype(op)>;
        if constexpr (std::is_same_v<Op, AddExtent>) out << "AddExtent{" << op.index << "}";
        if constexpr (std::is_same_v<Op, RemoveIdleExtent>) out << "RemoveIdleExtent{}";
        if constexpr (std::is_same_v<Op, Allocate>) {
          out << "Allocate{" << op.bytes << (op.fit == Fit::kExact ? ", exact}" : ", rounded}");
        }
        if constexpr (std::is_same_v<Op, Free>) out << "Free{" << op.nth << "}";
      },
      operation);
  return out.str();
}

class SlabsState {
 public:
  // Returns an empty string if the operation behaved as expected.
  std::string Run(const Operation& operation) {
    std::string wrong = std::visit([this](const auto& op) { return Do(op); }, operation);
    if (!wrong.empty()) return wrong;
    slabs_.Validate();
    return Check();
  }
  std::size_t live() const { return live_.size(); }
  std::uint32_t FirstAbsent() const {
    std::uint32_t index = 0;
    while (present_.contains(index)) ++index;
    return index;
  }

 private:
  std::string Do(const AddExtent& op) {
    slabs_.AddExtent(op.index);
    present_[op.index] = true;
    return "";
  }
  std::string Do(const RemoveIdleExtent&) {
    const std::optional<std::uint32_t> idle = slabs_.IdleExtent();
    std::optional<std::uint32_t> expected;
    for (const auto& [index, is] : present_) {
      const auto first = live_.lower_bound(index * kExtentBytes);
      if (first == live_.end() || first->first >= (index + 1) * kExtentBytes) expected = index;
    }
    if (present_.size() < 2) expected.reset();
    if (idle != expected) return "another extent is idle";
    if (!idle.has_value()) return "";
    slabs_.RemoveExtent(*idle);
    present_.erase(*idle);
    return "";
  }
  std::string Do(const Allocate& op) {
    const std::uint64_t bytes = Slabs::RoundUp(op.bytes, op.fit);
    if (bytes > kSlabBytes) return "";
    const std::optional<std::uint64_t> offset = slabs_.Allocate(bytes);
    if (!offset.has_value()) return HasRoom(bytes) ? "refused although a slab has room" : "";
    if (*offset % 64 != 0) return "not aligned";
    if (!present_.contains(static_cast<std::uint32_t>(*offset / kExtentBytes))) {
      return "in an extent that is not there";
    }
    if (*offset / kSlabBytes != (*offset + bytes - 1) / kSlabBytes) return "across a slab's border";
    live_[*offset] = bytes;
    return "";
  }
  std::string Do(const Free& op) {
    if (live_.empty()) return "";
    auto it = std::next(live_.begin(), static_cast<std::ptrdiff_t>(op.nth % live_.size()));
    slabs_.Free(it->first, it->second);
    live_.erase(it);
    return "";
  }

  // A slab has room for a size if it is empty, or if it serves that size and is not full.
  bool HasRoom(std::uint64_t bytes) const {
    for (const auto& [index, is] : present_) {
      for (std::uint32_t slab = 0; slab < kSlabsPerExtent; ++slab) {
        const std::uint64_t begin = index * kExtentBytes + slab * kSlabBytes;
        auto it = live_.lower_bound(begin);
        if (it == live_.end() || it->first >= begin + kSlabBytes) return true;
        if (it->second != bytes) continue;
        std::uint64_t held = 0;
        for (; it != live_.end() && it->first < begin + kSlabBytes; ++it) ++held;
        if (held < kSlabBytes / bytes) return true;
      }
    }
    return false;
  }

  std::string Check() const {
    std::uint64_t end = 0, used = 0;
    for (const auto& [offset, bytes] : live_) {
      if (offset < end) return "two live objects overlap";
      end = offset + bytes;
      used += bytes;
    }
    if (slabs_.used_bytes() != used) return "used bytes are not those of live objects";
    if (slabs_.objects() != live_.size()) return "the count of objects is wrong";
    return "";
  }

  Slabs slabs_{kExtentBytes, kSlabBytes};
  std::map<std::uint64_t, std::uint64_t> live_;  // offset -> bytes
  std::map<std::uint32_t, bool> present_;
};

Operation AnyOperation(TestRandom& random, const SlabsState& state, bool growing) {
  const std::uint64_t dice = random.Below(20);
  if (dice == 0) return AddExtent{state.FirstAbsent()};  // the lowest free place, as in an arena
  if (dice == 1) return RemoveIdleExtent{};
  if (dice < (growing ? 14 : 8)) {
    static constexpr std::uint64_t kSizes[] = {1, 64, 65, 128, 192, 256, 300, 1000, 2048, 4000};
    return Allocate{random.OneIn(5) ? random.Between(1, kSlabBytes) : random.Pick(kSizes),
                    random.OneIn(2) ? Fit::kExact : Fit::kRounded};
  }
  return Free{random.Below(1 << 20)};
}

TEST(Slabs, NoSequenceOfOperationsBreaksAnInvariant) {
  TestRandom random;
  for (int run = 0; run < 20; ++run) {
    SlabsState state;
    std::string story;
    for (int step = 0; step < 1500; ++step) {
      const bool growing = (step / 300) % 2 == 0;
      Operation operation = AnyOperation(random, state, growing);
      if (std::holds_alternative<AddExtent>(operation) && state.FirstAbsent() >= 6) continue;
      story += Print(operation) + "\n";
      const std::string wrong = state.Run(operation);
      ASSERT_EQ(wrong, "") << "after\n" << story;
    }
    while (state.live() > 0) ASSERT_EQ(state.Run(Free{0}), "") << story;
  }
}

TEST(Slabs, RoundsUpByLessThanAQuarterAndNeverDown) {
  TestRandom random;
  for (int i = 0; i < 20000; ++i) {
    const std::uint64_t bytes = random.Between(1, 1 << 20);
    const std::uint64_t exact = Slabs::RoundUp(bytes, Fit::kExact);
    const std::uint64_t rounded = Slabs::RoundUp(bytes, Fit::kRounded);
    ASSERT_EQ(exact % 64, 0u);
    ASSERT_EQ(rounded % 64, 0u);
    ASSERT_GE(exact, bytes);
    ASSERT_LT(exact, bytes + 64);
    ASSERT_GE(rounded, exact);
    ASSERT_LE(rounded, exact + exact / 4) << bytes;
    ASSERT_EQ(Slabs::RoundUp(rounded, Fit::kRounded), rounded) << bytes;
    ASSERT_LE(rounded, Slabs::RoundUp(bytes + 64, Fit::kRounded)) << bytes;
  }
  EXPECT_EQ(Slabs::RoundUp(0, Fit::kExact), 64u);
  EXPECT_EQ(Slabs::RoundUp(0, Fit::kRounded), 64u);
}

TEST(Slabs, AFullSlabHoldsAsManyAsFit) {
  for (std::uint64_t bytes : {64u, 128u, 320u, 1088u, 2048u, 4096u}) {
    Slabs slabs(kExtentBytes, kSlabBytes);
    slabs.AddExtent(0);
    std::uint64_t count = 0;
    while (slabs.Allocate(bytes).has_value()) ++count;
    EXPECT_EQ(count, kSlabBytes / bytes * kSlabsPerExtent) << bytes;
    slabs.Validate();
  }
}

TEST(Slabs, AReservedSlabIsNeverHandedOut) {
  Slabs slabs(kExtentBytes, kSlabBytes);
  slabs.AddExtent(0);
  slabs.ReserveFirstSlab(0);
  slabs.Validate();
  while (const std::optional<std::uint64_t> offset = slabs.Allocate(64)) {
    ASSERT_GE(*offset, kSlabBytes);
  }
  EXPECT_EQ(slabs.used_bytes(), (kSlabsPerExtent - 1) * kSlabBytes);
  slabs.AddExtent(1);
  EXPECT_EQ(slabs.IdleExtent(), std::optional<std::uint32_t>(1));
  slabs.RemoveExtent(1);
  EXPECT_EQ(slabs.IdleExtent(), std::nullopt);
}

TEST(SlabsDeathTest, CorruptFreesAbort) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  Slabs slabs(kExtentBytes, kSlabBytes);
  slabs.AddExtent(0);
  const std::uint64_t first = *slabs.Allocate(128);
  const std::uint64_t second = *slabs.Allocate(128);
  EXPECT_DEATH(slabs.Free(first + 64, 128), "check failed");
  EXPECT_DEATH(slabs.Free(first, 64), "check failed");
  EXPECT_DEATH(slabs.Free(kExtentBytes, 128), "check failed");
  EXPECT_DEATH(slabs.Free(second + 128, 128), "check failed");  // never allocated
  EXPECT_DEATH(slabs.RemoveExtent(0), "check failed");
  slabs.Free(second, 128);
  EXPECT_DEATH(slabs.Free(second, 128), "check failed");
  EXPECT_DEATH(slabs.AddExtent(0), "check failed");
  EXPECT_DEATH((void)slabs.Allocate(100), "check failed");
}

}  // namespace
}  // namespace tessera::pool
