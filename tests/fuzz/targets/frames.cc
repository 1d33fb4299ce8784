// What a peer of a gRPC address sends, before gRPC sees it. Bytes in pieces must be judged as in
// one, what is charged must be given back, and nobody is known who has not shown who he is.
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "daemon/base/check.h"
#include "daemon/guard/frame_guard.h"
#include "tests/fakes/http2_bytes.h"
#include "tests/fuzz/fuzz_target.h"

namespace tessera::fuzz {
namespace {

constexpr std::string_view kHello = "hello";
constexpr Clock::TimePoint kNow{std::chrono::hours(1)};

class CountingRegistrar final : public Registrar {
 public:
  ~CountingRegistrar() override {
    TESSERA_CHECK(charged_ == 0 && connections_ == 0, "all is given back");
  }
  TenantId Recognise(std::string_view begin) override {
    TESSERA_CHECK(begin.size() <= 1024, "little is kept of an unknown peer's message");
    return begin == kHello ? TenantId(1) : TenantId();
  }
  absl::Status Joined(TenantId) override {
    ++connections_;
    return absl::OkStatus();
  }
  void Left(TenantId) override { --connections_; }
  bool Charge(TenantId, std::uint64_t before, std::uint64_t now) override {
    TESSERA_CHECK(before == charged_ && now <= (16 << 20), "charges follow each other");
    charged_ = now;
    return true;
  }

 private:
  std::uint64_t charged_ = 0;
  int connections_ = 0;
};

absl::Status TakeAll(FrameGuard& guard, std::string_view bytes, std::size_t piece) {
  for (std::size_t at = 0; at < bytes.size(); at += piece) {
    const std::string_view part = bytes.substr(at, piece);
    const absl::Status status =
        guard.Take({reinterpret_cast<const std::uint8_t*>(part.data()), part.size()}, kNow);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

void Run(std::string_view bytes) {
  CountingRegistrar registrar;
  FrameGuard whole({}, registrar);
  const absl::Status verdict = TakeAll(whole, bytes, std::max<std::size_t>(1, bytes.size()));
  TESSERA_CHECK(!whole.known() || bytes.find(kHello) != std::string_view::npos, "known by Hello");
  const bool known = whole.known();
  whole.Release();
  for (const std::size_t piece : {1, 7}) {
    CountingRegistrar other;
    FrameGuard guard({}, other);
    TESSERA_CHECK(TakeAll(guard, bytes, piece) == verdict, "pieces are judged as the whole");
    TESSERA_CHECK(guard.known() == known, "and the same peer is known");
  }
}

}  // namespace

std::vector<Seed> Seeds() {
  using fakes::DataFrame;
  using fakes::Frame;
  using fakes::GrpcMessage;
  using fakes::HeadersFrame;
  const std::string preface(fakes::kHttp2Preface);
  const std::string hello =
      preface + Frame(4, 0, 0, "") + HeadersFrame(1) + DataFrame(1, GrpcMessage(kHello));
  return {{"hello", hello},
          {"call", hello + HeadersFrame(3) + DataFrame(3, GrpcMessage("call"), true)},
          {"large",
           hello + HeadersFrame(3) + DataFrame(3, GrpcMessage(std::string(70000, 'x'), 1 << 24))},
          {"unknown", preface + HeadersFrame(1) + DataFrame(1, GrpcMessage("who", 1 << 24))},
          {"blocks", preface + Frame(1, 0, 1, "a") + Frame(9, 0, 1, "b") + Frame(9, 4, 1, "c")},
          {"reset", hello + HeadersFrame(3) + Frame(3, 0, 3, "1234") + Frame(6, 0, 0, "12345678")},
          {"compressed", preface + HeadersFrame(1) + DataFrame(1, GrpcMessage("z", 1, 1))}};
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  tessera::fuzz::Run({reinterpret_cast<const char*>(data), size});
  return 0;
}
