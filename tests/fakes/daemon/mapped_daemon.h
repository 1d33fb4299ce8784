// A fake daemon under the test's control: the daemon side of the mapped protocol over real memfds,
// and a transport that answers in the same process. Nothing runs in the background: the test
// decides when tails are absorbed, memory moves, pins are revoked and leases end.
//
// To be as unkind as the protocol allows, every publication rewrites all tiles at new places, cut
// into random segments, and memory without a pin is overwritten at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "client/rpc/transport.h"
#include "daemon/platform/memfd.h"
#include "proto/shm/lane_layout.h"
#include "proto/shm/layout.h"
#include "tests/fakes/extent_arena.h"

namespace tessera::fakes {

class MappedDaemon {
 public:
  struct Options {
    std::uint64_t seed = 1;
    std::uint32_t ring_tiles = 4;
    std::uint64_t pool_extent_bytes = 256 << 10;
    std::uint64_t directory_extent_bytes = 256 << 10;
    std::uint64_t staging_bytes = 256 << 10;
    std::uint64_t max_message_bytes = 64 << 10;
    bool offer_mapping = true;
    bool has_staging = true;
    bool cut_segments = true;  // cut at random; false: one segment per lane
    // The needs of every sequence's policy. If set, Compress does nothing and reports success.
    std::optional<v1::PolicyNeeds> needs;
  };
  explicit MappedDaemon(const Options& options);
  ~MappedDaemon();

  // Connectors must not outlive the daemon or each other's sessions.
  std::unique_ptr<client::Connector> NewConnector(bool local = true);

  // ---- Work that a real daemon does in the background

  // Moves whole tiles of committed tokens out of the tails of all sequences. Returns the number of
  // tokens.
  std::uint64_t Absorb();
  // Frees everything without a pin, and lets workers overwrite ring rows.
  void Collect();
  // Rewrites everything at new places.
  void Republish();
  // Frees empty pool extents and informs the workers.
  std::uint32_t DropEmptyExtents();
  // Revokes all pins. Returns their number.
  std::uint32_t RevokePins();
  void FailSequence(std::uint64_t id, const std::string& why);
  void Evict(std::uint64_t id);
  // Closes the tail that a worker decodes into, as a call by another worker would.
  void CloseTailOf(std::uint64_t id);
  // Offloads a sequence, as memory pressure would: drops its tail, and marks its lane words and its
  // state as offloaded. Opening the tail restores it. Returns false if a step uses the sequence.
  bool OffloadAsDaemon(std::uint64_t id);
  void TruncateAsOther(std::uint64_t id, std::uint64_t tokens);
  void AnnounceDrain(std::uint64_t limit_ms);
  // Ends every stream with this status. If `restart` is set, the next attachment finds another
  // daemon.
  void EndLeases(const absl::Status& why, bool restart);
  // Attachments fail with this status until it is set to OK.
  void RefuseAttach(const absl::Status& why);
  // From now on writing a goodbye waits until the stream is cancelled, as beside a daemon that
  // reads nothing.
  void StallGoodbyes() { stall_goodbyes_.store(true); }
  // The Append after the next `after` ones fails with this status.
  void FailNextAppend(const absl::Status& why, std::uint32_t after = 0);
  // The next `times` calls of Truncate fail with this status.
  void FailTruncates(const absl::Status& why, std::uint32_t times);

  // ---- State that tests inspect

  std::uint64_t wakes() const { return wakes_; }
  std::uint64_t ring_full_waits();
  // Steps that the worker has counted in a bucket of shm::kStepWaitBounds.
  std::uint32_t step_waits(std::size_t bucket);
  void RequestWake();
  bool WakeAsked();
  std::uint32_t pins();
  std::uint32_t pool_extents();
  std::uint64_t appends() const { return appends_; }
  std::uint64_t staged_appends() const { return staged_appends_; }
  v1::Hello last_hello();
  // Observations received since the last call. Tensors are inline, whichever way they arrived.
  std::vector<v1::ObserveRequest> TakeObserved();
  // Sets the answer's ObserveResponse::norms_from.
  void SetNormsFrom(std::uint64_t token) { settled_before_ = token; }
  // Tensors of observations that arrived through the staging arena.
  std::uint64_t staged_tensors() const { return staged_tensors_; }
  std::optional<std::uint64_t> TokensOf(std::uint64_t id);
  std::size_t sequences();
  // Keys of one lane of a sequence, then its values, including committed rows in the tail.
  std::vector<std::byte> KeysOf(std::uint64_t id, std::uint32_t layer, std::uint32_t kv_head);

 private:
  class FakeStream;
  struct Pipe;
  class FakeSource;
  class FakeTransport;
  class FakeConnector;
  friend class FakeTransport;

