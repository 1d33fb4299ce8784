#include "daemon/guard/frame_guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <string_view>

#include "daemon/base/strings.h"
#include "tests/fakes/http2_bytes.h"

namespace tessera {
namespace {

using fakes::DataFrame;
using fakes::Frame;
using fakes::GrpcMessage;
using fakes::HeadersFrame;
using testing::HasSubstr;

constexpr std::string_view kKey = "key of tenant 7, and thirty-two.";  // 32 bytes
constexpr std::string_view kHello = "hello of tenant 7";

// Knows one tenant, whose messages may use a megabyte.
class FakeRegistrar final : public Registrar {
 public:
  static constexpr TenantId kTenant = TenantId(7);

  TenantId Recognise(std::string_view begin) override {
    return begin.starts_with(kKey) || begin == kHello ? kTenant : TenantId();
  }
  absl::Status Joined(TenantId) override {
    if (joined == most_joined) return absl::ResourceExhaustedError("too many connections");
    ++joined;
    return absl::OkStatus();
  }
  void Left(TenantId) override { --joined; }
  bool Charge(TenantId tenant, std::uint64_t before, std::uint64_t now) override {
    EXPECT_EQ(tenant, kTenant);
    EXPECT_EQ(before, charged);
    if (now > (1 << 20)) return false;
    charged = now;
    return true;
  }

  int joined = 0;
  int most_joined = 3;
  std::uint64_t charged = 0;
};

class FrameGuardTest : public testing::Test {
 protected:
  FrameGuardTest() { EXPECT_TRUE(Take(fakes::kHttp2Preface).ok()); }

  absl::Status Take(std::string_view bytes) {
    return guard_.Take({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}, now_);
  }
  void Introduce() {
    ASSERT_TRUE(Take(HeadersFrame(1)).ok());
    ASSERT_TRUE(Take(DataFrame(1, GrpcMessage(kHello))).ok());
    ASSERT_TRUE(guard_.known());
  }
  std::string ErrorOf(std::string_view bytes) {
    return std::string(AsStringView(Take(bytes).message()));
  }

