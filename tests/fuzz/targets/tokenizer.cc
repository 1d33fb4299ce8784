// tokenizer.json with its length in front, and a text. Any bytes must give an error, or a tokenizer
// that encodes the text or says why not; what it encodes without an unknown token decodes to the
// same text.
#include "client/model/checkpoint/tokenizer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input.h"

namespace tessera::fuzz {
namespace {

// A folder with a tokenizer.json in memory.
class Folder {
 public:
  Folder()
      : path_((std::filesystem::temp_directory_path() / "tessera-fuzz-XXXXXX").string()),
        fd_(::memfd_create("tokenizer.json", MFD_CLOEXEC)) {
    TESSERA_CHECK(::mkdtemp(path_.data()) != nullptr && fd_ >= 0, path_);
    std::filesystem::create_symlink(Concat("/proc/self/fd/", fd_), path_ + "/tokenizer.json");
  }
  ~Folder() {
    std::filesystem::remove_all(path_);
    ::close(fd_);
  }
  void Write(std::string_view bytes) const {
    TESSERA_CHECK(::ftruncate(fd_, 0) == 0, path_);
    TESSERA_CHECK(::pwrite(fd_, bytes.data(), bytes.size(), 0) == ssize_t(bytes.size()), path_);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  const int fd_;
};

constexpr std::string_view kModel =
    R"("model":{"type":"BPE","vocab":{"a":0,"b":1,"\u0120":2,"ab":3,"\u0120ab":4,"1":5},)"
    R"("merges":["a b",["\u0120","ab"]]},"added_tokens":[{"id":6,"content":"<|im_end|>"}]})";

std::string Json(std::string_view steps) {
  return Concat(R"({"pre_tokenizer":{"type":"Sequence","pretokenizers":[)", steps, "]},", kModel);
}

}  // namespace

std::vector<Seed> Seeds() {
  return {
      {"smollm", Output()
                     .Chunk(Json(R"({"type":"Digits"},{"type":"ByteLevel"})"))
                     .Bytes("ab ab 1a\n b")
                     .bytes()},
      {"gpt2", Output()
                   .Chunk(Concat(R"({"pre_tokenizer":{"type":"ByteLevel"},)", kModel))
                   .Bytes("abab a11")
                   .bytes()},
  };
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera;
  static const fuzz::Folder folder;
  fuzz::Input input(data, size);
  folder.Write(input.Chunk());
  const std::string_view text = input.Rest();
  const auto tokenizer = llm::ReadTokenizer(folder.path());
  if (!tokenizer.ok()) return 0;
  const auto tokens = (*tokenizer)->Encode(text);
  // Files of this kind have no unknown token.
  if (tokens.ok()) TESSERA_CHECK((*tokenizer)->Decode(*tokens) == text, "decodes to another text");
  return 0;
}
