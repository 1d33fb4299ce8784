// Mutates scripts as scripts: inserts, removes and swaps operations, and changes messages field by
// field, so that the result remains meaningful. Half of the time it mutates plain bytes.
#include <google/protobuf/message.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/fuzz/fuzz_target.h"
#include "tests/fuzz/stories/daemon_script.h"

namespace tessera::fuzz {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

struct Step {
  std::uint8_t op;
  std::string chunk;
};

std::vector<Step> Parse(std::string_view bytes) {
  std::vector<Step> steps;
  for (Input input(bytes); !input.empty();) {
    const std::uint8_t op = input.Byte();
    steps.push_back({op, std::string(input.Chunk())});
  }
  return steps;
}

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  std::string Change(std::string_view bytes) {
    std::vector<Step> steps = Parse(bytes);
    if (steps.empty() || OneIn(12)) {  // an operation of a seed
      static const std::vector<Seed> seeds = Seeds();
      const std::vector<Step> other = Parse(seeds[Below(seeds.size())].bytes);
      if (!other.empty()) Insert(steps, other[Below(other.size())]);
      return Write(steps);
    }
    const std::size_t at = Below(steps.size());
    switch (Below(8)) {
      case 0:
        steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(at));
        break;
      case 1:
        Insert(steps, Step(steps[at]));
        break;
      case 2:
        std::swap(steps[at], steps[Below(steps.size())]);
        break;
      default:
        ChangeChunk(steps[at]);
    }
    return Write(steps);
  }

 private:
  std::size_t Below(std::size_t bound) { return random_() % bound; }
  bool OneIn(std::size_t n) { return Below(n) == 0; }

  void Insert(std::vector<Step>& steps, Step step) {
    const auto at = static_cast<std::ptrdiff_t>(Below(steps.size() + 1));
    steps.insert(steps.begin() + at, std::move(step));
  }

  static std::string Write(const std::vector<Step>& steps) {
    Output output;
    for (const Step& step : steps) output.Byte(step.op).Chunk(step.chunk);
    return output.bytes();
  }

  void ChangeChunk(Step& step) {
    const auto op = static_cast<Op>(step.op % static_cast<std::uint8_t>(Op::kCount));
    const std::size_t front = op == Op::kStream ? 1 : 0;
    const std::unique_ptr<Message> message = RequestOf(op);
    if (message == nullptr || step.chunk.size() < front) return ChangeBytes(step.chunk);
    if (!message->ParsePartialFromString(step.chunk.substr(front)) || OneIn(6)) {
      return ChangeBytes(step.chunk);
    }
    ChangeMessage(*message, 4);
    step.chunk = step.chunk.substr(0, front) + message->SerializePartialAsString();
  }

  void ChangeBytes(std::string& bytes) {
    const std::size_t size = bytes.size();
    bytes.resize(size + 16);
    bytes.resize(LLVMFuzzerMutate(reinterpret_cast<std::uint8_t*>(bytes.data()), size, size + 16));
  }

  static std::unique_ptr<Message> RequestOf(Op op) {
    switch (op) {
      case Op::kAttach:
      case Op::kStream:
        return std::make_unique<v1::AttachRequest>();
      case Op::kMatch:
        return std::make_unique<v1::MatchRequest>();
#define TESSERA_FUZZ_OP(Method) \
  case Op::k##Method:           \
    return std::make_unique<v1::Method##Request>();
        TESSERA_FUZZ_WORKER_RPCS(TESSERA_FUZZ_OP)
#undef TESSERA_FUZZ_OP
#define TESSERA_FUZZ_OP(Method) \
  case Op::kAdmin##Method:      \
    return std::make_unique<v1::Method##Request>();
        TESSERA_FUZZ_ADMIN_RPCS(TESSERA_FUZZ_OP)
#undef TESSERA_FUZZ_OP
      default:
        return nullptr;
    }
  }

  // Changes a field of the message, or of a message in it.
  void ChangeMessage(Message& message, int depth) {
    const int fields = message.GetDescriptor()->field_count();
    if (fields == 0) return;
    const FieldDescriptor& field =
        *message.GetDescriptor()->field(static_cast<int>(Below(static_cast<std::size_t>(fields))));
    const auto& reflection = *message.GetReflection();
    if (field.is_map()) return;
    const int size = field.is_repeated() ? reflection.FieldSize(message, &field) : 0;
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      if (depth == 0) return;
      if (!field.is_repeated()) {
        if (OneIn(8)) return reflection.ClearField(&message, &field);
        return ChangeMessage(*reflection.MutableMessage(&message, &field), depth - 1);
      }
      if (size == 0 || OneIn(4)) {
        Message& more = *reflection.AddMessage(&message, &field);
        if (size > 0) more.CopyFrom(reflection.GetRepeatedMessage(message, &field, 0));
        return ChangeMessage(more, depth - 1);
      }
      if (OneIn(4)) return reflection.RemoveLast(&message, &field);
      const int at = static_cast<int>(Below(static_cast<std::size_t>(size)));
      return ChangeMessage(*reflection.MutableRepeatedMessage(&message, &field, at), depth - 1);
    }
    if (field.is_repeated() && size > 0 && OneIn(3)) return reflection.RemoveLast(&message, &field);
    if (!field.is_repeated() && OneIn(6)) return reflection.ClearField(&message, &field);
    ChangeValue(message, field, size);
  }

  // A small number, one near the old one, or any.
  std::uint64_t Number(std::uint64_t old) {
    switch (Below(5)) {
      case 0:
        return Below(4);
      case 1:
        return old + Below(5) - 2;
      case 2:
        return Below(300);
      case 3:
        return (std::uint64_t{1} << Below(64)) + Below(3) - 1;
      default:
        return old ^ (std::uint64_t{1} << Below(64));
    }
  }

  double Real(double old) {
    constexpr double kReals[] = {0, 0.25, 0.5, 1, -1, 1e-300, 1e300, 64, HUGE_VAL};
    return OneIn(3) ? old * 2 + 0.1 : kReals[Below(std::size(kReals))];
  }

  // Changes one element of a repeated field or adds one, or changes a singular field.
  void ChangeValue(Message& message, const FieldDescriptor& field, int size) {
    const auto& reflection = *message.GetReflection();
    const bool more = field.is_repeated() && (size == 0 || OneIn(3));
    const int at = size > 0 ? static_cast<int>(Below(static_cast<std::size_t>(size))) : 0;
#define TESSERA_FUZZ_CHANGE(Name, Changed)                                                     \
  {                                                                                            \
    if (!field.is_repeated()) {                                                                \
      const auto old = reflection.Get##Name(message, &field);                                  \
      return reflection.Set##Name(&message, &field, Changed);                                  \
    }                                                                                          \
    const auto old = size > 0 ? reflection.GetRepeated##Name(message, &field, at)              \
                              : decltype(reflection.GetRepeated##Name(message, &field, at))(); \
    return more ? reflection.Add##Name(&message, &field, Changed)                              \
                : reflection.SetRepeated##Name(&message, &field, at, Changed);                 \
  }
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_UINT64:
        TESSERA_FUZZ_CHANGE(UInt64, Number(old))
      case FieldDescriptor::CPPTYPE_UINT32:
        TESSERA_FUZZ_CHANGE(UInt32, static_cast<std::uint32_t>(Number(old)))
      case FieldDescriptor::CPPTYPE_DOUBLE:
        TESSERA_FUZZ_CHANGE(Double, Real(old))
      case FieldDescriptor::CPPTYPE_FLOAT:
        TESSERA_FUZZ_CHANGE(Float, static_cast<float>(Real(old)))
      case FieldDescriptor::CPPTYPE_BOOL:
        TESSERA_FUZZ_CHANGE(Bool, !old)
      case FieldDescriptor::CPPTYPE_ENUM:
        TESSERA_FUZZ_CHANGE(EnumValue, static_cast<int>(Below(6)) + 0 * old)
      case FieldDescriptor::CPPTYPE_STRING:
        TESSERA_FUZZ_CHANGE(String, ChangedText(old))
      default:
        return;
    }
#undef TESSERA_FUZZ_CHANGE
  }

  std::string ChangedText(std::string text) {
    ChangeBytes(text);
    return text;
  }

  std::minstd_rand random_;
};

}  // namespace
}  // namespace tessera::fuzz

std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                    unsigned seed) {
  tessera::fuzz::Mutator mutator(seed);
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  if (seed % 4 == 0) return LLVMFuzzerMutate(data, size, max_size);
  const std::string changed = mutator.Change(bytes);
  if (changed.size() > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::copy(changed.begin(), changed.end(), data);
  return changed.size();
}
