#include "tests/contract/attend/attend_batch.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>
#include <utility>

#include "gtest/gtest.h"

namespace tessera::kernels {
namespace {

constexpr std::uint32_t kRowsJudged = 48;  // rows checked per item
constexpr std::byte kPoison{0xff};

bool Untouched(const std::byte* bytes, std::size_t size) {
  return std::all_of(bytes, bytes + size, [](std::byte b) { return b == kPoison; });
}

// The largest error bound among the lane's segments and its tail.
ErrorBound BoundOf(const AttendSubject& subject, const LaneView& lane, ElementType type) {
  ErrorBound bound = subject.bound(type);
  for (std::uint32_t s = 0; s < lane.segment_count; ++s) {
    const ErrorBound other = subject.bound_of(lane.segments[s].shape);
    bound.base = std::max(bound.base, other.base);
    bound.per_logit_mass = std::max(bound.per_logit_mass, other.per_logit_mass);
  }
  return bound;
}

}  // namespace

double OutputElement(ElementType type, const std::byte* row, std::size_t index) {
  if (type == ElementType::kFp32) {
    float value;
    std::memcpy(&value, row + index * 4, 4);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, row + index * 2, 2);
  return type == ElementType::kBf16 ? Bf16ToFloat(bits) : Fp16ToFloat(bits);
}

TestBatch::TestBatch(const BatchShape& shape, TestRandom& random)
    : shape_(shape),
      random_(random),
      sinks_(std::make_unique<Buffer>(shape.geometry.query_heads * sizeof(float))) {
  auto* sinks = reinterpret_cast<float*>(sinks_->data());
  for (std::uint32_t h = 0; h < shape.geometry.query_heads; ++h) {
    sinks[h] = random.OneIn(8) ? -std::numeric_limits<float>::infinity() : NormalNumber(random);
  }
  if (shape.sinks) shape_.geometry.sinks = sinks;
}

std::size_t TestBatch::RowBytes(ElementType type) const {
  return shape_.geometry.head_dim * ElementBytes(type);
}

void TestBatch::Add(const std::vector<TestLane*>& lanes, std::uint32_t queries) {
  std::uint64_t end = 0;
  for (TestLane* lane : lanes) end = std::max(end, lane == nullptr ? 0 : lane->end_position());
  Add(lanes, queries, end < queries ? 0 : end - queries);
}

void TestBatch::Add(const std::vector<TestLane*>& lanes, std::uint32_t queries,
                    std::uint64_t first_position) {
  std::vector<const LaneView*> views;
  for (TestLane* lane : lanes) views.push_back(lane == nullptr ? nullptr : &lane->view());
  AddViews(views, queries, first_position);
}

void TestBatch::AddViews(const std::vector<const LaneView*>& lanes, std::uint32_t queries,
                         std::uint64_t first_position) {
  const LayerGeometry& geometry = shape_.geometry;
  const std::size_t rows = std::size_t{queries} * geometry.query_heads;
  Sequence& sequence = sequences_.emplace_back();
  sequence.queries = queries;
  sequence.query = std::make_unique<Buffer>(rows * RowBytes(geometry.type));
  sequence.output = std::make_unique<Buffer>(rows * RowBytes(shape_.output_type));
  sequence.lse = std::make_unique<Buffer>(rows * sizeof(float));
  sequence.asked.resize(geometry.kv_heads);
  for (std::size_t i = 0; i < rows * geometry.head_dim; ++i) {
    StoreElement(geometry.type, sequence.query->data(), i, NormalNumber(random_));
  }
  for (std::uint32_t head = 0; head < lanes.size(); ++head) {
    if (lanes[head] == nullptr) continue;
    sequence.asked[head] = true;
    items_.push_back({.lane = lanes[head],
                      .kv_head = head,
                      .queries = queries,
                      .first_query_position = first_position,
                      .query = sequence.query->data(),
                      .output = sequence.output->data(),
                      .lse = reinterpret_cast<float*>(sequence.lse->data())});
  }
}

const AttendBatch& TestBatch::batch() {
  batch_ = {.geometry = shape_.geometry,
            .causal = shape_.causal,
            .output_type = shape_.output_type,
            .items = items_};
  return batch_;
}

void TestBatch::SplitIntoQueries() {
  const LayerGeometry& geometry = shape_.geometry;
  const std::size_t row = std::size_t{geometry.query_heads} * geometry.head_dim;
  const std::vector<AttendItem> items = std::move(items_);
  items_.clear();
  for (const AttendItem& item : items) {
    for (std::uint32_t q = 0; q < item.queries; ++q) {
      AttendItem one = item;
      one.queries = 1;
      one.first_query_position += q;
      one.query = static_cast<const std::byte*>(item.query) + q * row * ElementBytes(geometry.type);
      one.output =
          static_cast<std::byte*>(item.output) + q * row * ElementBytes(shape_.output_type);
      one.lse = item.lse + q * geometry.query_heads;
      items_.push_back(one);
    }
  }
}

void TestBatch::Clear() {
  for (Sequence& sequence : sequences_) {
    std::memset(sequence.output->data(), 0xff, sequence.output->size());
    std::memset(sequence.lse->data(), 0xff, sequence.lse->size());
  }
}

void TestBatch::ExpectSameBitsOnExecutors(AttendSubject& subject,
                                          const std::vector<std::byte>& expected) {
  ReverseExecutor reverse;
  ThreadExecutor threads(4);
  for (Executor* executor : {static_cast<Executor*>(&reverse), static_cast<Executor*>(&threads)}) {
    Clear();
    ASSERT_EQ(Run(subject, *executor).status, AttendStatus::kOk);
    ASSERT_EQ(OutputBytes(), expected);
  }
}

void TestBatch::ExpectSameBitsItemByItem(AttendSubject& subject,
                                         const std::vector<std::byte>& expected) {
  const std::vector<AttendItem> items = items_;
  Clear();
  for (std::size_t i = items.size(); i > 0; --i) {
    items_ = {items[i - 1]};
    ASSERT_EQ(Run(subject).status, AttendStatus::kOk);
  }
  items_ = items;
  ASSERT_EQ(OutputBytes(), expected);
}

void TestBatch::ExpectSameBitsQueryByQuery(AttendSubject& subject,
                                           const std::vector<std::byte>& expected) {
  Clear();
  SplitIntoQueries();
  ASSERT_EQ(Run(subject).status, AttendStatus::kOk);
  ASSERT_EQ(OutputBytes(), expected);
}

AttendResult TestBatch::Run(AttendSubject& subject, Executor& executor) {
  const AttendResult result = subject.Run(batch(), executor);
  EXPECT_EQ(result.implementation, subject.name()) << "something else has run";
  return result;
}

AttendResult TestBatch::Run(AttendSubject& subject) {
  InlineExecutor executor;
  return Run(subject, executor);
}

void TestBatch::JudgeRow(const ErrorBound& bound, const AttendItem& item, const ExactLane& lane,
                         std::uint32_t row) {
  const LayerGeometry& geometry = shape_.geometry;
  const std::uint32_t query = row / geometry.group();
  const std::uint32_t head = item.kv_head * geometry.group() + row % geometry.group();
  const std::size_t index = std::size_t{query} * geometry.query_heads + head;
  std::vector<double> exact(geometry.head_dim);
  const OracleAnswer answer = AttendByDefinition(
      {.geometry = &geometry,
       .lane = item.lane,
       .row = static_cast<const std::byte*>(item.query) + index * RowBytes(geometry.type),
       .query_head = head,
       .position = item.first_query_position + query,
       .causal = shape_.causal},
      lane, exact.data());

  const double error = bound.At(answer.logit_mass + geometry.logit_softcap);
  const Rounding rounding = RoundingOf(shape_.output_type);
  const auto* output =
      static_cast<const std::byte*>(item.output) + index * RowBytes(shape_.output_type);
  for (std::uint32_t c = 0; c < geometry.head_dim; ++c) {
    const double got = OutputElement(shape_.output_type, output, c);
    const double allowed = error * answer.value_peak +
                           rounding.relative * std::fabs(exact[c]) * (1 + error) +
                           rounding.absolute;
    const bool within = std::fabs(got - exact[c]) <= allowed &&
                        std::fabs(got) <= answer.value_peak * (1 + std::max(0x1p-6, bound.base)) +
                                              rounding.absolute;
    ASSERT_TRUE(within) << "row " << row << " channel " << c << ": " << got << ", exact "
                        << exact[c] << ", allowed " << allowed << "; visible " << answer.visible
                        << ", logit mass " << answer.logit_mass;
  }
  const double lse = item.lse[index];
  if (std::isinf(answer.lse)) {
    ASSERT_EQ(lse, answer.lse) << "row " << row;
    return;
  }
  ASSERT_LE(std::fabs(lse - answer.lse), error + std::fabs(answer.lse) * 0x1p-23)
      << "row " << row << ": lse " << lse << ", exact " << answer.lse << ", visible "
      << answer.visible;
}

void TestBatch::JudgeItem(const AttendSubject& subject, std::size_t index, TestRandom& random,
                          std::uint32_t merges) {
  const AttendItem& item = items_[index];
  SCOPED_TRACE("item " + std::to_string(index));
  const ExactLane lane(*item.lane, shape_.geometry);
  ErrorBound bound = BoundOf(subject, *item.lane, shape_.geometry.type);
  // The magnitude of an lse is at most the logit mass plus the logarithm of the number of entries,
  // which is below 2^11.
  bound.base += merges * 0x1p-24 * 8;
  bound.per_logit_mass += merges * 0x1p-24;
  const std::uint32_t rows = item.queries * shape_.geometry.group();
  if (rows <= kRowsJudged) {
    for (std::uint32_t row = 0; row < rows; ++row) JudgeRow(bound, item, lane, row);
    return;
  }
  for (std::uint32_t i = 0; i < kRowsJudged; ++i) {
    JudgeRow(bound, item, lane, static_cast<std::uint32_t>(random.Below(rows)));
  }
}

void TestBatch::Judge(const AttendSubject& subject, TestRandom& random) {
  for (std::size_t i = 0; i < items_.size(); ++i) {
    JudgeItem(subject, i, random);
    if (testing::Test::HasFatalFailure()) return;
  }
  const std::uint32_t group = shape_.geometry.group();
  const std::size_t row_bytes = RowBytes(shape_.output_type);
  for (const Sequence& sequence : sequences_) {
    for (std::uint32_t row = 0; row < sequence.queries * shape_.geometry.query_heads; ++row) {
      if (sequence.asked[row % shape_.geometry.query_heads / group]) continue;
      ASSERT_TRUE(Untouched(sequence.output->data() + row * row_bytes, row_bytes)) << row;
      ASSERT_TRUE(Untouched(sequence.lse->data() + row * sizeof(float), sizeof(float))) << row;
    }
  }
}

std::vector<std::byte> TestBatch::OutputBytes() const {
  std::vector<std::byte> bytes;
  for (const Sequence& sequence : sequences_) {
    bytes.insert(bytes.end(), sequence.output->data(),
                 sequence.output->data() + sequence.output->size());
    bytes.insert(bytes.end(), sequence.lse->data(), sequence.lse->data() + sequence.lse->size());
  }
  return bytes;
}

void ThreadExecutor::ParallelFor(std::uint32_t tasks, Task task, void* context) {
  std::atomic<std::uint32_t> next{0};
  const auto work = [&] {
    for (std::uint32_t i = next++; i < tasks; i = next++) task(context, i);
  };
  std::vector<std::thread> threads;
  for (int t = 0; t < threads_; ++t) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tessera::kernels
