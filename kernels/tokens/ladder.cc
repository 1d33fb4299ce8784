#include "kernels/tokens/ladder.h"

#include <algorithm>

namespace tessera::kernels {
namespace {

std::uint64_t DivideUp(std::uint64_t a, std::uint64_t b) { return (a + b - 1) / b; }

std::uint64_t FirstCapacity(const LadderOptions& options) {
  return options.entries + ShapeOf(options).removed / 2;
}

// The ladders of one layer.
struct Ladders {
  LadderShape shape;
  std::uint64_t offset;

  // Applies `count` ladders from `begin` on: moves the `kept` entries of each to the end of the
  // previous ladder's, and erases the rest.
  void Remove(std::uint64_t begin, std::uint64_t count, std::vector<std::uint32_t>& held) const {
    std::uint64_t to = begin;
    for (std::uint64_t ladder = 0; ladder < count; ++ladder) {
      const std::uint64_t from = begin + ladder * shape.length + offset;
      for (std::uint64_t i = 0; i < shape.kept; ++i) held[to++] = held[from + i];
    }
    const auto at = [&](std::uint64_t i) { return held.begin() + static_cast<std::ptrdiff_t>(i); };
    held.erase(at(to), at(begin + count * shape.length));
  }
};

}  // namespace

LadderShape ShapeOf(const LadderOptions& options) {
  const std::uint64_t stride = options.span - options.overlap;
  LadderShape shape;
  shape.length = 1 + DivideUp(options.layers - options.span, stride);
  shape.kept = std::min(DivideUp(options.span, stride), shape.length);
  shape.removed = shape.length - shape.kept;
  return shape;
}

std::uint64_t LeastEntries(const LadderOptions& options) {
  const LadderShape shape = ShapeOf(options);
  const std::uint64_t least = options.sink + options.layers + shape.kept;
  return least - std::min(least, shape.removed / 2);
}

LadderFault FaultOf(const LadderOptions& options) {
  if (options.span == 0 || options.span > options.layers) return LadderFault::kSpan;
  if (options.overlap >= options.span) return LadderFault::kOverlap;
  if (ShapeOf(options).removed == 0) return LadderFault::kNothingRemoved;
  if (options.entries < LeastEntries(options)) return LadderFault::kTooFewEntries;
  return LadderFault::kNone;
}

std::uint64_t OffsetOf(const LadderOptions& options, std::uint32_t layer) {
  const std::uint64_t offsets = ShapeOf(options).removed + 1;
  return options.band ? layer * offsets / options.layers : layer % offsets;
}

std::uint64_t ProtectedEntries(const LadderOptions& options) {
  return options.layers - ShapeOf(options).removed + 1;
}

void StepLadder(const LadderOptions& options, std::uint32_t layer, LadderState& state,
                std::vector<std::uint32_t>& held) {
  const bool started = state.capacity != 0;
  if (held.size() <= (started ? state.capacity : options.entries)) return;
  if (!started) state = {.cursor = options.sink, .capacity = FirstCapacity(options)};
  if (held.size() <= state.capacity) return;  // the capacity has just grown

  const Ladders ladders = {.shape = ShapeOf(options), .offset = OffsetOf(options, layer)};
  const LadderShape& shape = ladders.shape;
  const auto wanted = [&] { return DivideUp(held.size() - state.capacity, shape.removed); };
  const std::uint64_t walked = state.cursor + options.layers;
  const std::uint64_t room = walked < state.capacity ? state.capacity - walked : 0;
  const std::uint64_t fitting = room / shape.kept;
  if (wanted() <= fitting) {
    const std::uint64_t count = wanted();
    ladders.Remove(state.cursor, count, held);
    state.cursor += shape.kept * count;
    return;
  }
  if (!options.uniform) ladders.Remove(state.cursor, fitting, held);
  while (held.size() > state.capacity) {
    const std::uint64_t behind_sink = options.uniform
                                          ? held.size() - options.sink - ProtectedEntries(options)
                                          : state.capacity - options.sink - options.layers;
    const std::uint64_t most = behind_sink / (options.uniform ? shape.length : shape.kept);
    const std::uint64_t count = std::min(wanted(), most);
    ladders.Remove(options.sink, count, held);
    state.cursor = options.sink + shape.kept * count;
  }
}

}  // namespace tessera::kernels
