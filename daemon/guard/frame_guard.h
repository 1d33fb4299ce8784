// FrameGuard checks the bytes of one HTTP/2 connection before gRPC sees them. It reads the headers
// of frames and of gRPC's messages, never a header list, and allocates next to nothing.
//
// gRPC 1.51 bounds neither the bytes of unfinished messages, nor the time that a header block may
// take, nor how often a peer opens and resets streams.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "daemon/base/clock.h"
#include "daemon/base/ids.h"

namespace tessera {

class FrameGuard;

// Knows tenants; implemented by the layer that has them. Thread-safe.
class Registrar {
 public:
  virtual ~Registrar() = default;
  // The tenant whose session key or token (of Hello) is at the beginning of a message, which may be
  // cut off anywhere; an invalid id if there is none.
  virtual TenantId Recognise(std::string_view begin) = 0;
  // A connection turns out to be of this tenant. RESOURCE_EXHAUSTED if it has too many; else Left
  // is called when it is closed.
  virtual absl::Status Joined(TenantId tenant) = 0;
  virtual void Left(TenantId tenant) = 0;
  // A tenant's unfinished messages use `now` bytes instead of `before`. False: it may not have so
  // many; nothing has changed then.
  virtual bool Charge(TenantId tenant, std::uint64_t before, std::uint64_t now) = 0;
  // Whether a connection with unfinished messages must stop reading for a while, so that another
  // one of the tenant can finish its messages.
  virtual bool MustWait(TenantId /*tenant*/, const FrameGuard& /*asker*/) { return false; }
  // The connection has no unfinished messages any more.
  virtual void Finished(TenantId /*tenant*/, const FrameGuard& /*payer*/) {}
};

// Events that may happen `burst` times at once, and `rate` times a second.
class EventBudget {
 public:
  EventBudget(double rate, double burst) : rate_(rate), burst_(burst), left_(burst) {}
  // False: too often.
  bool Spend(Clock::TimePoint now);
  double Left(Clock::TimePoint now);
  double burst() const { return burst_; }

 private:
  const double rate_;
  const double burst_;
  double left_;
  Clock::TimePoint filled_{};
};

// Not thread-safe: one connection is read by one thread at a time.
class FrameGuard {
 public:
  struct Limits {
    std::uint32_t header_block_bytes = 16 << 10;
    std::uint32_t continuations = 4;  // frames of a header block, beside the first
    // Requests that are unfinished, and streams before the peer has acknowledged this limit: a
    // worker may wait for 256 matches at a time.
    std::uint32_t streams = 512;
    double control_rate = 1000;  // frames a second that carry nothing for a call
    double control_burst = 10'000;
    double small_rate = 50'000;  // small frames of calls, and room for answers
    double small_burst = 50'000;
    // Of a peer that has shown no token or session key yet, for whom every frame is one of control.
    std::uint64_t unknown_bytes = 1 << 20;  // in all
    std::uint32_t unknown_streams = 16;
    std::uint64_t unknown_message_bytes = 64 << 10;
    double unknown_control_rate = 100;
    double unknown_control_burst = 1000;
    double unknown_call_rate = 10;
    double unknown_call_burst = 32;

    // Of a peer that needs no token: an operator.
    static Limits Trusted() {
      Limits limits;
      limits.unknown_streams = limits.streams;
      limits.unknown_bytes = std::numeric_limits<std::uint64_t>::max();
      limits.unknown_message_bytes = std::numeric_limits<std::uint64_t>::max();
      limits.unknown_control_rate = limits.small_rate;
      limits.unknown_control_burst = limits.small_burst;
      limits.unknown_call_rate = limits.unknown_call_burst = std::numeric_limits<double>::max();
      return limits;
    }
  };
  FrameGuard(const Limits& limits, Registrar& registrar)
      : limits_(limits),
        registrar_(registrar),
        controls_(limits.control_rate, limits.control_burst),
        small_(limits.small_rate, limits.small_burst),
        unknown_controls_(limits.unknown_control_rate, limits.unknown_control_burst),
        unknown_calls_(limits.unknown_call_rate, limits.unknown_call_burst) {}
  ~FrameGuard() { Release(); }
  FrameGuard(const FrameGuard&) = delete;
  FrameGuard& operator=(const FrameGuard&) = delete;

  // Takes the next bytes that the peer has sent. After an error, which says what is wrong, the
  // connection must be cut.
  absl::Status Take(std::span<const std::uint8_t> bytes, Clock::TimePoint now);

  // Whether no more bytes may be read now. Ask again later.
  bool MustWait() const { return charged_ > 0 && registrar_.MustWait(tenant_, *this); }

  // The connection is closed: gives back what it has. Take must not be called any more.
  void Release();

  // Whether the peer has begun as HTTP/2 does.
  bool speaks_http2() const { return preface_ == kPreface.size(); }
  // Whether the peer has shown a token or a session key.
  bool known() const { return tenant_.valid(); }
  TenantId tenant() const { return tenant_; }

 private:
  static constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

  // A stream whose request is unfinished, and the message of it that is arriving.
  struct Stream {
    std::uint32_t id;
    std::uint32_t prefix_filled = 0;       // bytes of gRPC's message prefix
    std::array<std::uint8_t, 5> prefix{};  // compressed flag, length (big-endian)
    std::uint32_t length = 0;
    std::uint32_t received = 0;
    std::string begin;  // of the message, while the peer is unknown
  };
  struct Frame {
    std::uint32_t length = 0;
    std::uint8_t type = 0;
    std::uint8_t flags = 0;
    std::uint32_t stream = 0;
  };

  absl::Status BeginFrame(Clock::TimePoint now);
  // The budget that the frame spends; nullptr: none.
  EventBudget* BudgetOfFrame();
  absl::Status BeginHeaders(Clock::TimePoint now);
  absl::Status BeginStream(Clock::TimePoint now);
  absl::Status BeginContinuation();
  absl::Status TakePayload(std::span<const std::uint8_t> bytes);
  absl::Status TakeMessageBytes(Stream& stream, std::span<const std::uint8_t> bytes);
  absl::Status BeginMessage(const Stream& stream) const;
  absl::Status Recognise(std::string_view begin);
  absl::Status TakeUnknown(Stream& stream, std::span<const std::uint8_t> bytes);
  void EndFrame();
  Stream* Find(std::uint32_t id);
  void Forget(std::uint32_t id);
  absl::Status Charge();

  const Limits limits_;
  Registrar& registrar_;
  EventBudget controls_;
  EventBudget small_;
  EventBudget unknown_controls_;
  EventBudget unknown_calls_;
  TenantId tenant_;
  std::uint32_t preface_ = 0;  // bytes of the preface so far
  std::array<std::uint8_t, 9> header_{};
  std::uint32_t header_filled_ = 0;
  Frame frame_;
  std::uint32_t payload_left_ = 0;
  bool in_payload_ = false;
  bool in_block_ = false;  // a header block is unfinished
  std::uint32_t block_bytes_ = 0;
  std::uint32_t block_frames_ = 0;
  bool acknowledged_ = false;  // our settings, and with them the limit of streams
  std::uint32_t opened_ = 0;   // streams, until then
  std::uint32_t last_stream_ = 0;
  std::uint64_t unknown_bytes_ = 0;
  std::vector<Stream> streams_;
  std::uint64_t unfinished_ = 0;  // bytes received of unfinished messages
  std::uint64_t charged_ = 0;
};

}  // namespace tessera
