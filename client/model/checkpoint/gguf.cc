#include "client/model/checkpoint/gguf.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "daemon/base/strings.h"

namespace tessera::llm {

namespace {

constexpr std::uint64_t kMaxValues = 1 << 16;
constexpr std::uint64_t kMaxTensors = 1 << 20;
constexpr std::uint64_t kMaxName = 1 << 10;   // bytes
constexpr std::uint64_t kMaxItems = 1 << 24;  // of all arrays together
constexpr std::uint32_t kMaxDimensions = 4;
constexpr std::uint64_t kMaxAlignment = 1 << 20;

// Types of values, by their numbers in the file.
enum ValueType : std::uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBool,
  kString,
  kArray,
  kUint64,
  kInt64,
  kFloat64,
};

template <typename... Parts>
absl::Status Refused(const Parts&... parts) {
  return absl::InvalidArgumentError(Concat(parts...));
}

}  // namespace

// Reads the header from front to back. The first error sticks; afterwards everything reads as 0.
class Gguf::Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  const absl::Status& status() const { return status_; }
  std::size_t at() const { return at_; }
  std::size_t left() const { return bytes_.size() - at_; }

  template <typename T>
  T Plain() {
    T value = {};
    if (const std::byte* const from = Take(sizeof value)) std::memcpy(&value, from, sizeof value);
    return value;
  }
  std::string_view String(std::uint64_t max) {
    const auto length = Plain<std::uint64_t>();
    if (length > max) {
      Fail("a text of ", length, " bytes at byte ", at_, "; the limit is ", max);
      return {};
    }
    const std::byte* const from = Take(length);
    return from == nullptr ? std::string_view()
                           : std::string_view(reinterpret_cast<const char*>(from), length);
  }

  Value ReadValue() {
    const auto type = Plain<std::uint32_t>();
    return type == kArray ? ReadArray() : ReadScalar(type);
  }

  template <typename... Parts>
  void Fail(const Parts&... parts) {
    if (status_.ok()) status_ = Refused(parts...);
    at_ = bytes_.size();
  }

 private:
  const std::byte* Take(std::uint64_t count) {
    if (count > left()) {
      Fail("the header ends at byte ", bytes_.size(), "; it needs ", count, " more bytes");
      return nullptr;
    }
    const std::byte* const from = bytes_.data() + at_;
    at_ += count;
    return from;
  }

  Value ReadScalar(std::uint32_t type) {
    switch (type) {
      case kUint8:
        return std::int64_t{Plain<std::uint8_t>()};
      case kInt8:
        return std::int64_t{Plain<std::int8_t>()};
      case kUint16:
        return std::int64_t{Plain<std::uint16_t>()};
      case kInt16:
        return std::int64_t{Plain<std::int16_t>()};
      case kUint32:
        return std::int64_t{Plain<std::uint32_t>()};
      case kInt32:
        return std::int64_t{Plain<std::int32_t>()};
      case kBool:
        return std::int64_t{Plain<std::uint8_t>() != 0};
      case kUint64:
        return static_cast<std::int64_t>(Plain<std::uint64_t>());
      case kInt64:
        return Plain<std::int64_t>();
      case kFloat32:
        return double{Plain<float>()};
      case kFloat64:
        return Plain<double>();
      case kString:
        return String(left());
      default:
        Fail("a value of type ", type, " at byte ", at_);
        return {};
    }
  }

  // Every item takes at least one byte, so no more than left() of them are stored.
  template <typename Item>
  Value ReadItems(std::uint32_t type, std::uint64_t count) {
    std::vector<Item> items;
    for (std::uint64_t i = 0; i < count && status_.ok(); ++i) {
      items.push_back(std::get<Item>(ReadScalar(type)));
    }
    return items;
  }

  Value ReadArray() {
    const auto type = Plain<std::uint32_t>();
    const auto count = Plain<std::uint64_t>();
    if (type > kFloat64 || type == kArray) Fail("an array of type ", type, " at byte ", at_);
    if (count > left()) Fail("an array of ", count, " items, and only ", left(), " bytes follow");
    items_ += std::min(count, kMaxItems);
    if (count > kMaxItems || items_ > kMaxItems) Fail("arrays of more than ", kMaxItems, " items");
    if (!status_.ok()) return {};
    if (type == kString) return ReadItems<std::string_view>(type, count);
    if (type == kFloat32 || type == kFloat64) return ReadItems<double>(type, count);
    return ReadItems<std::int64_t>(type, count);
  }

  const std::span<const std::byte> bytes_;
  std::size_t at_ = 0;
  std::uint64_t items_ = 0;  // of arrays so far
  absl::Status status_;
};

absl::StatusOr<Gguf> Gguf::Open(const std::string& path) {
  absl::StatusOr<MappedFile> file = MappedFile::Open(path, 24);
  if (!file.ok()) return file.status();
  Gguf gguf;
  gguf.file_ = *std::move(file);
  if (absl::Status status = gguf.Read(gguf.file_.bytes()); !status.ok()) {
    return Refused("\"", path, "\": ", status.message());
  }
  return gguf;
}

