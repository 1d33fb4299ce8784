// Writes GGUF files for tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::fakes {

class GgufWriter {
 public:
  GgufWriter& Text(std::string_view key, std::string_view value) {
    Key(key, 8);
    AddText(values_, value);
    return *this;
  }
  GgufWriter& Count(std::string_view key, std::uint32_t value) {
    Key(key, 4);
    Add(values_, value);
    return *this;
  }
  GgufWriter& Number(std::string_view key, float value) {
    Key(key, 6);
    Add(values_, value);
    return *this;
  }
  GgufWriter& Texts(std::string_view key, const std::vector<std::string>& values) {
    Array(key, 8, values.size());
    for (const std::string& value : values) AddText(values_, value);
    return *this;
  }
  GgufWriter& Counts(std::string_view key, const std::vector<std::int32_t>& values) {
    Array(key, 5, values.size());
    for (const std::int32_t value : values) Add(values_, value);
    return *this;
  }
  // `shape`: the last extent is a row's length. `type`: the number in the file.
  GgufWriter& Tensor(std::string_view name, const std::vector<std::uint64_t>& shape,
                     std::uint32_t type, std::string_view bytes) {
    AddText(table_, name);
    Add(table_, static_cast<std::uint32_t>(shape.size()));
    for (std::size_t i = shape.size(); i > 0; --i) Add(table_, shape[i - 1]);
    Add(table_, type);
    Add(table_, std::uint64_t{data_.size()});
    data_ += bytes;
    data_.resize((data_.size() + 31) / 32 * 32);
    ++tensors_;
    return *this;
  }
  GgufWriter& F32(std::string_view name, const std::vector<std::uint64_t>& shape,
                  const std::vector<float>& values) {
    return Tensor(name, shape, 0,
                  {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)});
  }

  std::string File() const {
    std::string file = "GGUF";
    Add(file, std::uint32_t{3});
    Add(file, tensors_);
    Add(file, count_);
    file += values_ + table_;
    file.resize((file.size() + 31) / 32 * 32);
    return file + data_;
  }

 private:
  template <typename T>
  static void Add(std::string& bytes, T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  static void AddText(std::string& bytes, std::string_view text) {
    Add(bytes, std::uint64_t{text.size()});
    bytes += text;
  }
  void Key(std::string_view key, std::uint32_t type) {
    AddText(values_, key);
    Add(values_, type);
    ++count_;
  }
  void Array(std::string_view key, std::uint32_t type, std::size_t count) {
    Key(key, 9);
    Add(values_, type);
    Add(values_, std::uint64_t{count});
  }

  std::uint64_t tensors_ = 0, count_ = 0;
  std::string values_, table_, data_;
};

}  // namespace tessera::fakes
