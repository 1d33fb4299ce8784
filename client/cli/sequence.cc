// tessera describe, policy, compress, offload, restore: shows or changes one sequence.

#include <google/protobuf/util/json_util.h>

#include <cstdio>
#include <string>
#include <vector>

#include "client/cli/command.h"
#include "client/tools/admin.h"
#include "client/tools/connection.h"
#include "client/tools/run_command.h"
#include "client/tools/table.h"
#include "daemon/base/bytes.h"
#include "daemon/base/strings.h"

namespace tessera::cli {

namespace {

absl::StatusOr<std::uint64_t> SequenceOf(const Flags& flags, std::size_t arguments) {
  if (flags.positional().size() != arguments) {
    return absl::InvalidArgumentError(Concat(
        "expected ", arguments == 1 ? "a sequence id" : "a sequence id and a policy", ", got ",
        flags.positional().size(), " arguments; 'tessera status' lists sequences"));
  }
  const std::string& text = flags.positional()[0];
  if (const std::uint64_t id = WholeNumber(text).value_or(0); id != 0) return id;
  return absl::InvalidArgumentError(
      Concat("\"", text, "\" is not a sequence id; 'tessera status' lists them"));
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
  if (run.block() != 0) {
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

std::string Render(const v1::DescribeResponse& sequence) {
  std::string text =
      Concat("sequence ", sequence.sequence_id(), "   policy ", sequence.policy(), "   tokens ",
             sequence.tokens(), sequence.decoding() ? "   decoding" : "",
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
  Table table({{"layer"},
               {"head"},
               {"format", Align::kLeft},
               {"from"},
               {"segments"},
               {"entries"},
               {"tokens"},
               {"tokens %"},
               {"elements %"},
               {"bytes %"},
               {"loss K"},
               {"loss V"},
               {"bytes"},
               {"B/entry"}});
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
  return text + table.Render();
}

absl::Status Describe(const Flags& flags) {
  const absl::StatusOr<std::uint64_t> id = SequenceOf(flags, 1);
  if (!id.ok()) return id.status();
  absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
  if (!admin.ok()) return admin.status();
  const absl::StatusOr<v1::DescribeResponse> sequence = admin->Describe(*id);
  if (!sequence.ok()) return sequence.status();
  std::string text = Render(*sequence);
  if (flags.Has("json")) {
    text.clear();
    google::protobuf::util::JsonPrintOptions options;
    options.always_print_primitive_fields = true;
    options.preserve_proto_field_names = true;
    if (!google::protobuf::util::MessageToJsonString(*sequence, &text, options).ok()) {
      return absl::InternalError("the response cannot be converted to JSON");
    }
    text += "\n";
  }
  std::fputs(text.c_str(), stdout);
  return absl::OkStatus();
}

absl::Status SetPolicy(const Flags& flags) {
  const absl::StatusOr<std::uint64_t> id = SequenceOf(flags, 2);
  if (!id.ok()) return id.status();
  const std::string& policy = flags.positional()[1];
  if (policy.empty()) {
    return absl::InvalidArgumentError("POLICY is empty; use 'dense' for no compression");
  }
  absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
  if (!admin.ok()) return admin.status();
  const absl::StatusOr<v1::SetPolicyResponse> outcome = admin->SetPolicy(*id, policy);
  if (!outcome.ok()) return outcome.status();
  std::printf("policy is now %s\n", outcome->policy().c_str());
  return absl::OkStatus();
}

absl::Status Compress(const Flags& flags) {
  const absl::StatusOr<std::uint64_t> id = SequenceOf(flags, 1);
  if (!id.ok()) return id.status();
  absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
  if (!admin.ok()) return admin.status();
  const absl::StatusOr<v1::CompressResponse> outcome = admin->Compress(*id);
  if (!outcome.ok()) return outcome.status();
  std::printf("tiles %s -> %s, rotations %s, entries dropped %llu\n",
              FormatBytes(outcome->tile_bytes_before()).c_str(),
              FormatBytes(outcome->tile_bytes_after()).c_str(),
              FormatBytes(outcome->rotation_bytes()).c_str(),
              static_cast<unsigned long long>(outcome->entries_dropped()));
  std::fputs(OutcomesOf(*outcome).c_str(), stdout);
  return absl::OkStatus();
}

absl::Status Offload(const Flags& flags) {
  const absl::StatusOr<std::uint64_t> id = SequenceOf(flags, 1);
  if (!id.ok()) return id.status();
  absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
  if (!admin.ok()) return admin.status();
  const absl::StatusOr<v1::OffloadResponse> outcome = admin->Offload(*id);
  if (!outcome.ok()) return outcome.status();
  std::printf("%s moved out of the pool\n", FormatBytes(outcome->moved_bytes()).c_str());
  return absl::OkStatus();
}

absl::Status Restore(const Flags& flags) {
  const absl::StatusOr<std::uint64_t> id = SequenceOf(flags, 1);
  if (!id.ok()) return id.status();
  absl::StatusOr<Admin> admin = Admin::At(ConnectionOf(flags));
  if (!admin.ok()) return admin.status();
  const absl::StatusOr<v1::RestoreResponse> outcome = admin->Restore(*id);
  if (!outcome.ok()) return outcome.status();
  std::printf("%llu tokens in the pool\n", static_cast<unsigned long long>(outcome->tokens()));
  return absl::OkStatus();
}

}  // namespace

int RunOffload(std::span<const std::string_view> args) {
  return RunWithArguments(
      Flags("Usage: tessera offload SEQUENCE [--address=ADDRESS]\n\n"
            "Moves the segments that only this sequence uses from the pool to the host tier.\n"
            "The next operation that needs them restores them.\n\n"
            "Example:\n"
            "  tessera offload 4711",
            WithConnection({})),
      args, Offload);
}

int RunRestore(std::span<const std::string_view> args) {
  return RunWithArguments(
      Flags("Usage: tessera restore SEQUENCE [--address=ADDRESS]\n\n"
            "Moves an offloaded sequence back to the pool ahead of its next use.\n\n"
            "Example:\n"
            "  tessera restore 4711",
            WithConnection({})),
      args, Restore);
}

int RunDescribe(std::span<const std::string_view> args) {
  return RunWithArguments(
      Flags(
          "Usage: tessera describe SEQUENCE [--json] [--address=ADDRESS]\n\n"
          "Shows one sequence lane by lane: segment formats, loss of their strategies, bytes, and\n"
          "what compression left dense, with the reason.\n"
          "\n"
          "Example:\n"
          "  tessera describe 4711",
          WithConnection({{"json", "", "Print one JSON object instead of tables.", ""}})),
      args, Describe);
}

int RunPolicy(std::span<const std::string_view> args) {
  return RunWithArguments(
      Flags("Usage: tessera policy SEQUENCE POLICY [--address=ADDRESS]\n\n"
            "Changes the policy of a sequence. Entries that are already compressed keep their\n"
            "format. 'tessera policies' lists policy terms and their options.\n\n"
            "Example:\n"
            "  tessera policy 4711 mosaickv:keep=0.25",
            WithConnection({})),
      args, SetPolicy);
}

int RunCompress(std::span<const std::string_view> args) {
  return RunWithArguments(
      Flags("Usage: tessera compress SEQUENCE [--address=ADDRESS]\n\n"
            "Compresses what a sequence holds now, under its policy, waits for the result, and\n"
            "prints what was left dense, with the reason.\n"
            "\n"
            "Example:\n"
            "  tessera compress 4711",
            WithConnection({})),
      args, Compress);
}

}  // namespace tessera::cli
