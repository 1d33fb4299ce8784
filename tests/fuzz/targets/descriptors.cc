// Arbitrary messages from peers on the descriptor socket, in arbitrary pieces and with descriptors
// attached. The daemon's side is DescriptorConnection, driven as by the watcher; a peer is a socket
// whose bytes the input supplies. A nonce opens once and only for its session. Each request is
// answered in order. A descriptor arrives exactly when the answer says so, and only for memory that
// the peer may have.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <filesystem>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "daemon/base/check.h"
#include "daemon/platform/unix_socket.h"
#include "daemon/serving/attach/descriptor_connection.h"
#include "proto/shm/layout.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/stories/daemon_core.h"
#include "tests/fuzz/stories/script_seeds.h"

namespace tessera::fuzz {
namespace {

using serving::DescriptorConnection;
using shm::DescriptorAnswer;
using shm::DescriptorCode;
using shm::DescriptorKind;
using shm::DescriptorOpening;
using shm::DescriptorRequest;

constexpr std::size_t kPeers = 4;
constexpr std::size_t kSessions = 2;
constexpr std::uint64_t kTokens = 4;  // of each session's sequence

enum class PeerOp : std::uint8_t {
  kConnect,  // peer: reconnects
  kOpening,  // peer, session, kind of error, its amount, attached descriptor
  kRequest,  // peer, kind, index
  kBytes,    // peer, chunk, attached descriptor
  kServe,    // peer: runs the daemon's side
  kHangUp,   // peer
  kEnd,      // session
  kTails,    // session: opens a tail
};
constexpr std::uint8_t kOps = 8;

std::size_t OpenDescriptors() {
  const std::filesystem::directory_iterator open("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(open), end(open)));
}

// An unexpected descriptor to attach.
int SentAlong() {
  static const int fd = ::memfd_create("of a peer", MFD_CLOEXEC);
  return fd;
}

struct Session {
  std::unique_ptr<FakeStream> stream;
  v1::Welcome welcome;
  std::uint64_t sequence = 0;
  bool opened = false;  // its nonce is used up
};

// One peer, and a model of the answers that it is owed.
class Peer {
 public:
  Peer(DaemonCore& core, std::vector<Session>& sessions) : core_(core), sessions_(sessions) {
    int ends[2];
    TESSERA_CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
                  std::strerror(errno));
    here_ = Fd(ends[0]);
    there_ = std::make_unique<DescriptorConnection>(Fd(ends[1]));
  }

  // Sends as many bytes as the socket takes. `along` attaches an unexpected descriptor.
  void Send(std::string_view bytes, bool along) {
    if (!here_.valid() || bytes.empty()) return;
    iovec io{const_cast<char*>(bytes.data()), bytes.size()};
    msghdr message{};
    message.msg_iov = &io;
    message.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    if (along) {
      message.msg_control = control;
      message.msg_controllen = sizeof control;
      cmsghdr* const header = CMSG_FIRSTHDR(&message);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      const int fd = SentAlong();
      std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    const ssize_t sent = ::sendmsg(here_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) unread_.append(bytes.substr(0, static_cast<std::size_t>(sent)));
  }

  // Runs the daemon's side like Watcher::Serve.
  void Serve() {
    if (there_ == nullptr) return;
    if (session_ == nullptr) return ServeOpening();
    cache::Tenant& tenant = *core_.node().TenantOf(session_->welcome.session().session_id());
    const auto next = there_->ServeRequests(tenant, *state_);
    TESSERA_CHECK(next.ok() || !here_.valid(), next.status().ToString());
    if (!next.ok()) return Cut();
    if (*next == DescriptorConnection::Next::kStaging) {
      const absl::Status answered = there_->AnswerStaging(state_->CreateStaging(), *state_);
      TESSERA_CHECK(answered.ok() || !here_.valid(), answered.ToString());
      if (!answered.ok()) return Cut();
    }
    ReadAnswers();
  }

  void HangUp() { here_ = Fd(); }
  void Cut() {
    there_.reset();
    session_ = nullptr;
    state_.reset();
  }
  // The watcher closes a session's socket when the session has ended.
  void Forget(const Session& session) {
    if (session_ == &session) Cut();
  }
  // Serves until no answer is missing.
  void Finish() {
    while (there_ != nullptr && here_.valid()) {
      const std::size_t before = unread_.size();
      Serve();
      if (unread_.size() == before) break;
    }
    if (session_ != nullptr && here_.valid()) {
      TESSERA_CHECK(unread_.size() < sizeof(DescriptorRequest),
                    "a peer that reads gets its answers");
    }
  }

 private:
  // The session that the opening must open; null if none.
  Session* Expected(const DescriptorOpening& opening) const {
    if (opening.magic != shm::kDescriptorMagic ||
        opening.protocol_version != shm::kProtocolVersion ||
        opening.layout_fingerprint != shm::kLayoutFingerprint) {
      return nullptr;
    }
    for (Session& session : sessions_) {
      if (session.stream != nullptr && !session.opened &&
          opening.nonce == session.welcome.nonce() &&
          opening.session_id == session.welcome.session().session_id()) {
        return &session;
      }
    }
    return nullptr;
  }

  void ServeOpening() {
    const auto session = there_->ReadOpening(core_.node());
    if (unread_.size() < sizeof(DescriptorOpening)) {
      TESSERA_CHECK(!session.ok() ? !here_.valid() : *session == nullptr,
                    "an incomplete opening waits");
      if (!session.ok()) Cut();
      return;
    }
    DescriptorOpening opening;
    std::memcpy(&opening, unread_.data(), sizeof opening);
    unread_.erase(0, sizeof opening);
    Session* const expected = Expected(opening);
    if (expected == nullptr) {
      TESSERA_CHECK(!session.ok(), *session == nullptr ? "a complete opening is answered"
                                                       : "an opening needs the session's nonce");
      if (here_.valid()) {
        const auto [answer, fd] = ReadAnswer().value();
        TESSERA_CHECK(answer.code == DescriptorCode::kBadOpening ||
                          answer.code == DescriptorCode::kUnknownNonce,
                      "a refusal has a reason");
        TESSERA_CHECK(!fd.valid(), "a refusal has no descriptor");
      }
      return Cut();
    }
    expected->opened = true;
    if (!session.ok()) {
      TESSERA_CHECK(!here_.valid(), session.status().ToString());
      return Cut();
    }
    TESSERA_CHECK(*session != nullptr && (*session)->id().value() == opening.session_id,
                  "its session");
    session_ = expected;
    state_ = *session;
    if (!here_.valid()) return;
    const auto [answer, fd] = ReadAnswer().value();
    TESSERA_CHECK(answer.code == DescriptorCode::kOk && fd.valid(),
                  "the answer to an opening has the wake event");
  }

  void ReadAnswers() {
    while (auto received = here_.valid() ? ReadAnswer() : std::nullopt) {
      TESSERA_CHECK(unread_.size() >= sizeof(DescriptorRequest), "no answer without a request");
      DescriptorRequest request;
      std::memcpy(&request, unread_.data(), sizeof request);
      unread_.erase(0, sizeof request);
      Judge(request, received->first, received->second);
    }
  }

  void Judge(const DescriptorRequest& request, const DescriptorAnswer& answer, const Fd& fd) {
    TESSERA_CHECK(answer.kind == request.kind && answer.index == request.index, "in order");
    TESSERA_CHECK(fd.valid() == (answer.code == DescriptorCode::kOk),
                  "a descriptor exactly if the answer says so");
    const auto kind = static_cast<std::uint32_t>(request.kind);
    const bool known = kind >= 1 && kind <= 5;
    TESSERA_CHECK(known == (answer.code != DescriptorCode::kBadRequest),
                  "only invalid requests are bad requests");
    if (!fd.valid()) return;
    struct stat info = {};
    TESSERA_CHECK(::fstat(fd.get(), &info) == 0, std::strerror(errno));
    TESSERA_CHECK(static_cast<std::uint64_t>(info.st_size) >= answer.bytes && answer.bytes > 0,
                  "the memory holds the bytes that the answer states");
    const bool read_only =
        request.kind == DescriptorKind::kDirectory || request.kind == DescriptorKind::kPool;
    void* const written =
        ::mmap(nullptr, answer.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    TESSERA_CHECK((written == MAP_FAILED) == read_only, "only the peer's own memory is writable");
    if (written != MAP_FAILED) ::munmap(written, answer.bytes);
    void* const read = ::mmap(nullptr, answer.bytes, PROT_READ, MAP_SHARED, fd.get(), 0);
    TESSERA_CHECK(read != MAP_FAILED, std::strerror(errno));
    const std::string_view shown(static_cast<const char*>(read), answer.bytes);
    TESSERA_CHECK(!DaemonCore::HoldsForeign(shown), "nothing of another tenant's");
    ::munmap(read, answer.bytes);
  }

  using Received = std::pair<DescriptorAnswer, Fd>;
  // nullopt if there is no answer. Answers are never split.
  std::optional<Received> ReadAnswer() {
    char byte;
    if (::recv(here_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) != 1) return std::nullopt;
    Received received;
    const absl::Status status = ReceiveMessage(
        here_.get(), std::as_writable_bytes(std::span(&received.first, 1)), &received.second);
    TESSERA_CHECK(status.ok(), status.ToString());
    return received;
  }

  DaemonCore& core_;
  std::vector<Session>& sessions_;
  Fd here_;
  std::unique_ptr<DescriptorConnection> there_;  // null: disconnected
  Session* session_ = nullptr;                   // the session that it has opened
  std::shared_ptr<cache::SessionState> state_;
  std::string unread_;  // sent, but not answered yet
};

class Peers {
 public:
  explicit Peers(DaemonCore& core) : core_(core), sessions_(kSessions) {
    for (Session& session : sessions_) {
      session.stream = core_.Attach();
      v1::AttachRequest attach;
      attach.mutable_hello()->set_protocol_version(shm::kProtocolVersion);
      attach.mutable_hello()->set_tenant_token("mine");
      TESSERA_CHECK(session.stream->Send(attach), "it reads");
      session.welcome = session.stream->Take().at(0).welcome();
      NewSequence(session);
    }
    for (std::size_t i = 0; i < kPeers; ++i) Connect(i);
  }
  ~Peers() {
    for (const std::unique_ptr<Peer>& peer : peers_) peer->Finish();
    for (Session& session : sessions_) End(session);
  }

  void Run(Input input) {
    while (!input.empty()) {
      const auto op = static_cast<PeerOp>(input.Byte() % kOps);
      const std::size_t whom = input.Byte();
      Peer& peer = *peers_[whom % kPeers];
      Session& session = sessions_[whom % kSessions];
      switch (op) {
        case PeerOp::kConnect:
          Connect(whom % kPeers);
          break;
        case PeerOp::kOpening: {
          const std::string opening = Opening(input);
          peer.Send(opening, input.Byte() % 4 == 3);
          break;
        }
        case PeerOp::kRequest: {
          const std::uint8_t kind = input.Byte() % 8;
          const DescriptorRequest request = {.kind = static_cast<DescriptorKind>(kind),
                                             .index = input.Take<std::uint32_t>() % 4};
          peer.Send({reinterpret_cast<const char*>(&request), sizeof request}, kind == 7);
          break;
        }
        case PeerOp::kBytes: {
          const std::string_view bytes = input.Chunk();
          peer.Send(bytes, input.Byte() % 2 == 1);
          break;
        }
        case PeerOp::kServe:
          peer.Serve();
          break;
        case PeerOp::kHangUp:
          peer.HangUp();
          break;
        case PeerOp::kEnd:
          End(session);
          break;
        case PeerOp::kTails:
          OpenTail(session);
          break;
      }
    }
  }

 private:
  void Connect(std::size_t index) {
    if (peers_.size() <= index) peers_.resize(index + 1);
    // In the daemon, losing the descriptor socket ends the session. Here the session lives on with
    // its stream.
    peers_[index] = std::make_unique<Peer>(core_, sessions_);
  }
  // The session's opening, with the changes from the input.
  std::string Opening(Input& input) const {
    const v1::Welcome& welcome = sessions_[input.Byte() % kSessions].welcome;
    DescriptorOpening opening = {.magic = shm::kDescriptorMagic,
                                 .protocol_version = shm::kProtocolVersion,
                                 .reserved = 0,
                                 .layout_fingerprint = shm::kLayoutFingerprint,
                                 .session_id = welcome.session().session_id(),
                                 .nonce = welcome.nonce()};
    const std::uint8_t wrong = input.Byte();
    const auto change = input.Byte();
    if (wrong & 1) opening.magic ^= change;
    if (wrong & 2) opening.protocol_version ^= change;
    if (wrong & 4) opening.layout_fingerprint ^= change;
    if (wrong & 8) opening.session_id = core_.foreign_session();
    if (wrong & 16) opening.session_id ^= change;
    if (wrong & 32) opening.nonce ^= change;
    if (wrong & 64) opening.nonce = sessions_[0].welcome.nonce();
    opening.reserved = change;
    return {reinterpret_cast<const char*>(&opening), sizeof opening};
  }
  void End(Session& session) {
    if (session.stream == nullptr) return;
    session.stream->HangUp();
    session.stream.reset();
    core_.scheduler().Run(100);  // the session is buried
    for (const std::unique_ptr<Peer>& peer : peers_) peer->Forget(session);
  }
  void NewSequence(Session& session) {
    const v1::SessionKey& key = session.welcome.session();
    grpc::ServerContext context;
    v1::RegisterModelRequest model = SeedModel();
    *model.mutable_session() = key;
    v1::RegisterModelResponse registered;
    TESSERA_CHECK(core_.worker().RegisterModel(&context, &model, &registered).ok(), "a model");
    v1::CreateSequenceRequest create;
    *create.mutable_session() = key;
    create.set_model_id(registered.model_id());
    v1::CreateSequenceResponse created;
    TESSERA_CHECK(core_.worker().CreateSequence(&context, &create, &created).ok(), "a sequence");
    session.sequence = created.sequence_id();
    v1::AppendRequest append = SeedAppend(0, kTokens);
    *append.mutable_session() = key;
    append.set_sequence_id(session.sequence);
    const std::string rows(kSeedLayers * kTokens * 64 * 2, '\x3e');
    append.mutable_key()->set_inline_(rows);
    append.mutable_value()->set_inline_(rows);
    v1::AppendResponse appended;
    TESSERA_CHECK(core_.worker().Append(&context, &append, &appended).ok(), "rows");
  }
  static void OpenTail(Session& session) {
    if (session.stream == nullptr) return;
    v1::AttachRequest request;
    request.mutable_open_tails()->add_sequence_ids(session.sequence);
    session.stream->Send(request);
    session.stream->Take();
  }

  DaemonCore& core_;
  std::vector<Session> sessions_;
  std::vector<std::unique_ptr<Peer>> peers_;
};

// ---- Seeds

class Script {
 public:
  template <typename... Bytes>
  Script& Add(PeerOp op, Bytes... bytes) {
    output_.Byte(static_cast<std::uint8_t>(op));
    (output_.Byte(static_cast<std::uint8_t>(bytes)), ...);
    return *this;
  }
  Script& Opening(int peer, int session, int wrong = 0, int change = 1) {
    return Add(PeerOp::kOpening, peer, session, wrong, change, 0).Add(PeerOp::kServe, peer);
  }
  Script& Request(int peer, int kind, int index) {
    return Add(PeerOp::kRequest, peer, kind, index, 0, 0, 0);
  }
  Script& Chunk(int peer, std::string_view bytes) {
    Add(PeerOp::kBytes, peer);
    output_.Chunk(bytes).Byte(1);
    return *this;
  }
  const std::string& bytes() const { return output_.bytes(); }

 private:
  Output output_;
};

std::string Everything() {
  Script script;
  script.Add(PeerOp::kTails, 0).Opening(0, 0);
  for (int kind = 0; kind < 8; ++kind) script.Request(0, kind, 0).Request(0, kind, 1);
  return script.Add(PeerOp::kServe, 0).bytes();
}

std::string Thieves() {
  Script script;
  script.Opening(0, 0);
  script.Opening(1, 0);      // its nonce is used up
  script.Opening(2, 1, 64);  // with another session's nonce
  script.Opening(3, 1, 8);   // for a session of another tenant
  script.Request(1, 2, 0).Add(PeerOp::kServe, 1).Request(0, 2, 0).Add(PeerOp::kServe, 0);
  script.Add(PeerOp::kEnd, 0).Add(PeerOp::kConnect, 1).Opening(1, 0);
  return script.bytes();
}

std::string Wrong() {
  Script script;
  for (int bit = 0; bit < 6; ++bit) {
    script.Add(PeerOp::kConnect, bit).Opening(bit, bit, 1 << bit);
  }
  return script.bytes();
}

std::string Pieces() {
  Script script;
  script.Chunk(0, std::string(39, '\x11')).Add(PeerOp::kServe, 0).Chunk(0, "x");
  script.Add(PeerOp::kServe, 0).Opening(1, 1).Chunk(1, std::string("\3\0\0\0\0", 5));
  script.Add(PeerOp::kServe, 1).Chunk(1, std::string(3, '\0')).Add(PeerOp::kServe, 1);
  return script.Add(PeerOp::kHangUp, 1).Add(PeerOp::kServe, 1).bytes();
}

// More requests than fit answers, while the peer reads none.
std::string Flood() {
  Script script;
  script.Opening(0, 0);
  for (int i = 0; i < 60; ++i) script.Request(0, 1 + i % 4, 0);
  return script.Add(PeerOp::kServe, 0).bytes();
}

}  // namespace

std::vector<Seed> Seeds() {
  return {{"everything", Everything()},
          {"thieves", Thieves()},
          {"wrong", Wrong()},
          {"pieces", Pieces()},
          {"flood", Flood()}};
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera::fuzz;
  TESSERA_CHECK(SentAlong() >= 0, std::strerror(errno));
  const std::size_t open = OpenDescriptors();
  {
    DaemonCore core;
    Peers(core).Run(Input(data, size));
  }
  TESSERA_CHECK(OpenDescriptors() == open, "no descriptor is left");
  return 0;
}
