#include "daemon/guard/frame_guard.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "daemon/base/strings.h"

namespace tessera {

namespace {

enum FrameType : std::uint8_t {
  kData = 0,
  kHeaders = 1,
  kPriority = 2,
  kResetStream = 3,
  kSettings = 4,
  kPushPromise = 5,
  kPing = 6,
  kGoAway = 7,
  kWindowUpdate = 8,
  kContinuation = 9,
};
constexpr std::uint8_t kEndStream = 0x1;  // of DATA and HEADERS
constexpr std::uint8_t kAck = 0x1;        // of SETTINGS and PING
constexpr std::uint8_t kEndHeaders = 0x4;
constexpr std::uint8_t kPadded = 0x8;

// A session key is within the first bytes; Hello has at most this many.
constexpr std::size_t kKeyBytes = 32;
constexpr std::size_t kHelloBytes = 1024;
// A smaller DATA frame costs gRPC more than its bytes.
constexpr std::uint32_t kSmallData = 256;
// Unfinished messages are charged in steps, so that small ones cost nothing.
constexpr std::uint64_t kChargeStep = 64 << 10;

std::uint32_t BigEndian(const std::uint8_t* bytes, int count) {
  std::uint32_t value = 0;
  for (int i = 0; i < count; ++i) value = value << 8 | bytes[i];
  return value;
}

absl::Status Violation(std::string_view what) { return absl::InvalidArgumentError(Concat(what)); }

absl::Status TooMany(std::string_view what, std::uint64_t count, std::uint64_t limit) {
  return absl::ResourceExhaustedError(Concat(count, " ", what, "; the limit is ", limit));
}

}  // namespace

double EventBudget::Left(Clock::TimePoint now) {
  const double seconds = std::chrono::duration<double>(now - filled_).count();
  left_ = std::min(burst_, left_ + std::max(0.0, seconds) * rate_);
  filled_ = now;
  return left_;
}

bool EventBudget::Spend(Clock::TimePoint now) {
  if (Left(now) < 1) return false;
  left_ -= 1;
  return true;
}

void FrameGuard::Release() {
  if (!known()) return;
  (void)registrar_.Charge(tenant_, charged_, 0);
  charged_ = 0;
  registrar_.Finished(tenant_, *this);
  registrar_.Left(tenant_);
  tenant_ = TenantId();
}

absl::Status FrameGuard::Take(std::span<const std::uint8_t> bytes, Clock::TimePoint now) {
  if (!known()) {
    unknown_bytes_ += bytes.size();
    if (unknown_bytes_ > limits_.unknown_bytes) {
      return TooMany("bytes without a session", unknown_bytes_, limits_.unknown_bytes);
    }
  }
  while (preface_ < kPreface.size() && !bytes.empty()) {
    if (bytes[0] != static_cast<std::uint8_t>(kPreface[preface_])) {
      return Violation("the connection does not begin as HTTP/2 does");
    }
    ++preface_;
    bytes = bytes.subspan(1);
  }
  while (!bytes.empty()) {
    if (!in_payload_) {
      const std::size_t count = std::min(bytes.size(), header_.size() - header_filled_);
      std::copy_n(bytes.begin(), count, header_.begin() + header_filled_);
      header_filled_ += static_cast<std::uint32_t>(count);
      bytes = bytes.subspan(count);
      if (header_filled_ < header_.size()) break;
      if (absl::Status status = BeginFrame(now); !status.ok()) return status;
    }
    const std::size_t count = std::min<std::size_t>(bytes.size(), payload_left_);
    if (absl::Status status = TakePayload(bytes.first(count)); !status.ok()) return status;
    payload_left_ -= static_cast<std::uint32_t>(count);
    bytes = bytes.subspan(count);
    if (payload_left_ == 0) EndFrame();
  }
  return Charge();
}

absl::Status FrameGuard::BeginFrame(Clock::TimePoint now) {
  frame_ = {.length = BigEndian(header_.data(), 3),
            .type = header_[3],
            .flags = header_[4],
            .stream = BigEndian(header_.data() + 5, 4) & 0x7fffffff};
  header_filled_ = 0;
  payload_left_ = frame_.length;
  in_payload_ = true;
  if (in_block_ != (frame_.type == kContinuation)) {
    return Violation("a header block is interrupted, or continued without a beginning");
  }
  if (EventBudget* const budget = BudgetOfFrame(); budget != nullptr && !budget->Spend(now)) {
    const auto most = static_cast<std::uint64_t>(budget->burst());
    return TooMany("frames of control at once", most + 1, most);
  }
  switch (frame_.type) {
    case kHeaders:
      return BeginHeaders(now);
    case kContinuation:
      return BeginContinuation();
    case kData:
      return (frame_.flags & kPadded) != 0 ? Violation("a DATA frame is padded") : absl::OkStatus();
    case kSettings:
      acknowledged_ |= (frame_.flags & kAck) != 0;
      return absl::OkStatus();
    default:
      return absl::OkStatus();
  }
}

EventBudget* FrameGuard::BudgetOfFrame() {
  if (!known()) return &unknown_controls_;
  switch (frame_.type) {
    case kHeaders:
    case kContinuation:
      return nullptr;  // limited by streams and blocks
    case kData:
      return frame_.length < kSmallData ? &small_ : nullptr;
    case kWindowUpdate:
    case kPing:  // some clients send one for each answer
      return &small_;
    default:
      return &controls_;
  }
}

absl::Status FrameGuard::BeginHeaders(Clock::TimePoint now) {
  block_bytes_ = 0;
  block_frames_ = 0;
  in_block_ = true;
  if (Find(frame_.stream) == nullptr) {
    if (absl::Status status = BeginStream(now); !status.ok()) return status;
  } else if ((frame_.flags & kEndStream) == 0) {
    return Violation("a request has headers twice");
  }
  return BeginContinuation();
}

absl::Status FrameGuard::BeginStream(Clock::TimePoint now) {
  if (frame_.stream % 2 == 0 || frame_.stream <= last_stream_) {
    return Violation("a request is on a stream that is not new");
  }
  last_stream_ = frame_.stream;
  if (!known() && !unknown_calls_.Spend(now)) {
    const auto most = static_cast<std::uint64_t>(limits_.unknown_call_burst);
    return TooMany("calls at once without a session", most + 1, most);
  }
  const std::uint32_t limit = known() ? limits_.streams : limits_.unknown_streams;
  if (streams_.size() >= limit) return TooMany("unfinished requests", streams_.size() + 1, limit);
  // gRPC refuses more streams than it has announced only when the peer has acknowledged that.
  if (!acknowledged_ && ++opened_ > limits_.streams) {
    return TooMany("streams before an acknowledgement of settings", opened_, limits_.streams);
  }
  streams_.push_back({.id = frame_.stream, .begin = {}});
  return absl::OkStatus();
}

absl::Status FrameGuard::BeginContinuation() {
  block_bytes_ += frame_.length;
  if (block_bytes_ > limits_.header_block_bytes) {
    return TooMany("bytes of headers", block_bytes_, limits_.header_block_bytes);
  }
  if (++block_frames_ > limits_.continuations + 1) {
    return TooMany("frames of headers", block_frames_, limits_.continuations + 1);
  }
  return absl::OkStatus();
}

absl::Status FrameGuard::TakePayload(std::span<const std::uint8_t> bytes) {
  if (frame_.type != kData || bytes.empty()) return absl::OkStatus();
  Stream* const stream = Find(frame_.stream);
  // A stream that was reset while its data was on the way; gRPC drops the data.
  return stream == nullptr ? absl::OkStatus() : TakeMessageBytes(*stream, bytes);
}

absl::Status FrameGuard::TakeMessageBytes(Stream& stream, std::span<const std::uint8_t> bytes) {
  while (!bytes.empty()) {
    if (stream.prefix_filled < stream.prefix.size()) {
      stream.prefix[stream.prefix_filled++] = bytes[0];
      bytes = bytes.subspan(1);
      if (stream.prefix_filled < stream.prefix.size()) continue;
      stream.length = BigEndian(stream.prefix.data() + 1, 4);
      if (absl::Status status = BeginMessage(stream); !status.ok()) return status;
    }
    const std::size_t count = std::min<std::size_t>(bytes.size(), stream.length - stream.received);
    stream.received += static_cast<std::uint32_t>(count);
    unfinished_ += count;
    if (!known()) {
      if (absl::Status status = TakeUnknown(stream, bytes.first(count)); !status.ok()) {
        return status;
      }
    }
    bytes = bytes.subspan(count);
    if (stream.received < stream.length) continue;
    unfinished_ -= stream.received;
    stream.prefix_filled = 0;
    stream.received = 0;
    stream.begin.clear();
  }
  return absl::OkStatus();
}

absl::Status FrameGuard::BeginMessage(const Stream& stream) const {
  if (stream.prefix[0] != 0) {
    return Violation("a message is compressed, which this daemon does not take");
  }
  return absl::OkStatus();
}

absl::Status FrameGuard::TakeUnknown(Stream& stream, std::span<const std::uint8_t> bytes) {
  const std::size_t before = stream.begin.size();
  const std::size_t room = kHelloBytes - std::min(before, kHelloBytes);
  const std::size_t count = std::min(bytes.size(), room);
  stream.begin.append(reinterpret_cast<const char*>(bytes.data()), count);
  const std::size_t filled = stream.begin.size();
  const bool whole = filled == stream.length;
  const bool has_key = before < kKeyBytes && filled >= kKeyBytes;
  const bool has_hello = whole || (before < kHelloBytes && filled == kHelloBytes);
  if (has_key || has_hello) {
    if (absl::Status status = Recognise(stream.begin); !status.ok()) return status;
  }
  if (known() || !has_hello || stream.length <= limits_.unknown_message_bytes) {
    return absl::OkStatus();
  }
  return TooMany("bytes in a message without a session", stream.length,
                 limits_.unknown_message_bytes);
}

absl::Status FrameGuard::Recognise(std::string_view begin) {
  const TenantId tenant = registrar_.Recognise(begin);
  if (!tenant.valid()) return absl::OkStatus();
  if (absl::Status status = registrar_.Joined(tenant); !status.ok()) return status;
  tenant_ = tenant;
  return absl::OkStatus();
}

void FrameGuard::EndFrame() {
  in_payload_ = false;
  const bool headers = frame_.type == kHeaders || frame_.type == kContinuation;
  if (headers && (frame_.flags & kEndHeaders) != 0) in_block_ = false;
  const bool ends =
      (frame_.type == kData || frame_.type == kHeaders) && (frame_.flags & kEndStream) != 0;
  if (ends || frame_.type == kResetStream) Forget(frame_.stream);
}

FrameGuard::Stream* FrameGuard::Find(std::uint32_t id) {
  const auto found = std::ranges::find(streams_, id, &Stream::id);
  return found == streams_.end() ? nullptr : &*found;
}

void FrameGuard::Forget(std::uint32_t id) {
  Stream* const stream = Find(id);
  if (stream == nullptr) return;
  unfinished_ -= stream->received;
  std::swap(*stream, streams_.back());
  streams_.pop_back();
}

absl::Status FrameGuard::Charge() {
  if (!known()) return absl::OkStatus();  // bounded by the limits of unknown peers
  const std::uint64_t now = unfinished_ / kChargeStep * kChargeStep;
  if (now == charged_) return absl::OkStatus();
  if (!registrar_.Charge(tenant_, charged_, now)) {
    return absl::ResourceExhaustedError(
        Concat("unfinished messages of ", unfinished_,
               " bytes on this connection are more than the tenant may have now"));
  }
  charged_ = now;
  if (now == 0) registrar_.Finished(tenant_, *this);
  return absl::OkStatus();
}

}  // namespace tessera
