#include "daemon/cluster/events/event_publisher.h"

#include <zmq.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "daemon/base/strings.h"
#include "daemon/metrics/names.h"

namespace tessera::cluster {
namespace {

constexpr auto kCoalesce = std::chrono::milliseconds(10);
constexpr auto kIdle = std::chrono::milliseconds(500);
// Of a batch: 39 KiB on the wire.
constexpr std::size_t kBlocksPerBatch = 256;
// Batches that wait for a slow subscriber; it misses those beyond.
constexpr int kWaitingBatches = 1000;
constexpr int kWaitingReplays = 10'000;
constexpr int kReplayPollMs = 100;
// How often askers can have a worker told anew.
constexpr auto kRetellPause = std::chrono::seconds(1);
constexpr std::size_t kNumberBytes = 8;
constexpr std::uint64_t kEndOfReplay = ~std::uint64_t{0};

std::string BigEndian(std::uint64_t number) {
  std::string bytes(kNumberBytes, '\0');
  for (std::size_t i = 0; i < kNumberBytes; ++i) {
    bytes[i] = static_cast<char>(number >> (8 * (kNumberBytes - 1 - i)));
  }
  return bytes;
}

std::uint64_t FromBigEndian(std::string_view bytes) {
  std::uint64_t number = 0;
  for (const char byte : bytes) number = number << 8 | static_cast<unsigned char>(byte);
  return number;
}

std::string TopicOf(const std::string& worker, const std::string& model) {
  return Concat("kv@", worker, "@", model);
}

// Sends a message of several frames; one that has no room is dropped as a whole.
void SendFrames(void* socket, std::initializer_list<std::string_view> frames) {
  std::size_t left = frames.size();
  for (const std::string_view frame : frames) {
    const int flags = ZMQ_DONTWAIT | (--left > 0 ? ZMQ_SNDMORE : 0);
    if (::zmq_send(socket, frame.data(), frame.size(), flags) < 0) return;
  }
}

// The frames of the message that waits; empty: none does, or it is longer than a request may be.
std::vector<std::string> ReceiveFrames(void* socket) {
  constexpr std::size_t kMostFrames = 4;
  std::vector<std::string> frames;
  bool more = true;
  bool fits = true;
  while (more) {
    std::array<char, 512> bytes;
    const int size = ::zmq_recv(socket, bytes.data(), bytes.size(), ZMQ_DONTWAIT);
    if (size < 0) return {};
    fits = fits && static_cast<std::size_t>(size) <= bytes.size() && frames.size() < kMostFrames;
    if (fits) frames.emplace_back(bytes.data(), static_cast<std::size_t>(size));
    int flag = 0;
    std::size_t flag_size = sizeof flag;
    more = ::zmq_getsockopt(socket, ZMQ_RCVMORE, &flag, &flag_size) == 0 && flag != 0;
  }
  return fits ? frames : std::vector<std::string>();
}

}  // namespace

void EventPublisher::CloseSocket::operator()(void* socket) const { (void)::zmq_close(socket); }
void EventPublisher::EndContext::operator()(void* context) const { (void)::zmq_ctx_term(context); }

absl::StatusOr<std::unique_ptr<EventPublisher>> EventPublisher::Create(const Options& options) {
  std::unique_ptr<EventPublisher> publisher(new EventPublisher(options));
  publisher->context_.reset(::zmq_ctx_new());
  absl::StatusOr<Socket> events = publisher->Bind(ZMQ_PUB, options.address, publisher->address_);
  if (!events.ok()) return events.status();
  publisher->events_ = *std::move(events);
  if (!options.replay_address.empty()) {
    absl::StatusOr<Socket> replays =
        publisher->Bind(ZMQ_ROUTER, options.replay_address, publisher->replay_address_);
    if (!replays.ok()) return replays.status();
    publisher->replays_ = *std::move(replays);
    publisher->replaying_ = std::thread([of = publisher.get()] { of->ServeReplays(); });
  }
  publisher->publishing_ = std::thread([of = publisher.get()] { of->Publish(); });
  return publisher;
}

EventPublisher::~EventPublisher() {
  stopping_.store(true);
  options_.queue->Stop();
  if (publishing_.joinable()) publishing_.join();
  if (replaying_.joinable()) replaying_.join();
}

absl::StatusOr<EventPublisher::Socket> EventPublisher::Bind(int type, const std::string& address,
                                                            std::string& bound) {
  Socket socket(::zmq_socket(context_.get(), type));
  const int waiting = type == ZMQ_PUB ? kWaitingBatches : kWaitingReplays;
  const int linger = 0;
  const int has_ipv6 = address.starts_with("[") ? 1 : 0;
  (void)::zmq_setsockopt(socket.get(), ZMQ_IPV6, &has_ipv6, sizeof has_ipv6);
  (void)::zmq_setsockopt(socket.get(), ZMQ_SNDHWM, &waiting, sizeof waiting);
  (void)::zmq_setsockopt(socket.get(), ZMQ_LINGER, &linger, sizeof linger);
  if (::zmq_bind(socket.get(), Concat("tcp://", address).c_str()) != 0) {
    return absl::UnavailableError(
        Concat("cannot publish KV events on ", address, ": ", ::zmq_strerror(::zmq_errno())));
  }
  std::array<char, 256> endpoint{};
  std::size_t size = endpoint.size();
  (void)::zmq_getsockopt(socket.get(), ZMQ_LAST_ENDPOINT, endpoint.data(), &size);
  bound = std::string(endpoint.data()).substr(std::string_view("tcp://").size());
  return socket;
}

void EventPublisher::Publish() {
  while (!stopping_.load()) {
    Apply(options_.queue->Take(kIdle));
    // Told anew one after the other, so that no more than one of them waits in memory.
    while (const std::optional<cache::BlockReader> lost = options_.queue->TakeLost()) {
      options_.retell(*lost);
      Apply(options_.queue->Take(Clock::Duration::zero()));
    }
    // What happens close together becomes one batch.
    if (!stopping_.load()) std::this_thread::sleep_for(kCoalesce);
  }
}

void EventPublisher::Apply(std::vector<EventQueue::Note> notes) {
  Pending pending;
  for (EventQueue::Note& note : notes) {
    std::vector<std::string>& topics = topics_[note.worker];
    if (note.kind == EventQueue::Note::Kind::kChanged) {
      const std::string topic = TopicOf(note.worker, note.model);
      if (std::find(topics.begin(), topics.end(), topic) == topics.end()) topics.push_back(topic);
      std::vector<cache::BlockEvent>& events = pending[topic].events;
      events.insert(events.end(), note.events.begin(), note.events.end());
      continue;
    }
    for (const std::string& topic : topics)
      pending[topic] = {.time = 0, .cleared = true, .events = {}};
    if (note.kind == EventQueue::Note::Kind::kLeft) {
      Send(pending);
      for (const std::string& topic : topics) history_.Forget(topic);
      topics_.erase(note.worker);
    }
  }
  Send(pending);
}

void EventPublisher::Send(Pending& pending) {
  for (auto& [topic, all] : pending) {
    all.cleared = all.cleared || !history_.Has(topic);
    for (std::size_t first = 0; first < all.events.size() || all.cleared;) {
      const std::size_t count = std::min(kBlocksPerBatch, all.events.size() - first);
      const auto begin = all.events.begin() + static_cast<std::ptrdiff_t>(first);
      SendBatch(topic, {.time = 0,
                        .cleared = all.cleared,
                        .events = {begin, begin + static_cast<std::ptrdiff_t>(count)}});
      all.cleared = false;
      first += count;
    }
  }
  pending.clear();
}

void EventPublisher::SendBatch(const std::string& topic, const EventBatch& batch) {
  EventBatch stamped = batch;
  stamped.time =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const auto payload =
      std::make_shared<const std::string>(Encode(stamped, options_.encoding, options_.medium));
  const std::uint64_t number = history_.Add(topic, payload);
  SendFrames(events_.get(), {topic, BigEndian(number), *payload});
  cleared_ += batch.cleared ? 1 : 0;
  for (const cache::BlockEvent& event : batch.events) ++(event.stored ? stored_ : removed_);
}

void EventPublisher::ServeReplays() {
  while (!stopping_.load()) {
    zmq_pollitem_t item = {.socket = replays_.get(), .fd = -1, .events = ZMQ_POLLIN, .revents = 0};
    if (::zmq_poll(&item, 1, kReplayPollMs) <= 0) continue;
    const std::vector<std::string> request = ReceiveFrames(replays_.get());
    if (!request.empty()) Replay(request);
  }
}

// Frames of a request: who asks, "", the first number, and perhaps the topic.
void EventPublisher::Replay(const std::vector<std::string>& request) {
  const bool is_valid = (request.size() == 3 || request.size() == 4) && request[1].empty() &&
                        request[2].size() == kNumberBytes;
  if (!is_valid) return;
  const std::string& asker = request[0];
  const std::uint64_t first = FromBigEndian(request[2]);
  const std::string topic =
      request.size() == 4 ? request[3] : history_.OnlyTopic().value_or(std::string());
  const EventHistory::Replay found = history_.From(topic, first);
  for (std::size_t i = 0; i < found.payloads.size(); ++i) {
    SendFrames(replays_.get(), {asker, "", BigEndian(found.first + i), *found.payloads[i]});
  }
  SendFrames(replays_.get(), {asker, "", BigEndian(kEndOfReplay), ""});
  ++replayed_;
  if (found.first == first) return;
  // Names of workers may have an @: the model is what follows the last one.
  const std::size_t end = topic.rfind('@');
  const std::string worker = topic.substr(3, end - 3);
  // Anybody may ask, and telling all anew takes the lock of PrefixStore.
  const auto now = std::chrono::steady_clock::now();
  std::erase_if(retold_, [&](const auto& entry) { return entry.second + kRetellPause <= now; });
  if (retold_.try_emplace(worker, now).second) (void)options_.queue->Lose(worker);
}

void EventPublisher::Collect(metrics::Visitor& visitor) const {
  visitor.Add(metrics::kKvEventsTotal, stored_.load(), "stored");
  visitor.Add(metrics::kKvEventsTotal, removed_.load(), "removed");
  visitor.Add(metrics::kKvEventsTotal, cleared_.load(), "cleared");
  const EventQueue::Figures queue = options_.queue->figures();
  visitor.Add(metrics::kKvEventsDroppedTotal, queue.dropped_blocks);
  visitor.Add(metrics::kKvEventsWaiting, queue.waiting_blocks);
  visitor.Add(metrics::kKvEventReplaysTotal, replayed_.load());
}

}  // namespace tessera::cluster