  FakeRegistrar registrar_;
  FrameGuard guard_{{}, registrar_};
  Clock::TimePoint now_{std::chrono::hours(1)};
};

TEST_F(FrameGuardTest, OnlyHttp2Begins) {
  for (const std::string_view bytes :
       {"GET / HTTP/1.1\r\n\r\n", "PRI * HTTP/1.1", "\x16\x03\x01"}) {
    FrameGuard guard({}, registrar_);
    EXPECT_FALSE(
        guard.Take({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}, now_).ok())
        << bytes;
  }
}

TEST_F(FrameGuardTest, AHelloMakesAPeerKnown) {
  EXPECT_FALSE(guard_.known());
  Introduce();
  EXPECT_EQ(guard_.tenant(), FakeRegistrar::kTenant);
  EXPECT_EQ(registrar_.joined, 1);
  guard_.Release();
  EXPECT_EQ(registrar_.joined, 0);
}

TEST_F(FrameGuardTest, AKeyMakesAPeerKnownBeforeItsMessageIsThere) {
  ASSERT_TRUE(Take(HeadersFrame(1)).ok());
  ASSERT_TRUE(Take(DataFrame(1, GrpcMessage(kKey.substr(0, 31), 16 << 20))).ok());
  EXPECT_FALSE(guard_.known());
  ASSERT_TRUE(Take(DataFrame(1, kKey.substr(31))).ok());
  EXPECT_TRUE(guard_.known());
}

TEST_F(FrameGuardTest, ATenantHasSoManyConnections) {
  registrar_.joined = registrar_.most_joined;
  ASSERT_TRUE(Take(HeadersFrame(1)).ok());
  EXPECT_EQ(ErrorOf(DataFrame(1, GrpcMessage(kHello))), "too many connections");
  EXPECT_FALSE(guard_.known());
}

TEST_F(FrameGuardTest, AnUnknownPeerSendsSmallMessages) {
  ASSERT_TRUE(Take(HeadersFrame(1)).ok());
  ASSERT_TRUE(Take(DataFrame(1, GrpcMessage(std::string(64 << 10, 'x')))).ok());
  ASSERT_TRUE(Take(HeadersFrame(3)).ok());
  // It is cut when the bytes that would show who it is are not there.
  const std::string begin(1023, 'x');
  ASSERT_TRUE(Take(DataFrame(3, GrpcMessage(begin, (64 << 10) + 1))).ok());
  EXPECT_EQ(ErrorOf(DataFrame(3, "x")),
            "65537 bytes in a message without a session; the limit is 65536");
}

TEST_F(FrameGuardTest, AnUnknownPeerHasFewUnfinishedRequests) {
  for (std::uint32_t i = 0; i < 16; ++i) ASSERT_TRUE(Take(HeadersFrame(2 * i + 1)).ok());
  EXPECT_EQ(ErrorOf(HeadersFrame(33)), "17 unfinished requests; the limit is 16");
}

TEST_F(FrameGuardTest, RequestsThatEndOrAreResetCountNoMore) {
  Introduce();
  ASSERT_TRUE(Take(Frame(4, 1, 0, "")).ok());
  for (std::uint32_t i = 1; i < 1000; ++i) {
    const std::uint32_t stream = 2 * i + 1;
    ASSERT_TRUE(Take(HeadersFrame(stream)).ok());
    ASSERT_TRUE(Take(i % 2 == 0 ? DataFrame(stream, GrpcMessage("x"), /*last=*/true)
                                : Frame(3, 0, stream, "1234"))
                    .ok())
        << i;
  }
}

TEST_F(FrameGuardTest, AnUnknownPeerCallsRarely) {
  const auto call = [&](std::uint32_t i) {
    return Take(HeadersFrame(2 * i + 1) + Frame(0, 1, 2 * i + 1, ""));
  };
  std::uint32_t i = 0;
  while (call(i).ok()) ++i;
  EXPECT_EQ(i, 32u);
}

TEST_F(FrameGuardTest, ProbesOfTheHealthAreRareEnough) {
  ASSERT_TRUE(Take(Frame(4, 1, 0, "")).ok());
  for (std::uint32_t i = 0; i < 1000; ++i) {
    const std::uint32_t stream = 2 * i + 1;
    ASSERT_TRUE(Take(HeadersFrame(stream) + DataFrame(stream, GrpcMessage(""), true)).ok()) << i;
    now_ += std::chrono::milliseconds(101);
  }
}

TEST_F(FrameGuardTest, ATrustedPeerCallsAsOftenAsItLikes) {
  FrameGuard guard(FrameGuard::Limits::Trusted(), registrar_);
  const auto take = [&](const std::string& bytes) {
    return guard.Take({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}, now_);
  };
  ASSERT_TRUE(take(std::string(fakes::kHttp2Preface) + Frame(4, 1, 0, "")).ok());
  for (std::uint32_t i = 0; i < 5000; ++i) {
    const std::uint32_t stream = 2 * i + 1;
    ASSERT_TRUE(take(HeadersFrame(stream) + DataFrame(stream, GrpcMessage("x"), true)).ok()) << i;
  }
  EXPECT_TRUE(take(HeadersFrame(10'001) + DataFrame(10'001, GrpcMessage("x", 1 << 24))).ok());
}

TEST_F(FrameGuardTest, HeadersAreShort) {
  EXPECT_THAT(ErrorOf(HeadersFrame(1, std::string((16 << 10) + 1, 'h'))),
              HasSubstr("16385 bytes of headers; the limit is 16384"));
}

TEST_F(FrameGuardTest, HeadersHaveFewFrames) {
  ASSERT_TRUE(Take(Frame(1, 0, 1, "h")).ok());
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Take(Frame(9, 0, 1, "h")).ok());
  EXPECT_EQ(ErrorOf(Frame(9, 0, 1, "h")), "6 frames of headers; the limit is 5");
}

TEST_F(FrameGuardTest, HeadersAreNotInterrupted) {
  ASSERT_TRUE(Take(Frame(1, 0, 1, "h")).ok());
  EXPECT_THAT(ErrorOf(Frame(6, 0, 0, "12345678")), HasSubstr("a header block is interrupted"));
}

TEST_F(FrameGuardTest, NothingIsContinuedThatHasNotBegun) {
  EXPECT_THAT(ErrorOf(Frame(9, 4, 1, "h")), HasSubstr("without a beginning"));
}

TEST_F(FrameGuardTest, CompressedMessagesAreCut) {
  ASSERT_TRUE(Take(HeadersFrame(1)).ok());
  EXPECT_THAT(ErrorOf(DataFrame(1, GrpcMessage("z", 1, 1))), HasSubstr("is compressed"));
}

TEST_F(FrameGuardTest, WhoIsKnownMayCancelManyCalls) {
  Introduce();
  for (int i = 0; i < 10'000; ++i) ASSERT_TRUE(Take(Frame(3, 0, 99, "1234")).ok()) << i;
  EXPECT_THAT(ErrorOf(Frame(3, 0, 99, "1234")), HasSubstr("the limit is 10000"));
}

TEST_F(FrameGuardTest, AnUnknownPeerPaysForEveryFrame) {
  const std::string frames[] = {Frame(6, 0, 0, "12345678"), Frame(6, 1, 0, "12345678"),
                                Frame(4, 0, 0, ""),         Frame(4, 1, 0, ""),
                                Frame(7, 0, 0, "12345678"), Frame(8, 0, 0, "1234"),
                                Frame(3, 0, 1, "1234"),     DataFrame(1, "x")};
  for (const std::string& frame : frames) {
    FrameGuard guard({}, registrar_);
    const auto take = [&](std::string_view bytes) {
      return guard.Take({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}, now_);
    };
    ASSERT_TRUE(take(fakes::kHttp2Preface).ok());
    for (int i = 0; i < 1000; ++i) ASSERT_TRUE(take(frame).ok()) << i;
    EXPECT_THAT(std::string(take(frame).message()), HasSubstr("the limit is 1000"));
  }
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(Take(frames[0]).ok());
  now_ += std::chrono::seconds(1);
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(Take(frames[0]).ok()) << i;
  EXPECT_FALSE(Take(frames[0]).ok());
}

TEST_F(FrameGuardTest, AnUnknownPeerSendsAMegabyteInAll) {
  ASSERT_TRUE(Take(HeadersFrame(1)).ok());
  const std::string message = GrpcMessage(std::string(60 << 10, 'x'));
  for (int i = 0; i < 17; ++i) ASSERT_TRUE(Take(DataFrame(1, message)).ok()) << i;
  EXPECT_THAT(ErrorOf(DataFrame(1, message)), HasSubstr("bytes without a session"));
}

TEST_F(FrameGuardTest, AKnownPeerMayAskForManyAnswers) {
  Introduce();
  for (int i = 0; i < 10'000; ++i) {
    ASSERT_TRUE(Take(Frame(6, 0, 0, "12345678")).ok()) << i;  // as some clients do
    ASSERT_TRUE(Take(Frame(8, 0, 0, "1234")).ok()) << i;
  }
  for (int i = 0; i < 10'000; ++i) ASSERT_TRUE(Take(Frame(7, 0, 0, "12345678")).ok()) << i;
  EXPECT_THAT(ErrorOf(Frame(7, 0, 0, "12345678")), HasSubstr("the limit is 10000"));
}

TEST_F(FrameGuardTest, RequestsAreOnNewStreams) {
  Introduce();
  ASSERT_TRUE(Take(HeadersFrame(7)).ok());
  for (const std::uint32_t stream : {0u, 8u, 5u, 7u}) {
    FrameGuard guard({}, registrar_);
    const std::string bytes =
        std::string(fakes::kHttp2Preface) + HeadersFrame(7) + HeadersFrame(stream);
    EXPECT_FALSE(
        guard.Take({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}, now_).ok())
        << stream;
  }
}

TEST_F(FrameGuardTest, StreamsAreLimitedUntilThePeerKnowsTheLimit) {
  Introduce();
  std::uint32_t stream = 3;
  const auto call = [&] {
    const std::string frames = HeadersFrame(stream) + DataFrame(stream, GrpcMessage("x"), true);
    stream += 2;
    return Take(frames);
  };
  for (int i = 0; i < 511; ++i) ASSERT_TRUE(call().ok()) << i;
  FrameGuard::Limits limits;
  EXPECT_EQ(limits.streams, 512u);
  ASSERT_TRUE(Take(Frame(4, 1, 0, "")).ok());
  for (int i = 0; i < 5000; ++i) ASSERT_TRUE(call().ok()) << i;
}

TEST_F(FrameGuardTest, WhoDoesNotAcknowledgeTheLimitIsCut) {
  Introduce();
  for (std::uint32_t i = 1; i < 512; ++i) {
    ASSERT_TRUE(Take(HeadersFrame(2 * i + 1) + DataFrame(2 * i + 1, "", true)).ok()) << i;
  }
  EXPECT_THAT(ErrorOf(HeadersFrame(1025)), HasSubstr("before an acknowledgement"));
}

TEST_F(FrameGuardTest, UnfinishedMessagesAreCharged) {
  Introduce();
  const std::string part(256 << 10, 'x');
  for (std::uint32_t i = 1; i <= 4; ++i) {
    ASSERT_TRUE(Take(HeadersFrame(2 * i + 1)).ok());
    ASSERT_TRUE(Take(DataFrame(2 * i + 1, GrpcMessage(part, 16 << 20))).ok());
    EXPECT_EQ(registrar_.charged, i * part.size());
  }
  ASSERT_TRUE(Take(Frame(3, 0, 3, "1234")).ok());  // one is given up
  EXPECT_EQ(registrar_.charged, 3 * part.size());
  ASSERT_TRUE(Take(DataFrame(5, part)).ok());
  EXPECT_THAT(ErrorOf(DataFrame(7, part)), HasSubstr("more than the tenant may have now"));
  guard_.Release();
  EXPECT_EQ(registrar_.charged, 0u);
}

TEST_F(FrameGuardTest, MessagesThatAreThereAreNotCharged) {
  Introduce();
  ASSERT_TRUE(Take(HeadersFrame(3)).ok());
  const std::string message = GrpcMessage(std::string(900 << 10, 'x'));
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(Take(DataFrame(3, message)).ok());
    EXPECT_EQ(registrar_.charged, 0u);
  }
}

TEST_F(FrameGuardTest, PiecesAreJudgedAsTheWhole) {
  const std::string bytes = HeadersFrame(1) + DataFrame(1, GrpcMessage(kHello)) +
                            Frame(6, 0, 0, "12345678") + HeadersFrame(3) +
                            DataFrame(3, GrpcMessage("x", 1, 1));
  for (std::size_t i = 0; i + 1 < bytes.size() - 1; ++i) {
    ASSERT_TRUE(Take(std::string_view(bytes).substr(i, 1)).ok() || i + 6 >= bytes.size()) << i;
  }
  EXPECT_TRUE(guard_.known());
}

}  // namespace
}  // namespace tessera
