// Every policy of the registry, with nothing but its defaults, fits every model that is served.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/grammar/validate.h"
#include "daemon/policies/registry.h"
#include "daemon/policies/token_policy.h"

namespace tessera::policies {
namespace {

using testing::HasSubstr;

// Terms that say something about another one say it beside that.
std::string DefaultsOf(const TermKind& kind) {
  if (kind.name == "select") return "mosaickv+select:rate=0.1";
  if (ParsePolicy(kind.name).ok()) return std::string(kind.name);
  return Concat("mosaickv+", kind.name);
}

absl::Status Fits(const Policy& policy, std::uint32_t layers, std::uint32_t head_dim,
                  bool delimiters) {
  const kernels::LayerGeometry geometry = {.query_heads = 1, .kv_heads = 1, .head_dim = head_dim};
  if (absl::Status status = CheckFor(policy, geometry); !status.ok()) return status;
  return CheckForModel(policy, {.layers = layers, .delimiters = delimiters});
}

TEST(PolicyDefaults, FitEveryModel) {
  for (const TermKind* kind : TermKinds()) {
    const absl::StatusOr<Policy> policy = ParsePolicy(DefaultsOf(*kind));
    ASSERT_TRUE(policy.ok()) << kind->name << ": " << policy.status();
    for (const std::uint32_t layers : {1u, 2u, 4u, 28u, 32u, 80u}) {
      for (const std::uint32_t head_dim : {64u, 128u, 256u}) {
        SCOPED_TRACE(Concat(policy->text, ", ", layers, " layers, head_dim ", head_dim));
        const absl::Status status = Fits(*policy, layers, head_dim, /*delimiters=*/true);
        if (kind->name == "lacache" && layers == 1) {
          // Its layers keep different tokens: one alone has nothing to differ from.
          EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
          EXPECT_THAT(std::string(status.message()), HasSubstr("at least 2 layers"));
          EXPECT_THAT(std::string(status.message()), HasSubstr("streaming"));
          continue;
        }
        EXPECT_TRUE(status.ok()) << status;
      }
    }
  }
}

// What a default does not settle is not settled in silence.
TEST(PolicyDefaults, DelimitersThatAreMissingAreAskedFor) {
  for (const TermKind* kind : TermKinds()) {
    if (kind->tokens == nullptr) continue;
    const Policy policy = *ParsePolicy(kind->name);
    const absl::Status status = Fits(policy, 4, 64, /*delimiters=*/false);
    EXPECT_EQ(status.ok(), !NeedsOf(policy).token_ids) << policy.text << ": " << status;
    if (status.ok()) continue;
    EXPECT_THAT(std::string(status.message()), HasSubstr("ModelGeometry::delimiter_token_ids"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("DelimiterTokens()"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("delimiters=0"));
  }
}

// A value that was given is taken at its word.
TEST(PolicyDefaults, GivenValuesAreNotChanged) {
  EXPECT_FALSE(CheckForModel(*ParsePolicy("lacache:span=16"), {.layers = 4}).ok());
  EXPECT_EQ(ParsePolicy("lacache:span=16")->text, "lacache:span=16");
  EXPECT_EQ(ParsePolicy("lacache")->text, "lacache");
}

}  // namespace
}  // namespace tessera::policies
