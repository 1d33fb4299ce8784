// Batches for tests, and the judge: every row against attention by its definition in double.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "kernels/reference/oracle.h"
#include "tests/contract/attend/attend_lanes.h"
#include "tests/contract/attend/attend_subject.h"

namespace tessera::kernels {

// Geometry and options of a batch, with the sinks owned.
struct BatchShape {
  LayerGeometry geometry = {.query_heads = 1, .kv_heads = 1, .head_dim = 128, .scale = 0.09f};
  bool causal = true;
  ElementType output_type = ElementType::kFp32;
  bool sinks = false;

  LaneShape Lane(std::vector<std::uint32_t> segments, std::uint32_t tail) const {
    return {.head_dim = geometry.head_dim,
            .type = geometry.type,
            .segments = std::move(segments),
            .tail = tail};
  }
};

class TestBatch {
 public:
  TestBatch(const BatchShape& shape, TestRandom& random);

  // One sequence: a lane per kv head (null: this head is not asked for), `queries` new tokens of
  // which the last stands at the lanes' newest position unless `first_position` says otherwise.
  void Add(const std::vector<TestLane*>& lanes, std::uint32_t queries);
  void Add(const std::vector<TestLane*>& lanes, std::uint32_t queries,
           std::uint64_t first_position);
  // The same for lanes of any kind.
  void AddViews(const std::vector<const LaneView*>& lanes, std::uint32_t queries,
                std::uint64_t first_position);
  void AddItem(const AttendItem& item) { items_.push_back(item); }
  // Asks the same with an item of its own for every query.
  void SplitIntoQueries();

  const AttendBatch& batch();
  std::vector<AttendItem>& items() { return items_; }
  std::byte* query(std::size_t sequence) { return sequences_[sequence].query->data(); }

  // Poisons what an earlier run wrote.
  void Clear();

  AttendResult Run(AttendSubject& subject, Executor& executor);
  AttendResult Run(AttendSubject& subject);

  // Compares output and lse with the oracle: all rows of small batches, a random choice of large
  // ones. Rows that no item asked for must be untouched.
  void Judge(const AttendSubject& subject, TestRandom& random);
  // `merges`: how many outputs have gone into this one. Each rounds the lse, to fp32.
  void JudgeItem(const AttendSubject& subject, std::size_t item, TestRandom& random,
                 std::uint32_t merges = 0);

  std::vector<std::byte> OutputBytes() const;

  // That what asks the same gives the same bits: on other executors; items one by one, the last
  // first; queries one by one.
  void ExpectSameBitsOnExecutors(AttendSubject& subject, const std::vector<std::byte>& expected);
  void ExpectSameBitsItemByItem(AttendSubject& subject, const std::vector<std::byte>& expected);
  void ExpectSameBitsQueryByQuery(AttendSubject& subject, const std::vector<std::byte>& expected);

 private:
  struct Sequence {
    std::uint32_t queries;
    std::unique_ptr<Buffer> query;
    std::unique_ptr<Buffer> output;
    std::unique_ptr<Buffer> lse;
    std::vector<bool> asked;  // per kv head
  };

  std::size_t RowBytes(ElementType type) const;
  void JudgeRow(const ErrorBound& bound, const AttendItem& item, const ExactLane& lane,
                std::uint32_t row);

  BatchShape shape_;
  TestRandom& random_;
  std::unique_ptr<Buffer> sinks_;
  std::deque<Sequence> sequences_;
  std::vector<AttendItem> items_;
  AttendBatch batch_;
};

double OutputElement(ElementType type, const std::byte* row, std::size_t index);

// Executors that run the same tasks differently.
class ReverseExecutor final : public Executor {
 public:
  void ParallelFor(std::uint32_t tasks, Task task, void* context) override {
    for (std::uint32_t i = tasks; i > 0; --i) task(context, i - 1);
  }
};

class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(int threads) : threads_(threads) {}
  void ParallelFor(std::uint32_t tasks, Task task, void* context) override;

 private:
  int threads_;
};

}  // namespace tessera::kernels