  struct Model {
    std::uint64_t id;
    v1::ModelGeometry geometry;
    shm::LaneLayout layout;
  };
  struct Lane {
    std::vector<std::byte> keys;  // in token order
    std::vector<std::byte> values;
    std::vector<std::uint64_t> pool_blocks;  // as published
    std::uint64_t snapshot = 0;
    std::uint64_t generation = 0;
    std::uint64_t tokens = 0;
  };
  struct OpenTail {
    std::uint32_t extent;
    std::uint64_t offset;
    std::uint32_t commit_slot;
    std::uint32_t generation;
  };
  struct Sequence {
    std::uint64_t id;
    const Model* model;
    std::uint64_t block;
    std::vector<Lane> lanes;
    std::optional<OpenTail> tail;
    std::uint32_t last_generation = 0;
    std::string failure;
    std::uint64_t owner = 0;
  };
  struct TailExtent {
    Memfd memory;
    AddressRange mapping;
    std::uint64_t region_bytes = 0;
    std::vector<bool> taken;
    bool present() const { return mapping.valid(); }
  };
  struct Session {
    std::uint64_t id;
    std::uint64_t secret;
    Memfd control_memory;
    AddressRange control_mapping;
    shm::ControlPage* control = nullptr;
    Memfd staging_memory;
    AddressRange staging_mapping;
    std::vector<TailExtent> tails;
    std::map<std::uint64_t, std::uint32_t> commit_slots;
    std::shared_ptr<Pipe> pipe;  // to the worker
    bool lost = false;
  };
  struct Retired {
    std::uint64_t epoch;
    std::vector<std::uint64_t> pool_blocks;
    std::vector<std::uint64_t> directory_blocks;
    std::function<void()> also;
  };

  // Everything below requires mutex_.
  void MakeMemory();
  shm::DirectoryHeader& header();
  shm::SequenceBlock& block(const Sequence& sequence);
  std::shared_ptr<Session> NewSession(const v1::Hello& hello, v1::Welcome& welcome);
  void EndSession(Session& session, const absl::Status& why);
  absl::StatusOr<std::shared_ptr<Session>> Find(const v1::SessionKey& key);
  absl::StatusOr<Sequence*> FindSequence(std::uint64_t id);
  std::uint64_t NewBlock(Sequence& sequence);
  void Publish(Sequence& sequence);
  void PublishLane(Sequence& sequence, std::uint32_t layer, std::uint32_t head, Retired& old);
  std::uint64_t WriteSegment(const Lane& lane, kernels::DenseTile tile, std::uint64_t first,
                             std::uint64_t count, std::vector<std::uint64_t>& blocks);
  void Retire(Retired old);
  void CollectLocked();
  std::uint64_t TokensLocked(const Sequence& sequence);
  std::uint64_t CommittedLocked(const Sequence& sequence);
  std::uint64_t AbsorbLocked(Sequence& sequence, std::uint64_t upto);
  bool InStep(const Sequence& sequence);
  static std::uint32_t PinsOf(const Session& session);
  void CloseTail(Sequence& sequence);
  void Cut(Sequence& sequence, std::uint64_t tokens);
  void FreeLocked(std::uint64_t id);
  void Answer(Session& session, const v1::AttachRequest& request);
  absl::Status OpenOne(Session& session, std::uint64_t id, v1::TailPlace& place);
  void Push(Session& session, const v1::AttachResponse& message);

  // Defined in mapped_daemon_rpc.cc.
  absl::Status Append(const v1::AppendRequest& request, v1::AppendResponse& response);
  absl::Status Attend(const v1::AttendRequest& request, v1::AttendResponse& response);
  absl::Status Describe(const v1::DescribeRequest& request, v1::DescribeResponse& response);
  absl::Status Observe(v1::ObserveRequest request, v1::ObserveResponse& response);
  absl::StatusOr<const std::byte*> Bytes(const v1::Tensor& tensor, Session& session,
                                         std::uint64_t bytes);

  const Options options_;
  std::atomic<std::uint64_t> wakes_{0};
  std::atomic<std::uint64_t> appends_{0};
  std::atomic<std::uint64_t> staged_appends_{0};
  std::atomic<std::uint64_t> staged_tensors_{0};
  std::atomic<std::uint64_t> settled_before_{0};

  std::mutex mutex_;
  std::mt19937_64 random_;
  std::uint64_t instance_ = 1000;
  std::uint64_t next_id_ = 1;
  std::unique_ptr<ExtentArena> directory_;
  std::unique_ptr<ExtentArena> pool_;
  bool header_ready_ = false;
  std::map<std::uint64_t, std::unique_ptr<Model>> models_;
  std::map<std::uint64_t, std::unique_ptr<Sequence>> sequences_;
  std::vector<std::shared_ptr<Session>> sessions_;
  std::deque<Retired> retired_;
  absl::Status refuse_attach_;
  std::atomic<bool> stall_goodbyes_{false};
  absl::Status fail_append_;
  std::uint32_t fail_append_after_ = 0;
  absl::Status fail_truncate_;
  std::uint32_t truncates_to_fail_ = 0;
  v1::Hello last_hello_;
  std::vector<v1::ObserveRequest> observed_;
};

}  // namespace tessera::fakes
