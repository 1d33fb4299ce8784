// A step through mapped memory: one reader slot, the pin in it, and the scratch it keeps.
//
// Begin pins and resolves; rows go straight into the tail rings; attention runs here, in the
// worker, on the mapped tiles. On the CPU there is no system call between Begin and End, and none
// in them either unless memory was added, a ring is full, or the daemon sleeps and a tile has
// filled. On a GPU the calls in between only launch, and End waits.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/mapped/mapped_memory.h"
#include "client/session/environment.h"
#include "client/session/session.h"
#include "client/step/step_backend.h"
#include "client/step/step_batch.h"
#include "client/step/step_engine.h"

namespace tessera::client {

class MappedStep final : public StepEngine, public SlotState {
 public:
  // The step of a free reader slot; RESOURCE_EXHAUSTED if all are taken. Release returns the slot.
  static absl::StatusOr<MappedStep*> Take(MappedMemory& door, const Environment& environment);
  // Both outlive the step.
  MappedStep(MappedMemory& door, const Environment& environment, std::uint32_t slot);

  // Errors give the slot back.
  absl::Status Begin(Session& session, std::span<Sequence* const> sequences,
                     const StepOptions& options);

  absl::Status Append(std::uint32_t layer, std::span<const std::byte> key,
                      std::span<const std::byte> value) override;
  absl::Status Attend(std::uint32_t layer, const StepTensors& tensors) override;
  absl::Status AppendAndAttend(std::uint32_t layer, const StepTensors& tensors) override;
  absl::Status End(std::span<const std::uint32_t> accepted) override;
  bool open() const override { return open_; }
  void Abandon() override;
  void Release() override;

 private:
  // What a look at a pinned batch finds.
  enum class Finding {
    kReady,       // pinned and resolved
    kNewMapping,  // extents came or went: map them first
    kTailGone,    // the daemon has closed this tail: open another
    kRingFull,    // no space for the new tokens yet
    kRevoked,     // the pin was taken back already
    kGone,        // freed, evicted or of another session
    kFailed,      // the daemon has marked it FAILED
    kBroken,      // a snapshot that cannot be
  };
  struct Look {
    Finding finding = Finding::kReady;
    std::size_t item = 0;  // the one at fault
  };

  absl::Status PrepareBatch(Session& session, std::span<Sequence* const> sequences,
                            const StepOptions& options);
  absl::Status BeginPinned(Session& session, const StepOptions& options);
  // Inside the gate, pinned. Where it fails, not pinned any more.
  absl::Status BeginBackend(const StepOptions& options);
  absl::Status OpenTails(Session& session);
  // Inside the gate. Stays pinned only where it is kReady.
  Look PinAndLook(std::uint64_t session);
  Finding LookAt(StepItem& item, std::uint64_t session);
  bool Resolve(SequenceState& sequence, const shm::Word* lane_words);
  absl::Status Unready(Session& session, const Look& look) const;
  absl::Status TailsTakenBack(const SequenceState& sequence, std::uint64_t times,
                              Clock::Duration waited) const;
  absl::Status WaitForRing(const StepItem& item, Clock::TimePoint deadline, Clock::Duration waited,
                           Clock::Duration& pause);

  // Inside the gate. Whether a step is at the batch's sequences, for the daemon to see.
  void MarkInStep(bool in_step);
  bool StillPinned() const;
  absl::Status AppendRows(std::uint32_t layer, std::span<const std::byte> key,
                          std::span<const std::byte> value);
  absl::Status AttendRows(std::uint32_t layer, const StepTensors& tensors);
  // A lane led out of bounds: under a pin that was taken back, or else it is broken.
  absl::Status OutOfBounds(const absl::Status& where);
  // Of what was attended with where the host cannot read it.
  absl::Status ObserveSettled();
  absl::Status Commit(std::span<const std::uint32_t> accepted);
  bool TailsStand() const;
  // Outside the gate, after a commit whose tails went meanwhile. OK where all of it counts.
  absl::Status AskWhatCounts();
  absl::Status TakeBack(bool changed);

  absl::Status Confirm(const absl::Status& status) const;  // outside the gate
  absl::Status Aborted();
  absl::Status LeaseLost();
  void Finish();

  MappedMemory& door_;
  const Environment& environment_;
  const std::uint32_t slot_;

  bool open_ = false;
  bool pinned_ = false;
  bool marked_ = false;    // MarkInStep(true), and nothing since
  bool doubtful_ = false;  // committed to tails that went at the same moment
  std::uint64_t pin_ = 0;  // the word in the reader slot
  Session* session_ = nullptr;
  StepBatch batch_;
  const std::unique_ptr<StepBackend> backend_;

  std::vector<Tails::Commit> commits_;
  std::vector<SequenceId> without_tail_;
  std::vector<std::size_t> first_segments_;  // per lane, while resolving
};

}  // namespace tessera::client
