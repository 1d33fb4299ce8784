#include "daemon/base/check.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera {
namespace {

TEST(Check, PassesSilentlyWithoutEvaluatingTheDetail) {
  bool evaluated = false;
  const auto detail = [&] {
    evaluated = true;
    return std::string("detail");
  };
  TESSERA_CHECK(1 + 1 == 2, detail());
  EXPECT_FALSE(evaluated);
}

TEST(CheckDeathTest, AbortsNamingPlaceConditionAndDetail) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const int tiles = 3;
  EXPECT_DEATH(TESSERA_CHECK(tiles == 4, "tiles is " + std::to_string(tiles)),
               "check_test.cc:[0-9]+: check failed: tiles == 4: tiles is 3");
}

}  // namespace
}  // namespace tessera
