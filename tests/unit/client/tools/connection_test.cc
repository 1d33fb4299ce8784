// The connection flags of commands.

#include "client/tools/connection.h"

#include <gtest/gtest.h>

#include <string_view>
#include <vector>

namespace tessera::cli {
namespace {

TEST(ConnectionTest, ATokenFromAFileMayEndInANewline) {
  Flags flags(ConnectionFlags(Connects::kToDaemon, /*attaches=*/true));
  const std::vector<std::string_view> args = {"--token=secret\n"};
  ASSERT_TRUE(flags.Parse(args).ok());
  EXPECT_EQ(ConnectionOf(flags).token, "secret");
}

}  // namespace
}  // namespace tessera::cli
