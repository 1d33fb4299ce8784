#include "daemon/base/error_cause.h"

#include <gtest/gtest.h>

#include "daemon/base/strings.h"

namespace tessera {
namespace {

constexpr ErrorCause kAll[] = {
    ErrorCause::kPoolFull,       ErrorCause::kQuota,        ErrorCause::kTailRingFull,
    ErrorCause::kReaderSlots,    ErrorCause::kHostMemory,   ErrorCause::kOverloaded,
    ErrorCause::kSequenceFailed, ErrorCause::kSequenceBusy, ErrorCause::kLeaseLost,
    ErrorCause::kDraining,       ErrorCause::kPinRevoked,   ErrorCause::kPolicy,
    ErrorCause::kArgument};

TEST(ErrorCause, EveryCauseSurvivesItsText) {
  for (const ErrorCause cause : kAll) {
    const ErrorInfo info = {.cause = cause, .retry_after = std::chrono::milliseconds(2001)};
    const std::string text = FormatErrorInfo(info);
    EXPECT_EQ(text, Concat("cause=", CauseName(cause), " retry_after_ms=2001"));
    EXPECT_EQ(ParseErrorInfo(text), info) << text;
  }
}

TEST(ErrorCause, MalformedTextIsRefused) {
  for (const char* text :
       {"", "cause=", "pool_full", "cause=pool_full",
        "cause=pool_full retry_after_ms=", "cause=pool_full retry_after_ms=1x",
        "cause=pool_full retry_after_ms=-1", "cause=pool_full retry_after_ms=99999999999",
        "cause=no_such retry_after_ms=0", " cause=pool_full retry_after_ms=0"}) {
    EXPECT_EQ(ParseErrorInfo(text), std::nullopt) << text;
  }
}

TEST(ErrorCause, TheFirstCauseIsKept) {
  const absl::Status status = WithCause(
      WithCause(absl::ResourceExhaustedError("full"), ErrorCause::kQuota), ErrorCause::kPoolFull);
  EXPECT_EQ(CauseOf(status)->cause, ErrorCause::kQuota);
  EXPECT_EQ(status.message(), "full");
}

TEST(ErrorCause, OkHasNone) {
  EXPECT_TRUE(WithCause(absl::OkStatus(), ErrorCause::kQuota).ok());
  EXPECT_EQ(CauseOf(absl::OkStatus()), std::nullopt);
  EXPECT_EQ(CauseOf(absl::InternalError("")), std::nullopt);
}

}  // namespace
}  // namespace tessera
