#include "tests/fuzz/stories/daemon_script.h"

#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "proto/shm/layout.h"

namespace tessera::fuzz {

namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

constexpr int kMostOps = 64;
constexpr std::size_t kMostStreams = 6;
constexpr std::size_t kMostMatches = 16;
constexpr std::uint64_t kMostTensor = 256 << 10;
constexpr int kMostJobs = 1000;

std::uint64_t ElementBytes(v1::DType type) { return type == v1::DTYPE_FP32 ? 4 : 2; }

void StoreNumber(v1::DType type, float number, char* at) {
  std::uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  if (type == v1::DTYPE_FP32) return void(std::memcpy(at, &bits, 4));
  const auto half = static_cast<std::uint16_t>(
      type == v1::DTYPE_FP16 ? (number == 0 ? 0 : 0x3800 + (bits >> 13) % 1024) : bits >> 16);
  std::memcpy(at, &half, 2);
}

// Expands a short tensor to its full shape: numbers from 0.5 to 2, of both signs. Bits of the first
// byte request a NaN somewhere (0x80) or, with four dimensions, unit
// rows (0x40).
void Expand(v1::Tensor& tensor) {
  const std::string seed = tensor.inline_();
  if (tensor.data_case() != v1::Tensor::kInline || seed.empty() || seed.size() > 8) return;
  std::uint64_t elements = 1;
  for (const std::uint64_t extent : tensor.shape()) {
    if (extent > kMostTensor || (elements *= extent) > kMostTensor) return;
  }
  const std::uint64_t size = ElementBytes(tensor.dtype());
  const auto flags = static_cast<std::uint8_t>(seed[0]);
  std::string bytes(elements * size, '\0');
  if ((flags & 0x40) != 0 && tensor.shape_size() == 4) {
    const std::uint64_t width = tensor.shape(3);
    const std::uint64_t rows = tensor.shape(2);
    for (std::uint64_t row = 0; width != 0 && row < elements / width; ++row) {
      if (row % rows < width) {
        StoreNumber(tensor.dtype(), 1, &bytes[(row * width + row % rows) * size]);
      }
    }
  } else {
    std::seed_seq sequence(seed.begin(), seed.end());
    std::minstd_rand random(sequence);
    for (std::uint64_t i = 0; i < elements; ++i) {
      const auto bits = static_cast<std::uint32_t>(random());
      const float number = 0.5f + static_cast<float>(bits % 1024) / 700;
      StoreNumber(tensor.dtype(), (bits & 0x8000) != 0 ? -number : number, &bytes[i * size]);
    }
    if ((flags & 0x80) != 0 && elements != 0) {
      std::memset(&bytes[random() % elements * size], 0xff, size);
    }
  }
  tensor.set_inline_(bytes);
}

// Whether an answer's field holds an id.
bool IsThing(const std::string& name) {
  return name == "sequence_id" || name == "prefix_id" || name == "computation_id";
}

}  // namespace

void DaemonScript::Run(Input input) {
  google::protobuf::SetLogHandler(nullptr);  // silences its complaints about invalid UTF-8
  given_foreign_ = DaemonCore::HoldsForeign(Input(input).Rest());
  for (int i = 0; i < kMostOps && !input.empty(); ++i) {
    const auto op = static_cast<Op>(input.Byte() % static_cast<std::uint8_t>(Op::kCount));
    RunOne(op, input.Chunk());
  }
  core_.scheduler().Run(kMostJobs);
  matches_.clear();
  attached_.clear();
}

