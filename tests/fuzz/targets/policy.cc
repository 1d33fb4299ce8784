// Policy texts: any text gives an error with a message, or a valid policy whose printed text parses
// to the same policy.
#include <algorithm>
#include <string>
#include <string_view>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "daemon/policies/grammar/parse.h"
#include "daemon/policies/grammar/validate.h"
#include "daemon/policies/registry.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/unit/policies/same.h"

namespace tessera::fuzz {
namespace {

void CheckError(const absl::Status& status) {
  const std::string_view message = AsStringView(status.message());
  TESSERA_CHECK(status.code() == absl::StatusCode::kInvalidArgument ||
                    status.code() == absl::StatusCode::kUnimplemented,
                status.ToString());
  TESSERA_CHECK(message.starts_with("policy"), message);
  TESSERA_CHECK(message.size() < 2 * policies::kMaxPolicyText, message);
  TESSERA_CHECK(std::ranges::all_of(message, [](char c) { return c >= ' ' && c <= '~'; }), message);
}

}  // namespace

std::vector<Seed> Seeds() {
  std::vector<Seed> seeds = {{"composed", "chunkkv:budget=0.35+mosaickv+int8"},
                             {"blanks", " mosaickv : keep = 25% , group = 2 + quest "},
                             {"numbers", "mosaickv:keep=2.5e-1,loss_k=1e400"}};
  for (const policies::TermKind* kind : policies::TermKinds()) {
    std::string text(kind->name);
    char separator = ':';
    for (const policies::Option& option : kind->options) {
      Append(text, separator, option.name, "=", option.standard);
      separator = ',';
    }
    seeds.push_back({Concat("term-", kind->name), std::move(text)});
  }
  return seeds;
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera::policies;
  const std::string text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<Policy> policy = ParsePolicy(text);
  if (!policy.ok()) {
    tessera::fuzz::CheckError(policy.status());
    return 0;
  }
  const absl::Status sound = Validate(*policy);
  TESSERA_CHECK(sound.ok(), sound.ToString());
  const absl::StatusOr<Policy> again = ParsePolicy(policy->text);
  TESSERA_CHECK(again.ok(), again.status().ToString());
  TESSERA_CHECK(Same(*policy, *again) && again->text == policy->text, policy->text);
  return 0;
}
