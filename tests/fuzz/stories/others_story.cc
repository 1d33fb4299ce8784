// Acts of a Story that involve others: a colleague that adopts a sequence for a while, an operator
// that changes its policy, and Select.

#include <algorithm>
#include <utility>

#include "client/api/worker_access.h"
#include "daemon/base/strings.h"
#include "tests/fuzz/stories/story.h"

namespace tessera::fuzz {

namespace {

// Checks that runs have rising positions below `tokens` and the stated number of entries.
absl::Status CheckChoice(const v1::HeadSelection& head, std::uint64_t tokens) {
  std::uint64_t end = 0;
  std::uint64_t entries = 0;
  for (const v1::PositionRun& run : head.runs()) {
    if (run.first_position() < end || run.entries() == 0) {
      return absl::DataLossError(Concat("kv head ", head.kv_head(), " reads ", run.entries(),
                                        " entries from ", run.first_position(),
                                        " after a run that ends at ", end));
    }
    end = run.first_position() + run.entries();
    entries += run.entries();
  }
  const std::uint64_t read = entries + head.entries_without_summary() + head.tail_entries();
  if (end <= tokens && entries == head.selected_entries() && read <= head.visible_entries() &&
      head.visible_entries() <= tokens) {
    return absl::OkStatus();
  }
  return absl::DataLossError(Concat("of ", tokens, " tokens kv head ", head.kv_head(), " sees ",
                                    head.visible_entries(), " entries and reads ", read, ", ",
                                    entries, " of them in runs up to ", end, "; it says ",
                                    head.selected_entries()));
}

// Retries when the daemon has too many calls. The handed-over sequence waits.
absl::StatusOr<client::Sequence> Adopt(client::Worker& worker, const client::Model& model,
                                       client::SequenceId id) {
  absl::StatusOr<client::Sequence> taken = worker.Adopt(model, id);
  for (int i = 0; i < 1000 && absl::IsResourceExhausted(taken.status()); ++i) {
    taken = worker.Adopt(model, id);
  }
  return taken;
}

// Policies that sequences may change to and from: they drop no rows and need no queries.
bool MayChange(const Kind& kind) {
  return kind.any_head && !std::string_view(kind.policy).starts_with("think");
}

}  // namespace

absl::Status ToAbsl(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::Status Story::Select(Known& known) {
  if (known.truth.tokens() == 0) return Describe(known);
  const auto layer = static_cast<std::uint32_t>(options_.random->Below(kStoryShape.layers));
  const client::SelectionRule rule = {.rate = 0.25,
                                      .first_block = options_.random->OneIn(2),
                                      .counts_tail = options_.random->OneIn(2),
                                      .each_head = options_.random->OneIn(2)};
  Say(Concat("select ", known.number, " layer ", layer, rule.each_head ? ", each head" : ""));
  const auto query = known.truth.Query(layer, known.truth.tokens() - 1);
  const absl::StatusOr<v1::SelectResponse> choice = client::SelectMessage(
      *options_.worker, layer, {.sequence = &known.sequence, .query = cli::BytesOf(query)}, rule);
  if (!choice.ok()) return choice.status();
  const std::uint32_t heads = rule.each_head ? kStoryShape.query_heads : kStoryShape.kv_heads;
  if (choice->heads_size() != static_cast<int>(heads) || choice->tokens() != known.truth.tokens()) {
    return absl::DataLossError(Concat(choice->heads_size(), " heads choose among ",
                                      choice->tokens(), " tokens; asked were ", heads, " and ",
                                      known.truth.tokens()));
  }
  for (const v1::HeadSelection& head : choice->heads()) {
    absl::Status status = CheckChoice(head, known.truth.tokens());
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Hands the sequence over and takes it back. Meanwhile the colleague attends.
absl::Status Story::Handover(Known& known) {
  client::Worker* const colleague = options_.colleague;
  if (colleague == nullptr) return Describe(known);
  Say(Concat("hand over ", known.number));
  const absl::StatusOr<client::Model> model = colleague->RegisterModel(kStoryShape.Geometry());
  if (!model.ok()) return model.status();
  const client::SequenceId id = known.sequence.id();
  if (absl::Status status = known.sequence.Handover(colleague->session_id()); !status.ok()) {
    return status;
  }
  absl::StatusOr<client::Sequence> taken = Adopt(*colleague, *model, id);
  if (!taken.ok()) return taken.status();
  if (taken->tokens() != known.truth.tokens()) {
    return absl::DataLossError(Concat("what was handed over holds ", taken->tokens(),
                                      " tokens; it held ", known.truth.tokens()));
  }
  absl::Status status = AttendBy(*colleague, *taken, known);
  if (!status.ok() && !absl::IsResourceExhausted(status)) return status;
  status = taken->Handover(options_.worker->session_id());
  for (int i = 0; i < 1000 && absl::IsResourceExhausted(status); ++i) {
    status = taken->Handover(options_.worker->session_id());
  }
  if (!status.ok()) return status;
  absl::StatusOr<client::Sequence> back = Adopt(*options_.worker, model_, id);
  if (!back.ok()) return back.status();
  known.sequence = *std::move(back);
  return absl::OkStatus();
}

absl::Status Story::AttendBy(client::Worker& worker, const client::Sequence& sequence,
                             const Known& known) {
  if (known.truth.tokens() == 0) return absl::OkStatus();
  const auto layer = static_cast<std::uint32_t>(options_.random->Below(kStoryShape.layers));
  const std::uint64_t position = known.truth.tokens() - 1;
  std::vector<float> output(kStoryShape.query_row());
  const auto query = known.truth.Query(layer, position);
  const client::AttendQuery asked[] = {{.sequence = &sequence,
                                        .query = cli::BytesOf(query),
                                        .output = cli::WritableBytesOf(output),
                                        .lse = {},
                                        .first_query_position = std::nullopt}};
  const absl::Status status = worker.AttendRpc(layer, asked, {});
  return status.ok() ? Judge(known, layer, position, output) : status;
}

absl::Status Story::SetPolicy(Known& known) {
  if (options_.admin == nullptr || !MayChange(known.kind)) return Describe(known);
  const Kind& next = Kinds()[options_.random->Below(Kinds().size())];
  if (!MayChange(next)) return Describe(known);
  Say(Concat("set policy of ", known.number, " to ", next.policy));
  grpc::ClientContext context;
  v1::SetPolicyRequest request;
  v1::SetPolicyResponse response;
  request.set_sequence_id(known.sequence.id().value());
  request.set_policy(next.policy);
  const absl::Status status = ToAbsl(options_.admin->SetPolicy(&context, request, &response));
  if (!status.ok()) return status;
  // Rows that the previous policy has changed stay changed.
  const std::optional<double> before = known.kind.tolerance;
  known.kind = next;
  if (!before.has_value()) known.kind.tolerance = std::nullopt;
  if (known.kind.tolerance.has_value())
    known.kind.tolerance = std::max(*known.kind.tolerance, *before);
  known.repolicied = true;
  return absl::OkStatus();
}

}  // namespace tessera::fuzz
