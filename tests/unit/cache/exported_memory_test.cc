// Another process receives everything that a worker gets, and tries every attack in the table of
// mappings.

#include <fcntl.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "daemon/platform/unix_socket.h"
#include "gtest/gtest.h"
#include "tests/fakes/daemon/peer_process.h"
#include "tests/fakes/hostile_mapping.h"
#include "tests/unit/cache/world.h"

namespace tessera::cache {
namespace {

struct Exported {
  const char* name;
  Fd fd;
  std::uint64_t bytes;
  bool worker_writes;
  const std::byte* daemons;  // the daemon's own mapping
};

class ExportedMemory : public testing::Test {
 protected:
  void SetUp() override {
    sequence_ = world_.NewSequence(worker_.session(), *model_);
    stamps_ = NewStamps(100);
    ASSERT_TRUE(AppendAll(*sequence_, 0, stamps_).ok());
    tail_ = *worker_.Open(*sequence_);
  }

  std::vector<Exported> Everything() {
    std::vector<Exported> all;
    Tenant& tenant = world_.tenant();
    SessionState& session = worker_.session();
    std::uint32_t generation;
    const auto add = [&all](const char* name, absl::StatusOr<device::Export> share, bool writable,
                            const std::byte* base) {
      ASSERT_TRUE(share.ok()) << share.status();
      all.push_back({name, std::move(share->fd), share->bytes, writable, base});
    };
    add("pool", tenant.pool().ShareExtent(0, session.id(), &generation), false,
        tenant.pool().base());
    add("directory", tenant.directory().pool().ShareExtent(0, session.id(), &generation), false,
        tenant.directory().mapped().base);
    add("tails", session.tails().Share(tail_.place.tail.extent), true,
        sequence_->tail()->region().data() - tail_.place.tail.offset);
    EXPECT_TRUE(session.CreateStaging().ok());
    add("staging", session.staging()->memory().Share(), true, *session.StagingRange(0, 1));
    Fd fd;
    EXPECT_TRUE(DuplicateFd(session.control()->memory().fd(), &fd).ok());
    all.push_back({"control", std::move(fd), session.control()->memory().bytes(), true,
                   reinterpret_cast<const std::byte*>(&session.control()->page())});
    return all;
  }

  World world_;
  TestWorker worker_{world_.tenant(), world_.OpenSession()};
  std::shared_ptr<const Model> model_ = world_.Register(SmallModel("m", 1, 1));
  std::shared_ptr<Sequence> sequence_;
  std::vector<std::uint64_t> stamps_;
  TestWorker::OpenTail tail_{};
};

TEST_F(ExportedMemory, AWorkerProcessCanDoNoMoreThanTheTableSays) {
  const std::vector<Exported> all = Everything();
  PeerProcess peer([&](int socket) {
    for (std::size_t i = 0; i < all.size(); ++i) {
      std::uint64_t bytes = 0;
      Fd passed;
      if (!ReceiveMessage(socket, std::as_writable_bytes(std::span(&bytes, 1)), &passed).ok()) {
        return 1;
      }
      const MappingReport report = TryEverything(passed.get(), bytes);
      if (!SendMessage(socket, std::as_bytes(std::span(report))).ok()) return 2;
    }
    return 0;
  });
  for (const Exported& memory : all) {
    ASSERT_TRUE(
        SendMessage(peer.socket(), std::as_bytes(std::span(&memory.bytes, 1)), memory.fd.get())
            .ok());
    MappingReport report{};
    ASSERT_TRUE(ReceiveMessage(peer.socket(), std::as_writable_bytes(std::span(report))).ok());
    for (std::size_t i = 0; i < report.size(); ++i) {
      const MappingAttempt& attempt = kMappingAttempts[i];
      EXPECT_EQ(report[i], memory.worker_writes ? attempt.worker_writes : attempt.daemon_writes)
          << memory.name << ", " << attempt.name << ": " << std::strerror(report[i]);
    }
    // Every page of the daemon's mapping is still present.
    unsigned sum = 0;
    for (std::uint64_t at = 0; at < memory.bytes; at += 512) {
      sum += static_cast<unsigned>(memory.daemons[at]);
    }
    RecordProperty(memory.name, static_cast<int>(sum));
  }
  EXPECT_EQ(peer.Wait(), 0);

  // The daemon continues: published data is untouched, and it publishes more.
  const SequenceView view = *ReadSequence(world_.tenant(), *sequence_);
  EXPECT_EQ(Differs(view, *model_, {stamps_}), "");
  const auto another = world_.NewSequence(worker_.session(), *model_);
  EXPECT_TRUE(AppendAll(*another, 0, NewStamps(500)).ok());
}

TEST_F(ExportedMemory, SealsAreTheOnesOfTheTable) {
  for (const Exported& memory : Everything()) {
    const int fixed = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    EXPECT_EQ(::fcntl(memory.fd.get(), F_GET_SEALS),
              memory.worker_writes ? fixed : fixed | F_SEAL_FUTURE_WRITE)
        << memory.name;
  }
}

// A worker that punches holes into its own rings during absorption harms only its own rows: they
// read as zeros, and the daemon continues.
TEST_F(ExportedMemory, HolesInATailReadAsZerosAndNothingFaults) {
  for (std::uint64_t i = 0; i < 40; ++i) worker_.Write(*sequence_, tail_, 100 + i, 5);
  worker_.Commit(tail_, 140);
  const auto share = worker_.session().tails().Share(tail_.place.tail.extent);
  ASSERT_TRUE(share.ok());
  ASSERT_EQ(::fallocate(share->fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                        static_cast<off_t>(share->bytes)),
            0);
  EXPECT_EQ(*sequence_->AbsorbFullTiles(), 28u);  // up to token 128
  EXPECT_EQ(sequence_->Describe(false).tokens, 140u);
  EXPECT_FALSE(sequence_->failed());
}

}  // namespace
}  // namespace tessera::cache
