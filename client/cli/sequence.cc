// tessera describe, policy, compress, offload, restore: shows or changes one sequence.

#include <optional>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "client/json/message_json.h"
#include "client/tools/admin.h"
#include "client/tools/connection.h"
#include "client/tools/output.h"
#include "client/tools/run_command.h"
#include "client/tools/short_id.h"
#include "client/tools/table.h"
#include "client/tools/terminal.h"
#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

// The sequence of the first argument, and the daemon that has it.
struct Target {
  Admin admin;
  std::uint64_t id = 0;
};

absl::StatusOr<Target> TargetOf(const Flags& flags) {
  const std::string& text = flags.positional()[0];
  const std::optional<std::uint64_t> id = ParseId(text, {&kSequenceLetter, 1});
  if (!id.has_value()) {
    return absl::InvalidArgumentError(
        Concat(Quoted(text), " is not a sequence, as in s51; 'tessera status' lists them"));
  }
  absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
  if (!admin.ok()) return admin.status();
  return Target{.admin = *std::move(admin), .id = *id};
}

// Says what to do about a sequence that does not exist.
absl::Status Explained(const absl::Status& status, const Target& target) {
  if (!absl::IsNotFound(status)) return status;
  return absl::NotFoundError(Concat("no sequence ", ShortId(kSequenceLetter, target.id),
                                    "; it may have been freed or evicted. 'tessera status' lists "
                                    "the sequences"));
}

std::string FormOf(const v1::SegmentRun& run) {
  std::string form = run.format();
  if (run.kept_channels() != 0) {
    const bool alike =
        run.kept_channels() == run.value_kept_channels() && run.channels() == run.value_channels();
    form += Concat(alike ? " " : ", K ", run.kept_channels(), " of ", run.channels());
    if (!alike) {
      form += Concat(", V ", run.value_kept_channels(), " of ", run.value_channels());
    }
    if (run.group() > 1) form += Concat(", groups of ", run.group());
  }
  if (run.summary() == v1::BLOCK_SUMMARY_SIGNS) {
    form += Concat(", signs (", FormatBytes(run.summary_bytes()), ")");
  } else if (run.block() != 0) {
    form += Concat(run.summary() == v1::BLOCK_SUMMARY_MIN_MAX ? ", min/max of " : ", means of ",
                   run.block());
  }
  if (run.provisional()) form += ", provisional";
  return form;
}

std::string LossOf(const v1::SegmentRun& run, double loss) {
  return run.kept_channels() == 0 || loss == 0 ? "-" : Fixed(loss, 3);
}

// One line for each reason.
template <typename Response>
std::string OutcomesOf(const Response& response) {
  std::string text;
  for (const v1::OutcomeGroup& group : response.outcomes()) {
    text += Concat(group.lanes(), group.lanes() == 1 ? " lane: " : " lanes: ", group.worst().text(),
                   group.lanes() == 1 ? ""
                                      : Concat(" (layer ", group.layer(), ", head ",
                                               group.kv_head(), ", is the worst of them)"),
                   "\n");
  }
  return text;
}

