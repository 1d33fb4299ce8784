// What a worker sees while it computes a prompt, boiled down to what the sequence's token policy
// asks for: the newest queries, those of the largest norm, what is paid to each key. Kept in this
// process until the sequence is compressed.
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

class Observer {
 public:
  Observer(v1::PolicyNeeds needs, std::shared_ptr<const BoundModel> model);

  const v1::PolicyNeeds& needs() const { return needs_; }
  // Whether that is what this one gathers, no more and no less.
  bool Sees(const v1::PolicyNeeds& needs) const;
  // Layer by layer, in the order of tokens; nothing is kept of layers that are not asked for. Rows
  // that were seen before may come again, and those from there on are forgotten. Weak ones that
  // were let go before do not come back: fewer are known then to be the strongest.
  absl::Status See(const ObservedRows& rows, const kernels::Operations& operations);
  // Whether the queries of tokens that are decoded are asked for, or may be among the newest ones,
  // or the strongest, when the next prompt ends.
  bool WantsDecoded() const {
    return needs_.decode_queries() || needs_.last_queries() > 0 || needs_.last_share() > 0 ||
           needs_.norm_share() > 0;
  }
  // INVALID_ARGUMENT names the token and the head of a query that the daemon would refuse, where
  // the policy learns from every one: it must not be seen, for nobody could go on behind it.
  absl::Status CheckDecoded(std::uint32_t layer, std::uint64_t first_token,
                            std::span<const std::byte> query) const;
  // Those queries; the same step may be tried again. By norm as many are kept as would be asked for
  // at twice the length, or 4,096 tokens on: none is missing while decoding goes no further, takes
  // nothing back, and nothing of it is packed for good.
  void SeeDecoded(std::uint32_t layer, std::uint64_t first_token, std::span<const std::byte> query);
  // In the order of tokens, too.
  absl::Status SeeTokens(std::uint64_t first_token, std::span<const std::uint32_t> ids);
  // The layer holds so many tokens, and no more: others were not accepted.
  void CutLayerTo(std::uint64_t tokens, std::uint32_t layer);
  // So does every one.
  void CutRowsTo(std::uint64_t tokens);
  // The sequence was cut off there.
  void CutTo(std::uint64_t tokens);

  // Sends what was seen of the layers [first, end) to the daemon, and returns where it ended:
  // before `end` if the daemon has room for no more, RESOURCE_EXHAUSTED if not even for the first.
  // Of the strongest queries those alone that are known to be: some may have been let go.
  // It is kept here until the daemon has decided by it: a fork that is made before shows it again.
  // Ids are shown of the first `tokens` alone, whose rows are there.
  // `to_another`: who goes on without this observer, and wants those that are asked for later, too.
  absl::StatusOr<std::uint32_t> Show(Session& session, SequenceId sequence, std::uint32_t first,
                                     std::uint32_t end, std::uint64_t tokens,
                                     bool to_another = false);
  // The layer has been compressed, and held some tokens. Those before `until` have been decided
  // about; others were left alone, and their strongest queries are shown again.
  void Decided(std::uint32_t layer, std::uint64_t until);
  // The sequence begins with tokens that were, or may be, decided about elsewhere: with a published
  // prefix, or with what another worker has shown.
  void BeginsDecided();

 private:
  struct ByNorm {
    double norm;
    std::vector<std::byte> row;
  };
  // (norm, ~position): the larger one is the stronger; of equal norms the first.
  using Strength = std::pair<double, std::uint64_t>;
  // Of rows that were let go since stronger ones were enough: one by one of the newest tokens,
  // which may be taken back; of others the strongest of each block, for as long as a part of that
  // counts.
  class LetGo {
   public:
    void Add(std::uint64_t position, double norm);
    void AddAll(const LetGo& other);
    void ForgetFrom(std::uint64_t position);
    void ForgetBefore(std::uint64_t position);
    bool empty() const { return newest_.empty() && blocks_.empty(); }
    Strength Strongest() const;

