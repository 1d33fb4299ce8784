#include "daemon/cluster/events/event_publisher.h"

#include <gmock/gmock.h>
#include <zmq.h>

#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <memory>
#include <msgpack.hpp>
#include <set>
#include <string>
#include <vector>

#include "tests/fakes/seed.h"
#include "tests/unit/cluster/blocks.h"

namespace tessera::cluster {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

const cache::BlockReader kReader = {"tenant", "10.0.0.1:8000"};
const std::string kTopic = "kv@10.0.0.1:8000@llama";
constexpr auto kPatience = std::chrono::seconds(20);

// A socket of a router.
class Socket {
 public:
  Socket(int type, const std::string& address) : context_(::zmq_ctx_new()) {
    socket_ = ::zmq_socket(context_, type);
    const int wait_ms = 50;
    ::zmq_setsockopt(socket_, ZMQ_RCVTIMEO, &wait_ms, sizeof wait_ms);
    if (type == ZMQ_SUB) ::zmq_setsockopt(socket_, ZMQ_SUBSCRIBE, "kv@", 3);
    EXPECT_EQ(::zmq_connect(socket_, ("tcp://" + address).c_str()), 0);
  }
  ~Socket() {
    ::zmq_close(socket_);
    ::zmq_ctx_term(context_);
  }
  void Send(const std::vector<std::string>& frames) {
    for (std::size_t i = 0; i < frames.size(); ++i) {
      const int flags = i + 1 < frames.size() ? ZMQ_SNDMORE : 0;
      ASSERT_GE(::zmq_send(socket_, frames[i].data(), frames[i].size(), flags), 0);
    }
  }
  // Empty: none came in a while.
  std::vector<std::string> Receive() {
    std::vector<std::string> frames;
    for (int more = 1; more != 0;) {
      zmq_msg_t message;
      ::zmq_msg_init(&message);
      if (::zmq_msg_recv(&message, socket_, 0) < 0) return {};
      frames.emplace_back(static_cast<const char*>(::zmq_msg_data(&message)),
                          ::zmq_msg_size(&message));
      more = ::zmq_msg_more(&message);
      ::zmq_msg_close(&message);
    }
    return frames;
  }

 private:
  void* context_;
  void* socket_;
};

std::uint64_t NumberOf(const std::string& bytes) {
  std::uint64_t number = 0;
  for (const char byte : bytes) number = number << 8 | static_cast<unsigned char>(byte);
  return number;
}

std::string BytesOf(std::uint64_t number) {
  std::string bytes;
  for (int shift = 56; shift >= 0; shift -= 8) bytes += static_cast<char>(number >> shift);
  return bytes;
}

// What a router knows of a topic, from the array encoding.
struct Known {
  std::uint64_t next = 0;
  std::set<std::uint64_t> blocks;

  void Apply(const std::string& payload) {
    const msgpack::object_handle handle = msgpack::unpack(payload.data(), payload.size());
    const auto events = handle.get().via.array.ptr[1].as<std::vector<msgpack::object>>();
    for (const msgpack::object& object : events) {
      const auto fields = object.as<std::vector<msgpack::object>>();
      const std::string type = fields[0].as<std::string>();
      if (type == "AllBlocksCleared") {
        blocks.clear();
        continue;
      }
      const auto hashes = fields[1].as<std::vector<std::uint64_t>>();
      if (type == "BlockRemoved") {
        for (const std::uint64_t hash : hashes) EXPECT_EQ(blocks.erase(hash), 1u);
        continue;
      }
      if (!fields[2].is_nil()) {
        EXPECT_TRUE(blocks.contains(fields[2].as<std::uint64_t>()));
      }
      blocks.insert(hashes.begin(), hashes.end());
      EXPECT_THAT(fields[3].as<std::vector<std::uint32_t>>(), SizeIs(32 * hashes.size()));
    }
  }
};

class EventPublisherTest : public testing::Test {
 protected:
  void Start(std::size_t history_bytes = EventHistory::kMostBytes) {
    auto publisher = EventPublisher::Create(
        {.address = "127.0.0.1:0",
         .replay_address = "127.0.0.1:0",
         .encoding = config::EventEncoding::kArray,
         .medium = "CPU",
         .queue = &queue_,
         .retell = [this](const cache::BlockReader& reader) { Retell(reader); },
         .history_bytes = history_bytes});
    ASSERT_TRUE(publisher.ok()) << publisher.status();
    publisher_ = *std::move(publisher);
    subscriber_ = std::make_unique<Socket>(ZMQ_SUB, publisher_->address());
    replays_ = std::make_unique<Socket>(ZMQ_DEALER, publisher_->replay_address());
    queue_.Cleared(kReader);
  }