std::string Render(const v1::DescribeResponse& sequence, std::size_t columns) {
  std::string text = Concat(
      "sequence ", ShortId(kSequenceLetter, sequence.sequence_id()), "   policy ",
      sequence.policy(), "   tokens ", sequence.tokens(), sequence.decoding() ? "   decoding" : "",
      sequence.state() == v1::SEQUENCE_STATE_OFFLOADED ? "   offloaded" : "", "\n");
  if (!sequence.failure().empty()) text += Concat("FAILED: ", sequence.failure(), "\n");
  if (sequence.bytes_kept() != 0) {
    text += Concat("kept: tokens ", Fixed(100 * sequence.tokens_kept(), 1), " %   elements ",
                   Fixed(100 * sequence.elements_kept(), 1), " %   bytes ",
                   Fixed(100 * sequence.bytes_kept(), 1), " % (1/",
                   Fixed(1 / sequence.bytes_kept(), 2), ")\n");
  }
  text += Concat("tiles ", FormatBytes(sequence.tile_bytes()), "   rotations ",
                 FormatBytes(sequence.rotation_bytes()), "   tables ",
                 FormatBytes(sequence.table_bytes()), "   raw copies ",
                 FormatBytes(sequence.raw_copy_bytes()), "   offloaded ",
                 FormatBytes(sequence.offloaded_bytes()), "\n", OutcomesOf(sequence), "\n");
  std::string head;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = text.find('\n', at);
    for (const std::string& line : WrappedLines(text.substr(at, end - at), columns)) {
      Append(head, line, "\n");
    }
    at = end + 1;
  }
  Table table({{.title = "layer"},
               {.title = "head"},
               {.title = "format", .align = Align::kLeft, .least = 16},
               {.title = "from", .leave_out = 6},
               {.title = "segments", .leave_out = 4},
               {.title = "entries"},
               {.title = "tokens", .leave_out = 5},
               {.title = "tokens %", .leave_out = 3},
               {.title = "elements %", .leave_out = 8},
               {.title = "bytes %", .leave_out = 1},
               {.title = "loss K"},
               {.title = "loss V"},
               {.title = "bytes"},
               {.title = "B/entry", .leave_out = 7}});
  for (const v1::LaneDescription& lane : sequence.lane()) {
    // These shares describe the whole lane; they are printed in its first row only.
    std::vector<std::string> kept = {Fixed(100 * lane.tokens_kept(), 1),
                                     Fixed(100 * lane.elements_kept(), 1),
                                     Fixed(100 * lane.bytes_kept(), 1)};
    for (const v1::SegmentRun& run : lane.segment_run()) {
      const std::uint64_t bytes = run.tile_bytes() + run.rotation_bytes() + run.table_bytes();
      table.Add({Concat(lane.layer()), Concat(lane.kv_head()), FormOf(run),
                 Concat(run.first_position()), Concat(run.segments()), Concat(run.entries()),
                 Concat(lane.tokens()), kept[0], kept[1], kept[2], LossOf(run, run.key_loss()),
                 LossOf(run, run.value_loss()), FormatBytes(bytes),
                 run.entries() == 0
                     ? "-"
                     : Fixed(static_cast<double>(bytes) / static_cast<double>(run.entries()), 1)});
      kept.assign(3, "");
    }
    if (lane.tail_entries() == 0) continue;
    table.Add({Concat(lane.layer()), Concat(lane.kv_head()), "tail", Concat(lane.tokens()), "-",
               Concat(lane.tail_entries()), "-", "-", "-", "-", "-", "-", "-", "-"});
  }
  return head + table.Render(0, columns);
}

absl::Status Describe(const Flags& flags) {
  absl::StatusOr<Target> target = TargetOf(flags);
  if (!target.ok()) return target.status();
  const absl::StatusOr<v1::DescribeResponse> sequence = target->admin.Describe(target->id);
  if (!sequence.ok()) return Explained(sequence.status(), *target);
  if (flags.Has("json")) return Print(client::JsonOf(*sequence) + "\n");
  return Print(Render(*sequence, flags.Has("wide") ? 0 : OutputColumns()));
}

absl::Status SetPolicy(const Flags& flags) {
  const std::string& policy = flags.positional()[1];
  if (policy.empty()) {
    return absl::InvalidArgumentError("POLICY is empty; use 'dense' for no compression");
  }
  absl::StatusOr<Target> target = TargetOf(flags);
  if (!target.ok()) return target.status();
  const absl::StatusOr<v1::SetPolicyResponse> outcome = target->admin.SetPolicy(target->id, policy);
  if (!outcome.ok()) return Explained(outcome.status(), *target);
  return Print(Concat("policy is now ", outcome->policy(), "\n"));
}

