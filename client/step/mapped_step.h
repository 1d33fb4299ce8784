// A step through mapped memory: one reader slot, the pin in it, and reusable scratch memory.
//
// Begin pins and resolves, Append writes rows straight into the tail rings, and attention runs in
// the worker on the mapped tiles. On the CPU no call makes a system call, except Begin and End if
// memory was added, a ring is full, or a tile has filled while the daemon sleeps. On a GPU the
// calls between Begin and End only launch kernels, and End waits for them.
//
// Owned by its reader slot (SlotState). Used by one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/mapped/mapped_memory.h"
#include "client/session/environment.h"
#include "client/session/session.h"
#include "client/step/read_engine.h"
#include "client/step/step_backend.h"
#include "client/step/step_batch.h"
#include "client/step/step_engine.h"

namespace tessera::client {

// A read (mapped_read.cc) pins and resolves in the same way. It commits nothing, and opens tails
// only where the snapshot alone does not hold every token.
class MappedStep final : public StepEngine, public ReadEngine, public SlotState {
 public:
  // Returns the step of a free reader slot; RESOURCE_EXHAUSTED if all are taken. Release returns
  // the slot.
  static absl::StatusOr<MappedStep*> Take(MappedMemory& mapped, const Environment& environment);
  // Both must outlive the step.
  MappedStep(MappedMemory& mapped, const Environment& environment, std::uint32_t slot);

  // Returns the slot on errors.
  absl::Status Begin(Session& session, std::span<Sequence* const> sequences,
                     const StepOptions& options);
  absl::Status BeginRead(Session& session, std::span<Sequence* const> sequences,
                         const ReadOptions& options);

  absl::Status AttendRead(std::uint32_t layer, const ReadTensors& tensors) override;
  absl::Status EndRead() override;

  absl::Status Append(std::uint32_t layer, std::span<const std::byte> key,
                      std::span<const std::byte> value) override;
  absl::Status Attend(std::uint32_t layer, const StepTensors& tensors) override;
  absl::Status AppendAndAttend(std::uint32_t layer, const StepTensors& tensors) override;
  absl::Status End(std::span<const std::uint32_t> accepted) override;
  bool open() const override { return open_; }
  void Abandon() override;
  void Release() override;

 private:
  // The state of a batch after pinning.
  enum class ReadinessState {
    kReady,       // pinned and resolved
    kNewMapping,  // extents were added or removed: refresh the mapping
    kTailGone,    // the daemon has closed this tail: open a new one
    kRingFull,    // no room for the new tokens yet
    kRevoked,     // the pin has been revoked
    kGone,        // freed, evicted, or owned by another session
    kFailed,      // the daemon has marked it FAILED
    kBroken,      // the snapshot is inconsistent
  };
  struct Look {
    ReadinessState finding = ReadinessState::kReady;
    std::size_t item = 0;  // the item that is not ready
  };

  absl::Status PrepareBatch(Session& session, std::span<Sequence* const> sequences,
                            const StepOptions& options);
  absl::Status BeginPinned(Session& session, const StepOptions& options);
  // Counts a step by the time it waited for ring space. nullopt: it did not wait.
  void CountWait(std::optional<Clock::TimePoint> since);
  // Inside the gate, pinned. Unpins on failure.
  absl::Status BeginBackend(const StepOptions& options);
  // Inside the gate: has the backend take the queries of a read's next call.
  absl::Status PrepareQueries(bool changed);
  absl::Status OpenTails(Session& session);
  // Inside the gate. Remains pinned only if the result is kReady.
  Look PinAndCheck(std::uint64_t session);
  ReadinessState LookAt(StepItem& item, std::uint64_t session);
  bool Resolve(SequenceState& sequence, const shm::Word* lane_words);
  // Whether a sequence without tail rings has all of its tokens in segments.
  bool HoldsAllTokens(const SequenceState& sequence) const;
  absl::Status NotReadyError(Session& session, const Look& look) const;
  absl::Status TailsReclaimedError(const SequenceState& sequence, std::uint64_t times,
                                   Clock::Duration waited) const;
  absl::Status WaitForRing(const StepItem& item, Clock::TimePoint deadline, Clock::Duration waited,
                           Clock::Duration& pause);

  // Inside the gate. Tells the daemon whether a step uses the batch's sequences.
  void MarkInStep(bool in_step);
  bool StillPinned() const;
  absl::Status AppendRows(std::uint32_t layer, std::span<const std::byte> key,
                          std::span<const std::byte> value);
  absl::Status AttendRows(std::uint32_t layer, const StepTensors& tensors);
  // The error for a lane that points out of bounds: the pin was revoked, or the lane is corrupt.
  absl::Status OutOfBounds(const absl::Status& where);
  // Observes queries in GPU memory, once the step has settled.
  absl::Status ObserveSettled();
  absl::Status Commit(std::span<const std::uint32_t> accepted);
  bool AreTailsOpen() const;
  // Outside the gate, after a commit during which tails were closed. OK if all sequences hold the
  // new tokens.
  absl::Status ResolveCommit();
  absl::Status RollBack(bool changed);

  absl::Status Confirm(const absl::Status& status) const;  // outside the gate
  absl::Status Aborted();
  absl::Status LeaseLost();
  void Finish();

  MappedMemory& mapped_memory_;
  const Environment& environment_;
  const std::uint32_t slot_;

  bool open_ = false;
  bool pinned_ = false;
  bool marked_ = false;  // MarkInStep(true) was called last
  bool is_backend_begun_ = false;
  bool is_query_stale_ = false;       // the backend has other queries of a read than the batch
  bool is_commit_uncertain_ = false;  // a tail was closed at the moment of the commit
  std::uint64_t pin_ = 0;             // the word in the reader slot
  Session* session_ = nullptr;
  StepBatch batch_;
  StepOptions read_options_;  // of a read
  const std::unique_ptr<StepBackend> backend_;

  std::vector<Tails::Commit> commits_;
  std::vector<SequenceId> without_tail_;
  std::vector<std::size_t> first_segments_;  // per lane, while resolving
};

}  // namespace tessera::client