  void Retell(const cache::BlockReader& reader) {
    MutexLock lock(mutex_);
    queue_.Cleared(reader);
    std::vector<cache::BlockEvent> events;
    for (const std::uint64_t hash : truth_) events.push_back(Stored(hash));
    queue_.Changed(reader, "llama", events);
    ++retold_;
  }
  void Change(const std::vector<cache::BlockEvent>& events) {
    MutexLock lock(mutex_);
    for (const cache::BlockEvent& event : events) {
      event.stored ? (void)truth_.insert(event.hash) : (void)truth_.erase(event.hash);
    }
    queue_.Changed(kReader, "llama", events);
  }

  // Reads batches until the router knows the truth. A missing number makes it ask for a replay.
  void AwaitTruth(Known& known) {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < deadline) {
      if (known.next > 0 && known.blocks == truth_) return;
      const std::vector<std::string> frames = subscriber_->Receive();
      if (frames.empty()) {
        if (known.next == 0) CatchUp(known);  // it may have subscribed too late for the first
        continue;
      }
      ASSERT_THAT(frames, SizeIs(3));
      ASSERT_EQ(frames[0], kTopic);
      const std::uint64_t number = NumberOf(frames[1]);
      if (number < known.next) continue;  // known from a replay
      if (number > known.next) {
        CatchUp(known);
        continue;
      }
      known.Apply(frames[2]);
      ++known.next;
    }
    FAIL() << "the router knows " << known.blocks.size() << " blocks of " << truth_.size();
  }

  void CatchUp(Known& known) {
    replays_->Send({"", BytesOf(known.next), kTopic});
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (std::chrono::steady_clock::now() < deadline) {
      const std::vector<std::string> frames = replays_->Receive();
      if (frames.empty()) continue;
      ASSERT_THAT(frames, SizeIs(3));
      const std::uint64_t number = NumberOf(frames[1]);
      if (number == ~std::uint64_t{0}) return;
      if (number > known.next) {
        known.blocks.clear();  // the daemon tells all anew, as a later batch
        gaps_ += 1;
        known.next = number;
        cleared_by_gap_ = true;
      }
      if (cleared_by_gap_) {
        SkipUntilCleared(known, frames[2]);
      } else {
        known.Apply(frames[2]);
      }
      known.next = number + 1;
    }
    FAIL() << "the replay did not end";
  }

  // After a gap, only AllBlocksCleared gives sense to what follows.
  void SkipUntilCleared(Known& known, const std::string& payload) {
    if (payload.find("AllBlocksCleared") == std::string::npos) return;
    cleared_by_gap_ = false;
    known.Apply(payload);
  }

  Mutex mutex_;
  std::set<std::uint64_t> truth_;
  int retold_ = 0;
  int gaps_ = 0;
  bool cleared_by_gap_ = false;
  EventQueue queue_;
  std::unique_ptr<EventPublisher> publisher_;
  std::unique_ptr<Socket> subscriber_;
  std::unique_ptr<Socket> replays_;
};

TEST_F(EventPublisherTest, ARouterKnowsWhatIsThere) {
  Start();
  Known known;
  TestRandom random;
  std::uint64_t next = 1;
  for (int round = 0; round < 20; ++round) {
    std::vector<cache::BlockEvent> events;
    std::optional<std::uint64_t> parent;
    for (std::uint64_t i = random.Below(700); i > 0; --i) {
      events.push_back(Stored(next, parent));
      parent = next++;
    }
    for (const std::uint64_t hash : std::set(truth_)) {
      if (random.OneIn(3)) events.push_back(Removed(hash));
    }
    Change(events);
    if (random.OneIn(2)) {
      ASSERT_NO_FATAL_FAILURE(AwaitTruth(known));
    }
  }
  ASSERT_NO_FATAL_FAILURE(AwaitTruth(known));
  EXPECT_EQ(retold_, 0);
}

