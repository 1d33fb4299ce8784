#include "client/eval/text/calibration.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "absl/status/status.h"
#include "client/eval/compressed_fork.h"
#include "daemon/base/strings.h"
#include "kernels/dispatch/implementation.h"

namespace tessera::cli::eval {

namespace {

constexpr std::uint32_t kSinks = 4;  // first tokens of a text, which no book is made of
constexpr std::uint64_t kFewestRows = 256;

kernels::BookedModel BookedModelOf(const client::ModelGeometry& geometry) {
  kernels::BookedModel model = {.layers = {},
                                .rope_theta = geometry.rope.theta,
                                .rope_interleaved = geometry.rope.interleaved,
                                .rope_scaling = geometry.rope.scaling,
                                .rope_scaling_factor = geometry.rope.scaling_factor,
                                .rope_frequencies = geometry.rope.frequencies};
  for (const client::LayerGeometry& layer : geometry.layers) {
    model.layers.push_back({layer.query_heads, layer.kv_heads, layer.head_dim});
  }
  return model;
}

// The rows of every lane, text after text.
class LanesOfTexts {
 public:
  explicit LanesOfTexts(const llm::Config& config)
      : config_(config), keys_(config.layers * config.kv_heads), values_(keys_.size()) {}

  void Add(const PromptRows& text) {
    for (std::uint32_t layer = 0; layer < config_.layers; ++layer) {
      for (std::uint32_t head = 0; head < config_.kv_heads; ++head) {
        const std::size_t lane = std::size_t{layer} * config_.kv_heads + head;
        AddLane(text.key(layer), head, keys_[lane]);
        AddLane(text.value(layer), head, values_[lane]);
      }
    }
  }
  std::uint64_t rows() const { return keys_[0].size() / config_.head_dim; }
  std::size_t lanes() const { return keys_.size(); }
  kernels::LaneRows lane(std::size_t lane) const {
    return {SpanOf(keys_[lane]), SpanOf(values_[lane])};
  }

 private:
  using Rows = std::vector<std::uint16_t>;
  void AddLane(std::span<const std::uint16_t> rows, std::uint32_t head, Rows& lane) const {
    for (std::size_t at = kSinks * config_.kv_row(); at < rows.size(); at += config_.kv_row()) {
      const auto row = rows.subspan(at + std::size_t{head} * config_.head_dim, config_.head_dim);
      lane.insert(lane.end(), row.begin(), row.end());
    }
  }
  kernels::RowSpan SpanOf(const Rows& rows) const {
    return {reinterpret_cast<const std::byte*>(rows.data()), rows.size() / config_.head_dim,
            config_.head_dim, kernels::ElementType::kBf16};
  }

  const llm::Config config_;
  std::vector<Rows> keys_, values_;
};

}  // namespace

absl::StatusOr<kernels::BookFile> Calibrate(const llm::Model& model,
                                            const llm::Tokenizer& tokenizer,
                                            const std::vector<EvaluationText>& texts,
                                            const CalibrationOptions& options) {
  const llm::Config& config = model.config();
  kernels::BookFile file = {
      .name = options.name,
      .fingerprint = kernels::FingerprintOf(BookedModelOf(llm::GeometryOf(config, "calibrate")))};
  LanesOfTexts lanes(config);
  const std::size_t each =
      (options.rows + texts.size() - 1) / std::max<std::size_t>(texts.size(), 1);
  for (const EvaluationText& text : texts) {
    file.texts.push_back(kernels::BookTextOf(text.path, text.text));
    absl::StatusOr<std::vector<llm::TokenId>> tokens = tokenizer.Encode(text.text);
    if (!tokens.ok()) return tokens.status();
    const std::size_t count =
        std::min({tokens->size(), kSinks + each, std::size_t{config.max_positions}});
    std::vector<std::uint32_t> positions(count);
    std::iota(positions.begin(), positions.end(), 0);
    PromptRows rows(config);
    const absl::Status computed =
        model.Forward({.tokens = std::span(*tokens).first(count), .positions = positions}, rows)
            .status();
    if (!computed.ok()) return computed;
    lanes.Add(rows);
  }
  file.rows = lanes.rows();
  if (file.rows < kFewestRows) {
    return absl::InvalidArgumentError(Concat("the texts have ", file.rows,
                                             " tokens after their first ", kSinks,
                                             "; a book needs at least ", kFewestRows));
  }
  const kernels::Operations& operations = kernels::OperationsOf(kernels::BestImplementation());
  for (std::size_t lane = 0; lane < lanes.lanes(); ++lane) {
    const std::string problem =
        kernels::BookProblem(lanes.lane(lane), {.key = 2, .value = 2}, operations);
    if (!problem.empty()) return absl::InvalidArgumentError(Concat("lane ", lane, ": ", problem));
    file.lanes.push_back(kernels::MakeFileLane(lanes.lane(lane), operations));
  }
  return file;
}

}  // namespace tessera::cli::eval
