#include "client/model/checkpoint/safetensors.h"

#include <cstring>
#include <optional>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "client/model/checkpoint/json.h"
#include "daemon/base/strings.h"

namespace tessera::llm {

namespace {

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

}  // namespace

absl::StatusOr<Safetensors> Safetensors::Open(const std::string& path) {
  absl::StatusOr<MappedFile> mapped = MappedFile::Open(path, 8);
  if (!mapped.ok()) return mapped.status();
  const auto refused = [&](const auto&... why) {
    return absl::InvalidArgumentError(Concat("\"", path, "\": ", why...));
  };
  Safetensors file;
  file.path_ = path;
  file.file_ = *std::move(mapped);
  const std::span<const std::byte> all = file.file_.bytes();
  std::uint64_t header = 0;
  std::memcpy(&header, all.data(), sizeof header);
  if (header > kMaxHeader || header > all.size() - 8) {
    return refused("a header of ", header, " bytes; the limit is ", kMaxHeader,
                   " bytes or the size of the file");
  }
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

absl::StatusOr<Tensor> Safetensors::FindTensor(const std::string& name) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) {
    return absl::NotFoundError(Concat("\"", path_, "\" has no tensor \"", name, "\""));
  }
  const auto refused = [&](const auto&... why) {
    return absl::InvalidArgumentError(Concat("\"", path_, "\": tensor \"", name, "\": ", why...));
  };
  const Entry& entry = it->second;
  const std::optional<TensorType> type = TypeOfSafetensors(entry.type);
  if (!type) return refused("type ", Quoted(entry.type), "; supported are F32, F16 and BF16");
  Tensor tensor = {.type = *type, .shape = entry.shape, .bytes = entry.bytes};
  if (absl::Status status = CheckTensor(tensor); !status.ok()) return refused(status.message());
  return tensor;
}

}  // namespace tessera::llm