void DaemonScript::RunOne(Op op, std::string_view chunk) {
  Input input(chunk);
  switch (op) {
    case Op::kAttach:
      return OpenStream(chunk);
    case Op::kStream:
      return SendOnStream(input);
    case Op::kHangUp:
      if (!attached_.empty()) attached_[input.Byte() % attached_.size()].stream->HangUp();
      return;
    case Op::kJobs:
      core_.scheduler().Run(input.Byte());
      return;
    case Op::kPass:
      return core_.Pass(std::chrono::milliseconds(input.Take<std::uint16_t>()));
    case Op::kWrite:
      return Write(input);
    case Op::kCommit:
      return Commit(input);
    case Op::kWake:
      if (!attached_.empty()) {
        if (auto state = StateOf(attached_[input.Byte() % attached_.size()])) {
          core_.services().absorber->Wake(state);
        }
      }
      return;
    case Op::kMatch:
      return CallMatch(chunk);
#define TESSERA_FUZZ_OP(Method) \
  case Op::k##Method:           \
    return Call(core_.worker(), &serving::WorkerService::Method, chunk, false);
      TESSERA_FUZZ_WORKER_RPCS(TESSERA_FUZZ_OP)
#undef TESSERA_FUZZ_OP
#define TESSERA_FUZZ_OP(Method) \
  case Op::kAdmin##Method:      \
    return Call(core_.admin(), &serving::AdminService::Method, chunk, true);
      TESSERA_FUZZ_ADMIN_RPCS(TESSERA_FUZZ_OP)
#undef TESSERA_FUZZ_OP
    case Op::kCount:
      break;
  }
}

// ---- Streams

void DaemonScript::OpenStream(std::string_view chunk) {
  if (attached_.size() == kMostStreams) return;
  Attached& attached = attached_.emplace_back();
  attached.stream = core_.Attach();
  v1::AttachRequest request;
  static_cast<void>(request.ParsePartialFromArray(chunk.data(), int(chunk.size())));
  Fix(request, false);
  attached.stream->Send(request);
  Hear(attached_.size() - 1);
}

void DaemonScript::SendOnStream(Input input) {
  if (attached_.empty()) return;
  const std::size_t index = input.Byte() % attached_.size();
  const std::string_view chunk = input.Rest();
  v1::AttachRequest request;
  static_cast<void>(request.ParsePartialFromArray(chunk.data(), int(chunk.size())));
  Fix(request, false);
  attached_[index].stream->Send(request);
  Hear(index);
}

void DaemonScript::Hear(std::size_t session) {
  Attached& attached = attached_[session];
  for (const v1::AttachResponse& message : attached.stream->Take()) {
    Judge(grpc::Status::OK, message);
    if (message.has_welcome()) {
      attached.key = message.welcome().session();
      if (const auto state = StateOf(attached)) MapMemory(attached, *state);
    }
    for (const v1::TailPlace& place : message.tails_opened().tails()) {
      tails_.push_back({session, place});
      const auto state = StateOf(attached);
      if (state == nullptr || attached.tails.count(place.extent()) != 0) continue;
      const absl::StatusOr<device::Export> share = state->tails().Share(place.extent());
      TESSERA_CHECK(share.ok(), share.status().ToString());
      absl::StatusOr<AddressRange> mapped =
          AddressRange::Map(share->fd.get(), share->bytes, Access::kReadWrite);
      TESSERA_CHECK(mapped.ok(), mapped.status().ToString());
      attached.tails.emplace(place.extent(), *std::move(mapped));
    }
    for (const std::uint32_t extent : message.tails_closed().released_extents()) {
      attached.tails.erase(extent);
    }
  }
}

std::shared_ptr<cache::SessionState> DaemonScript::StateOf(const Attached& attached) {
  auto found =
      core_.mine().FindSession(SessionId(attached.key.session_id()), attached.key.secret());
  return found.ok() ? *std::move(found) : nullptr;
}

// ---- Writes by a worker

void DaemonScript::MapMemory(Attached& attached, cache::SessionState& state) {
  absl::StatusOr<AddressRange> control = AddressRange::Map(
      state.control()->memory().fd(), state.control()->memory().bytes(), Access::kReadWrite);
  TESSERA_CHECK(control.ok(), control.status().ToString());
  attached.control = *std::move(control);
  if (!state.CreateStaging().ok()) return;  // no room for an arena
  absl::StatusOr<device::Export> share = state.staging()->memory().Share();
  TESSERA_CHECK(share.ok(), share.status().ToString());
  absl::StatusOr<AddressRange> mapped =
      AddressRange::Map(share->fd.get(), share->bytes, Access::kReadWrite);
  TESSERA_CHECK(mapped.ok(), mapped.status().ToString());
  attached.staging = *std::move(mapped);
}

