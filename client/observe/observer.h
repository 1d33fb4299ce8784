// Reduces a worker's queries and keys to the observations that the sequence's policy needs: the
// newest queries, the queries of largest norm, the attention that each key receives. They are kept
// in this process until the sequence is compressed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session/bound_model.h"
#include "client/session/session.h"
#include "client/session/tensor_carrier.h"
#include "kernels/format/operations.h"
#include "tessera/sequence.h"
#include "tessera/v1/observation.pb.h"

namespace tessera::client {

// Owned by SequenceState; used by one thread at a time.
class Observer {
 public:
  Observer(v1::PolicyNeeds needs, std::shared_ptr<const BoundModel> model);

  const v1::PolicyNeeds& needs() const { return needs_; }
  // Whether this observer collects exactly these observations.
  bool CollectsSame(const v1::PolicyNeeds& needs) const;
  // Observes rows of a prompt: layer by layer, in the order of tokens. Layers that the policy does
  // not need are ignored. Rows may be observed again; this discards the later ones. Rows with a
  // small norm that were dropped before do not return, so fewer rows are then known to be the
  // strongest.
  absl::Status See(const ObservedRows& rows, const kernels::Operations& operations);
  // Whether queries of decoded tokens are needed: by the policy while decoding, or because they may
  // be among the newest or strongest queries when the next prompt ends.
  bool WantsDecoded() const {
    return needs_.decode_queries() || needs_.last_queries() > 0 || needs_.last_share() > 0 ||
           needs_.norm_share() > 0;
  }
  // INVALID_ARGUMENT names the token and the head of a query that the daemon would refuse, if the
  // policy learns from every query. Such a query must not be observed: the daemon would refuse all
  // later observations.
  absl::Status CheckDecoded(std::uint32_t layer, std::uint64_t first_token,
                            std::span<const std::byte> query) const;
  // Observes queries of decoded tokens; a step may be repeated. By norm it keeps as many queries as
  // the policy would need at twice the length, or after 4,096 more tokens. So none is missing until
  // then, unless decoded tokens are taken back or have been packed.
  void ObserveDecoded(std::uint32_t layer, std::uint64_t first_token,
                      std::span<const std::byte> query);
  // Observes token ids, in the order of tokens.
  absl::Status ObserveTokenIds(std::uint64_t first_token, std::span<const std::uint32_t> ids);
  // Discards rows of the layer from token `tokens` on: they were not accepted.
  void TruncateLayer(std::uint64_t tokens, std::uint32_t layer);
  // The same for every layer.
  void TruncateRows(std::uint64_t tokens);
  // The sequence was truncated to `tokens` tokens: discards rows and ids of later ones.
  void TruncateTo(std::uint64_t tokens);

  // Sends the observations of the layers [first, end) to the daemon and returns the first layer
  // that was not sent: below `end` if the daemon has no room for more, RESOURCE_EXHAUSTED if not
  // even for the first. Of the strongest queries only those known to be the strongest are sent,
  // since others may have been dropped. Observations are kept here until the daemon has decided by
  // them, because an earlier fork sends them again. Ids are sent only of the first `tokens` tokens,
  // whose rows the daemon holds. `to_another`: a worker without this observer continues, so queries
  // that will be needed later are sent, too.
  absl::StatusOr<std::uint32_t> Show(Session& session, SequenceId sequence, std::uint32_t first,
                                     std::uint32_t end, std::uint64_t tokens,
                                     bool to_another = false);
  // The daemon has compressed the layer and decided about the tokens before `until`. Later tokens
  // are undecided, and their strongest queries will be sent again.
  void Decided(std::uint32_t layer, std::uint64_t until);
  // The first tokens of the sequence were or may be decided by observations of another worker: they
  // come from a published prefix or a handover.
  void MarkPrefixDecided();

 private:
  struct ByNorm {
    double norm;
    std::vector<std::byte> row;
  };
  // (norm, ~position): the larger pair is stronger; of equal norms the earlier position.
  using Strength = std::pair<double, std::uint64_t>;
  // The norms of rows that were dropped because enough stronger rows exist: one per row for the
  // newest tokens, which may be taken back, and the strongest per block for older ones.
  class DroppedNorms {
   public:
    void Add(std::uint64_t position, double norm);
    void AddAll(const DroppedNorms& other);
    void ForgetFrom(std::uint64_t position);
    void ForgetBefore(std::uint64_t position);
    bool empty() const { return newest_.empty() && blocks_.empty(); }
    Strength Strongest() const;