absl::Status Compress(const Flags& flags) {
  absl::StatusOr<Target> target = TargetOf(flags);
  if (!target.ok()) return target.status();
  const absl::StatusOr<v1::CompressResponse> outcome = target->admin.Compress(target->id);
  if (!outcome.ok()) return Explained(outcome.status(), *target);
  return Print(Concat("tiles ", FormatBytes(outcome->tile_bytes_before()), " -> ",
                      FormatBytes(outcome->tile_bytes_after()), ", rotations ",
                      FormatBytes(outcome->rotation_bytes()), ", entries dropped ",
                      outcome->entries_dropped(), "\n", OutcomesOf(*outcome)));
}

absl::Status Offload(const Flags& flags) {
  absl::StatusOr<Target> target = TargetOf(flags);
  if (!target.ok()) return target.status();
  const absl::StatusOr<v1::OffloadResponse> outcome = target->admin.Offload(target->id);
  if (!outcome.ok()) return Explained(outcome.status(), *target);
  return Print(FormatBytes(outcome->moved_bytes()) + " moved out of the pool\n");
}

absl::Status Restore(const Flags& flags) {
  absl::StatusOr<Target> target = TargetOf(flags);
  if (!target.ok()) return target.status();
  const absl::StatusOr<v1::RestoreResponse> outcome = target->admin.Restore(target->id);
  if (!outcome.ok()) return Explained(outcome.status(), *target);
  return Print(Concat(outcome->tokens(), " tokens in the pool\n"));
}

const Argument kSequence = {.name = "SEQUENCE", .hint = "'tessera status' lists sequences"};

}  // namespace

CommandSpec DescribeSpec() {
  return {
      .name = "describe",
      .summary = "show one sequence lane by lane",
      .description =
          "Shows one sequence lane by lane: segment formats, loss of their strategies, bytes,\n"
          "and what compression left dense, with the reason. On a terminal, the table fits its\n"
          "width.\n",
      .arguments = {kSequence},
      .examples = {"tessera describe s51"},
      .flags = {{"wide", "", "Show all columns, whatever the width of the terminal.", ""},
                {"json", "", "Print one JSON object instead of tables.", ""}}};
}

CommandSpec PolicySpec() {
  return {
      .name = "policy",
      .summary = "change the policy of a sequence",
      .description =
          "Changes the policy of a sequence. Entries that are already compressed keep their\n"
          "format. 'tessera policies' lists policy terms and their options.\n",
      .arguments = {kSequence, {.name = "POLICY", .hint = "'tessera policies' lists policy terms"}},
      .examples = {"tessera policy s51 mosaickv:keep=0.25"}};
}

CommandSpec CompressSpec() {
  return {.name = "compress",
          .summary = "compress what a sequence holds now, and wait",
          .description =
              "Compresses what a sequence holds now, under its policy, waits for the result, and\n"
              "prints what was left dense, with the reason.\n",
          .arguments = {kSequence},
          .examples = {"tessera compress s51"}};
}

CommandSpec OffloadSpec() {
  return {
      .name = "offload",
      .summary = "move a sequence to the host tier",
      .description =
          "Moves the segments that only this sequence uses from the pool to the host tier. The\n"
          "next operation that needs them restores them.\n",
      .arguments = {kSequence},
      .examples = {"tessera offload s51"}};
}

CommandSpec RestoreSpec() {
  return {.name = "restore",
          .summary = "move an offloaded sequence back to the pool",
          .description = "Moves an offloaded sequence back to the pool ahead of its next use.\n",
          .arguments = {kSequence},
          .examples = {"tessera restore s51"}};
}

int RunDescribe(std::span<const std::string_view> args) {
  return RunCommand(DescribeSpec(), args, Describe);
}
int RunPolicy(std::span<const std::string_view> args) {
  return RunCommand(PolicySpec(), args, SetPolicy);
}
int RunCompress(std::span<const std::string_view> args) {
  return RunCommand(CompressSpec(), args, Compress);
}
int RunOffload(std::span<const std::string_view> args) {
  return RunCommand(OffloadSpec(), args, Offload);
}
int RunRestore(std::span<const std::string_view> args) {
  return RunCommand(RestoreSpec(), args, Restore);
}

}  // namespace tessera::cli
