// A random model with two layers, as a GGUF file and as a folder with safetensors.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "daemon/base/strings.h"
#include "tests/fakes/model/gguf_writer.h"

namespace tessera::fakes {

struct TinyModel {
  struct Matrix {
    std::vector<std::uint64_t> shape;
    std::vector<float> values;
  };

  static constexpr std::uint64_t kVocabulary = 280, kHidden = 32, kMlp = 32, kLayers = 2;
  static constexpr std::uint64_t kHeads = 4, kKvHeads = 2;

  std::string kind;                        // "llama" or "qwen2"
  std::uint64_t dim;                       // of a head
  std::map<std::string, Matrix> matrices;  // by Hugging Face name

  // `random()` gives numbers around 0.
  template <typename Random>
  TinyModel(std::string architecture, bool tied, const Random& random, std::uint64_t head_dim = 8)
      : kind(std::move(architecture)), dim(head_dim) {
    const auto add = [&](const std::string& name, std::vector<std::uint64_t> shape, float middle) {
      std::size_t count = 1;
      for (const std::uint64_t extent : shape) count *= extent;
      Matrix& matrix = matrices[name];
      matrix.shape = std::move(shape);
      for (std::size_t i = 0; i < count; ++i) matrix.values.push_back(middle + random());
    };
    add("model.embed_tokens.weight", {kVocabulary, kHidden}, 0);
    add("model.norm.weight", {kHidden}, 1);
    if (!tied) add("lm_head.weight", {kVocabulary, kHidden}, 0);
    for (std::uint64_t layer = 0; layer < kLayers; ++layer) {
      const std::string prefix = Concat("model.layers.", layer, ".");
      add(prefix + "input_layernorm.weight", {kHidden}, 1);
      add(prefix + "post_attention_layernorm.weight", {kHidden}, 1);
      add(prefix + "self_attn.q_proj.weight", {kHeads * dim, kHidden}, 0);
      add(prefix + "self_attn.k_proj.weight", {kKvHeads * dim, kHidden}, 0);
      add(prefix + "self_attn.v_proj.weight", {kKvHeads * dim, kHidden}, 0);
      add(prefix + "self_attn.o_proj.weight", {kHidden, kHeads * dim}, 0);
      add(prefix + "mlp.gate_proj.weight", {kMlp, kHidden}, 0);
      add(prefix + "mlp.up_proj.weight", {kMlp, kHidden}, 0);
      add(prefix + "mlp.down_proj.weight", {kHidden, kMlp}, 0);
      if (kind != "qwen2") continue;
      add(prefix + "self_attn.q_proj.bias", {kHeads * dim}, 0);
      add(prefix + "self_attn.k_proj.bias", {kKvHeads * dim}, 0);
      add(prefix + "self_attn.v_proj.bias", {kKvHeads * dim}, 0);
    }
  }

  std::string Config() const {
    return Concat(R"({"model_type":")", kind, R"(","vocab_size":)", kVocabulary,
                  R"(,"hidden_size":)", kHidden, R"(,"intermediate_size":)", kMlp,
                  R"(,"num_hidden_layers":)", kLayers, R"(,"num_attention_heads":)", kHeads,
                  R"(,"num_key_value_heads":)", kKvHeads, R"(,"head_dim":)", dim,
                  R"(,"max_position_embeddings":512,"rope_theta":10000,"rms_norm_eps":1e-5,)",
                  R"("tie_word_embeddings":)",
                  matrices.contains("lm_head.weight") ? "false" : "true", "}");
  }