   private:
    static constexpr std::uint64_t kBlock = 32;
    static constexpr std::size_t kMaxNewest = 256;
    void AddToBlock(std::uint64_t block, const Strength& strength);
    std::map<std::uint64_t, double> newest_;    // by position
    std::map<std::uint64_t, Strength> blocks_;  // by position / kBlock
  };
  // The strongest rows of one query head, by position.
  struct HeadRows {
    std::map<std::uint64_t, ByNorm> rows;
    std::set<Strength> order;  // the strength of each row
    // No dropped row may be stronger than a row that is sent.
    DroppedNorms let_go;
    // Adds the row, and keeps the `most` strongest.
    void Add(std::uint64_t position, double norm, std::span<const std::byte> row,
             std::uint64_t most);
    void Erase(std::map<std::uint64_t, ByNorm>::iterator row);
    void ForgetFrom(std::uint64_t position);
    void ForgetBefore(std::uint64_t position);
    // The number of rows that are certainly the strongest of all observed.
    std::uint64_t known() const;
  };
  // The strongest rows of a range of tokens: of a prompt and the tokens decoded after it, or of
  // tokens decoded before the first prompt. If there are too many ranges, some are joined.
  struct Strongest {
    std::uint64_t first = 0;
    std::uint64_t prompt_end = 0;  // tokens from here on were decoded
    std::uint64_t end = 0;
    std::vector<HeadRows> heads;
    void ForgetFrom(std::uint64_t token);
    void ForgetBefore(std::uint64_t token);
    // Appends the range that follows this one, and keeps the `most` strongest rows of both.
    void Append(const Strongest& next, std::uint64_t most);
  };
  struct Layer {
    std::uint64_t next = 0;  // the token after the last one observed
    std::uint64_t from = 0;  // tokens before it are decided, or remain as appended
    // Everything has been sent to the daemon, so the next rows may start at any token.
    bool rests = false;
    std::uint64_t last_first = 0;  // position of the first row of `last`
    // [rows][query_heads][head_dim]. Up to twice as many rows as are sent, so that not every token
    // shifts the others, plus some for drafts that may be rejected.
    std::vector<std::byte> last;
    // The policy continues from its last decision, or from an empty sequence: it needs every query
    // of prompts and of decoded tokens.
    bool wants_all = false;
    static constexpr std::size_t kMaxRanges = 4;
    // In the order of their tokens. The daemon knows which of them count: those of the first
    // undecided prompt and of the tokens after it.
    std::vector<Strongest> norms;
    std::uint64_t sums_first = 0;              // position of the first key
    std::vector<std::vector<std::byte>> keys;  // by kv head, one row after another
    std::vector<std::vector<double>> sums;     // by kv head
    bool empty() const { return last.empty() && norms.empty() && sums.empty(); }
    // The range that the rows of these tokens belong to.
    Strongest& NormsOf(std::uint64_t begin, std::uint64_t end, bool prompt, std::uint64_t most);
    void JoinNorms(std::uint64_t most);
    void ForgetNormsFrom(std::uint64_t token);
    // The queries of earlier tokens no longer count.
    void ForgetNormsBefore(std::uint64_t token);
  };

  void ForgetFrom(std::uint64_t token, std::uint32_t layer);
  // How many of the newest queries are kept of a layer that holds `tokens` tokens.
  std::uint64_t MostLast(const Layer& layer, std::uint64_t tokens) const;
  // `drafts`: how many of the tokens may be rejected later.
  void ObserveLast(const ObservedRows& rows, std::uint64_t tokens, std::uint64_t drafts,
                   Layer& layer);
  static void KeepLast(std::uint64_t count, std::uint64_t token_bytes, Layer& layer);
  // Keeps the `most` strongest rows of each head.
  void ObserveNorms(const ObservedRows& rows, std::uint64_t tokens, std::uint64_t most, bool prompt,
                    Layer& layer);
  void ObserveSums(const ObservedRows& rows, std::uint64_t tokens,
                   const kernels::Operations& operations, Layer& layer);
  absl::Status SendTokenIds(Session& session, SequenceId sequence, std::uint64_t tokens);
  // Sends a layer and returns the daemon's answer; norms_from is 0 if no norms were sent.
  absl::StatusOr<v1::ObserveResponse> SendLayer(Session& session, SequenceId sequence,
                                                std::uint32_t index, const Layer& layer,
                                                bool to_another) const;
  // Sends the first piece. `sent` receives how many rows of `last` it contains.
  absl::Status SendFirstPiece(Session& session, SequenceId sequence, std::uint32_t index,
                              const Layer& layer, bool to_another, std::uint64_t& sent,
                              v1::ObserveResponse& response) const;
  // Adds queries of `last` from `first_row` on, up to the size of a piece. Returns how many.
  std::uint64_t FillLast(const kernels::LayerGeometry& geometry, const Layer& layer,
                         std::uint64_t first_row, v1::ObserveRequest& request,
                         TensorCarrier& tensors) const;
  // Returns the rows of norms[number], and sets their positions and shape in the request.
  std::vector<std::byte> FillNorms(std::uint32_t index, const Layer& layer, std::size_t number,
                                   bool to_another, v1::ObserveRequest& request) const;

  // How many queries by norm the policy needs of `tokens` tokens.
  std::uint64_t NormsOf(std::uint64_t tokens) const;
  static std::uint64_t RowBytes(const kernels::LayerGeometry& geometry) {
    return geometry.head_dim * kernels::ElementBytes(geometry.type);
  }

  const v1::PolicyNeeds needs_;
  const std::shared_ptr<const BoundModel> model_;
  // Whether the layer is decided by its own observations; other layers reuse a decision.
  bool Decides(std::uint32_t layer) const {
    return needs_.layers_alike() <= 1 || layer % needs_.layers_alike() == 0;
  }
  Layer& LayerOf(std::uint32_t index);
  std::map<std::uint32_t, Layer> layers_;
  // Layers with a decision: made by Compress, or reported by the daemon.
  std::set<std::uint32_t> decided_;
  // Ids that have not been sent. The daemon keeps those sent, for the sequence and its forks.
  std::uint64_t first_id_ = 0;
  std::vector<std::uint32_t> ids_;
};

}  // namespace tessera::client