   private:
    static constexpr std::uint64_t kBlock = 32;
    static constexpr std::size_t kMostNewest = 256;
    void AddToBlock(std::uint64_t block, const Strength& strength);
    std::map<std::uint64_t, double> newest_;    // by position
    std::map<std::uint64_t, Strength> blocks_;  // by position / kBlock
  };
  // Of one query head, by position.
  struct HeadRows {
    std::map<std::uint64_t, ByNorm> rows;
    std::set<Strength> order;  // of each row
    // None may be stronger than a row that is shown.
    LetGo let_go;
    // Keeps the `most` strongest of what it has and this one.
    void Add(std::uint64_t position, double norm, std::span<const std::byte> row,
             std::uint64_t most);
    void Erase(std::map<std::uint64_t, ByNorm>::iterator row);
    void ForgetFrom(std::uint64_t position);
    void ForgetBefore(std::uint64_t position);
    // So many rows are the strongest of all that came.
    std::uint64_t known() const;
  };
  // The strongest rows of tokens that follow one another: of a prompt and what is decoded behind
  // it, or of what was decoded before the first one. Of many turns some are joined.
  struct Strongest {
    std::uint64_t first = 0;
    std::uint64_t prompt_end = 0;  // what comes from there on was decoded
    std::uint64_t end = 0;
    std::vector<HeadRows> heads;
    void ForgetFrom(std::uint64_t token);
    void ForgetBefore(std::uint64_t token);
    // What follows it; of both as many rows are kept.
    void Append(const Strongest& next, std::uint64_t most);
  };
  struct Layer {
    std::uint64_t next = 0;  // the token after the last one seen
    std::uint64_t from = 0;  // those before it have been decided about, or stay as they came
    // The daemon has been shown all of it: what comes next may come from anywhere.
    bool rests = false;
    std::uint64_t last_first = 0;  // position of the first row of `last`
    // [rows][query_heads][head_dim]; up to twice as many as are shown, so that not every token
    // moves the others, and some more, so that drafts may be taken back.
    std::vector<std::byte> last;
    // The policy goes on from what it has decided, or from an empty sequence: no query may be
    // missing, whether its token was decoded or came with a prompt.
    bool wants_all = false;
    static constexpr std::size_t kMostNorms = 4;
    // In the order of their tokens. Which of them count the daemon knows: those of the first prompt
    // that waits, and what is behind it.
    std::vector<Strongest> norms;
    std::uint64_t sums_first = 0;              // position of the first key
    std::vector<std::vector<std::byte>> keys;  // by kv head, one row after another
    std::vector<std::vector<double>> sums;     // by kv head
    bool empty() const { return last.empty() && norms.empty() && sums.empty(); }
    // Where the rows of these tokens go, and as many are kept.
    Strongest& NormsOf(std::uint64_t begin, std::uint64_t end, bool prompt, std::uint64_t most);
    void JoinNorms(std::uint64_t most);
    void ForgetNormsFrom(std::uint64_t token);
    // Of these tokens none counts any more.
    void ForgetNormsBefore(std::uint64_t token);
  };

  void ForgetFrom(std::uint64_t token, std::uint32_t layer);
  // How many of the newest queries are kept of a layer that has so many tokens.
  std::uint64_t MostLast(const Layer& layer, std::uint64_t tokens) const;
  // `drafts`: so many of the tokens may be taken back.
  void SeeLast(const ObservedRows& rows, std::uint64_t tokens, std::uint64_t drafts, Layer& layer);
  static void KeepLast(std::uint64_t count, std::uint64_t token_bytes, Layer& layer);
  // Keeps the strongest of each head, so many.
  void SeeNorms(const ObservedRows& rows, std::uint64_t tokens, std::uint64_t most, bool prompt,
                Layer& layer);
  void SeeSums(const ObservedRows& rows, std::uint64_t tokens,
               const kernels::Operations& operations, Layer& layer);
  absl::Status ShowTokens(Session& session, SequenceId sequence, std::uint64_t tokens);
  // The daemon's answer to all of it: norms_from is 0 where none were shown.
  absl::StatusOr<v1::ObserveResponse> ShowLayer(Session& session, SequenceId sequence,
                                                std::uint32_t index, const Layer& layer,
                                                bool to_another) const;
  // `shown`: rows of `last` that went with it.
  absl::Status ShowFirst(Session& session, SequenceId sequence, std::uint32_t index,
                         const Layer& layer, bool to_another, std::uint64_t& shown,
                         v1::ObserveResponse& response) const;
  // The queries of `last` from this row on, as many as a message should have. Returns how many.
  std::uint64_t FillLast(const kernels::LayerGeometry& geometry, const Layer& layer,
                         std::uint64_t first_row, v1::ObserveRequest& request,
                         TensorCarrier& tensors) const;
  // The rows of the layer's norms with this number, whose positions and shape it fills in.
  std::vector<std::byte> FillNorms(std::uint32_t index, const Layer& layer, std::size_t number,
                                   bool to_another, v1::ObserveRequest& request) const;

  // How many queries by norm are asked for of so many tokens.
  std::uint64_t NormsOf(std::uint64_t tokens) const;
  static std::uint64_t RowBytes(const kernels::LayerGeometry& geometry) {
    return geometry.head_dim * kernels::ElementBytes(geometry.type);
  }

  const v1::PolicyNeeds needs_;
  const std::shared_ptr<const BoundModel> model_;
  // Others take over what is decided for one before them.
  bool Decides(std::uint32_t layer) const {
    return needs_.layers_alike() <= 1 || layer % needs_.layers_alike() == 0;
  }
  Layer& LayerOf(std::uint32_t index);
  std::map<std::uint32_t, Layer> layers_;
  // Layers of which something has been decided: by Compress, or as the daemon says.
  std::set<std::uint32_t> decided_;
  // Not shown yet. Those that were go on with the sequence in the daemon, and with its forks.
  std::uint64_t first_id_ = 0;
  std::vector<std::uint32_t> ids_;
};

}  // namespace tessera::client