TEST_F(EventPublisherTest, WhatIsNotKeptIsToldAnew) {
  Start(/*history_bytes=*/1);
  Known late;
  Change({Stored(1), Stored(2, 1)});
  ASSERT_NO_FATAL_FAILURE(AwaitTruth(late));
  Change({Stored(3)});
  ASSERT_NO_FATAL_FAILURE(AwaitTruth(late));
  Known newcomer;  // asks for batch 0, which is gone
  replays_->Send({"", BytesOf(0), kTopic});
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < deadline) {
    MutexLock lock(mutex_);
    if (retold_ > 0) break;
  }
  bool is_cleared = false;
  while (newcomer.blocks != truth_ && std::chrono::steady_clock::now() < deadline) {
    const std::vector<std::string> frames = subscriber_->Receive();
    if (frames.empty()) continue;
    is_cleared = is_cleared || frames[2].find("AllBlocksCleared") != std::string::npos;
    if (is_cleared) newcomer.Apply(frames[2]);
  }
  EXPECT_EQ(newcomer.blocks, truth_);
}

TEST_F(EventPublisherTest, AskersDoNotKeepItBusy) {
  Start(/*history_bytes=*/1);
  Known known;
  Change({Stored(1)});
  ASSERT_NO_FATAL_FAILURE(AwaitTruth(known));
  Change({Stored(2)});
  ASSERT_NO_FATAL_FAILURE(AwaitTruth(known));  // batch 0 is gone by now
  const auto begun = std::chrono::steady_clock::now();
  int answers = 0;
  for (int i = 0; i < 200; ++i) replays_->Send({"", BytesOf(0), kTopic});
  while (answers < 200 && std::chrono::steady_clock::now() < begun + kPatience) {
    const std::vector<std::string> frames = replays_->Receive();
    answers += frames.size() == 3 && NumberOf(frames[1]) == ~std::uint64_t{0};
  }
  EXPECT_EQ(answers, 200);
  const auto seconds =
      std::chrono::ceil<std::chrono::seconds>(std::chrono::steady_clock::now() - begun);
  MutexLock lock(mutex_);
  EXPECT_LE(retold_, seconds.count() + 1);
}

TEST_F(EventPublisherTest, AFullQueueIsToldAnew) {
  Start();
  Known known;
  Change({Stored(1)});
  ASSERT_NO_FATAL_FAILURE(AwaitTruth(known));
  std::vector<cache::BlockEvent> many;
  for (std::uint64_t hash = 10; hash < 10 + EventQueue::kMostBlocks + 1; ++hash) {
    many.push_back(Stored(hash));
  }
  Change(many);
  ASSERT_NO_FATAL_FAILURE(AwaitTruth(known));
  EXPECT_GE(retold_, 1);
  EXPECT_GE(queue_.figures().dropped_blocks, many.size());
}

TEST_F(EventPublisherTest, AWorkerThatLeavesIsCleared) {
  Start();
  Known known;
  Change({Stored(1)});
  ASSERT_NO_FATAL_FAILURE(AwaitTruth(known));
  truth_.clear();
  queue_.Left(kReader);
  ASSERT_NO_FATAL_FAILURE(AwaitTruth(known));
}

TEST_F(EventPublisherTest, ImpossibleRequestsAreIgnored) {
  Start();
  TestRandom random;
  for (int i = 0; i < 500; ++i) {
    std::vector<std::string> frames(1 + random.Below(6));
    for (std::string& frame : frames) {
      frame.resize(random.OneIn(10) ? 4000 : random.Below(12));
      for (char& byte : frame) byte = static_cast<char>(random.Bits());
    }
    replays_->Send(frames);
  }
  Known known;
  Change({Stored(1)});
  replays_ = std::make_unique<Socket>(ZMQ_DEALER, publisher_->replay_address());
  ASSERT_NO_FATAL_FAILURE(AwaitTruth(known));
}

TEST(EventPublisherAddress, IsNamedIfItIsTaken) {
  EventQueue queue;
  const auto first = EventPublisher::Create({.address = "127.0.0.1:0",
                                             .replay_address = "",
                                             .medium = "CPU",
                                             .queue = &queue,
                                             .retell = {}});
  ASSERT_TRUE(first.ok()) << first.status();
  EventQueue other;
  const auto second = EventPublisher::Create({.address = (*first)->address(),
                                              .replay_address = "",
                                              .medium = "CPU",
                                              .queue = &other,
                                              .retell = {}});
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr((*first)->address()));
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("in use"));
}

}  // namespace
}  // namespace tessera::cluster
