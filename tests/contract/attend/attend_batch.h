// Builds batches for attention tests, and compares each result row with attention computed in
// double from its definition.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "kernels/reference/oracle.h"
#include "tests/contract/attend/attend_lanes.h"
#include "tests/contract/attend/attend_subject.h"

namespace tessera::kernels {

// Geometry and options of a batch. Owns the sinks.
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

  // Adds one sequence: a lane per kv head (null: head not requested) and `queries` new tokens. The
  // last query is at the lanes' newest position unless `first_position` says otherwise.
  void Add(const std::vector<TestLane*>& lanes, std::uint32_t queries);
  void Add(const std::vector<TestLane*>& lanes, std::uint32_t queries,
           std::uint64_t first_position);
  // The same for lanes of any kind.
  void AddViews(const std::vector<const LaneView*>& lanes, std::uint32_t queries,
                std::uint64_t first_position);
  void AddItem(const AttendItem& item) { items_.push_back(item); }
  // Replaces every item by one item per query.
  void SplitIntoQueries();

  const AttendBatch& batch();
  std::vector<AttendItem>& items() { return items_; }
  std::byte* query(std::size_t sequence) { return sequences_[sequence].query->data(); }

  // Overwrites the results of an earlier run with NaN.
  void Clear();

  AttendResult Run(AttendSubject& subject, Executor& executor);
  AttendResult Run(AttendSubject& subject);

  // Compares outputs and lse with the oracle: all rows of small batches, a random sample of large
  // ones. Rows that no item requests must be unchanged.
  void Judge(const AttendSubject& subject, TestRandom& random);
  // `merges`: the number of partial outputs merged into this one. Each merge rounds the lse to
  // fp32.
  void JudgeItem(const AttendSubject& subject, std::size_t item, TestRandom& random,
                 std::uint32_t merges = 0);

  std::vector<std::byte> OutputBytes() const;

  // Expects the same bits from equivalent runs: on other executors; with one item at a time, last
  // first; with one query at a time.
  void ExpectSameBitsOnExecutors(AttendSubject& subject, const std::vector<std::byte>& expected);
  void ExpectSameBitsItemByItem(AttendSubject& subject, const std::vector<std::byte>& expected);
  void ExpectSameBitsQueryByQuery(AttendSubject& subject, const std::vector<std::byte>& expected);

 private:
  struct Sequence {
    std::uint32_t queries;
    std::unique_ptr<Buffer> query;
    std::unique_ptr<Buffer> output;
    std::unique_ptr<Buffer> lse;
    std::vector<bool> asked;  // by kv head
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

// Executors that run the same tasks in different orders.
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
