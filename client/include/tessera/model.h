// A model's geometry as the worker states it, and the handle of a registered model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/ids.h"

namespace tessera::client {

struct ModelRecord;

// Of K, V and Q. The numbers are those of the wire format.
enum class ElementType : std::uint8_t { kBf16 = 1, kFp16 = 2, kFp32 = 3 };

constexpr std::size_t ElementBytes(ElementType type) { return type == ElementType::kFp32 ? 4 : 2; }

struct Rope {
  double theta = 0;  // 0: no rotary positions
  bool interleaved = false;
  std::string scaling;
  double scaling_factor = 0;
  // Radians per position of each pair of channels, as the model has them ("inv_freq"); none: by
  // theta, and linear scaling.
  std::vector<double> frequencies;
};

struct LayerGeometry {
  std::uint32_t query_heads = 0;  // a multiple of kv_heads
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;        // 64, 128 or 256
  std::uint32_t value_head_dim = 0;  // 0: head_dim; the daemon refuses any other
  float scale = 0;                   // 0: 1 / sqrt(head_dim)
  std::uint32_t sliding_window = 0;  // 0: none
  float logit_softcap = 0;           // 0: none
  std::vector<float> sinks;          // one per query head, or none
  std::optional<Rope> rope;          // unset: the model's
};

struct ModelGeometry {
  std::string name;                       // 1 to 128 characters
  ElementType type = ElementType::kBf16;  // of K, V and Q
  std::vector<LayerGeometry> layers;
  Rope rope;
  std::vector<std::uint32_t> delimiter_token_ids;
  // A hash or a revision of the weights, and of an adapter (LoRA) on them; at most 64 bytes each.
  // Prefixes of other weights are never found, even under the same name. Empty: unknown.
  std::string weights_id;
  std::string adapter_id;
};

// A copyable handle of a registered model. A default-constructed handle has an empty geometry and
// an invalid id; calls that take one answer INVALID_ARGUMENT.
class Model {
 public:
  Model() = default;
  bool valid() const { return record_ != nullptr; }
  const ModelGeometry& geometry() const;
  ModelId id() const;

 private:
  friend class Worker;
  explicit Model(std::shared_ptr<ModelRecord> record) : record_(std::move(record)) {}
  std::shared_ptr<ModelRecord> record_;
};

}  // namespace tessera::client
