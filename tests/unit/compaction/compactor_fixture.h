// A compactor with callers, and a budget and clock that the test controls.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "tests/unit/compaction/compaction_fixture.h"

namespace tessera::compaction {

// Calls back when the time is read, which happens before and after a choice is made.
class CallbackClock final : public Clock {
 public:
  TimePoint Now() const override {
    if (calls_left_ > 0 && --calls_left_ == 0) std::exchange(then_, nullptr)();
    return TimePoint(std::chrono::seconds(1));
  }
  void After(int calls, std::function<void()> then) {
    calls_left_ = calls;
    then_ = std::move(then);
  }

 private:
  mutable int calls_left_ = 0;
  mutable std::function<void()> then_;
};

class CompactorTest : public CompactionFixture {
 protected:
  CompactorTest() = default;
  using CompactionFixture::CompactionFixture;

  // Results of Compress calls, and their number.
  struct Told {
    int times = 0;
    absl::Status status;
  };
  std::shared_ptr<Told> Compress(const Track& track) {
    auto told = std::make_shared<Told>();
    compactor_.Compress(track.sequence, {0, model_->layers(), true}, [told](absl::Status status) {
      ++told->times;
      told->status = std::move(status);
    });
    return told;
  }
  void ExpectTold(const Told& told, absl::StatusCode code = absl::StatusCode::kOk) {
    EXPECT_EQ(told.times, 1);
    EXPECT_EQ(told.status.code(), code) << told.status;
  }
  // Leaves room for this many bytes of raw copies.
  pool::Charge SqueezeRaw(std::uint64_t room) {
    pool::Account& budget = world_.raw_copies();
    return *budget.Reserve(pool::MemoryTag::kPoolExtents,
                           budget.limit_bytes() - budget.used_bytes() - room);
  }
  const CodingCounters& counters() { return compactor_.counters(); }
};

}  // namespace tessera::compaction