std::span<std::byte> DaemonScript::MemoryOf(Attached& attached, Memory which) {
  const auto all = [](AddressRange& range) {
    return range.valid() ? std::span(range.data(), range.bytes()) : std::span<std::byte>();
  };
  switch (which) {
    case Memory::kControl:
      return all(attached.control);
    case Memory::kStaging:
      return all(attached.staging);
    case Memory::kTail:
      if (!attached.tails.empty()) return all(attached.tails.begin()->second);
      break;
    case Memory::kCount:
      break;
  }
  return {};
}

void DaemonScript::Write(Input input) {
  if (attached_.empty()) return;
  Attached& attached = attached_[input.Byte() % attached_.size()];
  const auto which = static_cast<Memory>(input.Byte() % static_cast<std::uint8_t>(Memory::kCount));
  const std::span<std::byte> memory = MemoryOf(attached, which);
  if (memory.empty()) return;
  const std::size_t at = input.Take<std::uint32_t>() % memory.size();
  const std::string_view bytes = input.Rest().substr(0, memory.size() - at);
  std::memcpy(&memory[at], bytes.data(), bytes.size());
}

// Writes a tail's committed count, right or wrong. Writes valid rows first if a flag asks for it.
void DaemonScript::Commit(Input input) {
  if (tails_.empty()) return;
  const Tail& tail = tails_[input.Byte() % tails_.size()];
  Attached& attached = attached_[tail.session];
  if (!attached.control.valid()) return;
  const auto tokens = input.Take<std::uint32_t>();
  const std::uint32_t generation = tail.place.generation() + input.Byte();
  const std::uint8_t flags = input.Byte();
  if ((flags & 2) != 0) {
    const std::span<std::byte> memory = MemoryOf(attached, Memory::kTail);
    std::fill(memory.begin(), memory.end(), std::byte{0x3e});
  }
  std::uint64_t word = shm::CommitWord::Pack(generation, tail.place.tokens() + tokens);
  if ((flags & 1) != 0) word |= shm::CommitWord::kInStep;
  auto& page = *reinterpret_cast<shm::ControlPage*>(attached.control.data());
  page.commits[tail.place.commit_slot()].store(word);
}

// ---- Calls

template <typename Request, typename Response, typename Service>
void DaemonScript::Call(Service& service,
                        grpc::Status (Service::*method)(grpc::ServerContext*, const Request*,
                                                        Response*),
                        std::string_view chunk, bool admin) {
  Request request;
  static_cast<void>(request.ParsePartialFromArray(chunk.data(), int(chunk.size())));
  Fix(request, admin);
  Response response;
  grpc::ServerContext context;
  // Calls that may wait for jobs.
  constexpr bool kWaits =
      std::is_same_v<Request, v1::CompressRequest> || std::is_same_v<Request, v1::PublishRequest> ||
      std::is_same_v<Request, v1::TruncateRequest> || std::is_same_v<Request, v1::SetPolicyRequest>;
  const auto call = [&] { return (service.*method)(&context, &request, &response); };
  const grpc::Status status = kWaits ? core_.scheduler().Beside(call) : call();
  if (admin) return;  // operators may see everything
  Judge(status, response);
}

void DaemonScript::CallMatch(std::string_view chunk) {
  if (matches_.size() == kMostMatches) return;
  v1::MatchRequest request;
  static_cast<void>(request.ParsePartialFromArray(chunk.data(), int(chunk.size())));
  Fix(request, false);
  matches_.push_back(std::make_unique<FakeMatch>(core_.worker(), request));
  const FakeMatch& match = *matches_.back();
  if (match.finished()) Judge(match.status(), match.response());
}

// A lie must never be answered by an internal error.
void DaemonScript::Judge(const grpc::Status& status, const Message& response) {
  TESSERA_CHECK(status.error_code() != grpc::StatusCode::UNKNOWN &&
                    status.error_code() != grpc::StatusCode::INTERNAL,
                status.error_message());
  if (status.ok()) Harvest(response);
  if (given_foreign_) return;
  TESSERA_CHECK(!DaemonCore::HoldsForeign(response.SerializeAsString()) &&
                    !DaemonCore::HoldsForeign(status.error_message()),
                "an answer holds another tenant's row");
}

