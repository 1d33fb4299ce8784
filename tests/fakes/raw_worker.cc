#include "tests/fakes/raw_worker.h"

#include <random>
#include <utility>

#include "daemon/platform/unix_socket.h"
#include "kernels/format/element.h"
#include "proto/shm/layout.h"

namespace tessera::fakes {

v1::Hello RawWorker::GoodHello() {
  v1::Hello hello;
  hello.set_protocol_version(shm::kProtocolVersion);
  hello.set_layout_fingerprint(shm::kLayoutFingerprint);
  hello.set_worker_name("raw");
  return hello;
}

grpc::Status RawWorker::Attach(const v1::Hello& hello) {
  Leave();
  context_ = std::make_unique<grpc::ClientContext>();
  stream_ = stub_->Attach(context_.get());
  v1::AttachRequest request;
  *request.mutable_hello() = hello;
  v1::AttachResponse response;
  if (!stream_->Write(request) || !stream_->Read(&response) || !response.has_welcome()) {
    const grpc::Status status = stream_->Finish();
    stream_.reset();
    return status;
  }
  welcome_ = response.welcome();
  return grpc::Status::OK;
}

grpc::Status RawWorker::Leave() {
  if (stream_ == nullptr) return grpc::Status::OK;
  stream_->WritesDone();
  return AwaitEnd();
}

grpc::Status RawWorker::GreetAgain() {
  v1::AttachRequest request;
  *request.mutable_hello() = GoodHello();
  stream_->Write(request);
  return AwaitEnd();
}

void RawWorker::LeaveAndBreak() {
  v1::AttachRequest request;
  request.mutable_leave();
  // Returns when the message has been passed to the kernel.
  stream_->Write(request, grpc::WriteOptions().set_write_through());
  Break();
}

void RawWorker::Break() {
  context_->TryCancel();
  AwaitEnd();
}

grpc::Status RawWorker::AwaitEnd() {
  v1::AttachResponse ignored;
  while (stream_->Read(&ignored)) {
  }
  const grpc::Status status = stream_->Finish();
  stream_.reset();
  socket_ = Fd();
  return status;
}

v1::AttachResponse RawWorker::ReadReply() {
  v1::AttachResponse response;
  while (stream_->Read(&response)) {
    if (response.has_tails_opened() || response.has_tails_closed()) return response;
  }
  return {};
}

v1::TailsOpened RawWorker::OpenTails(const std::vector<std::uint64_t>& sequences) {
  v1::AttachRequest request;
  request.mutable_open_tails()->set_request_id(next_request_++);
  for (std::uint64_t id : sequences) request.mutable_open_tails()->add_sequence_ids(id);
  stream_->Write(request);
  return ReadReply().tails_opened();
}

v1::TailsClosed RawWorker::CloseTails(const std::vector<std::uint64_t>& sequences) {
  v1::AttachRequest request;
  request.mutable_close_tails()->set_request_id(next_request_++);
  for (std::uint64_t id : sequences) request.mutable_close_tails()->add_sequence_ids(id);
  stream_->Write(request);
  return ReadReply().tails_closed();
}

absl::Status RawWorker::OpenDescriptors() {
  absl::StatusOr<Fd> socket = ConnectUnix(welcome_.descriptor_socket());
  if (!socket.ok()) return socket.status();
  socket_ = *std::move(socket);
  const shm::DescriptorOpening opening = {.magic = shm::kDescriptorMagic,
                                          .protocol_version = shm::kProtocolVersion,
                                          .reserved = 0,
                                          .layout_fingerprint = shm::kLayoutFingerprint,
                                          .session_id = key().session_id(),
                                          .nonce = welcome_.nonce()};
  absl::Status status = SendMessage(socket_.get(), std::as_bytes(std::span(&opening, 1)));
  if (!status.ok()) return status;
  shm::DescriptorAnswer answer{};
  wake_event_.Close();
  return ReceiveMessage(socket_.get(), std::as_writable_bytes(std::span(&answer, 1)), &wake_event_);
}

absl::StatusOr<RawWorker::Descriptor> RawWorker::Fetch(shm::DescriptorKind kind,
                                                       std::uint32_t index) {
  const shm::DescriptorRequest request = {kind, index};
  absl::Status status = SendMessage(socket_.get(), std::as_bytes(std::span(&request, 1)));
  if (!status.ok()) return status;
  Descriptor descriptor{};
  status = ReceiveMessage(socket_.get(), std::as_writable_bytes(std::span(&descriptor.answer, 1)),
                          &descriptor.fd);
  if (!status.ok()) return status;
  return descriptor;
}

#define TESSERA_CALL(Method)                                                                    \
  grpc::Status RawWorker::Method(v1::Method##Request request, v1::Method##Response* response) { \
    if (!request.has_session()) *request.mutable_session() = key();                             \
    grpc::ClientContext context;                                                                \
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));          \
    return stub_->Method(&context, request, response);                                          \
  }
TESSERA_CALL(RegisterModel)
TESSERA_CALL(CreateSequence)
TESSERA_CALL(Append)
TESSERA_CALL(Attend)
TESSERA_CALL(Read)
TESSERA_CALL(Fork)
TESSERA_CALL(Truncate)
TESSERA_CALL(Handover)
TESSERA_CALL(Describe)
TESSERA_CALL(Free)
#undef TESSERA_CALL

v1::ModelGeometry SmallModel(int layers) {
  v1::ModelGeometry model;
  model.set_name("small-" + std::to_string(layers));
  model.set_dtype(v1::DTYPE_BF16);
  model.add_delimiter_token_ids(1'000'000);
  for (int i = 0; i < layers; ++i) {
    v1::LayerGeometry& layer = *model.add_layers();
    layer.set_query_heads(4);
    layer.set_kv_heads(2);
    layer.set_head_dim(64);
  }
  return model;
}

v1::Tensor SmallRows(int layers, int tokens, std::uint32_t seed) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::DTYPE_BF16);
  for (int dimension : {layers, tokens, 2, 64}) tensor.add_shape(dimension);
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> values(static_cast<std::size_t>(layers) * tokens * 2 * 64);
  for (std::uint16_t& value : values) value = kernels::FloatToBf16(normal(random));
  tensor.set_inline_(values.data(), values.size() * sizeof(std::uint16_t));
  return tensor;
}

}  // namespace tessera::fakes
