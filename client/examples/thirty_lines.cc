// A whole worker: attach, prefill a prompt in bulk, decode 16 tokens. (The values are made up.)
#include <cstdio>
#include <vector>

#include "tessera/worker.h"

int main(int argc, char** argv) {
  using tessera::client::Worker;
  auto worker = Worker::Attach({.address = argc > 1 ? argv[1] : "unix:/run/tessera/tesserad.sock"});
  if (!worker.ok()) return std::fprintf(stderr, "%s\n", worker.status().ToString().c_str()), 1;
  const tessera::client::LayerGeometry layer = {.query_heads = 8, .kv_heads = 2, .head_dim = 64};
  auto model = (*worker)->RegisterModel({.name = "tiny", .layers = {layer, layer, layer}}).value();
  auto sequence = (*worker)->CreateSequence(model).value();

  const std::vector<std::uint16_t> prompt(3 * 100 * 2 * 64, 0x3f80), kv(2 * 64, 0x3f80), q(8 * 64);
  const auto rows = std::as_bytes(std::span(prompt)), row = std::as_bytes(std::span(kv));
  sequence.Append({.key = rows, .value = rows, .tokens = 100}).value();

  std::vector<float> output(8 * 64);
  const auto query = std::as_bytes(std::span(q));
  const auto out = std::as_writable_bytes(std::span(output));
  tessera::client::Sequence* const batch[] = {&sequence};
  while (sequence.tokens() < 116) {
    auto step = (*worker)->BeginStep(batch).value();
    for (std::uint32_t i = 0; i < 3; ++i) (void)step.AppendAndAttend(i, {row, row, query, out});
    const absl::Status status = step.End();  // has the last word; ABORTED: the same step again
    if (!status.ok() && !absl::IsAborted(status)) return 1;
  }
  std::printf("%zu tokens, output[0] = %g\n", std::size_t{sequence.tokens()}, output[0]);
}
