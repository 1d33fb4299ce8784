// The model files that a worker opens: config.json, vocab.json and model.safetensors, in this
// order, the first two with their lengths in front. Any bytes must give an error, or numbers within
// their limits and tensors inside the file.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>

#include "client/model/checkpoint/config.h"
#include "client/model/checkpoint/json.h"
#include "client/model/checkpoint/safetensors.h"
#include "client/model/checkpoint/vocab.h"
#include "client/model/model.h"
#include "daemon/base/check.h"
#include "daemon/base/strings.h"
#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/input.h"

namespace tessera::fuzz {
namespace {

// A folder with the three files, in memory.
class Folder {
 public:
  Folder() : path_((std::filesystem::temp_directory_path() / "tessera-fuzz-XXXXXX").string()) {
    TESSERA_CHECK(::mkdtemp(path_.data()) != nullptr, path_);
    for (File& file : files_) {
      file.fd = ::memfd_create(file.name, MFD_CLOEXEC);
      TESSERA_CHECK(file.fd >= 0, file.name);
      std::filesystem::create_symlink(Concat("/proc/self/fd/", file.fd), Path(file));
    }
  }
  ~Folder() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }
  std::string config() const { return Path(files_[0]); }
  std::string vocab() const { return Path(files_[1]); }
  std::string tensors() const { return Path(files_[2]); }
  void Write(std::string_view config, std::string_view vocab, std::string_view tensors) const {
    const std::string_view texts[] = {config, vocab, tensors};
    for (std::size_t i = 0; i < std::size(files_); ++i) {
      const bool written =
          ::ftruncate(files_[i].fd, 0) == 0 &&
          ::pwrite(files_[i].fd, texts[i].data(), texts[i].size(), 0) == ssize_t(texts[i].size());
      TESSERA_CHECK(written, files_[i].name);
    }
  }

 private:
  struct File {
    const char* name;
    int fd = -1;
  };
  std::string Path(const File& file) const { return Concat(path_, "/", file.name); }
  std::string path_;
  File files_[3] = {{"config.json"}, {"vocab.json"}, {"model.safetensors"}};
};

void CheckTensors(const std::string& path, std::string_view bytes) {
  const absl::StatusOr<llm::Safetensors> file = llm::Safetensors::Open(path);
  if (!file.ok()) return;
  std::uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  const absl::StatusOr<llm::Json> json = llm::ParseJson(bytes.substr(8, header));
  TESSERA_CHECK(json.ok(), json.status().ToString());
  for (const auto& [name, value] : json->fields()) {
    const auto tensor = file->FindTensor(name);
    if (!tensor.ok()) continue;
    TESSERA_CHECK(tensor->bytes.size() <= bytes.size() - 8 - header, name);
    // Every tensor can be read.
    volatile std::uint32_t sum = 0;
    for (const std::byte byte : tensor->bytes) sum = sum + std::to_integer<std::uint32_t>(byte);
  }
}

void CheckConfig(const std::string& path) {
  const absl::StatusOr<llm::Config> config = llm::ReadConfig(path);
  if (!config.ok()) return;
  TESSERA_CHECK(config->query_heads % config->kv_heads == 0, "heads");
  TESSERA_CHECK(config->layers > 0 && config->head_dim <= 256, "limits");
  TESSERA_CHECK(llm::GeometryOf(*config, "m").layers.size() == config->layers, "layers");
}

void CheckVocab(const std::string& path) {
  const absl::StatusOr<llm::Vocab> vocab = llm::Vocab::Read(path);
  if (!vocab.ok()) return;
  const absl::StatusOr<llm::Json> json = llm::ReadJsonFile(path);
  TESSERA_CHECK(json.ok(), json.status().ToString());
  for (const auto& [word, value] : llm::Find(*json, "vocab")->struct_value().fields()) {
    const absl::StatusOr<llm::TokenId> id = vocab->Find(word);
    TESSERA_CHECK(id.ok() && *id == value.number_value(), word);
    TESSERA_CHECK(vocab->Decode(std::vector{*id}) == word, word);
  }
}

// A model with one layer that loads.
std::string TinyTensors() {
  constexpr std::pair<const char*, const char*> kTensors[] = {
      {"model.embed_tokens.weight", "[4,2]"},
      {"model.norm.weight", "[2]"},
      {"model.layers.0.self_attn.q_proj.weight", "[2,2]"},
      {"model.layers.0.self_attn.k_proj.weight", "[2,2]"},
      {"model.layers.0.self_attn.v_proj.weight", "[2,2]"},
      {"model.layers.0.self_attn.o_proj.weight", "[2,2]"},
      {"model.layers.0.mlp.gate_proj.weight", "[2,2]"},
      {"model.layers.0.mlp.up_proj.weight", "[2,2]"},
      {"model.layers.0.mlp.down_proj.weight", "[2,2]"},
      {"model.layers.0.input_layernorm.weight", "[2]"},
      {"model.layers.0.post_attention_layernorm.weight", "[2]"}};
  std::string header = "{";
  std::uint64_t at = 0;
  for (const auto& [name, shape] : kTensors) {
    const std::string_view text(shape);
    const std::uint64_t bytes = text == "[2]" ? 4 : text == "[2,2]" ? 8 : 16;
    Append(header, at == 0 ? "" : ",", "\"", name, "\":{\"dtype\":\"BF16\",\"shape\":", shape,
           ",\"data_offsets\":[", at, ",", at + bytes, "]}");
    at += bytes;
  }
  header += "}";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  return Output().Add<std::uint64_t>(header.size()).Bytes(header).bytes() + std::string(at, '\x3f');
}

constexpr std::string_view kConfig =
    R"({"vocab_size":4,"hidden_size":2,"intermediate_size":2,"num_hidden_layers":1,)"
    R"("num_attention_heads":1,"num_key_value_heads":1,"head_dim":2,)"
    R"("max_position_embeddings":64,"rope_theta":10000,"rms_norm_eps":1e-5,)"
    R"("tie_word_embeddings":true,"hidden_act":"silu","rope_scaling":null})";
constexpr std::string_view kVocab =
    R"({"vocab":{"a":0,"b":1,".":2,"\u00e9":3},"delimiters":{".":2}})";

}  // namespace

std::vector<Seed> Seeds() {
  return {{"tiny", Output().Chunk(kConfig).Chunk(kVocab).Bytes(TinyTensors()).bytes()}};
}

}  // namespace tessera::fuzz

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera;
  static const fuzz::Folder folder;
  fuzz::Input input(data, size);
  const std::string_view config = input.Chunk();
  const std::string_view vocab = input.Chunk();
  const std::string_view tensors = input.Rest();
  folder.Write(config, vocab, tensors);
  fuzz::CheckConfig(folder.config());
  fuzz::CheckVocab(folder.vocab());
  fuzz::CheckTensors(folder.tensors(), tensors);
  // Loading a model reads every number of it.
  static_cast<void>(llm::Model::Load(folder.path()).ok());
  return 0;
}