  std::string Safetensors() const {
    std::string header, data;
    for (const auto& [name, matrix] : matrices) {
      std::string shape;
      for (const std::uint64_t extent : matrix.shape) {
        Append(shape, shape.empty() ? "" : ",", extent);
      }
      const std::size_t bytes = matrix.values.size() * sizeof(float);
      Append(header, header.empty() ? "{" : ",", "\"", name, R"(":{"dtype":"F32","shape":[)", shape,
             R"(],"data_offsets":[)", data.size(), ",", data.size() + bytes, "]}");
      data.append(reinterpret_cast<const char*>(matrix.values.data()), bytes);
    }
    header += "}";
    const std::uint64_t length = header.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + data;
  }

  // With a vocabulary of bytes, two merges and ChatML's control tokens.
  GgufWriter Gguf() const {
    GgufWriter file;
    file.Text("general.architecture", kind)
        .Count(kind + ".block_count", kLayers)
        .Count(kind + ".context_length", 1024)
        .Count(kind + ".embedding_length", kHidden)
        .Count(kind + ".feed_forward_length", kMlp)
        .Count(kind + ".attention.head_count", kHeads)
        .Count(kind + ".attention.head_count_kv", kKvHeads)
        .Count(kind + ".attention.key_length", static_cast<std::uint32_t>(dim))
        .Number(kind + ".rope.freq_base", 10000)
        .Number(kind + ".attention.layer_norm_rms_epsilon", 1e-5f);
    AddTokenizer(file);
    for (const auto& [name, matrix] : matrices) {
      const bool heads = kind == "llama" && (name.find("q_proj") != std::string::npos ||
                                             name.find("k_proj") != std::string::npos);
      file.F32(GgufName(name), matrix.shape, heads ? Interleaved(matrix) : matrix.values);
    }
    return file;
  }

  // Rows i and i + dim / 2 of a head become rows 2i and 2i + 1.
  std::vector<float> Interleaved(const Matrix& matrix) const {
    const std::uint64_t row = matrix.shape.back();
    std::vector<float> values(matrix.values.size());
    for (std::uint64_t from = 0; from < matrix.shape[0]; ++from) {
      const std::uint64_t in_head = from % dim;
      const std::uint64_t to = from - in_head + in_head % (dim / 2) * 2 + in_head / (dim / 2);
      for (std::uint64_t i = 0; i < row; ++i) values[to * row + i] = matrix.values[from * row + i];
    }
    return values;
  }

  static std::string GgufName(std::string name) {
    const std::pair<const char*, const char*> parts[] = {{"model.layers.", "blk."},
                                                         {"model.embed_tokens", "token_embd"},
                                                         {"model.norm", "output_norm"},
                                                         {"lm_head", "output"},
                                                         {"self_attn.q_proj", "attn_q"},
                                                         {"self_attn.k_proj", "attn_k"},
                                                         {"self_attn.v_proj", "attn_v"},
                                                         {"self_attn.o_proj", "attn_output"},
                                                         {"mlp.gate_proj", "ffn_gate"},
                                                         {"mlp.up_proj", "ffn_up"},
                                                         {"mlp.down_proj", "ffn_down"},
                                                         {"input_layernorm", "attn_norm"},
                                                         {"post_attention_layernorm", "ffn_norm"}};
    for (const auto& [from, to] : parts) {
      const std::size_t at = name.find(from);
      if (at != std::string::npos) name.replace(at, std::string(from).size(), to);
    }
    return name;
  }

  static void AddTokenizer(GgufWriter& file) {
    std::vector<std::string> tokens;
    std::vector<std::int32_t> types;
    // GPT-2's alphabet of bytes.
    std::uint32_t next = 0x100;
    for (std::uint32_t b = 0; b < 256; ++b) {
      const bool printable =
          (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
      const std::uint32_t code = printable ? b : next++;
      std::string text;
      if (code < 0x80) {
        text += static_cast<char>(code);
      } else {
        text += static_cast<char>(0xC0 | code >> 6);
        text += static_cast<char>(0x80 | (code & 63));
      }
      tokens.push_back(text);
      types.push_back(1);
    }
    for (const char* const text : {"th", "the", "\xC4\xA0the"}) {
      tokens.push_back(text);
      types.push_back(1);
    }
    for (const char* const text : {"<|im_start|>", "<|im_end|>"}) {
      tokens.push_back(text);
      types.push_back(3);
    }
    while (tokens.size() < kVocabulary) {
      tokens.push_back(Concat("[unused", tokens.size(), "]"));
      types.push_back(3);
    }
    file.Text("tokenizer.ggml.model", "gpt2")
        .Text("tokenizer.ggml.pre", "smollm")
        .Texts("tokenizer.ggml.tokens", tokens)
        .Counts("tokenizer.ggml.token_type", types)
        .Texts("tokenizer.ggml.merges", {"t h", "th e", "\xC4\xA0 the"})
        .Count("tokenizer.ggml.eos_token_id", 260)
        .Text("tokenizer.chat_template",
              "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{{ '<|im_start|>' }}");
  }
};

}  // namespace tessera::fakes
