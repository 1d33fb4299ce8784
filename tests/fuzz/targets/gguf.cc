// A GGUF file, as a worker opens it. Any bytes must give an error, or tensors inside the file that
// can all be read; a model that loads computes, and a tokenizer that loads encodes any text.
#include "client/model/checkpoint/gguf.h"

#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <string_view>
#include <vector>

#include "client/model/checkpoint/tokenizer.h"
#include "client/model/model.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "tests/fakes/model/gguf_writer.h"
#include "tests/fakes/model/tiny_model.h"
#include "tests/fuzz/fuzz_target.h"

namespace tessera::fuzz {
namespace {

// A file in memory with a path.
class File {
 public:
  File() : fd_(::memfd_create("model.gguf", MFD_CLOEXEC)), path_(Concat("/proc/self/fd/", fd_)) {
    TESSERA_CHECK(fd_ >= 0, "memfd");
  }
  ~File() { ::close(fd_); }
  void Write(std::string_view bytes) const {
    TESSERA_CHECK(::ftruncate(fd_, 0) == 0, path_);
    TESSERA_CHECK(::pwrite(fd_, bytes.data(), bytes.size(), 0) == ssize_t(bytes.size()), path_);
  }
  const std::string& path() const { return path_; }

 private:
  const int fd_;
  const std::string path_;
};

void CheckTensors(const llm::Gguf& file, std::size_t bytes) {
  for (const auto& [name, tensor] : file.tensors()) {
    TESSERA_CHECK(tensor.bytes.size() <= bytes, name);
    TESSERA_CHECK(llm::CheckTensor(tensor).ok(), name);
    // The first row and the last.
    if (tensor.bytes.empty()) continue;
    std::vector<float> row(tensor.row_elements());
    tensor.ReadRow(0, row);
    tensor.ReadRow(tensor.bytes.size() / tensor.row_bytes() - 1, row);
  }
}

void CheckModel(const std::string& path) {
  const auto model = llm::Model::Load(path);
  if (!model.ok()) return;
  const llm::TokenId tokens[] = {0};
  const std::uint32_t positions[] = {0};
  llm::LocalAttention attention((*model)->config());
  const auto logits = (*model)->Forward(
      {.tokens = tokens, .positions = positions, .logits_of = positions}, attention);
  TESSERA_CHECK(logits.ok() && logits->size() == (*model)->config().vocabulary, path);
}

void CheckTokenizer(const std::string& path, std::string_view text) {
  const auto tokenizer = llm::ReadTokenizer(path);
  if (!tokenizer.ok()) return;
  if (const auto tokens = (*tokenizer)->Encode(text); tokens.ok()) {
    TESSERA_CHECK(tokens->size() <= text.size(), "a token stands for a byte at least");
    static_cast<void>((*tokenizer)->Decode(*tokens));
  }
  static_cast<void>((*tokenizer)->Prompt(text).ok());
}

// Every type of block in a tensor of its own.
std::string Blocks() {
  fakes::GgufWriter file;
  for (std::uint32_t type = 0; type < 32; ++type) {
    const auto known = llm::TypeOfGguf(type);
    if (!known) continue;
    file.Tensor(Concat("t", type), {2, llm::BlockElements(*known)}, type,
                std::string(2 * llm::BlockBytes(*known), '\x3f'));
  }
  return file.Texts("texts", {"a", "b"}).Counts("counts", {1, 2}).File();
}

}  // namespace

std::vector<Seed> Seeds() {
  const auto constant = [] { return 0.1f; };
  return {{"llama", fakes::TinyModel("llama", true, constant).Gguf().File()},
          {"qwen2", fakes::TinyModel("qwen2", false, constant).Gguf().File()},
          {"blocks", Blocks()}};
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera;
  static const fuzz::File file;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  file.Write(bytes);
  const absl::StatusOr<llm::Gguf> gguf = llm::Gguf::Open(file.path());
  if (gguf.ok()) {
    fuzz::CheckTensors(*gguf, size);
    fuzz::CheckModel(file.path());
    fuzz::CheckTokenizer(file.path(), bytes.substr(bytes.size() - std::min<std::size_t>(size, 99)));
  }
  return 0;
}