absl::Status Gguf::Read(std::span<const std::byte> bytes) {
  Reader reader(bytes);
  if (std::memcmp(bytes.data(), "GGUF", 4) != 0) return Refused("not a GGUF file");
  reader.Plain<std::uint32_t>();  // "GGUF"
  const auto version = reader.Plain<std::uint32_t>();
  const auto tensors = reader.Plain<std::uint64_t>();
  const auto values = reader.Plain<std::uint64_t>();
  if (version != 2 && version != 3) {
    return Refused("GGUF version ", version, "; versions 2 and 3 are supported");
  }
  if (tensors > kMaxTensors || values > kMaxValues) {
    return Refused(tensors, " tensors and ", values, " values; the limits are ", kMaxTensors,
                   " and ", kMaxValues);
  }
  for (std::uint64_t i = 0; i < values && reader.status().ok(); ++i) {
    std::string key(reader.String(kMaxName));
    Value value = reader.ReadValue();
    if (!values_.emplace(key, std::move(value)).second) reader.Fail(Quoted(key), " is there twice");
  }
  if (!reader.status().ok()) return reader.status();
  return ReadTensors(reader, tensors);
}

absl::Status Gguf::ReadTensors(Reader& reader, std::uint64_t count) {
  struct Entry {
    std::string name;
    TensorType type;
    std::vector<std::uint64_t> shape;
    std::uint64_t offset;
  };
  std::vector<Entry> entries;
  for (std::uint64_t i = 0; i < count; ++i) {
    Entry entry = {.name = std::string(reader.String(kMaxName))};
    const auto dimensions = reader.Plain<std::uint32_t>();
    if (dimensions > kMaxDimensions) reader.Fail(dimensions, " dimensions of a tensor");
    for (std::uint32_t d = 0; d < dimensions && reader.status().ok(); ++d) {
      entry.shape.insert(entry.shape.begin(), reader.Plain<std::uint64_t>());
    }
    const auto type = reader.Plain<std::uint32_t>();
    entry.offset = reader.Plain<std::uint64_t>();
    if (!reader.status().ok()) return reader.status();
    const std::optional<TensorType> known = TypeOfGguf(type);
    if (!known) {
      return Refused("tensor ", Quoted(entry.name), " is of type ", type,
                     "; supported are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K and "
                     "Q6_K");
    }
    entry.type = *known;
    entries.push_back(std::move(entry));
  }
  std::uint64_t alignment = 32;
  if (FindValue("general.alignment") != nullptr) {
    const absl::StatusOr<std::uint64_t> given = Count("general.alignment");
    if (!given.ok()) return given.status();
    if (*given == 0 || *given > kMaxAlignment) return Refused("general.alignment is ", *given);
    alignment = *given;
  }
  const std::size_t all = file_.bytes().size();
  const std::uint64_t first = (reader.at() + alignment - 1) / alignment * alignment;
  if (first > all) return Refused("the data begins after the end of the file");
  const std::span<const std::byte> data = file_.bytes().subspan(first);
  for (Entry& entry : entries) {
    Tensor tensor = {.type = entry.type, .shape = std::move(entry.shape)};
    // In doubles, so that nothing overflows; CheckTensor counts exactly.
    double bytes = static_cast<double>(BlockBytes(entry.type)) /
                   static_cast<double>(BlockElements(entry.type));
    for (const std::uint64_t extent : tensor.shape) bytes *= static_cast<double>(extent);
    const bool fits =
        entry.offset <= data.size() && bytes <= static_cast<double>(data.size() - entry.offset);
    if (!fits) {
      return Refused("tensor ", Quoted(entry.name), " needs ", bytes, " bytes at ", entry.offset,
                     "; the file has ", data.size(), " bytes of data");
    }
    tensor.bytes = data.subspan(entry.offset, static_cast<std::size_t>(bytes));
    if (absl::Status status = CheckTensor(tensor); !status.ok()) {
      return Refused("tensor ", Quoted(entry.name), ": ", status.message());
    }
    if (!tensors_.emplace(entry.name, std::move(tensor)).second) {
      return Refused("tensor ", Quoted(entry.name), " is there twice");
    }
  }
  return absl::OkStatus();
}

const Gguf::Value* Gguf::FindValue(const std::string& key) const {
  const auto it = values_.find(key);
  return it == values_.end() ? nullptr : &it->second;
}

const Tensor* Gguf::FindTensor(const std::string& name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

absl::StatusOr<std::uint64_t> Gguf::Count(const std::string& key) const {
  const Value* const value = FindValue(key);
  if (value == nullptr) return Refused(Quoted(key), " is missing");
  const std::int64_t* const count = std::get_if<std::int64_t>(value);
  if (count == nullptr || *count < 0) return Refused(Quoted(key), " is not a whole number");
  return static_cast<std::uint64_t>(*count);
}

absl::StatusOr<double> Gguf::Number(const std::string& key) const {
  const Value* const value = FindValue(key);
  if (value == nullptr) return Refused(Quoted(key), " is missing");
  const double* const number = std::get_if<double>(value);
  if (number == nullptr || !std::isfinite(*number)) return Refused(Quoted(key), " is not a number");
  return *number;
}

absl::StatusOr<std::string_view> Gguf::Text(const std::string& key) const {
  const Value* const value = FindValue(key);
  if (value == nullptr) return Refused(Quoted(key), " is missing");
  const std::string_view* const text = std::get_if<std::string_view>(value);
  if (text == nullptr) return Refused(Quoted(key), " is not a text");
  return *text;
}

}  // namespace tessera::llm