void DaemonScript::Harvest(const Message& response) {
  const Reflection& reflection = *response.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(response, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->type() != FieldDescriptor::TYPE_FIXED64 || field->is_repeated()) continue;
    const std::uint64_t id = reflection.GetUInt64(response, field);
    if (id == 0) continue;
    std::vector<std::uint64_t>* to = IsThing(field->name())        ? &things_
                                     : field->name() == "model_id" ? &models_
                                                                   : nullptr;
    if (to != nullptr && std::find(to->begin(), to->end(), id) == to->end()) to->push_back(id);
  }
}

// ---- Placeholders

std::uint64_t DaemonScript::IdOf(const std::string& field, std::uint64_t value, bool admin) const {
  const auto pick = [value](const std::vector<std::uint64_t>& ids) {
    return value < ids.size() ? ids[value] : value;
  };
  if (field == "model_id") return pick(models_);
  if (field == "to_session_id") {
    return value < attached_.size() ? attached_[value].key.session_id() : value;
  }
  if (field == "layout_fingerprint") return value == 1 ? shm::kLayoutFingerprint : value;
  if (field == "previous_instance") return value == 1 ? core_.node().instance() : value;
  if (field == "sequence_id" || field == "sequence_ids" || field == "parent_id") {
    // An operator may act on the other tenant's sequences.
    if (value == kForeignPlace && !admin) return core_.foreign_sequence();
    return admin && value == core_.foreign_sequence() ? 0 : pick(things_);
  }
  return value;
}

void DaemonScript::FixIds(Message& message, const FieldDescriptor& field, bool admin) {
  const Reflection& reflection = *message.GetReflection();
  if (!field.is_repeated()) {
    const std::uint64_t value = reflection.GetUInt64(message, &field);
    reflection.SetUInt64(&message, &field, IdOf(field.name(), value, admin));
    return;
  }
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    const std::uint64_t value = reflection.GetRepeatedUInt64(message, &field, i);
    reflection.SetRepeatedUInt64(&message, &field, i, IdOf(field.name(), value, admin));
  }
}

void DaemonScript::Fix(Message& message, bool admin) {
  if (auto* key = dynamic_cast<v1::SessionKey*>(&message)) {
    const std::uint64_t place = key->session_id();
    if (place < attached_.size()) {
      key->set_session_id(attached_[place].key.session_id());
      if (key->secret() == 0) key->set_secret(attached_[place].key.secret());
    } else if (place == kForeignPlace) {
      key->set_session_id(core_.foreign_session());
    }
    return;
  }
  if (auto* hello = dynamic_cast<v1::Hello*>(&message)) {
    // The other tenant's token cannot be guessed.
    hello->set_tenant_token(hello->tenant_token().empty() ? "mine" : "wrong");
    if (hello->protocol_version() == 0) hello->set_protocol_version(shm::kProtocolVersion);
  }
  if (auto* tensor = dynamic_cast<v1::Tensor*>(&message)) return Expand(*tensor);
  const Reflection& reflection = *message.GetReflection();
  // Every request carries a key. A missing key stands for SessionKey{0, 0}: the first session.
  if (const FieldDescriptor* key = message.GetDescriptor()->FindFieldByName("session");
      key != nullptr && key->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
    reflection.MutableMessage(&message, key);
  }
  // Visits unset fields too: a missing id stands for the first one.
  for (int f = 0; f < message.GetDescriptor()->field_count(); ++f) {
    const FieldDescriptor* field = message.GetDescriptor()->field(f);
    if (field->is_map()) continue;
    if (field->type() == FieldDescriptor::TYPE_FIXED64 && !field->has_presence()) {
      FixIds(message, *field, admin);
    }
    if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
    if (field->is_repeated()) {
      for (int i = 0; i < reflection.FieldSize(message, field); ++i) {
        Fix(*reflection.MutableRepeatedMessage(&message, field, i), admin);
      }
    } else if (reflection.HasField(message, field)) {
      Fix(*reflection.MutableMessage(&message, field), admin);
    }
  }
}

}  // namespace tessera::fuzz
