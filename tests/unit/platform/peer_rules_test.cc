#include "daemon/platform/peer_rules.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

namespace tessera {
namespace {

using testing::HasSubstr;

constexpr std::uint32_t kDaemon = 42;  // the daemon's user

PeerCredentials Peer(std::uint32_t uid, std::uint32_t gid, std::vector<std::uint32_t> groups = {}) {
  return {.pid = 1, .uid = uid, .gid = gid, .groups = std::move(groups)};
}

TEST(PeerRules, WithoutAnyEverybodyIsAdmitted) {
  EXPECT_TRUE(PeerRules{}.Admits(Peer(7, 7), kDaemon));
}

TEST(PeerRules, UsersGroupsAndTheDaemonsOwnUser) {
  const PeerRules rules = {.uids = {1000, 0}, .gids = {27}};
  EXPECT_TRUE(rules.Admits(Peer(1000, 5), kDaemon));
  EXPECT_TRUE(rules.Admits(Peer(0, 5), kDaemon));
  EXPECT_TRUE(rules.Admits(Peer(8, 27), kDaemon));
  EXPECT_TRUE(rules.Admits(Peer(8, 5, {4, 27}), kDaemon));
  EXPECT_TRUE(rules.Admits(Peer(kDaemon, 5), kDaemon));
  EXPECT_FALSE(rules.Admits(Peer(8, 5, {4, 28}), kDaemon));
  EXPECT_FALSE(rules.Admits(Peer(27, 1000), kDaemon)) << "a user is no group";
}

TEST(PeerRules, TextIsTakenAndGivenBack) {
  for (const char* text : {"", "uid:0", "gid:4294967294", "uid:1000,uid:2,gid:27"}) {
    const absl::StatusOr<PeerRules> rules = ParsePeerRules(text);
    ASSERT_TRUE(rules.ok()) << rules.status();
    EXPECT_EQ(rules->ToString(), text);
    EXPECT_EQ(rules->open(), *text == '\0');
  }
  for (const char* text : {"1000", "uid:", "uid:x", "uid:-1", "uid:4294967295", "user:1", "uid:1,",
                           ",", "uid:1 ,gid:2", "uid:1,,gid:2", " uid:1"}) {
    const absl::Status refused = ParsePeerRules(text).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(refused.ToString(), HasSubstr("uid:N")) << text;
  }
}

TEST(PeerRules, TheKernelSaysWhoIsAtTheOtherEnd) {
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const Fd here(ends[0]);
  const Fd there(ends[1]);
  const absl::StatusOr<PeerCredentials> peer = PeerOf(here.get());
  ASSERT_TRUE(peer.ok()) << peer.status();
  std::vector<gid_t> groups(::getgroups(0, nullptr));
  ASSERT_EQ(::getgroups(static_cast<int>(groups.size()), groups.data()),
            static_cast<int>(groups.size()));
  EXPECT_THAT(peer->groups, testing::UnorderedElementsAreArray(groups));
  EXPECT_TRUE(CheckPeer(here.get(), {}).ok());
  EXPECT_TRUE(CheckPeer(here.get(), {.uids = {::geteuid() + 1}, .gids = {}}).ok()) << "its own";
}

}  // namespace
}  // namespace tessera
