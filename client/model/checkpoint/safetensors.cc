#include "client/model/checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <bit>
#include <cstring>
#include <string_view>

#include "absl/status/status.h"
#include "client/model/checkpoint/json.h"
#include "daemon/base/strings.h"
#include "daemon/platform/fd.h"

namespace tessera::llm {

namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr std::uint64_t kMaxHeader = 16 << 20;  // bytes; a 70B model's header is about 0.1 MiB
constexpr std::size_t kMaxDimensions = 8;

absl::StatusOr<std::vector<std::uint64_t>> CountsOf(const Json& tensor, const std::string& key) {
  const JsonValue* list = Find(tensor, key);
  if (list == nullptr || !list->has_list_value()) {
    return absl::InvalidArgumentError(Concat("\"", key, "\" is missing or not a list"));
  }
  std::vector<std::uint64_t> counts;
  for (const JsonValue& value : list->list_value().values()) {
    const absl::StatusOr<std::uint64_t> count = CountOf(value, key);
    if (!count.ok()) return count.status();
    counts.push_back(*count);
  }
  if (counts.size() > kMaxDimensions) {
    return absl::InvalidArgumentError(
        Concat("\"", key, "\" has ", counts.size(), " items; the limit is ", kMaxDimensions));
  }
  return counts;
}

std::string ShapeText(const std::vector<std::uint64_t>& shape) {
  std::string text;
  for (const std::uint64_t extent : shape) Append(text, text.empty() ? "" : " x ", extent);
  return text;
}

// Whether the shape's elements, two bytes each, take exactly `bytes` bytes. Cannot overflow: no
// product above `bytes` is computed.
bool Fills(const std::vector<std::uint64_t>& shape, std::uint64_t bytes) {
  std::uint64_t left = bytes / 2;
  std::uint64_t product = 1;
  for (const std::uint64_t extent : shape) {
    if (extent != 0 && product > left / extent) return false;
    product *= extent;
  }
  return bytes % 2 == 0 && product == left;
}

}  // namespace

absl::StatusOr<Safetensors> Safetensors::Open(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(Concat("open \"", path, "\""));
  struct stat about = {};
  if (::fstat(fd.get(), &about) != 0) return ErrnoStatus(Concat("stat \"", path, "\""));
  const auto refused = [&](const auto&... why) {
    return absl::InvalidArgumentError(Concat("\"", path, "\": ", why...));
  };
  const std::uint64_t size = static_cast<std::uint64_t>(about.st_size);
  if (!S_ISREG(about.st_mode) || size < 8)
    return refused("not a safetensors file: ", size, " bytes");
  absl::StatusOr<AddressRange> mapped = AddressRange::Map(fd.get(), size, Access::kReadOnly);
  if (!mapped.ok()) return mapped.status();

  Safetensors file;
  file.path_ = path;
  file.file_ = *std::move(mapped);
  std::uint64_t header = 0;
  std::memcpy(&header, file.file_.data(), sizeof header);
  if (header > kMaxHeader || header > size - 8) {
    return refused("a header of ", header, " bytes; the limit is ", kMaxHeader,
                   " bytes or the size of the file");
  }
  const std::span<const std::byte> all(file.file_.data(), size);
  const std::string_view text(reinterpret_cast<const char*>(all.data()) + 8, header);
  if (absl::Status status = file.ReadHeader(text, all.subspan(8 + header)); !status.ok()) {
    return refused(status.message());
  }
  return file;
}

absl::Status Safetensors::ReadHeader(std::string_view text, std::span<const std::byte> data) {
  const absl::StatusOr<Json> header = ParseJson(text);
  if (!header.ok()) return header.status();
  for (const auto& [name, value] : header->fields()) {
    if (name == "__metadata__") continue;
    const auto refused = [&, &key = name](const auto&... why) {
      return absl::InvalidArgumentError(Concat("tensor ", Quoted(key), ": ", why...));
    };
    const JsonValue* type = Find(value.struct_value(), "dtype");
    if (type == nullptr || !type->has_string_value()) return refused("dtype is missing");
    absl::StatusOr<std::vector<std::uint64_t>> shape = CountsOf(value.struct_value(), "shape");
    if (!shape.ok()) return refused(shape.status().message());
    const absl::StatusOr<std::vector<std::uint64_t>> range =
        CountsOf(value.struct_value(), "data_offsets");
    if (!range.ok()) return refused(range.status().message());
    if (range->size() != 2 || (*range)[0] > (*range)[1] || (*range)[1] > data.size()) {
      return refused("data_offsets are not a range within the ", data.size(), " bytes of data");
    }
    const auto bytes = data.subspan((*range)[0], (*range)[1] - (*range)[0]);
    tensors_[name] = {.type = type->string_value(), .shape = *std::move(shape), .bytes = bytes};
  }
  return absl::OkStatus();
}

absl::StatusOr<std::span<const std::uint16_t>> Safetensors::Bf16(
    const std::string& name, const std::vector<std::uint64_t>& shape) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) {
    return absl::NotFoundError(Concat("\"", path_, "\" has no tensor \"", name, "\""));
  }
  const Tensor& tensor = it->second;
  if (tensor.type != "BF16" || tensor.shape != shape || !Fills(shape, tensor.bytes.size())) {
    return absl::InvalidArgumentError(Concat("\"", path_, "\": tensor \"", name, "\" is ",
                                             Quoted(tensor.type), " of ", ShapeText(tensor.shape),
                                             " in ", tensor.bytes.size(), " bytes; BF16 of ",
                                             ShapeText(shape), " is required"));
  }
  if (reinterpret_cast<std::uintptr_t>(tensor.bytes.data()) % 2 != 0) {
    return absl::InvalidArgumentError(Concat("\"", path_, "\": tensor \"", name,
                                             "\" starts at an odd file offset; BF16 needs an even "
                                             "one"));
  }
  return std::span(reinterpret_cast<const std::uint16_t*>(tensor.bytes.data()),
                   tensor.bytes.size() / 2);
}

}  // namespace tessera::llm
